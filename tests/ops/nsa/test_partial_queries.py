"""Queries that are a part of their sequences, as context parallelism has them: a whole call's queries cut into parts
must give the whole call's rows, and gradients of keys that sum up to the whole call's.
"""

import itertools
from pathlib import Path

import pytest
import torch
from battery import first_quick, some_quick
from compiling import compiled
from nsa_inputs import assert_close, cumulative, random, windows

from tilewise.ops.nsa import reference, steps
from tilewise.ops.nsa.branches import KERNELS
from tilewise.ops.nsa.problem import Sizes, mean_windows
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs

SCALE = 0.3
SIZE, STRIDE = 8, 4
LENGTHS = (0, 23, 7, 45, 1)
# Of each part and sequence the first query and the one after its last: odd cuts, an empty part, a part of only some
# sequences.
PACKED = (
    ((0, 0), (0, 9), (0, 7), (0, 17), (0, 0)),
    ((0, 0), (0, 0), (0, 0), (0, 0), (0, 0)),
    ((0, 0), (9, 9), (7, 7), (17, 18), (0, 1)),
    ((0, 0), (9, 23), (7, 7), (18, 45), (1, 1)),
)
# Two sequences of 45, of which a part has as many queries, at different positions.
DENSE = (((0, 17), (28, 45)), ((18, 18), (3, 3)), ((17, 18), (27, 28)), ((18, 45), (0, 27)))


class Part:
    """Some queries of every sequence: where they are, and the operators' arguments that say so."""

    def __init__(self, bounds, packed):
        self.bounds, self.packed = bounds, packed
        self.first = torch.tensor([a for a, _ in bounds], dtype=torch.int32)
        self.cu = cumulative([b - a for a, b in bounds]).int() if packed else None
        self.cu_k = cumulative(LENGTHS).int() if packed else None
        self.starts = cumulative(LENGTHS).tolist() if packed else [0] * len(bounds)

    def places(self, x, axis):
        """Of each sequence its rows of x, whose tokens lie along `axis`: to read, or to write to."""
        each = [x] * len(self.bounds) if self.packed else x.unbind(0)
        for one, start, (a, b) in zip(each, self.starts, self.bounds, strict=False):
            yield one.narrow(axis, start + a, b - a)

    def take(self, x, axis=-3):
        rows = list(self.places(x, axis))
        return torch.cat(rows, axis) if self.packed else torch.stack(rows)

    def put(self, whole, x, axis=-3):
        rows = x.split([b - a for a, b in self.bounds], axis) if self.packed else x.unbind(0)
        for place, row in zip(self.places(whole, axis), rows, strict=True):
            place.copy_(row)

    def poisoned(self, x, seen, offsets=None):
        """Keys with NaN behind what the last query sees: `seen(tokens)` rows of each sequence, which begins at its
        offset.
        """
        x = x.clone()
        each = [x[a:b] for a, b in itertools.pairwise(offsets)] if self.packed else x.unbind(0)
        for one, (a, b) in zip(each, self.bounds, strict=True):
            one[seen(b) if b > a else 0 :] = torch.nan
        return x


def cut(packed):
    return [Part(bounds, packed) for bounds in (PACKED if packed else DENSE)]


def strided(x):
    """Head by head in memory."""
    return x.transpose(-3, -2).contiguous().transpose(-3, -2)


def tensors(packed, heads, kv_heads):
    """q, k, v, k_cmp and v_cmp by name, and the output's and the LSE's gradient."""
    rows, count = ((sum(LENGTHS),), sum(map(windows, LENGTHS))) if packed else ((2, 45), windows(45))
    of_windows = (count,) if packed else (2, count)
    shapes = [(*rows, heads, 16), (*rows, kv_heads, 16), (*rows, kv_heads, 12)]
    shapes += [(*of_windows, kv_heads, 16), (*of_windows, kv_heads, 12), (*rows, heads, 12)]
    *made, do = map(strided, random(*shapes))
    return dict(zip(("q", "k", "v", "k_cmp", "v_cmp"), made, strict=True)), do, random((*rows[:-1], heads, rows[-1]))[0]


def truth(function, given, do, dlse, packed):
    """o, lse, dq, dk and dv of the whole by the reference in fp64."""
    leaves = [x.double().requires_grad_() for x in given]
    o, lse = function(*leaves, scale=SCALE, cu_seqlens=cumulative(LENGTHS) if packed else None)
    # A query that sees nothing passes no gradient on.
    dlse = dlse.double().masked_fill(lse.isinf(), 0.0)
    total = (o * do.double()).sum() + (lse.masked_fill(lse.isinf(), 0.0) * dlse).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def assembled(parts, given, do, run):
    """o, lse and dq of all parts in their places, dk and dv summed up; `run(part)` gives a part's."""
    q, k, v = given
    o, lse, dq = torch.zeros_like(do), do.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.zeros_like(q)
    dk, dv = torch.zeros_like(k, dtype=torch.float64), torch.zeros_like(v, dtype=torch.float64)
    for part in parts:
        o_part, lse_part, dq_part, dk_part, dv_part = run(part)
        part.put(o, o_part)
        part.put(lse, lse_part, -1)
        part.put(dq, dq_part)
        dk += dk_part
        dv += dv_part
    return [o, lse, dq, dk, dv]


def moved(device, *arguments):
    """Tensors to where kernels run; anything else as it is."""
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


def by_operator(forward, part, q, k, v, do, dlse, *arguments, place):
    """A part's o, lse, dq, dk and dv by a registered operator and autograd."""
    backend, device = place
    *leaves, do, dlse = moved(device, part.take(q), k, v, part.take(do), part.take(dlse, -1))
    leaves = [x.requires_grad_() for x in leaves]
    o, lse = forward(*leaves, *moved(device, *arguments), backend)
    return [x.detach().cpu() for x in (o, lse, *torch.autograd.grad([o, lse], leaves, [do, dlse]))]


LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
GROUPS = pytest.mark.parametrize(("heads", "kv_heads"), some_quick([(6, 2), (2, 2)], 2), ids=["groups", "no-groups"])


@pytest.fixture(params=["cpu", pytest.param("triton", marks=pytest.mark.gpu)])
def place(request, device):
    """A backend and where it runs."""
    return request.param, device if request.param == "triton" else torch.device("cpu")


def window_offsets(lengths):
    return cumulative(map(windows, lengths)).tolist()


@LAYOUTS
@GROUPS
def test_compressed_attention(packed, heads, kv_heads, place):
    x, do, dlse = tensors(packed, heads, kv_heads)
    given = x["q"], x["k_cmp"], x["v_cmp"]
    sizes = {"compress_size": SIZE, "compress_stride": STRIDE}

    def run(part):
        k, v = (part.poisoned(y, windows, window_offsets(LENGTHS)) for y in given[1:])
        where = part.cu, part.cu_k, part.first
        return by_operator(
            steps.compressed_forward, part, given[0], k, v, do, dlse, *where, SIZE, STRIDE, SCALE, place=place
        )

    expected = truth(lambda *y, **z: reference.compressed_attention(*y, **sizes, **z), given, do, dlse, packed)
    assert_close(assembled(cut(packed), given, do, run), expected)


def test_compressed_attention_to_means(place):
    """Packed means lie with room between sequences."""
    (backend, device), cu = place, cumulative(LENGTHS).int()
    kernels = KERNELS[backend]
    x, do, dlse = tensors(True, 4, 2)
    room = mean_windows(cu, sum(LENGTHS), STRIDE)
    given = x["q"], *(KERNELS["cpu"].compress(y, cu, room, SIZE, STRIDE) for y in (x["k"], x["v"]))

    def run(part, *offsets):
        q, do_part, dlse_part, means_k, means_v, windows_at, cu_q, first = moved(
            device, part.take(x["q"]), part.take(do), part.take(dlse, -1), *given[1:], room, *offsets
        )
        numbers = cu_q, windows_at, SIZE, STRIDE, SCALE, first
        o, lse = kernels.compressed_forward(q, means_k, means_v, *numbers)
        gradients = kernels.compressed_backward(q, means_k, means_v, o, lse, do_part, dlse_part, *numbers)
        return [y.cpu() for y in (o, lse, *gradients)]

    whole = Part([(0, length) for length in LENGTHS], True)
    expected = [y.double() for y in run(whole, cu, None)]
    assert_close(assembled(cut(True), given, do, lambda part: run(part, part.cu, part.first)), expected)


@LAYOUTS
@pytest.mark.parametrize(
    "sizes",
    first_quick([Sizes(SIZE, STRIDE, 12, 2, 1, 1), Sizes(SIZE, STRIDE, 8, 3, 1, 1), Sizes(12, STRIDE, 4, 4, 1, 2)]),
    ids=["blocks-of-3-strides", "blocks-of-windows", "blocks-of-a-stride"],
)
def test_the_choice(packed, sizes, place):
    x, _, _ = tensors(packed, 4, 2)
    k_cmp = x["k_cmp"]
    if sizes.compress_size != SIZE:
        # Fewer windows than of SIZE.
        count = [windows(length, *sizes[:2]) for length in (LENGTHS if packed else (45,))]
        k_cmp = k_cmp[..., : sum(count), :, :]
    whole = reference.select_blocks(
        x["q"].double(),
        k_cmp.double(),
        **sizes._asdict(),
        scale=SCALE,
        cu_seqlens=cumulative(LENGTHS) if packed else None,
    )
    ends = cumulative([windows(length, *sizes[:2]) for length in LENGTHS]).tolist()
    chosen = torch.full_like(whole, -7)
    for part in cut(packed):
        keys = part.poisoned(k_cmp, lambda tokens: windows(tokens, *sizes[:2]), ends)
        given = moved(place[1], part.take(x["q"]), keys, part.cu, part.cu_k, part.first)
        part.put(chosen, steps.select(*given, *sizes, SCALE, place[0]).cpu())
    assert torch.equal(chosen, whole)


def named_blocks(x, packed, block):
    """Three blocks a query in any order: some after it, some named twice, some none."""
    kv_heads = x["k"].shape[-2]
    lengths = torch.tensor([n for length in LENGTHS for n in [length] * length]) if packed else torch.full((2, 45), 45)
    blocks = -(-lengths // block)[..., None, None]
    (uniform,) = torch.rand(1, *lengths.shape, kv_heads, 3, generator=torch.Generator().manual_seed(3))
    return (uniform * (blocks + 1)).int() - 1


@LAYOUTS
@GROUPS
@pytest.mark.parametrize("block", first_quick([12, 8]))
def test_selected_attention(packed, heads, kv_heads, block, place):
    x, do, dlse = tensors(packed, heads, kv_heads)
    indices = named_blocks(x, packed, block)
    given = x["q"], x["k"], x["v"]

    def run(part):
        k, v = (part.poisoned(y, int, cumulative(LENGTHS).tolist()) for y in given[1:])
        where = part.take(indices), part.cu, part.cu_k, part.first
        return by_operator(steps.selected_forward, part, given[0], k, v, do, dlse, *where, block, SCALE, place=place)

    expected = truth(
        lambda *y, **z: reference.selected_attention(*y, indices, block_size=block, **z), given, do, dlse, packed
    )
    assert_close(assembled(cut(packed), given, do, run), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", first_quick([True, False]), ids=["packed", "dense"])
@pytest.mark.parametrize("order", ["lists", "union"])
def test_both_loop_orders_of_selected_attention(packed, order, device):
    x, do, dlse = tensors(packed, 4, 2)
    indices = named_blocks(x, packed, 16)
    given = x["q"], x["k"], x["v"]

    def run(part):
        k, v = (part.poisoned(y, int, cumulative(LENGTHS).tolist()) for y in given[1:])
        q, k, v, named, do_part, dlse_part, cu, cu_k, first = moved(
            device, part.take(x["q"]), k, v, part.take(indices), part.take(do), part.take(dlse, -1), part.cu, part.cu_k,
            part.first,
        )  # fmt: skip
        called = make_inputs(q, k, v, named, cu, 16, SCALE, cu_k=cu_k, first=first)
        o, lse = selected.forward(called, order)
        return [y.cpu() for y in (o, lse, *selected.backward(called, o, lse, do_part, dlse_part, order)[:3])]

    expected = truth(
        lambda *y, **z: reference.selected_attention(*y, indices, block_size=16, **z), given, do, dlse, packed
    )
    assert_close(assembled(cut(packed), given, do, run), expected)


@pytest.mark.gpu
def test_nothing_behind_the_last_query_is_reached_through_descriptors(device):
    """Dense 16-bit keys come in tiles that reach behind what is seen."""
    kernels = KERNELS["triton"]
    q, k = (x.to(device, torch.bfloat16) for x in random((1, 16, 2, 16), (1, 300, 1, 16)))
    k[:, 100:] = torch.nan
    first = torch.tensor([390], dtype=torch.int32, device=device)
    o, lse = kernels.compressed_forward(q, k, k, None, None, 8, 4, 0.25, first)
    results = [o, lse, *kernels.compressed_backward(q, k, k, o, lse, q, None, None, None, 8, 4, 0.25, first)]
    # Blocks 5 and 6 reach to key 111.
    named = torch.tensor([0, 5, 6], dtype=torch.int32, device=device).expand(1, 16, 1, 3).contiguous()
    for order in ("lists", "union"):
        called = make_inputs(q, k, k, named, None, 16, 0.25, first=torch.full_like(first, 84))
        o, lse = selected.forward(called, order)
        results += [o, lse, *selected.backward(called, o, lse, q, None, order)[:3]]
    assert all(x.isfinite().all() for x in results)


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", first_quick([2**31 - 1, -(2**31), -3, 100]))
def test_unchecked_positions_never_lead_out_of_bounds(wrong, device):
    """And offsets of keys that decrease. Memory around what kernels read holds huge numbers, so that a read out of
    bounds shows; results may be anything else.
    """
    around = torch.full((768, 2, 16), 1e15, device=device)
    around[256:512] = random((256, 2, 16))[0].to(device)
    q, k = around[256:384], around[256:512, :1]
    k_cmp = around[256:320, :1]
    cu = torch.tensor([0, 60, 60, 128], dtype=torch.int32, device=device)
    cu_k = torch.tensor([0, 256, 0, 256], dtype=torch.int32, device=device)
    first = torch.tensor([0, 7, wrong], dtype=torch.int32, device=device)
    room = torch.tensor([0, 64, 0, 64], dtype=torch.int32, device=device)
    kernels = KERNELS["triton"]
    o, lse = kernels.compressed_forward(q, k_cmp, k_cmp, cu, room, 8, 4, 0.25, first)
    results = [o, lse, *kernels.compressed_backward(q, k_cmp, k_cmp, o, lse, q, None, cu, room, 8, 4, 0.25, first)]
    chosen = kernels.choose(q, k_cmp, lse, cu, room, Sizes(8, 4, 16, 4, 1, 1), 0.25, first)
    assert chosen.min() >= -1
    assert chosen.max() <= 256 // 16
    for order in ("lists", "union"):
        called = make_inputs(q, k, k, chosen, cu, 16, 0.25, cu_k=cu_k, first=first)
        o, lse = selected.forward(called, order)
        results += [o, lse, *selected.backward(called, o, lse, q, None, order)[:3]]
    assert not any((x.isfinite() & (x.abs() > 1e6)).any() for x in results)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernels_compile(architecture):
    kernels = compiled(Path(__file__).with_name("compile_partial.py"), architecture)
    names = {kernel["kernel"] for kernel in kernels}
    assert len(names) == 18, names
    for kernel in kernels:
        assert kernel["spill_stores"] <= 1600, kernel


def test_queries_behind_their_keys_are_refused():
    x, _, _ = tensors(True, 2, 2)
    part = Part(PACKED[3], True)
    numbers = *Sizes(SIZE, STRIDE, 8, 3, 1, 1), SCALE, "cpu"
    indices = torch.zeros(41, 2, 3, dtype=torch.int32)
    for wrong in (-1, 19):
        first = part.first.clone()
        first[3] = wrong
        arguments = part.take(x["q"]), x["k_cmp"], part.cu, part.cu_k, first
        with pytest.raises(ValueError, match=rf"first\[3\] is {wrong}: .* must stand among its keys"):
            steps.select(*arguments, *numbers)
        with pytest.raises(ValueError, match=rf"first\[3\] is {wrong}: .* must stand among its keys"):
            steps.selected_forward(
                part.take(x["q"]), x["k"], x["v"], indices, part.cu, part.cu_k, first, 8, SCALE, "cpu"
            )
