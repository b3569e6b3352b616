"""Gluon kernels on CPU tensors: what they compute, under any schedule, and the faults that a GPU hides."""

import pickle

import pytest
import torch

pytest.importorskip("triton")

from gluon_kernels import (
    COLUMNS,
    LAYOUT,
    ROWS,
    TensorDescriptor,
    added_kernel,
    copies_kernel,
    descriptor,
    loops_kernel,
    odd_kernel,
    phases_kernel,
    product_kernel,
    scale_kernel,
    sum_kernel,
    tile_at_kernel,
    tiles,
    turns_kernel,
    unawaited_kernel,
)

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
RIGHT = {"EARLY": False, "BYTES": 1, "JOINED": True, "RELEASES": 1, "PHASE": 0}


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
    ],
)
def test_a_product_without_one_of_its_statements(left_out, kind, seed):
    with interpreter.scheduled(seed):
        assert fault(product, **{left_out: False}).kind == kind


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_thread_barriers_that_the_compiler_adds(seed):
    """Before a copy reads what threads have stored, and before an arrival that lets it be overwritten."""
    with interpreter.scheduled(seed):
        c, a, b = product(JOINED=False)
        assert torch.equal(c, (a.float() @ b.float()).half())
        out, x = total(5, JOINED=False)
        assert torch.equal(out, sum(part.float() for part in x.chunk(5)))
        with interpreter.written_barriers():
            assert fault(product, JOINED=False).kind == "missing fence"
            assert fault(total, 5, JOINED=False).kind == "overwritten"


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
        ("assembly", "not simulated: inline_asm_elementwise"),
        ("memory", "too much shared memory: 262144 bytes are allocated"),
        ("buffer", "out of bounds: buffer 2 of 2"),
    ],
)
def test_what_a_kernel_may_not_do(how, says):
    found = fault(lambda: odd_kernel[(1,)](torch.zeros(128, dtype=torch.int32), how))
    assert str(found).startswith(says)
    assert found.lines[-1][0].function == "odd_kernel"


@pytest.mark.parametrize(("first", "count"), [(0, 100), (28, 100), (64, 0)])
def test_a_kernel_stays_inside_of_the_tensor_that_it_is_given(first, count):
    """However much the storage has around it."""
    whole = torch.arange(256.0)
    x, y = whole[first : first + count], torch.zeros(128)
    scale_kernel[(1,)](x, y, count, 2.0, BLOCK=128)
    assert torch.equal(y[:count], x * 2)
    for given in ((x, y), (y, x)):
        found = fault(lambda given=given: scale_kernel[(1,)](*given, count + 1, 2.0, BLOCK=128))
        assert f"out of bounds: element {first + count} of a tensor's {count}, {first} to" in str(found)


def test_a_descriptor_stays_inside_of_its_tensor():
    whole = tiles(2)
    larger = TensorDescriptor(whole[:ROWS], list(whole.shape), list(whole.stride()), [ROWS, COLUMNS], LAYOUT)
    tile_at_kernel[(1,)](larger, 0, 0, True)
    found = fault(lambda: tile_at_kernel[(1,)](larger, ROWS, 0, True))
    assert found.kind == "out of bounds"
    assert "reaches elements 4096 to 8191 of a tensor's 4096, 0 to 4095 of its storage's 8192" in str(found)


def test_whole_numbers_are_those_of_32_bits():
    x = torch.tensor([0, 2**31 - 1, -2], dtype=torch.int32)
    odd_kernel[(1,)](x, "overflow")
    # Twice the largest is -2; 7 / -2 is -3, towards 0.
    assert x[0].item() == -5


def numbers(count=128):
    return torch.zeros(count, dtype=torch.int32)


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_a_wait_tells_of_its_own_phase_alone(seed):
    """However far the barrier has come meanwhile."""
    with interpreter.scheduled(seed):
        x = numbers()
        phases_kernel[(1,)](x, 1)
        assert x.tolist() == [7] * 128
        assert fault(lambda: phases_kernel[(1,)](numbers(), 0)).kind in ("read too early", "deadlock")


@pytest.mark.parametrize("seed", [None, 0, 1, 2])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("adds", "is written and then changed by an atomic"),
        ("two adders", "is changed by an atomic and then read"),
        ("reads", ""),
    ],
)
def test_an_atomic_hides_no_write_before_it(how, says, seed):
    with interpreter.scheduled(seed):
        x = numbers(2)
        if says:
            found = fault(lambda: added_kernel[(3,)](x, numbers(1), how))
            assert found.kind == "race"
            assert says in str(found) or "is changed by an atomic and then written" in str(found)
        else:
            added_kernel[(3,)](x, numbers(1), how)
            assert x.tolist() == [7, 7]


def test_a_copys_wait_is_for_shared_memory_alone():
    a, c = tiles(), tiles()
    assert fault(lambda: copies_kernel[(2,)](descriptor(a), descriptor(c), numbers(1), c.view(-1))).kind == "race"


@pytest.mark.parametrize(
    ("coordinates", "stores", "wrong"),
    [
        ((0, 4), False, True),
        ((0, -8), False, False),
        ((-8, 0), False, False),
        ((0, 4), True, True),
        ((-8, 0), True, True),
    ],
)
def test_coordinates_that_stop_a_gpu(coordinates, stores, wrong):
    """Its last coordinate is counted in 16 bytes, and a store's are not negative: measured on an H200."""
    a = tiles()
    if wrong:
        found = fault(lambda: tile_at_kernel[(1,)](descriptor(a), *coordinates, stores))
        assert found.kind == "coordinates"
        assert f"the tile at {list(coordinates)}" in str(found)
    else:
        tile_at_kernel[(1,)](descriptor(a), *coordinates, stores)


def test_a_copy_that_nothing_waits_for():
    assert fault(lambda: unawaited_kernel[(1,)](descriptor(tiles()))).kind == "not waited for"


def test_a_loop_with_an_end_of_its_own_is_no_deadlock_and_one_without_is():
    loops_kernel[(1,)](numbers(), "falling")
    found = fault(lambda: loops_kernel[(1,)](numbers(), "waits"))
    assert found.kind == "deadlock"
    assert "spins on a number in global memory, which is 0" in str(found)


def test_a_loops_variable_is_a_number_of_the_kernel():
    x = numbers()
    loops_kernel[(1,)](x, "wide")
    assert x[:3].tolist() == [0, 2, 4]


def test_atomics_on_one_place_come_one_after_the_other():
    x = numbers(129)
    loops_kernel[(1,)](x, "tickets")
    assert x[0].item() == 128
    assert sorted(x[1:101].tolist()) == list(range(100))


def test_a_launch_refuses_what_it_does_not_know():
    x, y = torch.randn(8), torch.zeros(8)
    with pytest.raises(TypeError, match="scale_kernel has no parameter num_warp, and a launch no such option"):
        scale_kernel[(1,)](x, y, 8, 1.0, BLOCK=8, num_warp=4)


def test_a_fault_can_be_pickled():
    found = fault(product, FENCED=False)
    again = pickle.loads(pickle.dumps(found))
    assert (str(again), again.kind, again.lines) == (str(found), found.kind, found.lines)
