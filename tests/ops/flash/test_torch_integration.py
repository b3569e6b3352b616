"""flash_attention inside torch: custom operators, torch.compile, autocast, double backward, no_grad."""

import pytest
import torch
from torch import library

from tilewise import flash_attention
from tilewise.ops.flash import api


def leaves(device, *, packed=False, dtype=torch.float32, tokens=20):
    generator = torch.Generator().manual_seed(0)
    shape = (tokens, 2, 16) if packed else (2, tokens, 2, 16)
    return [torch.randn(*shape, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)]


@pytest.fixture(params=[pytest.param("triton", marks=pytest.mark.gpu), "cpu"])
def place(request, device):
    """A backend and a device that it runs on."""
    return request.param, device if request.param == "triton" else torch.device("cpu")


def operator_arguments(backend, device, packed):
    q, k, v = leaves(device, packed=packed)
    offsets = torch.tensor([0, 7, 7, 20], device=device) if packed else None
    return (q, k, v, offsets, offsets, None, None, True, -1, -1, 0.25, 0.0, True, backend)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_opcheck(place, packed):
    backend, device = place
    arguments = operator_arguments(backend, device, packed)
    library.opcheck(api.flash_forward.overload, arguments)
    q, k, v, cu_q, cu_k, _, _, *options = (x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    o, lse = api.flash_forward(*(x.detach() if isinstance(x, torch.Tensor) else x for x in arguments))
    library.opcheck(
        api.flash_backward.overload, (torch.randn_like(o), torch.randn_like(lse), q, k, v, o, lse, cu_q, cu_k, *options)
    )


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compile_fullgraph(place, dynamic):
    backend, device = place

    def attend(q, k, v):
        o, lse = flash_attention(q * 2, k, v, causal=True, window_size=(9, 0), return_lse=True, backend=backend)
        return o.sin().sum() + lse.sum()

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for tokens in (20, 33):
        plain, traced = leaves(device, tokens=tokens), leaves(device, tokens=tokens)
        expected, actual = attend(*plain), compiled(*traced)
        torch.testing.assert_close(actual, expected)
        expected.backward()
        actual.backward()
        for a, b in zip(traced, plain, strict=True):
            assert torch.equal(a.grad, b.grad)


def test_compile_packed(place):
    backend, device = place
    offsets = torch.tensor([0, 7, 7, 20], device=device)

    def attend(q, k, v, offsets):
        return flash_attention(q, k, v, cu_seqlens_q=offsets, max_seqlen_q=13, causal=True, backend=backend)

    q, k, v = leaves(device, packed=True)
    assert torch.equal(
        torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v, offsets), attend(q, k, v, offsets)
    )


def test_compile_with_the_default_backend(device):
    compiled = torch.compile(lambda q, k, v: flash_attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    q, k, v = leaves(device)
    assert torch.equal(compiled(q, k, v), flash_attention(q, k, v, causal=True))


def test_autocast(place):
    backend, device = place
    q, k, v = leaves(device)
    expected = flash_attention(*(x.bfloat16() for x in (q, k, v)), backend=backend)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        o = flash_attention(q, k, v, backend=backend)
        sdpa = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)))
    assert o.dtype == sdpa.dtype == torch.bfloat16
    assert torch.equal(o, expected)
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_autocast_does_not_reach_into_the_backward(place):
    backend, device = place
    q, k, v = leaves(device, dtype=torch.bfloat16)
    o = flash_attention(q * 10, k, v, window_size=(100, 0), backend=backend)
    expected = torch.autograd.grad(o.sum(), (q, k, v), retain_graph=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = torch.autograd.grad(o.sum(), (q, k, v))
    for a, b in zip(inside, expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_finds_its_tensors_in_any_order():
    q, k, v = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(window_size=(100, 0), v=v, k=k, q=q).dtype == torch.bfloat16


def test_meta_tensors_run_through_the_reference():
    q, k, v = (torch.empty(1, 8, 2, 16, device="meta") for _ in range(3))
    assert flash_attention(q, k, v, backend="reference").shape == (1, 8, 2, 16)
    with pytest.raises(ValueError, match="the tensors are on meta: .*backend='reference'"):
        flash_attention(q, k, v)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{}, {"window_size": (100, 0)}, {"cu_seqlens_q": torch.tensor([0, 7, 20])}],
    ids=["plain", "window", "packed"],
)
def test_torch_s_default_dtype_changes_nothing(place, options, default):
    backend, device = place
    options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}

    inputs = leaves(device, packed="cu_seqlens_q" in options)

    def run():
        o, lse = flash_attention(*inputs, **options, return_lse=True, backend=backend)
        return [o, lse, *torch.autograd.grad([o, lse], inputs, [torch.ones_like(o), torch.ones_like(lse)])]

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

    def attend(q):
        return flash_attention(q, k, v, backend=backend)

    for transform in (
        lambda: torch.func.vmap(attend)(q[None]),
        lambda: torch.func.jvp(attend, (q,), (q,)),
        lambda: torch.func.grad(lambda q: attend(q).sum())(q),
    ):
        with pytest.raises(NotImplementedError, match="torch.func.*backend='reference'"):
            transform()
    with (
        torch.autograd.forward_ad.dual_level(),
        pytest.raises(NotImplementedError, match="forward-mode.*backend='reference'"),
    ):
        attend(torch.autograd.forward_ad.make_dual(q, q))


def test_nan_is_not_a_row_that_sees_nothing(place):
    backend, device = place
    q, k, v = (x.detach() for x in leaves(device))
    q[0, 3] = torch.nan
    o, lse = flash_attention(q, k, v, return_lse=True, window_size=(100, 0), backend=backend)
    assert o[0, 3].isnan().all()
    assert lse[0, :, 3].isnan().all()
    assert lse[0, :, 4].isfinite().all()


def test_autocast_leaves_fp64_alone():
    q, k, v = (x.detach().double() for x in leaves("cpu"))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = flash_attention(q, k, v, backend="reference")
    assert torch.equal(o, flash_attention(q, k, v, backend="reference"))


def test_mixed_dtypes_are_one_under_autocast():
    q, k, v = leaves("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attention(q, k.bfloat16(), v, backend="cpu").dtype == torch.bfloat16


def test_double_backward_says_what_to_do(place):
    backend, device = place
    q, k, v = leaves(device)
    o = flash_attention(q, k, v, backend=backend)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward.*backend='reference'"):
        dq.sum().backward()


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


def test_stride_zero_gradients(place):
    backend, device = place
    q, k, v = leaves(device)
    flash_attention(q, k, v, backend=backend).sum().backward()
    expected = torch.autograd.grad(flash_attention(q, k, v, backend="reference").sum(), (q, k, v))
    for x, truth in zip((q, k, v), expected, strict=True):
        torch.testing.assert_close(x.grad, truth, rtol=1e-4, atol=1e-5)


def test_only_what_is_asked_for(place):
    backend, device = place
    q, k, v = leaves(device)
    assert isinstance(flash_attention(q, k, v, backend=backend), torch.Tensor)
    with torch.no_grad():
        assert not flash_attention(q, k, v, backend=backend).requires_grad
