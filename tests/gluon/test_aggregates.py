"""Aggregates, tuples and functions of constants: what kernels compute with them. test_layouts.py compiles them."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_aggregate_kernels import inherited_kernel, state_kernel, tuples_kernel, wrong_kernel

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")


@pytest.mark.parametrize(
    ("how", "n", "expected"),
    [
        # First, last, total, least and most that has been seen, half of the width.
        ("for", 4, [13, 20, 58, 0, 18, 4]),
        ("for", 0, [5, 12, 0, 100, -100, 4]),
        ("while", 50, [7, 14, 60, 12, 12, 4]),
        ("if", 4, [7, 14, 20, 4, 12, 4]),
        ("if", 3, [5, 12, -1, 100, -100, 4]),
        ("static_range", 0, [11, 18, 25, 0, 16, 4]),
    ],
)
def test_aggregates(how, n, expected):
    x = torch.tensor([5, n, *[77] * 6], dtype=torch.int32)
    state_kernel[(1,)](x, how)
    assert x[2:].tolist() == expected


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("named", [4, 7, 10]),
        ("joined", [17, 18, 19]),
        ("carried", [11 * 1000 + 18] * 3),
        ("unrolled", [3 + 5 + 22, 4 + 27, 1 + 27]),
        ("nested", [324] * 3),
    ],
)
def test_tuples(how, expected):
    x = torch.full((256,), 77, dtype=torch.int32)
    x[:3] = torch.tensor([3, 4, 1])
    tuples_kernel[(1,)](x, how)
    assert x[128:131].tolist() == expected


@pytest.mark.skipif(inherited_kernel is None, reason="of newer Tritons")
def test_defaults_and_inheritance():
    x = torch.tensor([3, 0, 0], dtype=torch.int32)
    inherited_kernel[(1,)](x)
    assert x.tolist() == [3, 41, 22]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("tensor for a constant", "refused: WIDTH of Span is tensor: expected constexpr"),
        ("another aggregate", "refused: span of State is tensor: expected Span"),
        ("aggregate for a tensor", "refused: first of Span is Span: expected tensor"),
        ("field that changes", "refused: first of Span: an aggregate does not change"),
        ("field too few", "arguments: Span takes first, WIDTH: got 1 values"),
        ("assertion", "assertion: static_assert of 8 it is 3"),
    ],
)
def test_what_a_kernel_may_not_do(how, says):
    with pytest.raises(KernelFaultError) as raised:
        wrong_kernel[(1,)](torch.zeros(8, dtype=torch.int32), how)
    assert str(raised.value).startswith(says)
    assert raised.value.lines[-1][0].function == "wrong_kernel"
