"""What Gluon has of Ampere, on CPU tensors: copies by threads with what they must wait for, products of warps."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_ampere_kernels import barrier_kernel, steps_kernel, warps_product_kernel

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
SEEDS = pytest.mark.parametrize("seed", [None, 0, 1])


def fault(function, *arguments, **options):
    with pytest.raises(KernelFaultError) as raised:
        function(*arguments, **options)
    return raised.value


def double(**left_out):
    x, y = torch.randn(300), torch.full((512,), torch.nan)
    options = {"PENDING": 1, "COMMITS": True, "REUSES": False} | left_out
    steps_kernel[(1,)](x, y, 300, 4, **options)
    assert torch.equal(y, torch.cat((x * 2, torch.zeros(212))))


def square(**left_out):
    x, y = torch.randn(64, 64).half(), torch.full((64, 64), torch.nan)
    options = {"INCREMENTS": True, "ARRIVES": True, "FENCED": True} | left_out
    barrier_kernel[(1,)](x, y, **options)
    torch.testing.assert_close(y, x.float() @ x.float())


def product(a, b, c, width=2, index=0, precision=None):
    warps_product_kernel[(1,)](a, b, c, width, index, precision)
    return c


@SEEDS
def test_copies_by_threads(seed):
    with interpreter.scheduled(seed):
        double()
        square()
        square(INCREMENTS=False)


@SEEDS
@pytest.mark.parametrize(
    ("left_out", "kind"),
    [({"PENDING": 2}, "read too early"), ({"COMMITS": False}, "read too early"), ({"REUSES": True}, "written twice")],
)
def test_copies_that_are_not_waited_for(left_out, kind, seed):
    with interpreter.scheduled(seed):
        assert fault(double, **left_out).kind == kind


@SEEDS
@pytest.mark.parametrize(
    ("left_out", "kinds"),
    [
        ({"ARRIVES": False}, ["read too early"]),
        ({"INCREMENTS": False, "ARRIVES": False}, ["deadlock"]),
        ({"FENCED": False}, ["missing fence"]),
    ],
)
def test_copies_of_an_mbarrier(left_out, kinds, seed):
    with interpreter.scheduled(seed):
        assert fault(square, **left_out).kind in kinds


def test_a_fault_names_the_copy():
    found = fault(double, PENDING=2)
    assert "load_async(buffers.index(" in str(found)
    assert [lines[0].function for lines in found.lines] == ["steps_kernel", "steps_kernel"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_products(dtype):
    a, b = torch.randn(64, 64).to(dtype), torch.randn(64, 64).to(dtype)
    torch.testing.assert_close(product(a, b, torch.empty(64, 64), 4 // dtype.itemsize), a.float() @ b.float())


def test_products_of_whole_numbers():
    a, b = (torch.randint(-128, 128, (64, 64), dtype=torch.int8) for _ in range(2))
    assert torch.equal(product(a, b, torch.empty(64, 64, dtype=torch.int32), 4), a.int() @ b.int())


def test_operands_of_32_bits_lose_13_of_them():
    a, ones = torch.full((64, 64), 1 + 2**-10 + 2**-11), torch.ones(64, 64)
    assert torch.equal(product(a, ones, torch.empty(64, 64), 1), torch.full((64, 64), 64 * (1 + 2**-10)))
    assert "take tf32 alone" in str(fault(product, a, ones, torch.empty(64, 64), 1, precision="ieee"))


def test_an_operand_in_the_other_ones_layout():
    a = torch.ones(64, 64).half()
    found = fault(product, a, a, torch.empty(64, 64), index=1)
    assert str(found).startswith("layouts differ: operand 0 of mma_v2")
