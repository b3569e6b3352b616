"""The kernel as `kernels` loads it from this folder, forward and backward against fp64: on a GPU where there is one."""

from pathlib import Path

import kernels
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Lengths of packed sequences.
LENGTHS = (5, 1, 77, 45)


@pytest.fixture(scope="module")
def kernel():
    return kernels.get_local_kernel(Path(__file__).parents[1])


def eager(q, k, v):
    """Causal attention in plain torch, in its inputs' dtype: [B, T, H, D]."""
    group, length = q.shape[2] // k.shape[2], q.shape[1]
    q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    after = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    scores = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).masked_fill(after, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2)


def eager_packed(q, k, v):
    parts = zip(*(x.split(LENGTHS) for x in (q, k, v)), strict=True)
    return torch.cat([eager(*(x[None] for x in part))[0] for part in parts])


def run(attention, tensors, dtype):
    """The output and the gradients of q, k and v, in fp64."""
    q, k, v, do = (x.to(dtype) for x in tensors)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attention(*leaves)
    return [x.double() for x in (o.detach(), *torch.autograd.grad(o, leaves, do))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packed", [False, True])
def test_errors_are_at_most_twice_those_of_eager_torch(kernel, packed, dtype):
    torch.manual_seed(0)
    sizes = (sum(LENGTHS),) if packed else (2, 130)
    tensors = [torch.randn(*sizes, heads, 64, device=DEVICE).to(dtype) for heads in (4, 2, 2, 4)]
    offsets = torch.tensor([0, *LENGTHS], device=DEVICE).cumsum(0).to(torch.int32)

    def ours(q, k, v):
        if packed:
            longest = max(LENGTHS)
            return kernel.flash_attn_varlen_func(q, k, v, offsets, offsets, longest, longest, causal=True)
        return kernel.flash_attn_func(q, k, v, causal=True)

    plain = eager_packed if packed else eager
    truth = run(plain, tensors, torch.float64)
    errors, allowed = (
        [(x - exact).abs().max() for x, exact in zip(run(attention, tensors, dtype), truth, strict=True)]
        for attention in (ours, plain)
    )
    assert all(ours <= 2 * limit for ours, limit in zip(errors, allowed, strict=True)), (errors, allowed)


@torch.no_grad()
def test_a_step_over_a_cache(kernel):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 20, heads, 64, device=DEVICE) for heads in (4, 2, 2))
    k_cache, v_cache = torch.zeros(2, 2, 64, 2, 64, device=DEVICE)
    options = {"causal": True}
    kernel.flash_attn_with_kvcache(q[:, :19], k_cache, v_cache, k[:, :19], v[:, :19], cache_seqlens=0, **options)
    last = (x[:, 19:] for x in (k, v))
    o = kernel.flash_attn_with_kvcache(q[:, 19:], k_cache, v_cache, *last, cache_seqlens=19, **options)
    exact = eager(*(x.double() for x in (q, k, v)))
    torch.testing.assert_close(o.double(), exact[:, 19:], rtol=1e-5, atol=1e-5)
