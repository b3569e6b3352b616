"""Flash attention inside torch, beyond what every operator is tested for: its custom operators, and its LSE."""

import pytest
import torch
from battery import first_quick
from torch import library

from tilewise import flash_attention
from tilewise.ops.flash import api


def leaves(device, *, packed=False):
    generator = torch.Generator().manual_seed(0)
    shape = (20, 2, 16) if packed else (2, 20, 2, 16)
    return [torch.randn(*shape, generator=generator).to(device).requires_grad_() for _ in range(3)]


def operator_arguments(backend, device, packed):
    q, k, v = leaves(device, packed=packed)
    offsets = torch.tensor([0, 7, 7, 20], device=device) if packed else None
    sinks = torch.randn(2, device=device).requires_grad_() if packed else None
    return (q, k, v, offsets, offsets, sinks, None, None, 0, True, -1, -1, 0.25, 0.0, True, backend)


@pytest.mark.parametrize("packed", first_quick([False, True]), ids=["dense", "packed"])
def test_opcheck(place, packed):
    backend, device = place
    arguments = operator_arguments(backend, device, packed)
    library.opcheck(api.flash_forward.overload, arguments)
    q, k, v, cu_q, cu_k, sinks, _, _, _, *options = (
        x.detach() if isinstance(x, torch.Tensor) else x for x in arguments
    )
    o, lse = api.flash_forward(*(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments))
    library.opcheck(
        api.flash_backward.overload,
        (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, cu_q, cu_k, sinks, *options),
    )


def test_autocast_finds_its_tensors_in_any_order():
    q, k, v = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(window_size=(100, 0), v=v, k=k, q=q).dtype == torch.bfloat16


def test_nan_is_not_a_row_that_sees_nothing(place):
    backend, device = place
    q, k, v = (x.detach() for x in leaves(device))
    q[0, 3] = torch.nan
    o, lse = flash_attention(q, k, v, return_lse=True, window_size=(100, 0), backend=backend)
    assert o[0, 3].isnan().all()
    assert lse[0, :, 3].isnan().all()
    assert lse[0, :, 4].isfinite().all()


@pytest.mark.slow
def test_reference_differentiates_twice():
    q, k, v = (x.detach().double()[:, :3].requires_grad_() for x in leaves("cpu"))
    assert torch.autograd.gradgradcheck(lambda *x: flash_attention(*x, causal=True, backend="reference"), (q, k, v))


def test_a_gradient_of_the_lse_alone(place):
    backend, device = place
    q, k, v = leaves(device)
    _, lse = flash_attention(q, k, v, return_lse=True, backend=backend)
    gradients = torch.autograd.grad(lse.sum(), (q, k, v))
    _, expected_lse = flash_attention(
        *(x.detach().double().requires_grad_() for x in (q, k, v)), return_lse=True, backend="reference"
    )
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = torch.autograd.grad(
        flash_attention(*wide, return_lse=True, backend="reference")[1].sum(), wide, materialize_grads=True
    )
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    for actual, truth in zip(gradients, expected, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=1e-4, atol=1e-5)


def test_only_what_is_asked_for(place):
    backend, device = place
    q, k, v = leaves(device)
    assert isinstance(flash_attention(q, k, v, backend=backend), torch.Tensor)
