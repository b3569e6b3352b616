"""Reductions by the copy engine: what they compute, and what is wrong around them."""

import operator

import pytest
import torch

pytest.importorskip("triton")

from gluon_reduction_kernels import descriptor, read_back_kernel, reduce_kernel

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
FUNCTIONS = {
    "add": operator.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}


def reduced(kind, dtype, fenced=True, ctas=2):
    generator = torch.Generator().manual_seed(0)
    x, out = (torch.randint(-99, 99, (n, 16, 16), generator=generator).to(dtype) for n in (ctas, 1))
    out, before = out[0], out[0].clone()
    reduce_kernel[(ctas,)](x, descriptor(out), kind, fenced)
    return x, before, out


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("add", torch.float32),
        ("add", torch.bfloat16),
        ("add", torch.int32),
        ("min", torch.float16),
        ("max", torch.bfloat16),
        ("and", torch.int32),
        ("or", torch.int32),
        ("xor", torch.int32),
    ],
)
def test_tiles_of_several_ctas_are_reduced_and_nothing_outside_is_written(kind, dtype, seed):
    with interpreter.scheduled(seed):
        x, expected, out = reduced(kind, dtype)
    for tile in x:
        expected[8:, 8:] = FUNCTIONS[kind](expected[8:, 8:], tile[:8, :8])
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "says"),
    [
        ("add", torch.int16, "operand: async_atomic_add of int16: the copy engine takes int32, float32"),
        ("max", torch.float32, "operand: async_atomic_max of fp32: the copy engine takes int32, int64"),
        ("xor", torch.float16, "operand: async_atomic_xor of fp16"),
    ],
)
def test_what_hopper_does_not_reduce(kind, dtype, says):
    with pytest.raises(KernelFaultError, match=says):
        reduced(kind, dtype)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_tile_without_a_fence(seed):
    with interpreter.scheduled(seed), pytest.raises(KernelFaultError, match="missing fence: buffer 0 of"):
        reduced("add", torch.float32, fenced=False)


@pytest.mark.parametrize("seed", [None, 0, 1])
def test_a_number_is_read_while_the_copy_engine_may_still_change_it(seed):
    """The wait for shared memory alone does not tell that the sum is there."""
    out = torch.zeros(16, 16)
    with interpreter.scheduled(seed):
        with pytest.raises(KernelFaultError, match="is changed by an atomic and then read, in no order"):
            read_back_kernel[(1,)](descriptor(out), out.view(-1), False)
        out.zero_()
        read_back_kernel[(1,)](descriptor(out), out.view(-1), True)
    assert out[0, :2].tolist() == [1, 1]
