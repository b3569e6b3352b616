"""Wrong calls that block-sparse attention alone can get: they raise before anything is launched, as all do."""

import pytest
import torch

from tilewise import block_sparse_attn, hstu_attention_with_bsa
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")
GATES = ("g_cmp", "g_slc", "g_swa")


def dense(heads=4, **more):
    tensors = {name: torch.randn(2, 20, heads, 16) for name in ("q", "k", "v", "u")}
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
    "heads-differ": (
        dense(k=torch.randn(2, 20, 2, 16)),
        ValueError,
        r"k and q must have the same shape \(got shapes q \[2, 20, 4, 16\]",
    ),
    "lengths-differ": (dense(k=torch.randn(2, 19, 4, 16)), ValueError, "k and q must have the same shape"),
    "values-differ": (dense(v=torch.randn(2, 20, 2, 16)), ValueError, "v and q must agree in all but the last axis"),
    "no-heads": (dense(heads=0), ValueError, "q has no heads"),
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


def test_odd_heads_are_taken_without_interleave():
    assert block_sparse_attn(**dense(heads=3), interleave=False)[0].shape == (2, 20, 3, 16)


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")


def on_gpu(arguments):
    return {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in arguments.items()}


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
