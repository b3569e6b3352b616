"""flash-attn's calls in 16 bits where kernels are compiled, against fp64 and as far from it as eager torch is."""

import pytest
import torch

from tilewise import compat
from tilewise.ops.flash import reference
from tilewise.ops.flash.decode.reference import flash_attention_with_kvcache as cached
from tilewise.verify.compare import compare, is_telling, limits_from_eager

pytestmark = pytest.mark.gpu
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
# The default lets the backward be one whose sums have no fixed order.
ORDERS = pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
# Of three sequences of queries and of keys.
QUERIES, KEYS = (torch.tensor([0, *ends], dtype=torch.int32) for ends in ((150, 151, 300), (150, 220, 500)))


@pytest.fixture(autouse=True)
def compiled(device):
    if device.type != "cuda":
        pytest.skip("on CPU tensors test_flash_attn.py has these calls")


def made(device, dtype, *shapes):
    random = torch.Generator().manual_seed(0)
    return [torch.randn(*shape, generator=random).to(device, dtype) for shape in shapes]


def results(attend, tensors):
    """Output, LSE, then the gradients."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o, lse = attend(*leaves)[:2]
    # The same numbers in every dtype.
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(1)).bfloat16().to(o)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)


def judge(found, truth, eager, dtype):
    names = ("o", "lse", "dq", "dk", "dv")
    for name, x, exact, other in zip(names, found, truth, eager, strict=False):
        limits = limits_from_eager(exact, other, gradient=name.startswith("d"))
        assert is_telling(exact, limits)
        shown = compare(name, x, exact, torch.float32 if name == "lse" else dtype, limits, "BTHD"[-x.dim() :])
        assert shown.passed, "\n".join(shown.lines())


def eagerly(attend, tensors):
    """With every step in the tensors' own dtype; the LSE alone in fp32, as it is promised."""
    o, _, *gradients = attend(tensors[0].dtype)
    return o, attend(torch.float32)[1], *gradients


def by_reference(tensors, **options):
    """In fp64, and eagerly."""
    truth = results(lambda *x: reference.flash_attention(*x, **options), [x.double() for x in tensors])

    def attend(dtype):
        return results(lambda *x: reference.flash_attention(*x, **options, compute_dtype=dtype), tensors)

    return truth, eagerly(attend, tensors)


@DTYPES
@ORDERS
def test_dense(device, dtype, deterministic, free_order):
    tensors = made(device, dtype, (2, 190, 4, 64), (2, 260, 2, 64), (2, 260, 2, 64))
    options = {"causal": True, "window_size": (100, 0), "softcap": 5.0}

    def attend(*x):
        return compat.flash_attn_func(*x, **options, deterministic=deterministic, return_attn_probs=True)

    judge(results(attend, tensors), *by_reference(tensors, **options), dtype)


@DTYPES
@ORDERS
def test_varlen(device, dtype, deterministic, free_order):
    tensors = made(device, dtype, (300, 4, 64), (500, 2, 64), (500, 2, 64))
    starts = QUERIES.to(device), KEYS.to(device)
    options = {"causal": True, "deterministic": deterministic, "return_attn_probs": True}

    def attend(*x):
        return compat.flash_attn_varlen_func(*x, *starts, 150, 280, **options)

    expected = by_reference(tensors, causal=True, cu_seqlens_q=starts[0], cu_seqlens_k=starts[1])
    judge(results(attend, tensors), *expected, dtype)


@DTYPES
@pytest.mark.parametrize("paged", [False, True], ids=["dense", "paged"])
def test_with_kvcache(device, dtype, paged):
    """New keys are written, and every one of the cache's is seen up to its sequence's length."""
    q, k, v, *caches = made(device, dtype, (3, 2, 4, 64), *[(3, 2, 2, 64)] * 2, *[(3, 512, 2, 64)] * 2)
    lengths = torch.tensor([7, 130, 510], dtype=torch.int32, device=device)
    given, given_table = [x.clone() for x in caches], None
    if paged:
        order = torch.randperm(24, generator=torch.Generator().manual_seed(2)).to(device)
        given = [x.reshape(24, 64, 2, 64)[order.argsort()] for x in caches]
        given_table = order.view(3, 8).to(torch.int32)
    with torch.no_grad():
        found = compat.flash_attn_with_kvcache(
            q, *given, k, v, cache_seqlens=lengths, block_table=given_table, causal=True, return_softmax_lse=True
        )
    truth = cached(*(x.double() for x in (q, *caches, k, v)), cache_seqlens=lengths, causal=True)

    def attend(dtype):
        return cached(q, *caches, k, v, cache_seqlens=lengths, causal=True, compute_dtype=dtype)

    judge(found, truth, eagerly(attend, [q]), dtype)
    for pool, cache in zip(given, caches, strict=True):
        assert torch.equal(pool[order].view_as(cache) if paged else pool, cache)
