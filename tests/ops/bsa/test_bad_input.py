"""Wrong calls raise before anything is launched, naming the argument, what was expected and what came."""

import pytest
import torch

from tilewise import block_sparse_attn, hstu_attention_with_bsa
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")
GATES = ("g_cmp", "g_slc", "g_swa")


def dense(dtype=torch.float32, heads=4, **more):
    tensors = {name: torch.randn(2, 20, heads, 16, dtype=dtype) for name in ("q", "k", "v", "u")}
    return (
        tensors
        | {name: torch.rand(2, 20, heads) for name in GATES}
        | {"block_counts": 2, "block_size": 16, "window_size": 9}
        | more
    )


def packed(offsets=(0, 9, 20), dtype=torch.int32, **more):
    tensors = {name: x[0] if isinstance(x, torch.Tensor) else x for name, x in dense().items()}
    return tensors | {"seq_offsets": torch.tensor(offsets, dtype=dtype)} | more


ATTENTION = {
    "not-a-tensor": (dense(k=[[1.0]]), TypeError, "k is a list: expected a torch.Tensor"),
    "rank-3": (
        dense(q=torch.randn(20, 4, 16)),
        ValueError,
        r"q has 3 dimensions: expected \[B, T, H, D\] \(give seq_offsets for packed",
    ),
    "rank-4-packed": (
        packed(v=torch.randn(1, 20, 4, 16)),
        ValueError,
        r"v has 4 dimensions: expected \[N, H, D\].*seq_offsets is given",
    ),
    "dtype-mix": (dense(v=torch.randn(2, 20, 4, 16).half()), TypeError, "v is torch.float16 and q is torch.float32"),
    "integers": (dense(q=torch.ones(2, 20, 4, 16, dtype=torch.int32)), TypeError, "q is torch.int32: expected float16"),
    "heads-differ": (
        dense(k=torch.randn(2, 20, 2, 16)),
        ValueError,
        r"k and q must have the same shape \(got shapes q \[2, 20, 4, 16\]",
    ),
    "lengths-differ": (dense(k=torch.randn(2, 19, 4, 16)), ValueError, "k and q must have the same shape"),
    "values-differ": (dense(v=torch.randn(2, 20, 2, 16)), ValueError, "v and q must agree in all but the last axis"),
    "no-heads": (dense(heads=0), ValueError, "q has no heads"),
    "too-wide": (dense(v=torch.randn(2, 20, 4, 257)), ValueError, "v has 257 channels: expected 1 to 256"),
    "last-axis": (
        dense(q=torch.randn(2, 20, 16, 4).transpose(2, 3)),
        ValueError,
        r"q's last axis has stride 4.*q\.contiguous\(\)",
    ),
    "u-last-axis": (
        dense(u=torch.randn(2, 20, 16, 4).transpose(2, 3)),
        ValueError,
        r"u's last axis has stride 4.*u\.contiguous\(\)",
    ),
    "u-shape": (
        dense(u=torch.randn(2, 20, 4, 8)),
        ValueError,
        r"u has shape \[2, 20, 4, 8\]: expected v's shape, here \[2, 20, 4, 16\]",
    ),
    "u-dtype": (
        dense(u=torch.randn(2, 20, 4, 16).half()),
        TypeError,
        "u is torch.float16 and q is torch.float32: expected q's dtype or float32",
    ),
    "u-none": (dense(u=None), TypeError, "u is a NoneType"),
    "devices-differ": (dense(v=torch.empty(2, 20, 4, 16, device="meta")), ValueError, "v is on meta and q is on cpu"),
    "gate-list": (dense(g_cmp=[1.0]), TypeError, r"g_cmp is a list: expected a torch.Tensor \[B, T, H\]"),
    "gate-shape": (
        dense(g_slc=torch.rand(2, 20, 2)),
        ValueError,
        r"g_slc has shape \[2, 20, 2\]: expected \[B, T, H\], here \[2, 20, 4\]",
    ),
    "gate-packed": (
        packed(g_swa=torch.rand(1, 20, 4)),
        ValueError,
        r"g_swa has shape \[1, 20, 4\]: expected \[N, H\], here \[20, 4\]",
    ),
    "gate-unused": (dense(g_swa=torch.rand(2, 20, 2), window_size=0), ValueError, r"g_swa has shape \[2, 20, 2\]"),
    "gate-dtype": (
        dense(g_cmp=torch.rand(2, 20, 4).half()),
        TypeError,
        "g_cmp is torch.float16 and q is torch.float32",
    ),
    "count-0": (dense(block_counts=0), ValueError, "block_counts is 0: expected a whole number of at least 1"),
    "count-fraction": (dense(block_counts=2.0), TypeError, r"block_counts is 2\.0: expected a whole number"),
    "block-0": (dense(block_size=0), ValueError, "block_size is 0: expected a whole number of at least 1"),
    "block-bool": (dense(block_size=True), TypeError, "block_size is True"),
    "window-negative": (dense(window_size=-1), ValueError, "window_size is -1: expected a whole number of at least 0"),
    "scale-0": (dense(scale=0), ValueError, "scale is 0: expected a number above 0"),
    "scale-negative": (dense(scale=-0.5), ValueError, r"scale is -0\.5: expected a number above 0"),
    "scale-infinite": (dense(scale=float("inf")), ValueError, "scale is inf: expected a finite number"),
    "scale-nan": (dense(scale=float("nan")), ValueError, "scale is nan: expected a finite number"),
    "scale-word": (dense(scale="1"), TypeError, "scale is a str"),
    "odd-heads": (
        dense(heads=3),
        ValueError,
        "interleave is True and q has 3 heads: .*give an even number, or interleave=False",
    ),
    "backend": (dense(backend="cuda"), ValueError, "backend is 'cuda': expected one of triton, cpu, reference"),
    "offsets-start": (packed([1, 20]), ValueError, "seq_offsets starts at 1: the first offset must be 0"),
    "offsets-unsorted": (packed([0, 9, 3, 20]), ValueError, "seq_offsets decreases from 9 to 3 at position 2"),
    "offsets-end": (
        packed([0, 5]),
        ValueError,
        "seq_offsets ends at 5: the last offset must be the number of tokens, 20",
    ),
    "offsets-none": (packed([0]), ValueError, "seq_offsets holds no sequence and there are 20 tokens"),
    "offsets-float": (packed(dtype=torch.float32), TypeError, "seq_offsets is torch.float32: expected int32 or int64"),
    "offsets-list": (packed(seq_offsets=[0, 20]), TypeError, "seq_offsets is a list"),
    "offsets-device": (
        packed(seq_offsets=torch.empty(2, dtype=torch.int32, device="meta")),
        ValueError,
        "seq_offsets is on meta",
    ),
}


def gates(shape=(2, 16, 4), dtype=torch.float32):
    return lambda _: [torch.ones(shape, dtype=dtype)] * 3


def layer(offsets=(0, 9, 20), length=16, **more):
    tensors = {name: torch.randn(20, 4 * 16) for name in ("q", "k")} | {
        name: torch.randn(20, 4 * 8) for name in ("v", "u")
    }
    sizes = {"num_heads": 4, "attention_dim": 16, "linear_dim": 8, "block_counts": 2, "block_size": 16}
    mask = torch.ones(2, length, length, dtype=torch.bool)
    return (
        tensors | sizes | {"x_offsets": torch.tensor(offsets), "invalid_attn_mask": mask, "gate_model": gates()} | more
    )


LAYER = {
    "heads-0": (layer(num_heads=0), ValueError, "num_heads is 0: expected a whole number of at least 1"),
    "channels-fraction": (layer(attention_dim=16.0), TypeError, r"attention_dim is 16\.0: expected a whole number"),
    "not-a-tensor": (layer(k=[[1.0]]), TypeError, "k is a list: expected a torch.Tensor"),
    "width": (
        layer(attention_dim=8),
        ValueError,
        r"q has shape \[20, 64\]: expected \[N, num_heads · attention_dim\], here 4 · 8 = 32 channels",
    ),
    "width-of-values": (
        layer(linear_dim=16),
        ValueError,
        r"v has shape \[20, 32\]: expected \[N, num_heads · linear_dim\], here 4 · 16 = 64",
    ),
    "width-of-u": (layer(u=torch.randn(20, 31)), ValueError, r"u has shape \[20, 31\]"),
    "rank": (layer(q=torch.randn(20, 4, 16)), ValueError, r"q has shape \[20, 4, 16\]: expected \[N, num_heads"),
    "tokens-differ": (layer(k=torch.randn(19, 64)), ValueError, "k has 19 tokens and q has 20: they must be equal"),
    "values-differ": (layer(v=torch.randn(19, 32)), ValueError, "v has 19 tokens and q has 20"),
    "devices-differ": (layer(k=torch.empty(20, 64, device="meta")), ValueError, "k is on meta and q is on cpu"),
    "dtype-mix": (layer(k=torch.randn(20, 64).half()), TypeError, "k is torch.float16 and q is torch.float32"),
    "last-axis": (layer(q=torch.randn(64, 20).T), ValueError, "q's last axis has stride 20"),
    "offsets-unsorted": (layer((0, 9, 3, 20)), ValueError, "x_offsets decreases from 9 to 3 at position 2"),
    "offsets-end": (
        layer((0, 9, 19)),
        ValueError,
        "x_offsets ends at 19: the last offset must be the number of tokens, 20",
    ),
    "offsets-list": (layer(x_offsets=[0, 9, 20]), TypeError, "x_offsets is a list"),
    "too-long": (
        layer((0, 3, 20)),
        ValueError,
        r"invalid_attn_mask.size\(-1\) is 16 and x_offsets holds a sequence of 17 tokens",
    ),
    "much-too-long": (
        layer(length=9),
        ValueError,
        r"invalid_attn_mask.size\(-1\) is 9 and there are 20 tokens in 2 sequences",
    ),
    "mask-number": (
        layer(invalid_attn_mask=16),
        TypeError,
        r"invalid_attn_mask is a int: expected a torch.Tensor \[\.\.\., n\]",
    ),
    "mask-scalar": (
        layer(invalid_attn_mask=torch.tensor(16)),
        ValueError,
        r"invalid_attn_mask has no axes: expected \[\.\.\., n\]",
    ),
    "model-none": (layer(gate_model=None), TypeError, "gate_model is a NoneType: expected a function or module"),
    "gates-two": (
        layer(gate_model=lambda _: [torch.ones(2, 16, 4)] * 2),
        TypeError,
        "gate_model returned 2 of them: expected three gates",
    ),
    "gates-one": (
        layer(gate_model=lambda _: torch.ones(2, 16, 4)),
        TypeError,
        "gate_model returned a Tensor: expected three gates",
    ),
    "gates-none": (
        layer(gate_model=lambda _: [None] * 3),
        TypeError,
        r"gate_model returned a NoneType for g_cmp: expected a torch.Tensor \[B, n, H\]",
    ),
    "gates-shape": (
        layer(gate_model=gates((20, 4))),
        ValueError,
        r"gate_model returned g_cmp of shape \[20, 4\]: expected \[B, n, H\], here \[2, 16, 4\]",
    ),
    "gates-heads": (
        layer(gate_model=gates((2, 16, 1))),
        ValueError,
        r"gate_model returned g_cmp of shape \[2, 16, 1\]",
    ),
    "gates-device": (
        layer(gate_model=lambda _: [torch.ones(2, 16, 4, device="meta")] * 3),
        ValueError,
        "gate_model returned g_cmp on meta and q is on cpu: move the model there",
    ),
    "gates-dtype": (
        layer(gate_model=gates(dtype=torch.float16)),
        TypeError,
        "g_cmp is torch.float16 and q is torch.float32",
    ),
    "count-0": (layer(block_counts=0), ValueError, "block_counts is 0"),
    "window-negative": (layer(window_size=-1), ValueError, "window_size is -1"),
    "backend": (layer(backend="cuda"), ValueError, "backend is 'cuda'"),
}
BAD = {name: (block_sparse_attn, *case) for name, case in ATTENTION.items()} | {
    f"layer-{name}": (hstu_attention_with_bsa, *case) for name, case in LAYER.items()
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("function", "arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(function, arguments, error, message, backend):
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    with pytest.raises(error, match=message):
        function(**{"backend": backend} | arguments)


def test_fp64_is_for_the_reference_alone():
    tensors = dense(dtype=torch.float64)
    assert block_sparse_attn(**tensors, backend="reference")[0].dtype == torch.float64
    with pytest.raises(TypeError, match="q is torch.float64.*backend='reference' also takes float64"):
        block_sparse_attn(**tensors)


def test_odd_heads_are_taken_without_interleave():
    assert block_sparse_attn(**dense(heads=3), interleave=False)[0].shape == (2, 20, 3, 16)


def test_the_environment_chooses_and_is_named(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    assert block_sparse_attn(**dense(dtype=torch.float64))[0].dtype == torch.float64
    monkeypatch.setenv("TILEWISE_BACKEND", "tritn")
    with pytest.raises(ValueError, match="TILEWISE_BACKEND is 'tritn'"):
        hstu_attention_with_bsa(**layer())


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")


def on_gpu(arguments):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["offsets-start", "offsets-unsorted", "offsets-end"])
def test_cuda_values_are_checked_on_request(name, monkeypatch):
    arguments, error, message = ATTENTION[name]
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(error, match=message):
        block_sparse_attn(**on_gpu(arguments))


WILD = ([0, 9, 3, 20], [-(2**31), 2**40, -5], [17, 2, 0], [0, 1, 20], [5, 5, 5])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("offsets", WILD, ids=str)
def test_unchecked_bad_values_stay_in_bounds(offsets):
    """Under compute-sanitizer this shows that nothing is read or written out of bounds; alone, that nothing crashes."""
    calls = [(block_sparse_attn, packed(offsets, torch.int64)), (hstu_attention_with_bsa, layer(offsets))]
    for function, arguments in calls:
        given = on_gpu(arguments)
        if "gate_model" in given:
            given["gate_model"] = lambda padded: [torch.ones(padded.shape[:3], device="cuda")] * 3
        leaves = [x.requires_grad_() for x in given.values() if isinstance(x, torch.Tensor) and x.is_floating_point()]
        o = function(**given)[0]
        torch.autograd.grad(o, leaves, torch.ones_like(o), allow_unused=True)
    torch.cuda.synchronize()


def test_places_by_bad_offsets_stay_in_bounds(monkeypatch):
    """The same where values are not checked, by the places that tokens are padded to."""
    from tilewise.ops.bsa import hstu_bsa

    monkeypatch.setattr(hstu_bsa.checks, "check_offset_values", lambda *_: None)
    for offsets in WILD:
        slots = hstu_bsa.bsa_slots(torch.tensor(offsets), 20, 16)
        assert slots.shape == (20,)
        assert ((slots >= 0) & (slots < 16 * (len(offsets) - 1))).all()
