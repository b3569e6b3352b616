"""What must not matter to the CPU backend: chunks, packing, strides, the run, torch's defaults, what is masked, the
length.
"""

import pytest
import torch
from nsa_inputs import (
    LENGTHS,
    SMALL,
    assert_close,
    attend_inputs,
    case,
    cumulative,
    differentiate,
    inputs,
    random,
    windows,
)

from tilewise import native_sparse_attend, native_sparse_attention, select_blocks, selected_attention
from tilewise.ops.nsa import cpu, cpu_tiles, reference
from tilewise.ops.nsa.problem import given_windows, mean_windows
from tilewise.verify.watch import grows_as_square, peak_memory

CHOICE = {"compress_size": 8, "compress_stride": 4, "block_size": 8, "block_count": 4}


def test_packed_is_each_sequence_alone():
    tensors, options = case("packed-learned")
    o, chosen = native_sparse_attention(
        **tensors, **options | {"block_indices": None}, return_indices=True, backend="cpu"
    )
    starts, window_starts = cumulative(LENGTHS).tolist(), cumulative(map(windows, LENGTHS)).tolist()
    for b, length in enumerate(LENGTHS):
        rows, of_windows = slice(starts[b], starts[b] + length), slice(window_starts[b], window_starts[b + 1])
        alone = {
            name: x[None, of_windows if name.endswith("_cmp") and name != "g_cmp" else rows]
            for name, x in tensors.items()
        }
        expected_o, expected_chosen = native_sparse_attention(**alone, **SMALL, return_indices=True, backend="cpu")
        torch.testing.assert_close(o[rows], expected_o[0], rtol=1e-5, atol=1e-6)
        assert torch.equal(chosen[rows], expected_chosen[0])


@pytest.mark.parametrize("offsets", [[0], [0, 0], [0, 0, 0]])
def test_packed_without_tokens(offsets):
    tensors = {name: x[:0] for name, x in inputs(packed=True, learned=True).items()}
    o, chosen = native_sparse_attention(
        **tensors, **SMALL, cu_seqlens=torch.tensor(offsets), return_indices=True, backend="cpu"
    )
    assert o.shape == (0, 4, 12)
    assert chosen.shape == (0, 2, 4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 5, 16, 1000])
@pytest.mark.parametrize("name", ["plain", "packed-learned"])
def test_chunks_do_not_matter(name, chunk, monkeypatch):
    tensors, options = case(name)
    attended, named = attend_inputs(2)

    def run():
        return [
            *differentiate(lambda **x: native_sparse_attention(**x, **options, backend="cpu"), tensors),
            *differentiate(lambda **x: native_sparse_attend(**x, **named, return_lse=True, backend="cpu"), attended),
        ]

    expected = run()
    monkeypatch.setattr(cpu_tiles, "CHUNK", chunk)
    assert_close(run(), expected, tolerance=1e-5)
    _, chosen = native_sparse_attention(
        **tensors, **options | {"block_indices": None}, return_indices=True, backend="cpu"
    )
    assert torch.equal(chosen, options["block_indices"])


def test_repeatable():
    tensors, options = case("plain")
    attended, named = attend_inputs(4)
    for function, given, more in ((native_sparse_attention, tensors, options), (native_sparse_attend, attended, named)):
        first, second = (
            differentiate(lambda f=function, m=more, **x: f(**x, **m, backend="cpu"), given) for _ in range(2)
        )
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_strides_do_not_matter():
    tensors, options = case("learned")
    expected = differentiate(lambda **x: native_sparse_attention(**x, **options, backend="cpu"), tensors)
    strided = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in tensors.items()}
    options["block_indices"] = options["block_indices"].transpose(1, 2).contiguous().transpose(1, 2)
    assert_close(
        differentiate(lambda **x: native_sparse_attention(**x, **options, backend="cpu"), strided),
        expected,
        tolerance=1e-6,
    )


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_means_and_their_gradient(packed):
    """Packed, each sequence has room for a window a stride; what it has no window for is 0."""
    (x,) = random((sum(LENGTHS), 2, 5) if packed else (2, 77, 2, 5))
    cu_seqlens = cumulative(LENGTHS) if packed else None
    room = mean_windows(cu_seqlens, x.shape[-3], 4)
    means = cpu.compress(x, cu_seqlens, room, 8, 4)
    leaf = x.double().requires_grad_()
    truth = reference.compress_mean(leaf, 8, 4, cu_seqlens)
    (incoming,) = random(means.shape, seed=1)
    if packed:
        starts = room.tolist()
        theirs = torch.cat([torch.arange(starts[b], starts[b] + windows(length)) for b, length in enumerate(LENGTHS)])
        rest = torch.ones(means.shape[0], dtype=torch.bool).index_fill(0, theirs, False)
        assert not means[rest].any()
        assert rest.any()
        means, along = means[theirs], incoming[theirs]
    else:
        along = incoming
    torch.testing.assert_close(means.double(), truth, rtol=1e-5, atol=1e-6)
    (expected,) = torch.autograd.grad(truth, leaf, along.double())
    torch.testing.assert_close(
        cpu.compress_backward(incoming, x.shape[-3], cu_seqlens, room, 8, 4).double(), expected, rtol=1e-5, atol=1e-6
    )


def test_indices_that_nobody_checked_are_skipped():
    tensors = inputs()
    q, k, v = (tensors[name] for name in "qkv")
    chosen = torch.tensor([0, 3, -1, 7, 9]).expand(2, 77, 2, 5)
    wild = torch.tensor([0, 3, -(2**40), 7, 9, 10, 2**40, 2**32]).expand(2, 77, 2, 8)
    for actual, expected in zip(
        cpu.selected_forward(q, k, v, wild, None, 8, 0.25),
        cpu.selected_forward(q, k, v, chosen, None, 8, 0.25),
        strict=True,
    ):
        assert torch.equal(actual, expected)


def test_nan_reaches_only_what_sees_it():
    """Block 2 of the keys is NaN: rows that do not attend it keep every bit, forward and backward."""
    tensors, options = case("plain")
    tensors = {name: tensors[name] for name in "qkv"}
    chosen = options["block_indices"]
    run = {"block_size": 8, "block_indices": chosen, "return_lse": True, "backend": "cpu"}
    expected = differentiate(lambda **x: selected_attention(**x, **run), tensors)
    for name in "kv":
        tensors[name] = tensors[name].clone()
        tensors[name][:, 16:24] = torch.nan
    o, lse, dq, _, _ = differentiate(lambda **x: selected_attention(**x, **run), tensors)
    # The first key of block 2 is seen by every query that attends the block.
    attends = ((chosen == 2).any(-1) & (torch.arange(77) >= 16)[None, :, None]).repeat_interleave(2, dim=2)
    assert attends.any()
    assert not attends.all()
    assert o[attends].isnan().all()
    assert dq[attends].isnan().all()
    for actual, right in ((o, expected[0]), (lse.transpose(1, 2), expected[1].transpose(1, 2)), (dq, expected[2])):
        assert torch.equal(actual[~attends], right[~attends])


def test_nan_after_the_last_query_that_counts():
    """Both branches are causal: what comes later, being NaN, changes no bit of an earlier output."""
    tensors = inputs(gates=("g_cmp", "g_slc"))
    expected = native_sparse_attention(**tensors, **SMALL, g_swa=None, backend="cpu")
    for x in tensors.values():
        x[:, 50:] = torch.nan
    o, chosen = native_sparse_attention(**tensors, **SMALL, g_swa=None, return_indices=True, backend="cpu")
    assert torch.equal(o[:, :50], expected[:, :50])
    # A row of NaN still chooses what is forced, and nothing that comes later.
    last = chosen[:, -1]
    assert (last[..., 0] == 0).all()
    assert (last[..., -2:] == torch.tensor([8, 9])).all()


def test_neighbours_of_a_packed_sequence_never_reach_it():
    tensors, options = case("packed")
    rows = slice(30, 75)

    def own(tensors):
        gradients = differentiate(lambda **x: native_sparse_attention(**x, **options, backend="cpu")[rows], tensors)
        return [gradients[0], *(x[rows] for x in gradients[1:])]

    expected = own(tensors)
    for x in tensors.values():
        x[:30] = torch.nan
        x[75:] = torch.nan
    actual = own(tensors)
    assert all(x.isfinite().all() for x in actual)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_what_fmask_leaves_out_is_not_read():
    tensors, named = attend_inputs(2)
    expected = differentiate(lambda **x: native_sparse_attend(**x, **named, backend="cpu"), tensors)
    tensors["sel_scale"] = tensors["sel_scale"].masked_fill(~named["fmask"], torch.nan)
    named["selected_block_indices"] = named["selected_block_indices"].masked_fill(~named["fmask"], 0)
    actual = differentiate(lambda **x: native_sparse_attend(**x, **named, backend="cpu"), tensors)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    assert not actual[-1][~named["fmask"]].any()


def test_large_scores():
    """Logits of thousands: no overflow, and the largest score takes everything."""
    tensors, options = case("plain")
    tensors["q"] = tensors["q"] * 1000
    o = native_sparse_attention(**tensors, **options, backend="cpu")
    truth = native_sparse_attention(**{name: x.double() for name, x in tensors.items()}, **options, backend="reference")
    torch.testing.assert_close(o.double(), truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torch_s_defaults_change_nothing(default):
    tensors, options = case("learned")
    attended, named = attend_inputs(2)
    ones = torch.ones(2, 77, 4, 12), torch.ones(2, 4, 45, 12)

    def run():
        results = []
        for function, inputs_, given, along in (
            (native_sparse_attention, tensors, options, ones[0]),
            (native_sparse_attend, attended, named, ones[1]),
        ):
            leaves = {name: x.detach().requires_grad_() for name, x in inputs_.items()}
            o = function(**leaves, **given, backend="cpu")
            results += [o.detach(), *torch.autograd.grad(o, list(leaves.values()), along)]
        return [*results, select_blocks(tensors["q"], tensors["k_cmp"], **CHOICE, backend="cpu")]

    expected = run()
    torch.set_default_dtype(default)
    torch.set_default_device("meta")
    try:
        changed = run()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert all(torch.equal(a, b) for a, b in zip(changed, expected, strict=True))


@pytest.mark.slow
def test_memory_grows_with_the_tokens():
    def peak(tokens):
        tensors = {name: x.requires_grad_() for name, x in inputs(tokens, batch=1).items()}
        attended, named = attend_inputs(2, tokens=tokens)
        attended = {name: x.requires_grad_() for name, x in attended.items()}

        def call():
            native_sparse_attention(**tensors, **SMALL, backend="cpu").sum().backward()
            native_sparse_attend(**attended, **named, backend="cpu").sum().backward()

        return peak_memory(call, torch.device("cpu"))

    assert not grows_as_square([peak(tokens) for tokens in (128, 256, 512)], 128)


def test_windows_without_room_are_counted_on_the_device():
    cu_seqlens = cumulative(LENGTHS)
    assert given_windows(cu_seqlens, 100, 8, 4).tolist() == cumulative(map(windows, LENGTHS)).tolist()
    assert given_windows(cu_seqlens, 3, 8, 4).max() == 3
    assert mean_windows(cu_seqlens, 76, 4).tolist() == [0, 0, 5, 7, 7, 18, 19]
