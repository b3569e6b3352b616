"""Decoding gives what native sparse attention gives on the whole sequence: outputs and choices, however the sequence is
split into steps.
"""

import pytest
import torch

from tilewise.ops.nsa import reference
from tilewise.ops.nsa.cached import reference as cached
from tilewise.ops.nsa.decode import NSACache, nsa_decode_step

SMALL = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 8,
    "block_count": 4,
    "window_size": 11,
    "init_blocks": 1,
    "local_blocks": 2,
}
SIZES = {
    "small": SMALL,
    "no-overlap": SMALL | {"compress_size": 4},
    "long-windows": SMALL | {"compress_size": 16, "compress_stride": 2, "block_size": 4, "block_count": 7},
    "nothing-forced": SMALL | {"init_blocks": 0, "local_blocks": 0, "block_count": 2},
    "one-key-window": SMALL | {"window_size": 1, "compress_stride": 8},
    "larger-than-the-sequence": SMALL
    | {"compress_size": 128, "compress_stride": 64, "block_size": 64, "window_size": 512, "block_count": 16},
}
BATCH, TOKENS, KV_HEADS, HEADS, D, DV = 2, 61, 2, 6, 8, 5


def draw(tokens=TOKENS, *, dtype=torch.float64, device="cpu", batch=BATCH, seed=0):
    """q, k, v and three gates of whole sequences."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (HEADS, D),
        "k": (KV_HEADS, D),
        "v": (KV_HEADS, DV),
        "g_cmp": (HEADS,),
        "g_slc": (HEADS,),
        "g_swa": (HEADS,),
    }
    return {
        name: torch.randn(batch, tokens, *shape, generator=generator).to(device, dtype)
        for name, shape in shapes.items()
    }


def cut(tensors, tokens):
    return {name: x if x is None else x[:, tokens] for name, x in tensors.items()}


def make_cache(max_len=TOKENS, *, dtype=torch.float64, device="cpu", batch=BATCH, **more):
    return NSACache(batch, max_len, KV_HEADS, D, DV, **{**SMALL, **more}, dtype=dtype, device=device)


def decode_in(steps, tensors, cache, **options):
    """Outputs and choices, decoded in steps of so many tokens."""
    parts, at = [], 0
    for n in steps:
        parts.append(nsa_decode_step(**cut(tensors, slice(at, at + n)), cache=cache, return_indices=True, **options))
        at += n
    return [torch.cat(x, dim=1) for x in zip(*parts, strict=True)]


STEPS = {
    "one-by-one": [1] * TOKENS,
    "at-once": [TOKENS],
    "prompt-then-one-by-one": [40] + [1] * 21,
    "uneven": [3, 0, 17, 1, 8, 9, 23],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_equals_the_whole_sequence(sizes, steps):
    tensors = draw()
    expected, choices = reference.native_sparse_attention(**tensors, **sizes)
    o, indices = decode_in(steps, tensors, make_cache(**sizes), backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(indices, choices)


@pytest.mark.parametrize(
    "left_out",
    [("g_cmp",), ("g_slc",), ("g_swa",), ("g_cmp", "g_swa"), ("g_slc", "g_swa"), ("g_cmp", "g_slc")],
    ids="-".join,
)
def test_a_gate_of_none_leaves_its_branch_out(left_out):
    tensors = draw() | dict.fromkeys(left_out)
    expected, _ = reference.native_sparse_attention(**tensors, **SMALL)
    cache = make_cache()
    o = torch.cat(
        [nsa_decode_step(**cut(tensors, slice(t, t + 1)), cache=cache, backend="reference") for t in range(TOKENS)],
        dim=1,
    )
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("scale", [0.7, 0.0, -1.5])
def test_scale(scale):
    tensors = draw()
    expected, choices = reference.native_sparse_attention(**tensors, **SMALL, scale=scale)
    o, indices = decode_in([30] + [1] * 31, tensors, make_cache(), scale=scale, backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(indices, choices)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=str
)
def test_dtypes_and_backends(dtype, tolerance, backend, device):
    """The choices are held fixed by block_indices, for in 16 bits the compressed keys are rounded and near scores may
    swap.
    """
    tensors = draw(dtype=dtype, device=device)
    o, indices = decode_in([40] + [1] * 21, tensors, make_cache(dtype=dtype, device=device), backend=backend)
    means = {f"{name}_cmp": reference.compress_mean(tensors[name], 8, 4) for name in "kv"}
    expected, _ = reference.native_sparse_attention(
        **{name: x.double() for name, x in (tensors | means).items()}, **SMALL, block_indices=indices
    )
    assert o.dtype == dtype
    error = (o.double() - expected).norm() / expected.norm()
    assert error < tolerance, error
    if dtype == torch.float32:
        assert torch.equal(indices, reference.native_sparse_attention(**tensors, **SMALL)[1])


def test_ties_go_to_the_lower_index():
    tensors = draw()
    tensors["k"].fill_(1.0)
    choices = reference.native_sparse_attention(**tensors, **SMALL)[1]
    _, indices = decode_in([1] * TOKENS, tensors, make_cache(), backend="reference")
    scores = reference.choice_scores(
        tensors["q"],
        reference.compress_mean(tensors["k"], 8, 4),
        **{name: SMALL[name] for name in ("compress_size", "compress_stride", "block_size")},
    )
    # Of equal scores, none that was left out lies before one that was taken.
    for t in range(TOKENS):
        taken = indices[0, t, 0][indices[0, t, 0] >= 0].tolist()
        free = [j for j in taken if scores[0, t, 0, j].isfinite()]
        left = [j for j in range(t // 8 + 1) if j not in taken]
        assert not [
            (i, j)
            for i in left
            for j in free
            if i < j and torch.isclose(scores[0, t, 0, i], scores[0, t, 0, j], rtol=1e-9)
        ]
    assert (indices >= 0).sum() == (choices >= 0).sum()


LENGTHS = [17, 0, 44, 8]


@pytest.mark.parametrize("place", ["step", "append"])
def test_sequences_of_different_lengths(place):
    """Prompts padded to one length with NaN, then tokens one by one: each sequence as if it were alone."""
    tensors, counts = draw(batch=4), torch.tensor(LENGTHS)
    expected, choices = reference.native_sparse_attention(**tensors, **SMALL)
    real = torch.arange(44) < counts[:, None]
    prompt = {
        name: x.masked_fill(~real.view(4, 44, *[1] * (x.dim() - 2)), torch.nan)
        for name, x in cut(tensors, slice(0, 44)).items()
    }
    cache = make_cache(batch=4)
    if place == "step":
        o, indices = nsa_decode_step(**prompt, cache=cache, counts=counts, return_indices=True, backend="reference")
        torch.testing.assert_close(o, expected[:, :44].masked_fill(~real[..., None, None], 0.0), rtol=1e-10, atol=1e-12)
        assert torch.equal(indices, choices[:, :44].masked_fill(~real[..., None, None], -1))
    else:
        cache.append(prompt["k"], prompt["v"], counts)
    assert cache.lengths.tolist() == LENGTHS
    assert cache.longest == 44
    for i in range(17):
        at = counts + i
        new = {name: x[torch.arange(4), at][:, None] for name, x in tensors.items()}
        o, indices = nsa_decode_step(**new, cache=cache, return_indices=True, backend="reference")
        torch.testing.assert_close(o[:, 0], expected[torch.arange(4), at], rtol=1e-10, atol=1e-12)
        assert torch.equal(indices[:, 0], choices[torch.arange(4), at])


def test_some_sequences_pause():
    """Counts of 0 and 1 in turn: a paused sequence keeps its length, and gives 0."""
    tensors = draw()
    expected, _ = reference.native_sparse_attention(**tensors, **SMALL)
    cache, at = make_cache(), torch.tensor([0, 0])
    for i in range(60):
        counts = torch.tensor([i % 2, 1 - i % 3 // 2])
        new = {name: x[torch.arange(2), at][:, None] for name, x in tensors.items()}
        o = nsa_decode_step(**new, cache=cache, counts=counts, backend="reference")
        truth = expected[torch.arange(2), at] * counts[:, None, None]
        torch.testing.assert_close(o[:, 0], truth, rtol=1e-10, atol=1e-12)
        at += counts
        assert torch.equal(cache.lengths, at)


def test_the_cache_holds_what_training_would():
    tensors = draw()
    cache = make_cache(max_len=TOKENS + 9)
    decode_in(STEPS["uneven"], tensors, cache, backend="reference")
    assert torch.equal(cache.k[:, :TOKENS], tensors["k"])
    assert torch.equal(cache.v[:, :TOKENS], tensors["v"])
    for name in ("k", "v"):
        means = reference.compress_mean(tensors[name], 8, 4)
        torch.testing.assert_close(getattr(cache, f"{name}_cmp")[:, : means.shape[1]], means, rtol=1e-12, atol=1e-14)
    assert cache.k_cmp.shape == (BATCH, (TOKENS + 9 - 8) // 4 + 1, KV_HEADS, D)


def learned(k, v):
    """A compression that looks at the order of the tokens."""
    weight = torch.linspace(-1, 2, k.shape[2], dtype=k.dtype, device=k.device)[:, None, None]
    return (k * weight).sum(2).sin(), (v * weight).sum(2).cos()


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_learned_compression(steps):
    tensors = draw()
    k_cmp, v_cmp = learned(*(tensors[name].unfold(1, 8, 4).movedim(-1, 2) for name in "kv"))
    expected, choices = reference.native_sparse_attention(**tensors, **SMALL, k_cmp=k_cmp, v_cmp=v_cmp)
    o, indices = decode_in(steps, tensors, make_cache(compress=learned), backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(indices, choices)


def test_only_windows_that_became_whole_are_compressed():
    seen = []

    def watching(k, v):
        seen.append(k.shape)
        return learned(k, v)

    cache = make_cache(compress=watching, batch=4)
    tensors = draw(batch=4)
    cache.append(*(tensors[name][:, :30] for name in "kv"), torch.tensor([7, 12, 30, 0]))
    # The second sequence has two windows and the third six.
    assert seen == [(1, 8, 8, KV_HEADS, D)]
    for t in range(8):
        seen.clear()
        cache.append(*(tensors[name][:, t : t + 1] for name in "kv"))
        after = [n + t + 1 for n in (7, 12, 30, 0)]
        completed = [n for n in after if n >= 8 and n % 4 == 0]
        assert seen == ([(1, len(completed), 8, KV_HEADS, D)] if completed else [])


def test_many_new_tokens_are_taken_in_pieces(monkeypatch):
    tensors = draw()
    whole, choices = decode_in([TOKENS], tensors, make_cache(), backend="reference")
    monkeypatch.setattr(cached, "MOST_ELEMENTS", 9000)
    pieces, same = decode_in([TOKENS], tensors, make_cache(), backend="reference")
    torch.testing.assert_close(pieces, whole, rtol=1e-12, atol=1e-14)
    assert torch.equal(choices, same)


def test_reset_makes_room_for_another_sequence():
    first, second = draw(), draw(seed=1)
    # What is left behind must not matter, NaN either.
    first["v"][0, 9] = torch.nan
    first["k"][0, 9] = torch.nan
    expected, choices = reference.native_sparse_attention(**second, **SMALL)
    cache = make_cache(max_len=TOKENS + 20)
    decode_in([TOKENS], first, cache, backend="reference")
    cache.reset(0)
    assert cache.lengths.tolist() == [0, TOKENS]
    counts = torch.tensor([1, 0])
    for t in range(20):
        o, indices = nsa_decode_step(
            **cut(second, slice(t, t + 1)), cache=cache, counts=counts, return_indices=True, backend="reference"
        )
        torch.testing.assert_close(o[0], expected[0, t : t + 1], rtol=1e-10, atol=1e-12)
        assert torch.equal(indices[0], choices[0, t : t + 1])
    cache.reset()
    assert cache.lengths.tolist() == [0, 0]
    assert cache.longest == 0
    o, indices = decode_in([TOKENS], second, cache, backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(indices, choices)
    cache.reset(torch.tensor([1, 0]))
    assert cache.lengths.tolist() == [0, 0]


@pytest.mark.parametrize("sizes", [SMALL, SIZES["nothing-forced"]], ids=["small", "nothing-forced"])
def test_a_nan_key_reaches_only_what_sees_it(sizes):
    tensors = draw()
    tensors["v"][1, 20] = torch.nan
    expected, _ = reference.native_sparse_attention(**tensors, **sizes)
    o, _ = decode_in([1] * TOKENS, tensors, make_cache(**sizes), backend="reference")
    torch.testing.assert_close(o, expected, rtol=1e-10, atol=1e-12, equal_nan=True)
    assert o[0].isfinite().all()
    assert o[1, :20].isfinite().all()


def test_no_gradient_passes():
    tensors = {name: x.requires_grad_() for name, x in draw().items()}
    o, _ = decode_in([TOKENS], tensors, make_cache(), backend="reference")
    assert not o.requires_grad


def test_inference_mode_may_come_and_go():
    tensors = draw()
    expected, _ = reference.native_sparse_attention(**tensors, **SMALL)
    with torch.inference_mode():
        cache = make_cache()
        cache.append(*(tensors[name][:, :30] for name in "kv"))
    o = [nsa_decode_step(**cut(tensors, slice(30, 40)), cache=cache, backend="reference")]
    with torch.inference_mode():
        o.append(nsa_decode_step(**cut(tensors, slice(40, TOKENS)), cache=cache, backend="reference"))
    torch.testing.assert_close(torch.cat(o, dim=1), expected[:, 30:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("holds", [torch.bfloat16, torch.float32])
def test_autocast(holds):
    """Inside autocast q and the gates take its dtype, and the cache its own; what is computed in fp32 stays so."""
    tensors = draw(dtype=torch.float32)
    narrow = {name: x.bfloat16() for name, x in tensors.items()}
    expected, choices = decode_in([30] + [1] * 31, narrow, make_cache(dtype=torch.bfloat16))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, indices = decode_in([30] + [1] * 31, narrow if holds == torch.float32 else tensors, make_cache(dtype=holds))
    assert o.dtype == torch.bfloat16
    if holds == torch.bfloat16:
        assert torch.equal(o, expected)
        assert torch.equal(indices, choices)
    else:
        forced = indices[..., 0]
        assert torch.equal(forced, choices[..., 0])
        assert (o.float() - expected.float()).norm() / expected.float().norm() < 0.1


def test_torch_s_default_dtype_changes_nothing():
    tensors = draw(dtype=torch.float32)
    expected = decode_in([30] + [1] * 31, tensors, make_cache(dtype=torch.float32))
    torch.set_default_dtype(torch.float64)
    try:
        actual = decode_in([30] + [1] * 31, tensors, make_cache(dtype=torch.float32))
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(actual[0], expected[0])
    assert torch.equal(actual[1], expected[1])


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("counts", [None, "cpu", "cuda"])
def test_the_host_waits_for_nothing(counts):
    tensors = draw(dtype=torch.bfloat16, device="cuda")
    cache = make_cache(dtype=torch.bfloat16, device="cuda")
    given = None if counts is None else torch.tensor([30, 11], device=counts)
    one = None if counts is None else torch.tensor([1, 1], device=counts)
    decode_in([1], tensors, make_cache(dtype=torch.bfloat16, device="cuda"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        nsa_decode_step(**cut(tensors, slice(0, 30)), cache=cache, counts=given)
        for t in range(30, 60):
            nsa_decode_step(**cut(tensors, slice(t, t + 1)), cache=cache, counts=one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert cache.lengths.tolist() == ([60, 60] if counts is None else [60, 41])


@pytest.mark.gpu
@needs_gpu
def test_counts_on_the_gpu():
    """Outputs are the same, unchecked counts stay in bounds, and a full cache is noticed by check()."""
    tensors = draw(device="cuda")
    expected, choices = reference.native_sparse_attention(**tensors, **SMALL)
    cache = make_cache(device="cuda")
    counts = torch.tensor([40, 13], device="cuda")
    nsa_decode_step(**cut(tensors, slice(0, 50)), cache=cache, counts=counts, backend="reference")
    assert cache.longest == 40
    for i in range(21):
        new = {name: x[torch.arange(2), counts + i][:, None] for name, x in tensors.items()}
        ones = torch.ones(2, dtype=torch.int32, device="cuda")
        o, indices = nsa_decode_step(**new, cache=cache, counts=ones, return_indices=True, backend="reference")
        torch.testing.assert_close(o[:, 0], expected[torch.arange(2), counts + i], rtol=1e-10, atol=1e-12)
        assert torch.equal(indices[:, 0], choices[torch.arange(2), counts + i])
    cache.check()
    o = nsa_decode_step(**new, cache=cache, counts=ones, backend="reference")
    assert cache.lengths.tolist() == [61, 35]
    assert not o[0].any()
    with pytest.raises(ValueError, match="sequence 0 is full: .* max_len is 61"):
        cache.check()
    other = make_cache(device="cuda")
    nsa_decode_step(
        **cut(tensors, slice(0, 20)), cache=other, counts=torch.tensor([-5, 2**40], device="cuda"), backend="reference"
    )
    assert other.lengths.tolist() == [0, 20]


@pytest.mark.gpu
@needs_gpu
def test_a_full_cache_raises_on_the_gpu_where_values_are_checked(monkeypatch):
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    tensors = draw(dtype=torch.bfloat16, device="cuda")
    cache = make_cache(max_len=TOKENS - 1, dtype=torch.bfloat16, device="cuda")
    nsa_decode_step(**cut(tensors, slice(0, 50)), cache=cache)
    with pytest.raises(ValueError, match="sequence 0 has 50 tokens and 11 come: max_len is 60"):
        nsa_decode_step(**cut(tensors, slice(50, 61)), cache=cache)
    assert cache.lengths.tolist() == [50, 50]
    cache.check()
