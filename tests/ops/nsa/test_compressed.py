"""Compressed attention through flash's kernels, against a direct computation in fp64; the tile ranges of strided keys,
against all pairs.
"""

import itertools

import pytest
import torch
import triton
import triton.language as tl
from battery import first_quick

from tilewise.ops._device.records import Window
from tilewise.ops._device.scores import diagonal, key_range, query_range
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch as flash
from tilewise.ops.flash import simulate
from tilewise.ops.flash.configs import Config
from tilewise.ops.nsa.compress.launch import compressed_backward, compressed_forward, make_inputs

pytestmark = pytest.mark.gpu
SCALE = 0.3
NAMES = ("o", "lse", "dq", "dk", "dv")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def windows_in(tokens, size, stride):
    return max(0, (tokens - size) // stride + 1)


def tensors(device, tokens, rows, heads=(2, 1), channels=(16, 24), dtype=torch.float32, batch=(1,)):
    """q, k_cmp, v_cmp, do, dlse."""
    generator = torch.Generator().manual_seed(0)
    (hq, hk), (d, dv) = heads, channels
    shapes = [(tokens, hq, d), (rows, hk, d), (rows, hk, dv), (tokens, hq, dv)]
    made = [torch.randn(*batch, *shape, generator=generator).to(device, dtype) for shape in shapes]
    return [*made, torch.randn(*batch, hq, tokens, generator=generator).to(device)]


def attend(q, k, v, size, stride):
    """One sequence, q [T, Hq, D]: o and lse. The first size - 1 queries see nothing, the others window 0 at least."""
    tokens, hq = q.shape[:2]
    k, v = (x.repeat_interleave(hq // x.shape[1], 1) for x in (k, v))
    blind = min(size - 1, tokens)
    ends = torch.arange(len(k), device=q.device) * stride + size - 1
    seen = ends[None, :] <= torch.arange(blind, tokens, device=q.device)[:, None]
    scores = (torch.einsum("thd,chd->htc", q[blind:], k) * SCALE).masked_fill(~seen, -torch.inf)
    o = torch.einsum("htc,chd->thd", scores.softmax(-1), v)
    lse = scores.logsumexp(-1)
    return torch.cat([o.new_zeros(blind, *o.shape[1:]), o]), torch.cat([lse.new_full((hq, blind), -torch.inf), lse], 1)


def truth(q, k, v, do, dlse, size, stride, sequences=None):
    """o, lse, dq, dk and dv in fp64; `sequences` has the tokens and windows of each packed sequence, else a batch's
    entries are the sequences.
    """
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    if sequences is None:
        o, lse = map(
            torch.stack, zip(*(attend(*entry, size, stride) for entry in zip(*leaves, strict=True)), strict=True)
        )
    else:
        found = [attend(leaves[0][rows], leaves[1][keys], leaves[2][keys], size, stride) for rows, keys in sequences]
        o, lse = torch.cat([x[0] for x in found]), torch.cat([x[1] for x in found], 1)
    gradients = torch.autograd.grad(
        [o, lse],
        leaves,
        [do.double(), torch.zeros_like(lse) if dlse is None else dlse.double()],
        materialize_grads=True,
    )
    return [o.detach(), lse.detach(), *gradients]


def assert_near(actual, expected, dtype):
    for name, a, b in zip(NAMES, actual, expected, strict=True):
        assert a.shape == b.shape, name
        assert a.dtype == (torch.float32 if name == "lse" else dtype), name
        finite = b[b.isfinite()]
        size = max(1.0, finite.abs().max().item()) if finite.numel() else 1.0
        tolerance = TOLERANCE[torch.float32 if name == "lse" else dtype]
        torch.testing.assert_close(
            a.double() / size, b / size, rtol=0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def run(q, k, v, do, dlse, size, stride, cu=None, windows=None):
    o, lse = compressed_forward(q, k, v, cu, windows, size, stride, SCALE)
    return [o, lse, *compressed_backward(q, k, v, o, lse, do, dlse, cu, windows, size, stride, SCALE)]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("size", "stride", "tokens"), [(32, 16, 171), (16, 16, 144), (48, 16, 100), (8, 4, 131), (3, 1, 70), (1, 1, 40)]
)
def test_dense(size, stride, tokens, dtype, device):
    given = tensors(device, tokens, windows_in(tokens, size, stride), dtype=dtype)
    actual = run(*given, size, stride)
    assert_near(actual, truth(*given, size, stride), dtype)
    o, lse, dq, _, _ = actual
    blind = slice(0, size - 1)
    assert (o[:, blind] == 0).all()
    assert (dq[:, blind] == 0).all()
    assert (lse[..., blind] == -torch.inf).all()


def test_several_batches_and_no_gradient_of_the_lse(device):
    q, k, v, do, _ = tensors(device, 90, windows_in(90, 32, 16), batch=(2,))
    assert_near(run(q, k, v, do, None, 32, 16), truth(q, k, v, do, None, 32, 16), torch.float32)


@pytest.mark.parametrize("size", [32, 2**40])
def test_no_window_at_all(size, device):
    """T < size: C = 0."""
    given = tensors(device, 31, 0)
    o, lse, dq, dk, dv = run(*given, size, 16)
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert (dq == 0).all()
    assert dk.shape == given[1].shape
    assert dv.shape == given[2].shape


def test_strides_are_free(device):
    """Transposed q and do, windows cut out of wider tensors, an expanded gradient of the LSE."""
    q, k, v, do, _ = tensors(device, 75, windows_in(75, 8, 4), channels=(16, 16))
    dlse = torch.full((1, 1, 1), 0.7, device=device).expand(1, 2, 75)
    wide = torch.full((1, k.shape[1], 3, 40), torch.nan, device=device)
    odd = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, do)]
    cut = [wide.clone()[:, :, 1:2, 8:24].copy_(x) for x in (k, v)]
    assert_near(run(odd[0], *cut, odd[1], dlse, 8, 4), truth(q, k, v, do, dlse, 8, 4), torch.float32)


LENGTHS = (0, 70, 7, 0, 45)


def packed(lengths, size, stride, means):
    """Offsets of tokens and windows, rows of windows, and the tokens and windows of each sequence.

    `means` makes room as the means have it.
    """
    cu = torch.tensor([0, *itertools.accumulate(lengths)])
    counts = [windows_in(n, size, stride) for n in lengths]
    starts = (cu // stride).tolist() if means else [0, *itertools.accumulate(counts)]
    pairs = [
        (slice(int(a), int(b)), slice(c, c + n)) for a, b, c, n in zip(cu[:-1], cu[1:], starts, counts, strict=False)
    ]
    return cu, torch.tensor(starts, dtype=torch.int32), starts[-1], pairs


@pytest.mark.parametrize("means", [True, False], ids=["room", "no-room"])
@pytest.mark.parametrize(("size", "stride"), [(32, 16), (8, 4), (3, 1)])
def test_packed(size, stride, means, device):
    cu, windows, rows, pairs = packed(LENGTHS, size, stride, means)
    given = tensors(device, sum(LENGTHS), rows, batch=())
    real = torch.zeros(rows, dtype=torch.bool)
    for _, keys in pairs:
        real[keys] = True
    assert real.all() == (not means), "room behind the last window is what this is about"
    for x in given[1:3]:
        x[~real] = 0
    actual = run(*given, size, stride, cu.to(device), windows.to(device))
    assert_near(actual, truth(*given, size, stride, pairs), torch.float32)
    for gradient in actual[3:]:
        assert (gradient[~real] == 0).all()


def test_packed_sequences_without_a_window(device):
    cu = torch.tensor([0, 20, 20, 51], device=device)
    given = tensors(device, 51, 3, batch=())
    o, lse, *gradients = run(*given, 32, 16, cu, (cu // 16).int())
    assert (o == 0).all()
    assert (lse == -torch.inf).all()
    assert all((x == 0).all() for x in gradients)


# Several tiles both ways: masked, whole and unseen ones.
TILED = [(8, 4, (32, 16), 147), (48, 16, (64, 16), 400)]


def tiled(device, size, stride, tokens, dtype=torch.float32):
    rows = windows_in(tokens, size, stride)
    q, k, v, do, dlse = tensors(device, tokens, rows, heads=(4, 1), dtype=dtype)
    return q, k, v, do, dlse, make_inputs(q, k, v, None, None, size, stride, SCALE)


@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize(("size", "stride", "tiles", "tokens"), TILED)
def test_chunks_of_a_group(size, stride, tiles, tokens, chunks, device):
    *given, inputs = tiled(device, size, stride, tokens)
    config = Config(*tiles, 4, 1, chunks=chunks)
    o, lse = flash.forward(inputs, config)
    assert_near(
        [o, lse, *flash.backward(inputs, o, lse, *given[3:], config, config)],
        truth(*given, size, stride),
        torch.float32,
    )


@pytest.mark.parametrize("chunks", [2, 4])
def test_chunks_of_packed_sequences(chunks, device):
    size, stride = 8, 4
    cu, windows, rows, pairs = packed(LENGTHS, size, stride, False)
    given = tensors(device, sum(LENGTHS), rows, heads=(8, 2), dtype=torch.bfloat16, batch=())
    inputs = make_inputs(*given[:3], cu.to(device), windows.to(device), size, stride, SCALE)
    config = Config(128, 32, 4, 1, chunks=chunks)
    o, lse = flash.forward(inputs, config)
    assert_near(
        [o, lse, *flash.backward(inputs, o, lse, *given[3:], config, config)],
        truth(*given, size, stride, pairs),
        torch.bfloat16,
    )


def test_long_sequences_are_divided(device, monkeypatch):
    """The launcher itself divides the group; with one step as enough, so that it shows on a short sequence."""
    made = []
    empty = flash._empty
    monkeypatch.setattr(flash.configs, "LEAST_STEPS", 1)
    monkeypatch.setattr(flash, "_empty", lambda x, chunks=1: made.append(chunks) or empty(x, chunks))
    given = tensors(device, 70, windows_in(70, 8, 4))
    assert_near(run(*given, 8, 4), truth(*given, 8, 4), torch.float32)
    assert made == [1, 2, 2]
    assert run(*tensors(device, 7, 0), 8, 4)[3].shape == (1, 0, 1, 16)


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("dtype", first_quick([torch.bfloat16, torch.float32]), ids=str)
@pytest.mark.parametrize(("size", "stride", "tiles", "tokens"), TILED)
def test_the_kernel_stores_what_the_simulation_makes(size, stride, tiles, tokens, dtype, chunks, device):
    q, k, v, do, dlse, inputs = tiled(device, size, stride, tokens, dtype)
    config = Config(*tiles, 4, 1, chunks=chunks)
    o, lse = flash.forward(inputs, config)
    dq, dk, dv = (flash._empty(x, n) for x, n in ((q, 1), (k, chunks), (v, chunks)))
    run_all(flash.backward_launches(inputs, o, lse, do, dlse, (dq, dk, dv), config, config), q.device)
    close = {"rtol": 0.0, "atol": 2e-5 if dtype == torch.float32 else 2**-6}
    simulated = simulate_all(
        q, k, v, o, lse, do, dlse, config, simulate.Options(SCALE, right=1 - size, key_stride=stride)
    )
    for name, actual in zip(NAMES, (o, lse, dq, dk, dv), strict=True):
        expected = simulated[name].to(actual.device)
        largest = max(1.0, expected[expected.isfinite()].abs().max().item())
        torch.testing.assert_close(
            actual[0].float() / largest, expected.float() / largest, **close, msg=lambda m, n=name: f"{n}: {m}"
        )


def simulate_all(q, k, v, o, lse, do, dlse, config, options):
    """Every tile of every head of batch entry 0 on one key head, simulated from the kernels' o and lse; dk and dv with
    a head for each part.
    """
    tiling = simulate.Tiling(config.block_m, config.block_n)
    q, o, do = (x[0].transpose(0, 1) for x in (q, o, do))
    k, v, lse, dlse = k[0, :, 0], v[0, :, 0], lse[0], None if dlse is None else dlse[0]
    (heads, tokens, _), rows = q.shape, len(k)
    delta, lse_log2 = simulate.prepare(o, do, lse, dlse)
    starts = range(0, tokens, config.block_m)
    fwd = [[dict(simulate.forward(q[h], k, v, i_m, tiling, options)) for i_m in starts] for h in range(heads)]
    dq = [
        [dict(simulate.backward_dq(q[h], k, v, do[h], lse_log2[h], delta[h], i_m, tiling, options)) for i_m in starts]
        for h in range(heads)
    ]
    part = [slice(first, first + heads // config.chunks) for first in range(0, heads, heads // config.chunks)]
    dkdv = [
        [
            dict(simulate.backward_dkdv(q[p], k, v, do[p], lse_log2[p], delta[p], i_n, tiling, options))
            for i_n in range(0, rows, config.block_n)
        ]
        for p in part
    ]

    def joined(found, name, length):
        return torch.stack([torch.cat([x[name] for x in tiles])[:length] for tiles in found], 1)

    made = {
        "o": joined(fwd, "O_final", tokens),
        "lse": joined(fwd, "LSE", tokens).T,
        "dq": joined(dq, "dQ_final", tokens),
    }
    return made | {"dk": joined(dkdv, "dK_final", rows), "dv": joined(dkdv, "dV_final", rows)}


@pytest.mark.parametrize(("size", "stride", "tiles", "tokens"), [*TILED, (32, 16, (64, 64), 60)])
def test_the_simulation_equals_the_truth_in_fp64(size, stride, tiles, tokens):
    given = [x.double() for x in tensors("cpu", tokens, windows_in(tokens, size, stride), heads=(4, 1))]
    expected = truth(*given, size, stride)
    simulated = simulate_all(
        *given[:3],
        *expected[:2],
        *given[3:],
        Config(*tiles, 4, 1),
        simulate.Options(SCALE, right=1 - size, key_stride=stride),
    )
    for name, actual, exact in zip(NAMES, simulated.values(), expected, strict=True):
        torch.testing.assert_close(actual, exact[0], rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")


@triton.jit
def ranges_kernel(
    cases,
    found,
    n_cases,
    KEYS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    LANES: tl.constexpr,
):
    # Grid: the cases, LANES to a program.
    # Owns: LANES cases of four numbers: a tile's first row, queries, keys, right.
    # Loops over: nothing.
    # Writes: their four bounds: key_range's where KEYS, else query_range's.
    o_case = tl.program_id(0) * LANES + tl.arange(0, LANES)
    m_case = o_case < n_cases
    i_row = tl.load(cases + o_case * 4, mask=m_case, other=0)
    n_queries = tl.load(cases + o_case * 4 + 1, mask=m_case, other=0)
    n_keys = tl.load(cases + o_case * 4 + 2, mask=m_case, other=0)
    right = tl.load(cases + o_case * 4 + 3, mask=m_case, other=0)
    window = Window(None, right, diagonal(n_queries, n_keys, KEY_STRIDE))
    if KEYS:
        ends = key_range(i_row, n_keys, window, BLOCK_M, BLOCK_N, KEY_STRIDE)
    else:
        ends = query_range(i_row, n_queries, n_keys, window, BLOCK_M, BLOCK_N, KEY_STRIDE)
    for END in tl.static_range(4):
        tl.store(found + o_case * 4 + END, ends[END] + tl.zeros([LANES], tl.int32), mask=m_case)


def all_ranges(device, by_keys, tiles, stride):
    """Cases [n, 4] (first row of a tile, queries, keys, right) and their bounds [n, 4], from one launch."""
    own, step = (0, tiles[0]) if by_keys else (1, tiles[1])
    sizes = itertools.product((0, 1, 2, 5, 8, 11, 16, 17, 23), (0, 1, 2, 3, 4, 7, 8, 13), range(-3 * stride - 2, 3))
    cases = torch.tensor(
        [(i, *size) for size in sizes for i in range(0, size[own], step)], dtype=torch.int32, device=device
    )
    found = torch.full_like(cases, -(2**20))
    blocks = {"BLOCK_M": tiles[0], "BLOCK_N": tiles[1], "KEY_STRIDE": stride, "LANES": 1024}
    arguments = {"cases": cases, "found": found, "n_cases": len(cases), "KEYS": by_keys, **blocks}
    run_all([Launch(ranges_kernel, -(-len(cases) // 1024), arguments)], device)
    return cases.cpu(), found.cpu()


def blocks_of(ends, block, count):
    """[n, count], which of a side's first `count` tiles the bounds walk, and which of them without a mask."""
    first = torch.arange(count) * block
    low, full_low, full_high, high = (x[:, None] for x in ends.unbind(1))
    return (low <= first) & (first < high), (full_low <= first) & (first < full_high)


TILES = [(4, 4), (8, 2), (2, 8), (16, 4)]


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_key_range_is_exact(tiles, stride, device):
    """Walked are the key tiles in which a query of the tile sees a key, unmasked those in which each sees all."""
    cases, ends = all_ranges(device, True, tiles, stride)
    i_m, _, keys, right = (x[:, None, None] for x in cases.unbind(1))
    m, n = i_m + torch.arange(tiles[0])[:, None], torch.arange(16)
    seen = (n < keys) & (n * stride <= m + right)
    by_tile = seen.unflatten(2, (-1, tiles[1]))
    walked, whole = blocks_of(ends, tiles[1], 16 // tiles[1])
    assert torch.equal(walked, by_tile.any(3).any(1))
    assert torch.equal(whole, by_tile.all(3).all(1))
    assert (ends[:, :2] == 0).all()
    assert torch.equal(ends[:, 3], (seen.any(1) * (n + 1)).amax(1).int()), "no key past the last that is seen"
    tiling = simulate.Tiling(*tiles)
    for (i, tq, tk, limit), row in zip(cases.tolist(), walked, strict=True):
        simulated = simulate.key_blocks(i, tq, tk, tiling, simulate.Options(1.0, right=limit, key_stride=stride))
        assert simulated == (row.nonzero()[:, 0] * tiles[1]).tolist()


@pytest.mark.parametrize("stride", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("tiles", TILES, ids=str)
def test_query_range_is_exact(tiles, stride, device):
    """Walked are the query tiles in which a query sees a key of the tile, unmasked those in which each sees all; what
    lies past an end is free.
    """
    cases, ends = all_ranges(device, False, tiles, stride)
    i_n, queries, keys, right = (x[:, None, None] for x in cases.unbind(1))
    m, n = torch.arange(32)[:, None], i_n + torch.arange(tiles[1])
    inside = (m < queries) & (n < keys)
    seen = inside & (n * stride <= m + right)
    walked, whole = blocks_of(ends, tiles[0], 32 // tiles[0])
    some = seen.any(2).unflatten(1, (-1, tiles[0])).any(2)
    full = (seen | ~inside).all(2).unflatten(1, (-1, tiles[0])).all(2) & inside.any(2).unflatten(1, (-1, tiles[0])).any(
        2
    )
    unseen = ~some.any(1)
    assert torch.equal(walked[~unseen], some[~unseen])
    # A key tile that nobody sees may cost one masked step, where the last query tile is partial.
    assert (walked[unseen].sum(1) <= 1).all()
    assert torch.equal(whole, full)
    tiling = simulate.Tiling(*tiles)
    for (i, tq, tk, limit), row in zip(cases.tolist(), walked, strict=True):
        simulated = simulate.query_blocks(i, tq, tk, tiling, simulate.Options(1.0, right=limit, key_stride=stride))
        assert simulated == (row.nonzero()[:, 0] * tiles[0]).tolist()
