"""The short way past the dispatcher gives what the dispatcher gives."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewise import flash_attention
from tilewise.ops.flash import api


def arguments(**options):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 12, 2, 16, generator=generator).requires_grad_() for _ in range(3))
    return q, k, v, None, None, None, None, None, 0, True, -1, -1, 0.25, 0.0, True, "cpu"


def test_both_ways_agree_bit_for_bit():
    direct, dispatched = arguments(), arguments()
    outputs = api.flash_forward(*direct), api.flash_forward.overload(*dispatched)
    for o, lse in outputs:
        (o.sin().sum() + lse.sum()).backward()
    for a, b in zip(outputs[0], outputs[1], strict=True):
        assert torch.equal(a, b)
    for a, b in zip(direct[:3], dispatched[:3], strict=True):
        assert torch.equal(a.grad, b.grad)


def test_no_graph_without_gradients():
    with torch.no_grad():
        assert not api.flash_forward(*arguments())[0].requires_grad
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments()]
    assert not api.flash_forward(*detached)[0].requires_grad


def test_only_the_inputs_that_want_a_gradient_get_one():
    q, k, v, *rest = arguments()
    o, _ = api.flash_forward(q, k.detach(), v.detach(), *rest)
    o.sum().backward()
    assert q.grad is not None
    assert k.grad is None


def test_parameters_are_plain_and_subclasses_are_dispatched():
    q, k, v, *rest = arguments()
    parameter = torch.nn.Parameter(q.detach())
    assert torch.equal(api.flash_forward(parameter, k, v, *rest)[0], api.flash_forward(q, k, v, *rest)[0])

    class Logged(torch.Tensor):
        calls: list[str] = []  # noqa: RUF012

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            cls.calls.append(str(function))
            return super().__torch_function__(function, types, args, kwargs or {})

    api.flash_forward(q.detach().as_subclass(Logged), k, v, *rest)
    assert any("flash_forward" in call for call in Logged.calls)


def test_fake_tensors_go_through_the_dispatcher():
    with FakeTensorMode():
        q, k, v = (torch.empty(1, 12, 2, 16) for _ in range(3))
        o, lse = api.flash_forward(q, k, v, *arguments()[3:])
    assert o.shape == (1, 12, 2, 16)
    assert lse.shape == (1, 2, 12)


def test_a_graph_can_be_kept_and_run_again():
    q, k, v, *rest = arguments()
    o, _ = api.flash_forward(q, k, v, *rest)
    first = torch.autograd.grad(o.sum(), q, retain_graph=True)[0]
    assert torch.equal(torch.autograd.grad(o.sum(), q)[0], first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o.sum(), q)


def test_no_tensor_at_all_is_said_to_be_none():
    _, k, v, *_ = arguments()
    with pytest.raises(TypeError, match="q is a NoneType: expected a torch.Tensor"):
        flash_attention(None, k, v)
