"""HSTU attention inside torch, beyond what every operator is tested for: its custom operators, symbolic numbers."""

import pytest
import torch
from torch import library

from tilewise import hstu_attention
from tilewise.ops.hstu import api


def leaves(device):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(20, 2, d, generator=generator).to(device).requires_grad_() for d in (16, 16, 8)]


def sequences(device):
    """Offsets and targets."""
    return torch.tensor([0, 7, 7, 20], device=device), torch.tensor([2, 0, 3], device=device)


def attend(q, k, v, backend, offsets=None, **options):
    offsets = sequences(q.device)[0] if offsets is None else offsets
    return hstu_attention(q, k, v, offsets, **{"max_seq_len": 40, "backend": backend} | options)


@pytest.mark.parametrize("targets", [False, True], ids=["plain", "targets"])
def test_opcheck(place, targets):
    backend, device = place
    q, k, v = leaves(device)
    offsets, num_targets = sequences(device)
    options = (offsets, num_targets if targets else None, 40, 0.25, True, 5, 3, backend)
    library.opcheck(api.hstu_forward.overload, (q, k, v, *options))
    q, k, v = (x.detach() for x in (q, k, v))
    library.opcheck(api.hstu_backward.overload, (torch.randn_like(v), q, k, v, *options))


def test_compile_with_symbolic_numbers(place):
    """max_seq_len and the limits as they come out of a model's shapes."""
    backend, device = place

    def padded(q, k, v, offsets, padding):
        return attend(q, k, v, backend, offsets, max_seq_len=padding.shape[0], max_attn_len=padding.shape[0] // 4)

    compiled = torch.compile(padded, fullgraph=True, backend="aot_eager", dynamic=True)
    for longest in (30, 44):
        given = *leaves(device), sequences(device)[0], torch.zeros(longest, device=device)
        assert torch.equal(compiled(*given), padded(*given))


def test_reference_differentiates_twice():
    q, k, v = (x.detach().double()[:4, :1, :3].requires_grad_() for x in leaves("cpu"))
    offsets = torch.tensor([0, 1, 4])
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, "reference", offsets), (q, k, v))


def test_only_what_needs_a_gradient_gets_one(place):
    backend, device = place
    q, k, v = leaves(device)
    attend(q, k.detach(), v, backend).sum().backward()
    expected = torch.autograd.grad(attend(q, k, v, "reference").sum(), (q, v))
    assert k.grad is None
    for x, truth in zip((q, v), expected, strict=True):
        torch.testing.assert_close(x.grad, truth, rtol=1e-4, atol=1e-6)
