"""Wrong calls that hstu_attention alone can get: they raise before anything is launched, as all do."""

import pytest
import torch

from tilewise import hstu_attention
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")


def packed(heads=2, channels=16, device="cpu", **more):
    tensors = {
        name: torch.randn(8, heads, d, device=device) for name, d in (("q", channels), ("k", channels), ("v", 16))
    }
    offsets = torch.tensor([0, 5, 8], dtype=torch.int32, device=device)
    return tensors | {"seq_offsets": offsets, "max_seq_len": 8} | more


def targets(*counts, **more):
    return packed(num_targets=torch.tensor(counts, **more))


META = {"device": "meta"}
BAD = {
    "heads-differ": (
        packed(k=torch.randn(8, 1, 16)),
        ValueError,
        r"k and q must have the same shape .*q \[8, 2, 16\], k \[8, 1, 16\]",
    ),
    "tokens-differ": (packed(k=torch.randn(9, 2, 16)), ValueError, "k and q must have the same shape"),
    "channels-differ": (packed(k=torch.randn(8, 2, 8)), ValueError, "k and q must have the same shape"),
    "values-differ": (packed(v=torch.randn(9, 2, 16)), ValueError, "v and q must agree in all but the last axis"),
    "no-heads": (packed(heads=0), ValueError, "q has no heads: expected at least 1"),
    "too-wide": (packed(channels=257), ValueError, "q has 257 channels: expected 1 to 256"),
    "no-channels": (packed(channels=0), ValueError, "q has 0 channels"),
    "alpha-infinite": (packed(alpha=float("inf")), ValueError, "alpha is inf: expected a finite number"),
    "alpha-text": (packed(alpha="1"), TypeError, "alpha is a str: expected a number"),
    "longest-negative": (
        packed(max_seq_len=-1),
        ValueError,
        "max_seq_len is -1: expected a whole number of at least 0",
    ),
    "longest-float": (packed(max_seq_len=8.0), TypeError, "max_seq_len is 8.0: expected a whole number"),
    "longest-zero": (packed(max_seq_len=0), ValueError, "max_seq_len is 0 and there are 8 tokens"),
    "longest-too-short": (
        packed(max_seq_len=4),
        ValueError,
        "max_seq_len is 4 and seq_offsets holds a sequence of 5 tokens",
    ),
    "max-attn-len": (packed(max_attn_len=-1), ValueError, "max_attn_len is -1: expected a whole number of at least 0"),
    "max-attn-len-none": (packed(max_attn_len=None), TypeError, "max_attn_len is None: expected a whole number"),
    "context": (
        packed(contextual_seq_len=-2),
        ValueError,
        "contextual_seq_len is -2: expected a whole number of at least 0",
    ),
    "targets-negative": (
        targets(-1, 0),
        ValueError,
        "num_targets is -1 for sequence 0: expected 0 to 5, for it has 5 tokens",
    ),
    "targets-many": (
        targets(5, 4),
        ValueError,
        "num_targets is 4 for sequence 1: expected 0 to 3, for it has 3 tokens",
    ),
    "targets-batch": (
        targets(1, 1, 1),
        ValueError,
        r"num_targets has shape \[3\]: expected \[B\], a number for each sequence, here \[2\]",
    ),
    "targets-rank": (targets([1, 1]), ValueError, r"num_targets has shape \[1, 2\]"),
    "targets-float": (targets(1.0, 1.0), TypeError, "num_targets is torch.float32: expected int32 or int64"),
    "targets-list": (packed(num_targets=[1, 1]), TypeError, "num_targets is a list"),
    "targets-device": (
        packed(num_targets=torch.empty(2, dtype=torch.int32, **META)),
        ValueError,
        "num_targets is on meta and q is on cpu",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(arguments, error, message, backend):
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    with pytest.raises(error, match=message):
        hstu_attention(**{"backend": backend} | arguments)


def test_max_seq_len_must_be_given():
    arguments = packed()
    del arguments["max_seq_len"]
    with pytest.raises(TypeError, match="max_seq_len"):
        hstu_attention(**arguments)


def test_the_limits_themselves_are_good():
    """As many targets as tokens, and a max_seq_len of just the longest sequence."""
    o = hstu_attention(**targets(5, 3) | {"max_seq_len": 5}, backend="cpu")
    assert o.shape == (8, 2, 16)
    assert o.isfinite().all()


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("name", ["longest-too-short", "targets-negative", "targets-many"])
def test_cuda_values_are_checked_on_request(name, monkeypatch):
    arguments, error, message = BAD[name]
    arguments = {key: x.cuda() if isinstance(x, torch.Tensor) else x for key, x in arguments.items()}
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(error, match=message):
        hstu_attention(**arguments)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [-(2**31), 2**31 - 1, -5], [7, 2, 0], [0, 2**40, 8], [3, 3, 3]])
@pytest.mark.parametrize("count", [0, -(2**40), 2**40], ids=["no-targets", "negative", "many"])
def test_unchecked_bad_values_stay_in_bounds(offsets, count):
    """Under compute-sanitizer this shows that nothing is read or written out of bounds; alone, that nothing crashes."""
    arguments = packed(device="cuda") | {
        "seq_offsets": torch.tensor(offsets, device="cuda"),
        "max_seq_len": 1,
        "contextual_seq_len": 2,
    }
    arguments = {
        name: x.requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in arguments.items()
    }
    o = hstu_attention(**arguments, num_targets=torch.full((len(offsets) - 1,), count, device="cuda"))
    torch.autograd.grad(o, [arguments[name] for name in "qkv"], torch.ones_like(o))
    torch.cuda.synchronize()
