"""Wrong calls raise before anything is launched, naming the argument, what was expected and what came."""

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops._host import backend as backends

BACKENDS = ("cpu", "triton", "reference")


def qkv(batch=2, queries=8, heads=4, channels=16, *, keys=8, kv_heads=2, values=16, dtype=torch.float32, device="cpu"):
    return {
        "q": torch.randn(batch, queries, heads, channels, dtype=dtype, device=device),
        "k": torch.randn(batch, keys, kv_heads, channels, dtype=dtype, device=device),
        "v": torch.randn(batch, keys, kv_heads, values, dtype=dtype, device=device),
    }


def packed(offsets, tokens=8, dtype=torch.int32, **more):
    tensors = {name: torch.randn(tokens, 2, 16) for name in "qkv"}
    return tensors | {"cu_seqlens_q": torch.tensor(offsets, dtype=dtype)} | more


BAD = {
    "not-a-tensor": (qkv() | {"k": [[1.0]]}, TypeError, "k is a list: expected a torch.Tensor"),
    "rank-3": (
        qkv() | {"q": torch.randn(8, 4, 16)},
        ValueError,
        r"q has 3 dimensions: expected \[B, T, H, D\].*cu_seqlens_q",
    ),
    "rank-4-packed": (
        packed([0, 8]) | {"v": torch.randn(1, 8, 2, 16)},
        ValueError,
        r"v has 4 dimensions: expected \[N, H, D\]",
    ),
    "dtype-mix": (qkv() | {"v": qkv(dtype=torch.float16)["v"]}, TypeError, "v is torch.float16 and q is torch.float32"),
    "integers": (
        qkv(dtype=torch.float32) | {"q": torch.ones(2, 8, 4, 16, dtype=torch.int64)},
        TypeError,
        "q is torch.int64",
    ),
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
    "too-wide-values": (qkv(values=300), ValueError, "v has 300 channels: expected 1 to 256"),
    "no-channels": (qkv(channels=0), ValueError, "q has 0 channels"),
    "last-axis": (
        qkv() | {"q": torch.randn(2, 8, 16, 4).transpose(2, 3)},
        ValueError,
        r"q's last axis has stride 4.*q\.contiguous\(\)",
    ),
    "devices-differ": (
        qkv() | {"v": torch.empty(2, 8, 2, 16, device="meta")},
        ValueError,
        "v is on meta and q is on cpu",
    ),
    "window-below": (qkv() | {"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
    "window-not-a-pair": (qkv() | {"window_size": 5}, TypeError, "window_size is 5: expected two whole numbers"),
    "scale-infinite": (qkv() | {"scale": float("inf")}, ValueError, "scale is inf: expected a finite number"),
    "softcap-negative": (
        qkv() | {"softcap": -1.0},
        ValueError,
        "softcap is -1.0: expected a finite number of at least 0",
    ),
    "softcap-text": (qkv() | {"softcap": "2"}, TypeError, "softcap is a str"),
    "backend": (qkv() | {"backend": "cuda"}, ValueError, "backend is 'cuda': expected one of triton, cpu, reference"),
    "offsets-start": (packed([1, 8]), ValueError, "cu_seqlens_q starts at 1: the first offset must be 0"),
    "offsets-negative": (packed([0, -1, 8]), ValueError, "cu_seqlens_q decreases from 0 to -1 at position 1"),
    "offsets-unsorted": (packed([0, 5, 3, 8]), ValueError, "cu_seqlens_q decreases from 5 to 3 at position 2"),
    "offsets-none": (packed([0]), ValueError, "cu_seqlens_q holds no sequence and there are 8 tokens"),
    "offsets-k-none": (
        packed([0, 8], cu_seqlens_k=torch.tensor([0])),
        ValueError,
        "cu_seqlens_k holds no sequence and there are 8 tokens",
    ),
    "offsets-end": (
        packed([0, 5]),
        ValueError,
        "cu_seqlens_q ends at 5: the last offset must be the number of tokens, 8",
    ),
    "offsets-k-end": (packed([0, 8], cu_seqlens_k=torch.tensor([0, 9])), ValueError, "cu_seqlens_k ends at 9"),
    "offsets-float": (
        packed([0, 8], dtype=torch.float32),
        TypeError,
        "cu_seqlens_q is torch.float32: expected int32 or int64",
    ),
    "offsets-list": (packed([0, 8]) | {"cu_seqlens_q": [0, 8]}, TypeError, "cu_seqlens_q is a list"),
    "offsets-rank": (packed([[0, 8]]), ValueError, r"cu_seqlens_q has shape \[1, 2\]: expected \[B \+ 1\]"),
    "offsets-device": (
        packed([0, 8]) | {"cu_seqlens_q": torch.empty(2, dtype=torch.int32, device="meta")},
        ValueError,
        "cu_seqlens_q is on meta",
    ),
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


def test_fp64_is_for_the_reference_alone():
    tensors = qkv(dtype=torch.float64)
    assert flash_attention(**tensors, backend="reference").dtype == torch.float64
    with pytest.raises(TypeError, match="q is torch.float64.*backend='reference' also takes float64"):
        flash_attention(**tensors)


def test_triton_on_cpu_tensors_wants_interpretation(monkeypatch):
    monkeypatch.setattr(backends, "interpreting", lambda: False)
    with pytest.raises(ValueError, match="backend is 'triton' and the tensors are on the CPU: .*TRITON_INTERPRET=1"):
        flash_attention(**qkv(), backend="triton")


def test_the_environment_chooses_and_is_named(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    assert flash_attention(**qkv(dtype=torch.float64)).dtype == torch.float64
    monkeypatch.setenv("TILEWISE_BACKEND", "tritn")
    with pytest.raises(ValueError, match="TILEWISE_BACKEND is 'tritn'"):
        flash_attention(**qkv())
    assert flash_attention(**qkv(), backend="cpu").shape == (2, 8, 4, 16)


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
def test_cuda_values_are_checked_on_request(monkeypatch):
    arguments = {name: x.cuda() for name, x in packed([0, 5, 3, 8]).items()}
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    with pytest.raises(ValueError, match="cu_seqlens_q decreases"):
        flash_attention(**arguments)


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
