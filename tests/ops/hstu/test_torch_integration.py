"""hstu_attention inside torch: custom operators, torch.compile, autocast, double backward, no_grad."""

import pytest
import torch
from torch import library

from tilewise import hstu_attention
from tilewise.ops.hstu import api


def leaves(device, *, dtype=torch.float32, tokens=20):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(tokens, 2, d, generator=generator).to(device, dtype).requires_grad_() for d in (16, 16, 8)]


def sequences(device, tokens=20):
    """Offsets and targets."""
    return torch.tensor([0, 7, 7, tokens], device=device), torch.tensor([2, 0, 3], device=device)


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.gpu), "cpu"])
def place(request, device):
    """A backend and a device that it runs on."""
    return request.param, device if request.param == "triton" else torch.device("cpu")


def attend(q, k, v, backend, offsets=None, **options):
    offsets = sequences(q.device, q.shape[0])[0] if offsets is None else offsets
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


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(place, dynamic):
    backend, device = place

    def loss(q, k, v, offsets, num_targets):
        o = attend(q * 2, k, v, backend, offsets, num_targets=num_targets, max_attn_len=9, contextual_seq_len=2)
        return o.sin().sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (20, 33):
        plain, traced = leaves(device, tokens=tokens), leaves(device, tokens=tokens)
        expected, actual = loss(*plain, *sequences(device, tokens)), compiled(*traced, *sequences(device, tokens))
        torch.testing.assert_close(actual, expected)
        expected.backward()
        actual.backward()
        for a, b in zip(traced, plain, strict=True):
            assert torch.equal(a.grad, b.grad)


def test_compile_with_symbolic_numbers(place):
    """max_seq_len and the limits as they come out of a model's shapes."""
    backend, device = place

    def padded(q, k, v, offsets, padding):
        return attend(q, k, v, backend, offsets, max_seq_len=padding.shape[0], max_attn_len=padding.shape[0] // 4)

    compiled = torch.compile(padded, fullgraph=True, backend="aot_eager", dynamic=True)
    for longest in (30, 44):
        given = *leaves(device), sequences(device)[0], torch.zeros(longest, device=device)
        assert torch.equal(compiled(*given), padded(*given))


def test_compile_with_the_default_backend(device):
    def attended(q, k, v, offsets):
        return hstu_attention(q, k, v, offsets, max_seq_len=40)

    given = *leaves(device), sequences(device)[0]
    assert torch.equal(torch.compile(attended, fullgraph=True, backend="aot_eager")(*given), attended(*given))


def test_autocast(place):
    backend, device = place
    q, k, v = leaves(device)
    expected = attend(*(x.bfloat16() for x in (q, k, v)), backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = attend(q, k, v, backend)
    assert o.dtype == torch.bfloat16
    assert torch.equal(o, expected)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_does_not_reach_into_the_backward(place):
    backend, device = place
    q, k, v = leaves(device, dtype=torch.bfloat16)
    o = attend(q * 10, k, v, backend)
    expected = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(o.sum(), (q, k, v))
    for a, b in zip(inside, expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_leaves_fp64_alone():
    q, k, v = (x.detach().double() for x in leaves("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = attend(q, k, v, "reference")
    assert torch.equal(o, attend(q, k, v, "reference"))


def test_mixed_dtypes_are_one_under_autocast():
    q, k, v = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k.bfloat16(), v, "cpu").dtype == torch.bfloat16


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_torch_s_default_dtype_changes_nothing(place, default):
    backend, device = place
    inputs = leaves(device)

    def run():
        o = attend(*inputs, backend)
        return [o, *torch.autograd.grad(o, inputs, torch.ones_like(o))]

    expected = run()
    torch.set_default_dtype(default)
    try:
        with_default = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(with_default, expected, strict=True):
        assert torch.equal(a, b)


def test_transforms_and_forward_mode_are_refused(place):
    backend, device = place
    q, k, v = (x.detach() for x in leaves(device))

    def of_q(q):
        return attend(q, k, v, backend)

    for transform in (
        lambda: torch.func.vmap(of_q)(q[None]),
        lambda: torch.func.jvp(of_q, (q,), (q,)),
        lambda: torch.func.grad(lambda q: of_q(q).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match="torch.func.*backend='reference'"):
            transform()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode.*backend='reference'"),
    ):
        of_q(torch.autograd.forward_ad.make_dual(q, q))


def test_double_backward_says_what_to_do(place):
    backend, device = place
    q, k, v = leaves(device)
    (dq,) = torch.autograd.grad(attend(q, k, v, backend).square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward.*backend='reference'"):
        dq.sum().backward()


def test_reference_differentiates_twice():
    q, k, v = (x.detach().double()[:4, :1, :3].requires_grad_() for x in leaves("cpu"))
    offsets = torch.tensor([0, 1, 4])
    assert torch.autograd.gradgradcheck(lambda *x: attend(*x, "reference", offsets), (q, k, v))


def test_stride_zero_gradients(place):
    backend, device = place
    q, k, v = leaves(device)
    attend(q, k, v, backend).sum().backward()
    expected = torch.autograd.grad(attend(q, k, v, "reference").sum(), (q, k, v))
    for x, truth in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, truth, rtol=1e-4, atol=1e-6)


def test_only_what_needs_a_gradient_gets_one(place):
    backend, device = place
    q, k, v = leaves(device)
    attend(q, k.detach(), v, backend).sum().backward()
    expected = torch.autograd.grad(attend(q, k, v, "reference").sum(), (q, v))
    assert k.grad is None
    for x, truth in zip((q, v), expected, strict=True):
        torch.testing.assert_close(x.grad, truth, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        assert not attend(q, k, v, backend).requires_grad
