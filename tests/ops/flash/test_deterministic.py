"""torch.use_deterministic_algorithms(True) wins over deterministic=False, decided at the forward."""

import pytest
import torch

from tilewise import flash_attention
from tilewise.ops.flash import api


@pytest.fixture
def asked(monkeypatch):
    """What `deterministic` each backward of the CPU backend is called with."""
    found = []

    def forward(q, k, v, *_):
        return torch.zeros_like(q), torch.zeros(*q.shape[:-3], q.shape[-2], q.shape[-3])

    def call_checked(given, options):
        found.append(options[5])
        return *(torch.zeros_like(x) for x in given[2:5]), torch.zeros(0)

    monkeypatch.setattr(api.cpu, "forward", forward)
    monkeypatch.setattr(api.flash_backward, "call_checked", call_checked)
    return found


def tensors():
    return [torch.zeros(1, 5, 2, 16, requires_grad=True) for _ in range(3)]


def test_the_flag_of_the_forward_counts(asked, free_order):
    inputs = tensors()
    for flag in (False, True, False):
        torch.use_deterministic_algorithms(flag)
        o = flash_attention(*inputs, deterministic=False, backend="cpu")
        torch.use_deterministic_algorithms(not flag)
        o.sum().backward()
    assert asked == [False, True, False]


def test_without_the_flag_the_default_is_deterministic(asked, free_order):
    flash_attention(*tensors(), backend="cpu").sum().backward()
    assert asked == [True]


def test_the_flag_counts_in_a_compiled_call(asked, free_order):
    compiled = torch.compile(lambda *x: flash_attention(*x, deterministic=False), fullgraph=True, backend="eager")
    for flag in (False, True):
        torch.use_deterministic_algorithms(flag)
        compiled(*tensors()).sum().backward()
    assert asked == [False, True]
