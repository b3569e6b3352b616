"""Programs: memory lives as long as it is needed, sizes are those of the call, and a program is found again."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tilewise.ops._host import program, start
from tilewise.ops._host import template as templates
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.program import Operation, Planned, Program, emit
from tilewise.ops._host.symbol import Trace, compute

CPU = torch.device("cpu")


def made(plan, *shapes, trace=None):
    """The program of a plan for tensors of these shapes."""
    return Program(templates.make(plan, tuple(torch.empty(shape) for shape in shapes), CPU, trace))


def launch_of(**arguments):
    return Launch(None, 1, arguments)


class Noted:
    """In place of a compiled kernel: the values that it was launched with, and the fresh memory there was."""

    def __init__(self, memory):
        self.memory = memory
        self.launches = []

    def __getitem__(self, grid):
        def launch(*values):
            self.launches.append((grid, values, [(x.data_ptr(), x.nbytes()) for x in self.memory.alive]))

        return launch


@pytest.fixture
def noted(on_the_cpu, monkeypatch):
    noted = Noted(on_the_cpu)
    kernel = start.Kernel(noted, None, ())
    monkeypatch.setattr(start, "find", lambda launch: start.Found(kernel, list(launch.arguments.values())))
    return noted


def test_memory_is_free_as_soon_as_no_step_reads_it(noted):
    def chain(x):
        for _ in range(6):
            y = x.new_empty(x.shape)
            emit(x, launch_of(x=x, o=y))
            x = y
        return x

    result = made(chain, (8,)).run([torch.empty(8)], ())
    assert result.shape == (8,)
    assert [len(alive) for *_, alive in noted.launches] == [1, 2, 2, 2, 2, 2]


def test_scratch_side_by_side_lies_apart(noted):
    def plan(x):
        out = x.new_empty((1,))
        a, b, c = x.new_empty((2,)), x.new_empty((300,)), x.new_empty((4,), dtype=torch.int32)
        emit(x, launch_of(a=a, b=b, c=c, moved=b[5:], pair=(c, 1)))
        return out

    made(plan, (8,)).run([torch.empty(8)], ())
    ((_, (a, b, c, moved, pair), alive),) = noted.launches
    assert moved == b + 20
    assert pair == (c, 1)
    start_, size = max(alive, key=lambda one: one[1])
    places = sorted(((a, 8), (b, 1200), (c, 16)))
    assert start_ == places[0][0]
    assert all(at + long <= after for (at, long), (after, _) in itertools.pairwise(places))
    assert sum(places[-1]) <= start_ + size
    assert all((at - start_) % templates.SHARED_ALIGNMENT == 0 for at, _ in places)


def test_sizes_are_those_of_the_call(noted):
    def plan(x):
        y = x.new_zeros((x.shape[0] // 2, 3))
        emit(
            x,
            Launch(
                None,
                x.shape[0] * 4,
                {"x": x[1:], "y": y, "n": x.shape[0] + 1, "strides": y.stride(), "half": x.shape[0] / 2},
            ),
        )
        return y, x

    one = made(plan, (8,), trace=Trace())
    for size in (8, 10):
        x = torch.empty(size)
        y, same = one.run([x], one.solve([x], []))
        assert same is x
        assert y.shape == (size // 2, 3)
        assert not y.any()
        assert noted.launches[-1][:2] == (
            (size * 4, 1, 1),
            (x.data_ptr() + 4, y.data_ptr(), size + 1, (3, 1), size / 2),
        )
    assert one.solve([torch.empty(0)], []) is None, "a grid of 0 programs is no launch"


@pytest.mark.parametrize("declared", [((4,), torch.float32), ((3,), torch.float64)], ids=str)
def test_a_computation_that_gives_something_else_raises(on_the_cpu, declared):
    shape, dtype = declared
    one = made(lambda x: compute(torch.clone, x, shape=shape, dtype=dtype), (3,))
    with pytest.raises(RuntimeError, match="its plan expected contiguous.*report"):
        one.run([torch.ones(3)], ())
    apart = made(lambda x: compute(torch.t, x, shape=(3, 2), dtype=x.dtype), (2, 3))
    with pytest.raises(RuntimeError, match="strides"):
        apart.run([torch.ones(2, 3)], ())


def test_a_tensor_added_in_place_is_what_comes_back(on_the_cpu):
    def plan(x):
        copy = compute(torch.clone, x[1:], shape=(x.shape[0] - 1,), dtype=x.dtype)
        return copy.add_(x[:-1]), None, x

    one = made(plan, (3,), trace=Trace())
    for x in (torch.arange(3.0), torch.arange(5.0)):
        total, nothing, same = one.run([x], one.solve([x], []))
        assert torch.equal(total, x[1:] + x[:-1])
        assert nothing is None
        assert same is x


def test_programs_are_found_by_kinds_and_decisions(on_the_cpu):
    calls = []

    def plan(x, pair, option):
        calls.append(x.shape)
        return x.new_empty((x.shape[0] * 2 if x.shape[0] > 4 else 1,))

    planned = Planned(plan)

    def sizes(*arguments):
        found, tensors, values = planned.known(arguments) or planned.make(arguments)
        return found.run(tensors, values).shape

    for size, wanted, count in ((8, 16, 1), (9, 18, 1), (2, 1, 2), (3, 1, 2), (8, 16, 2)):
        assert sizes(torch.empty(size), (1, 2), True) == (wanted,)
        assert len(calls) == count
    x = torch.empty(8)
    kinds = [
        (x, (1, 2), 1),
        (x, (1, 2), 1.0),
        (x, (1,), True),
        (x, (1, 2.0), True),
        (x, (1, 2), "a"),
        (x, (1, None), True),
        (x.double(), (1, 2), True),
        (x[:, None], (1, 2), True),
    ]
    kinds += [(torch.empty(9)[1:], (1, 2), True), (x, (True, 2), True)]
    kinds += [(x, (torch.empty(3, device=device), 2), True) for device in ("cpu", "meta")]
    for count, arguments in enumerate(kinds, start=3):
        sizes(*arguments)
        assert len(calls) == count, arguments
    sizes(x, (7, 9), True)
    sizes(x, (1, 0.5), True)
    assert len(calls) == count, "another number, by which nothing is decided"
    planned.forget()
    sizes(x, (1, 2), True)
    assert len(calls) == count + 1


def test_at_most_so_many_programs_are_kept(on_the_cpu, monkeypatch):
    monkeypatch.setattr(program, "MOST_PROGRAMS", 3)
    planned = Planned(lambda x: x.new_empty((int(x.shape[0]),)))
    made = []
    for size in (1, 2, 3, 1, 4, 3, 5, 1):
        x = torch.empty(size)
        found = planned.known((x,))
        made += [size] if found is None else []
        found, tensors, values = found or planned.make((x,))
        assert found.run(tensors, values).shape == (size,)
    (programs,) = planned._kinds._values.values()
    assert len(programs) == 3
    # The least recently used one went: 2 for 4, then 1 for 5.
    assert made == [1, 2, 3, 4, 5, 1]


def test_threads_that_are_careful_for_the_first_time(noted):
    """Their function is compiled then; its text was written before."""

    def plan(x):
        for _ in range(20):
            emit(x, launch_of(x=x, name=f"{_}"))
        return x.new_empty((3,))

    one, meet = made(plan, (8,)), threading.Barrier(6)
    torch.use_deterministic_algorithms(True, warn_only=True)

    def call(_):
        meet.wait()
        return one.run([torch.empty(8)], ()).shape

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(call, range(6))) == [(3,)] * 6


def test_threads_that_make_programs_at_a_time(on_the_cpu):
    """Each runs its own, though another one adds to the same kind meanwhile; and none is lost."""
    meet = threading.Barrier(4)

    def plan(x):
        size = int(x.shape[0])
        if not meet.broken:
            meet.wait(5)
        return x.new_empty((size,))

    planned = Planned(plan)

    def call(size):
        found, tensors, values = planned.make((torch.empty(size),))
        return found.run(tensors, values).shape[0]

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(call, range(1, 5))) == [1, 2, 3, 4]
    meet.abort()
    assert all(planned.known((torch.empty(size),)) for size in range(1, 5))


def test_an_operation_on_the_cpu_is_its_plan():
    operation = Operation(lambda x, n=2: x * n)
    assert operation(torch.ones(2), n=3).tolist() == [3.0, 3.0]
    assert operation(torch.ones(2)).tolist() == [2.0, 2.0]
