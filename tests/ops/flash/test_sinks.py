"""Sinks, beyond what `tilewise verify` checks: rows without keys, dtypes, strides, and what is launched."""

import pytest
import torch

import tilewise
from tilewise import flash_attention

QUERIES, KEYS = 70, 10


def inputs(device, dtype=torch.float32):
    """Causal, most rows see no key; a tile of 64 rows sees none at all."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, QUERIES, 3, 16), (1, KEYS, 1, 16), (1, KEYS, 1, 16)
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def test_a_row_that_sees_no_key_has_its_sink_for_an_lse(place):
    backend, device = place
    # The last is beyond fp32 in base 2.
    sinks = torch.tensor([0.3, -torch.inf, 3.4e38], device=device, requires_grad=True)
    o, lse = flash_attention(*inputs(device), causal=True, sinks=sinks, return_lse=True, backend=backend)
    unseeing = QUERIES - KEYS
    assert not o[:, :unseeing].any()
    assert torch.equal(lse[0, :, :unseeing], sinks.detach()[:, None].expand(3, unseeing))
    (gradient,) = torch.autograd.grad(lse[:, :, :unseeing].sum(), sinks)
    assert gradient.tolist() == [unseeing, 0, unseeing]


@pytest.mark.parametrize(
    ("dtype", "of_sinks"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float16), (torch.float16, torch.bfloat16)],
    ids=str,
)
def test_sinks_have_a_dtype_and_strides_of_their_own(place, dtype, of_sinks):
    backend, device = place
    given = inputs(device, dtype)
    wide = torch.tensor([0.5, 7.0, -1.0, 7.0, 1.5, 7.0], dtype=of_sinks, device=device, requires_grad=True)
    do = torch.randn(1, QUERIES, 3, 16, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    o = flash_attention(*given, sinks=wide[::2], backend=backend)
    actual = torch.autograd.grad(o, [*given, wide], do)

    leaves = [x.detach().double().requires_grad_() for x in (*given, wide)]
    truth = flash_attention(*leaves[:3], sinks=leaves[3][::2], backend="reference")
    expected = torch.autograd.grad(truth, leaves, do.double())
    assert actual[3].dtype == of_sinks
    for x, right in zip((o, *actual), (truth, *expected), strict=True):
        torch.testing.assert_close(x.double(), right, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("architecture", [80, 90])
def test_they_launch_no_kernel_more(architecture):
    q = torch.empty(2, 600, 4, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    sinks = torch.empty(4, device="meta", requires_grad=True)
    with tilewise.explaining_on(architecture):
        without, with_sinks = (tilewise.explain(flash_attention, q, q, q, sinks=x) for x in (None, sinks))
    assert (with_sinks.forward, with_sinks.backward) == (without.forward, without.backward)
