"""Wrong calls that flash_attention alone can get: they raise before anything is launched, as all do."""

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")


def qkv(heads=4, kv_heads=2, channels=16):
    return {
        "q": torch.randn(2, 8, heads, channels),
        "k": torch.randn(2, 8, kv_heads, channels),
        "v": torch.randn(2, 8, kv_heads, 16),
    }


def packed(offsets, tokens=8, dtype=torch.int32, **more):
    tensors = {name: torch.randn(tokens, 2, 16) for name in "qkv"}
    return tensors | {"cu_seqlens_q": torch.tensor(offsets, dtype=dtype)} | more


BAD = {
    "head-ratio": (
        qkv(heads=8, kv_heads=3),
        ValueError,
        r"k has 3 heads and q has 8: q's heads must be a multiple of k's .*q \[2, 8, 8, 16\]",
    ),
    "no-heads": (qkv(kv_heads=0), ValueError, "k has 0 heads"),
    "channels-differ": (qkv() | {"k": torch.randn(2, 8, 2, 8)}, ValueError, "k has 8 channels and q has 16"),
    "kv-lengths-differ": (qkv() | {"v": torch.randn(2, 9, 2, 16)}, ValueError, "v and k must agree"),
    "batch-differs": (qkv() | {"q": torch.randn(3, 8, 4, 16)}, ValueError, "k has batch 2 and q has batch 3"),
    "too-wide": (qkv(channels=257), ValueError, "q has 257 channels: expected 1 to 256"),
    "no-channels": (qkv(channels=0), ValueError, "q has 0 channels"),
    "window-below": (qkv() | {"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
    "window-not-a-pair": (qkv() | {"window_size": 5}, TypeError, "window_size is 5: expected two whole numbers"),
    "scale-infinite": (qkv() | {"scale": float("inf")}, ValueError, "scale is inf: expected a finite number"),
    "softcap-negative": (
        qkv() | {"softcap": -1.0},
        ValueError,
        "softcap is -1.0: expected a finite number of at least 0",
    ),
    "softcap-text": (qkv() | {"softcap": "2"}, TypeError, "softcap is a str"),
    "sinks-list": (qkv() | {"sinks": [0.0] * 4}, TypeError, r"sinks is a list: expected a torch.Tensor \[Hq\]"),
    "sinks-dtype": (qkv() | {"sinks": torch.zeros(4, dtype=torch.int32)}, TypeError, "sinks is torch.int32: expected"),
    "sinks-kv-heads": (
        qkv() | {"sinks": torch.zeros(2)},
        ValueError,
        r"sinks has shape \[2\]: expected \[Hq\], one a query head, here \[4\]",
    ),
    "sinks-device": (qkv() | {"sinks": torch.zeros(4, device="meta")}, ValueError, "sinks is on meta and q is on cpu"),
    "sinks-nan": (
        qkv() | {"sinks": torch.tensor([0.0, -torch.inf, torch.nan, 0.0])},
        ValueError,
        "sinks holds nan for head 2: expected a finite number, or -inf for no sink",
    ),
    "sinks-infinite": (qkv() | {"sinks": torch.full((4,), torch.inf)}, ValueError, "sinks holds inf for head 0"),
    "offsets-k-none": (
        packed([0, 8], cu_seqlens_k=torch.tensor([0])),
        ValueError,
        "cu_seqlens_k holds no sequence and there are 8 tokens",
    ),
    "offsets-k-end": (packed([0, 8], cu_seqlens_k=torch.tensor([0, 9])), ValueError, "cu_seqlens_k ends at 9"),
    "offsets-batches": (
        packed([0, 8], cu_seqlens_k=torch.tensor([0, 4, 8])),
        ValueError,
        "cu_seqlens_k holds 2 sequences and cu_seqlens_q holds 1",
    ),
    "offsets-k-alone": (
        qkv() | {"cu_seqlens_k": torch.tensor([0, 8])},
        ValueError,
        "cu_seqlens_k is given without cu_seqlens_q",
    ),
    "offsets-k-missing": (
        packed([0, 8]) | {"k": torch.randn(9, 2, 16), "v": torch.randn(9, 2, 16)},
        ValueError,
        "give cu_seqlens_k",
    ),
    "longest-too-short": (
        packed([0, 8], max_seqlen_q=7),
        ValueError,
        "max_seqlen_q is 7 and cu_seqlens_q holds a sequence of 8 tokens",
    ),
    "longest-negative": (packed([0, 8], max_seqlen_k=-1), ValueError, "max_seqlen_k is -1"),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("arguments", "error", "message"), BAD.values(), ids=BAD)
def test_bad_input(arguments, error, message, backend):
    if backend == "triton" and not backends.interpreting():
        pytest.skip("CPU tensors are interpreted only where there is no GPU")
    with pytest.raises(error, match=message):
        flash_attention(**{"backend": backend} | arguments)


@pytest.mark.parametrize("name", ["cpu", "triton"])
def test_a_request_never_falls_back(name, monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    with pytest.raises(ValueError, match=r"backend is 'cpu' and the tensors are on cuda|the tensors are on"):
        backends.resolve_backend(name, torch.device("cuda" if name == "cpu" else "mps"))


def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with pytest.raises(RuntimeError, match=r"Tesla T4 has compute capability 7\.5: tilewise's kernels need 8\.0"):
        backends.architecture(torch.device("cuda", 63))


needs_gpu = pytest.mark.skipif("not __import__('torch').cuda.is_available()", reason="values of CUDA tensors")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("offsets", [[0, 5, 3, 8], [-(2**31), 2**31 - 1, -5], [7, 2, 0], [0, 2**40, 8], [3, 3, 3]])
def test_unchecked_bad_offsets_stay_in_bounds(offsets):
    """Under compute-sanitizer this shows that nothing is read or written out of bounds; alone, that nothing crashes."""
    arguments = {name: x.cuda() for name, x in packed(offsets, dtype=torch.int64).items()}
    arguments = {name: x.requires_grad_() if x.is_floating_point() else x for name, x in arguments.items()}
    o = flash_attention(**arguments, causal=True)
    torch.autograd.grad(o, [arguments[name] for name in "qkv"], torch.ones_like(o))
    torch.cuda.synchronize()
