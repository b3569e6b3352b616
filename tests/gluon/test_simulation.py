"""Gluon kernels on CPU tensors: what they compute, under any schedule, and the faults that a GPU hides."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_kernels import (
    COLUMNS,
    ROWS,
    descriptor,
    odd_kernel,
    product_kernel,
    scale_kernel,
    sum_kernel,
    tiles,
    turns_kernel,
)

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
RIGHT = {"EARLY": False, "BYTES": 1, "RELEASES": 1, "PHASE": 0}


def product(**left_out):
    a, b = tiles(), tiles().flip(0)
    c = torch.full((ROWS, COLUMNS), torch.nan, dtype=torch.float16)
    options = {"AWAITED": True, "USED": True, "FENCED": True, "JOINED": True} | left_out
    product_kernel[(1,)](descriptor(a), descriptor(b), descriptor(c), **options)
    return c, a, b


def total(steps=3, **options):
    a, out = tiles(steps), torch.full((ROWS, COLUMNS), torch.nan)
    sum_kernel[(1,)](descriptor(a), out, steps, **(RIGHT | options))
    return out, a


def turns(order="acquire", ctas=5):
    sums, turn = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    turns_kernel[(ctas,)](sums, turn, order)
    return sums.item()


def fault(function, *arguments, **options):
    with pytest.raises(KernelFaultError) as raised:
        function(*arguments, **options)
    return raised.value


def test_a_launch_takes_arguments_as_triton_does():
    x, y = torch.randn(300), torch.full((300,), torch.nan)
    scale_kernel[lambda meta: (-(-meta["n"] // meta["BLOCK"]),)](x, y, n=300, factor=0.5, BLOCK=128, num_warps=4)
    assert torch.equal(y, x * 0.5)
    with pytest.raises(TypeError, match="scale_kernel needs factor, BLOCK"):
        scale_kernel[(1,)](x, y, 300)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_results_under_any_schedule(seed):
    with interpreter.scheduled(seed):
        c, a, b = product()
        out, x = total(5)
        assert turns() == 57
    assert torch.equal(c, (a.float() @ b.float()).half())
    assert torch.equal(out, sum(part.float() for part in x.chunk(5)))


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("left_out", "kind"),
    [
        ("AWAITED", "read too early"),
        ("USED", "used too early"),
        ("FENCED", "missing fence"),
        ("JOINED", "missing fence"),
    ],
)
def test_a_product_without_one_of_its_statements(left_out, kind, seed):
    with interpreter.scheduled(seed):
        assert fault(product, **{left_out: False}).kind == kind


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"EARLY": True}, {"overwritten", "too many arrivals"}),
        ({"BYTES": 2}, {"deadlock"}),
        ({"BYTES": 0}, {"bytes missing", "read too early"}),
        ({"RELEASES": 0}, {"deadlock"}),
        ({"RELEASES": 2}, {"too many arrivals"}),
        ({"PHASE": 1}, {"uninitialised", "deadlock", "read too early"}),
    ],
)
def test_a_ring_of_one_buffer_that_is_out_of_step(options, kinds, seed):
    with interpreter.scheduled(seed):
        if options == {"RELEASES": 2}:
            # The phases of both arrivals pass, and the producer overtakes.
            kinds = kinds | {"overwritten"}
        assert fault(total, **options).kind in kinds


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_race_between_ctas(seed):
    """The numbers are right: only the order is missing."""
    with interpreter.scheduled(seed):
        found = fault(turns, "relaxed")
    assert found.kind == "race"
    assert "gl.store(total" in str(found)


def test_a_deadlock_names_every_partition_with_its_line_and_barrier():
    message = str(fault(total, BYTES=2))
    assert "CTA 0, partition 0 (consume) waits for phase 0 of barrier 0 of gluon_kernels.py:" in message
    assert "0 phases are done, 0 of 1 arrivals and 8192 bytes are missing to the next" in message
    assert "CTA 0, partition 1 (produce) waits for phase 0 of barrier 0" in message
    assert "mbarrier.wait(full.index(0), (i & 1) ^ PHASE)" in message


def test_a_fault_names_both_lines():
    found = fault(product, FENCED=False)
    write, read = found.lines
    assert write[0].function == read[0].function == "product_kernel"
    assert write[0].number < read[0].number
    assert "tiles.index(0).store(acc.to(gl.float16))" in str(found)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("layouts", "layouts differ: operands have different layouts"),
        ("bounds", "out of bounds: element 128 of a tensor's 128 is accessed"),
        ("histogram", "not simulated: histogram"),
        ("memory", "too much shared memory: 262144 bytes are allocated"),
        ("buffer", "out of bounds: buffer 2 of 2"),
    ],
)
def test_what_a_kernel_may_not_do(how, says):
    found = fault(lambda: odd_kernel[(1,)](torch.zeros(128, dtype=torch.int32), how))
    assert str(found).startswith(says)
    assert found.lines[-1][0].function == "odd_kernel"


def test_whole_numbers_are_those_of_32_bits():
    x = torch.tensor([0, 2**31 - 1, -2], dtype=torch.int32)
    odd_kernel[(1,)](x, "overflow")
    # Twice the largest is -2; 7 / -2 is -3, towards 0.
    assert x[0].item() == -5
