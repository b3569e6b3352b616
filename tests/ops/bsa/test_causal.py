"""What comes after a token changes nothing up to it, on any backend: neither the output, nor the choice, nor a
gradient.
"""

import pytest
import torch

from tilewise import block_sparse_attn

TOKENS = 45
BACKENDS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.gpu)]
SIZES = {"block_counts": 3, "block_size": 8, "window_size": 6}


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, TOKENS, 2, 16)] * 4 + [(1, TOKENS, 2)] * 3
    return [torch.randn(*shape, generator=generator) for shape in shapes]


def run(tensors, until, backend, device):
    """The first `until` rows: output, choice, and gradients of what they give."""
    leaves = [x.to(device).requires_grad_() for x in tensors]
    o, block_indices = block_sparse_attn(*leaves, **SIZES, backend=backend)
    gradients = torch.autograd.grad(o[:, :until].square().sum(), leaves)
    return [
        o[:, :until].detach(),
        block_indices[:, :, :until],
        *(gradient[:, :until] for gradient in gradients),
    ], gradients


@pytest.mark.parametrize("until", [1, 8, 20, 24])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_future_changes_nothing(backend, until, device):
    device = device if backend == "triton" else torch.device("cpu")
    tensors = inputs(seed=0)
    changed = [torch.cat([x[:, :until], y[:, until:]], dim=1) for x, y in zip(tensors, inputs(seed=1), strict=True)]
    expected, _ = run(tensors, until, backend, device)
    actual, gradients = run(changed, until, backend, device)
    # Products of other lengths may be summed in another order.
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(actual[1], expected[1])
    assert not any(gradient[:, until:].any() for gradient in gradients)


def test_on_the_cpu_not_even_where_it_is_nan():
    """Kernels multiply a later key of the same tile by 0, which leaves NaN what it is; the CPU backend
    leaves it out.
    """
    tensors = inputs(seed=0)
    until = 20
    broken = [torch.cat([x[:, :until], torch.full_like(x[:, until:], torch.nan)], dim=1) for x in tensors]
    o, block_indices = block_sparse_attn(*tensors, **SIZES, backend="cpu")
    broken_o, broken_indices = block_sparse_attn(*broken, **SIZES, backend="cpu")
    torch.testing.assert_close(broken_o[:, :until], o[:, :until], rtol=1e-5, atol=1e-5)
    assert torch.equal(broken_indices[:, :, :until], block_indices[:, :, :until])
    # The own block is chosen whatever it holds.
    own = torch.arange(TOKENS) // SIZES["block_size"]
    assert (broken_indices == own[:, None]).any(-1).all()
