"""Launch templates: slots say what tensors say, and a template gives bit for bit what its plan gives.

Templates run on GPUs alone. Here the same code runs them on the CPU: only the last step, the launch of a compiled
kernel, is an interpreted one that finds its tensors by their addresses.
"""

import ctypes
import dataclasses
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime_problems import KINDS, ON_GPU, make, operators

from tilewise.ops._host import launching, start
from tilewise.ops._host import template as templates
from tilewise.ops._host.launch import Descriptor, Launch
from tilewise.ops._host.register import _Problem
from tilewise.ops._host.slot import Slot, compute
from tilewise.ops._host.template import Operation, Template, emit

CPU = torch.device("cpu")


def slot_of(x):
    return Template(CPU).given(x)


@st.composite
def strided(draw):
    """A tensor of any strides at any address."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    shift = draw(st.integers(0, 9))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int64]))
    size = torch.Size(shape).numel()
    flat = torch.empty(size + shift, dtype=dtype)[shift:]
    return flat.view([shape[i] for i in order]).permute([order.index(i) for i in range(len(shape))])


@st.composite
def indexed(draw):
    """A tensor and an index into it."""
    x = draw(strided())
    limit = st.none() | st.integers(-6, 6)

    def items(sizes):
        found = []
        for size in sizes:
            numbers = [st.integers(-size, size - 1)] if size else []
            found.append(draw(st.one_of(*numbers, st.builds(slice, limit, limit, st.none() | st.integers(1, 3)))))
        for _ in range(draw(st.integers(0, 1))):
            found.insert(draw(st.integers(0, len(found))), None)
        return found

    first = draw(st.integers(0, x.dim()))
    index = items(x.shape[:first])
    if draw(st.booleans()):
        index += [Ellipsis, *items(x.shape[draw(st.integers(first, x.dim())) :])]
    return x, tuple(index)


def assert_alike(slot, x, base):
    assert slot.shape == x.shape
    assert slot.stride() == x.stride()
    assert (slot.dtype, slot.device, slot.dim(), slot.numel()) == (x.dtype, x.device, x.dim(), x.numel())
    assert slot.element_size() == x.element_size()
    assert slot.offset == (x.storage_offset() - base.storage_offset()) * x.element_size()
    if x.numel():
        # torch gives an empty tensor no address.
        assert slot.data_ptr() % 16 == x.data_ptr() % 16
    found = slot.of([base])
    assert (found.shape, found.stride(), found.storage_offset()) == (x.shape, x.stride(), x.storage_offset())


@given(indexed())
@settings(max_examples=200, deadline=None)
def test_a_slot_is_indexed_as_a_tensor_is(given_):
    x, index = given_
    if x.numel() == 0 and x.untyped_storage().nbytes() == 0:
        return
    assert_alike(slot_of(x)[index], x[index], x)


@given(strided(), st.data())
@settings(max_examples=100, deadline=None)
def test_a_slot_is_transposed_iterated_and_made_contiguous_as_a_tensor_is(x, data):
    slot = slot_of(x)
    axes = st.integers(-x.dim(), x.dim() - 1)
    one, other = data.draw(axes), data.draw(axes)
    assert_alike(slot.transpose(one, other), x.transpose(one, other), x)
    assert [slot.stride(axis) for axis in range(x.dim())] == [x.stride(axis) for axis in range(x.dim())]
    for part, truth in zip(slot, x, strict=True):
        assert_alike(part, truth, x)
    copied = slot.contiguous()
    assert (copied is slot) == x.is_contiguous()
    assert (copied.shape, copied.stride()) == (x.shape, x.contiguous().stride())


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (2, 3, 4)], ids=str)
def test_fresh_memory_lies_as_torch_lays_it_out(shape):
    x = torch.empty(5, dtype=torch.float16)[1:]
    slot = slot_of(x)
    for made, truth in (
        (slot.new_empty(shape), x.new_empty(shape)),
        (slot.new_zeros(shape, dtype=torch.int32), x.new_zeros(shape, dtype=torch.int32)),
    ):
        assert (made.shape, made.stride(), made.dtype) == (truth.shape, truth.stride(), truth.dtype)
        assert made.data_ptr() == 0


def test_bad_indices_raise_as_a_tensor_s():
    x = torch.empty(2, 3)
    for index in (2, -3, (0, 0, 0)):
        for one in (x, slot_of(x)):
            with pytest.raises(IndexError):
                one[index]
    for one in (x, slot_of(x)):
        with pytest.raises(ValueError, match="step"):
            one[::-1]


def test_a_plan_cannot_look_at_values():
    slot = slot_of(torch.ones(3))
    compared = lambda x: x == 1, lambda x: x != 1, lambda x: x > 1, lambda x: 1 in [x]
    for look in (bool, int, float, Slot.tolist, Slot.item, Slot.numpy, *compared):
        with pytest.raises(TypeError):
            look(slot)
    with pytest.raises(TypeError, match="a slot has no values"):
        Operation(lambda x: x if x[0] else None)._plan(slot)


def at(address, like, alive):
    """What a slot stands for, at an address; all of it must be memory of a tensor that is alive."""
    if not like.numel():
        return torch.empty(like.shape, dtype=like.dtype)
    last = sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    size = (1 + last) * like.dtype.itemsize
    before = [x.untyped_storage() for x in alive if x is not None and x.data_ptr() <= address]
    assert any(address + size <= x.data_ptr() + x.nbytes() for x in before), "memory that is not there"
    flat = torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return flat.view(like.dtype).as_strided(like.shape, like.stride())


def find_interpreted(launch):
    """In place of `start.find`: the kernel is interpreted."""

    def started(tensors, addresses, _stream):
        def placed(value):
            if isinstance(value, Slot):
                return at(addresses[value.base] + value.offset, value, tensors)
            if isinstance(value, Descriptor):
                return value._replace(base=placed(value.base))
            return tuple(map(placed, value)) if type(value) is tuple else value

        filled = {name: placed(value) for name, value in launch.arguments.items()}
        launching.run_all([dataclasses.replace(launch, arguments=filled)], CPU)

    return started


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Template.run for tensors on the CPU, whose device has no number and no stream."""
    monkeypatch.setattr(start, "find", find_interpreted)
    monkeypatch.setattr(templates, "EMPTY_STRIDED", None)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 0, raising=False)


def flat(results):
    return list(results) if isinstance(results, tuple) else [results]


def watched(operator, seen):
    """An operator's run that also makes a template, runs it twice, and compares."""
    run, plan = operator.run, operator._plan

    def compared(*arguments):
        tensors = arguments[: len(operator._tensors)]
        template = _Problem(run, plan, None, tensors, arguments).make_template(tensors)
        seen.append(template)
        truth = run(*arguments)
        # Each allocation by itself, as where fresh memory is filled; then scratch shares one.
        for careful in (True, False):
            torch.use_deterministic_algorithms(careful, warn_only=True)
            made = template.run([x for x in tensors if x is not None])
            torch.use_deterministic_algorithms(True, warn_only=True)
            for a, b in zip(flat(made), flat(truth), strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                # Rows that no sequence owns are never written: they hold what fresh memory is filled with.
                assert torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))
        return truth

    return compared


@pytest.mark.gpu
@pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")
@pytest.mark.parametrize("name", KINDS)
def test_every_operator_s_templates_give_what_its_plans_give(name, monkeypatch, on_the_cpu):
    seen = []
    for operator in operators(name):
        operator.forget()
        monkeypatch.setattr(operator, "run", watched(operator, seen))
    problem = make(name, backend="triton")
    # A gradient whose last axis is apart makes the backward compute a copy.
    do = problem.do.transpose(-1, -2).contiguous().transpose(-1, -2)
    problem.on(problem.leaves, do).step()
    for operator in operators(name):
        operator.forget()
    assert len(seen) >= 2, "forward and backward"
    assert any(isinstance(step, templates._Computation) for template in seen for step in template.steps)


def launch_of(**arguments):
    return Launch(None, 1, arguments)


def lives(template):
    """For each step, how many pieces of memory there are after it that the template made."""
    runs = template._find_kernels(careful=False)
    held = [torch.empty(0)] * template._given + [None] * (template._size - template._given)
    addresses, counts = [0] * template._size, []
    for run, freed in runs:
        run(held, addresses, 0)
        for base in freed:
            held[base] = None
        counts.append(sum(x is not None for x in held[template._given :]))
    return counts


@pytest.fixture
def without_kernels(monkeypatch):
    monkeypatch.setattr(start, "find", lambda launch: lambda tensors, addresses, stream: None)
    monkeypatch.setattr(templates, "EMPTY_STRIDED", None)


def made(plan, *shapes):
    """The template of a plan for tensors of these shapes."""
    return templates.make(plan, tuple(torch.empty(shape) for shape in shapes), CPU)


def test_memory_is_free_as_soon_as_no_step_reads_it(without_kernels):
    def chain(x):
        for _ in range(6):
            y = x.new_empty(x.shape)
            emit(x, launch_of(x=x, o=y))
            x = y
        return x

    assert max(lives(made(chain, (8,)))) == 2
    assert lives(made(chain, (8,)))[-1] == 1


def test_what_no_step_reads_is_not_allocated():
    def plan(x):
        x.new_empty((100,))
        emit(x, Launch(None, 0, {"x": x.new_empty((100,))}))
        return x.new_empty((3,))

    template = made(plan, (8,))
    assert [step.slot.shape for step in template.steps] == [(3,)]


def shares(template):
    """Which allocations become one, by their shapes."""
    found = template._share_memory(dict(template._last))
    return [[slot.shape for slot in one.slots] for one in found.values() if one is not None]


def test_scratch_side_by_side_is_one_allocation(without_kernels):
    def plan(x):
        out = x.new_empty((1,))
        a, b, c = x.new_empty((2,)), x.new_empty((300,)), x.new_empty((4,), dtype=torch.int32)
        emit(x, launch_of(x=x, a=a, b=b[5:], c=(c, 1), o=out))
        return out

    template = made(plan, (8,))
    assert shares(template) == [[(2,), (300,), (4,)]]
    one = next(x for x in template._share_memory(dict(template._last)).values() if x is not None)
    held, addresses = [None] * template._size, [0] * template._size
    one.runner()(held, addresses, 0)
    (memory,) = [x for x in held if x is not None]
    places = sorted((addresses[slot.base], slot.numel() * slot.element_size()) for slot in one.slots)
    assert places[0][0] >= memory.data_ptr()
    assert all(start_ + size <= after for (start_, size), (after, _) in itertools.pairwise(places))
    assert sum(places[-1]) <= memory.data_ptr() + memory.numel()
    assert all((address - memory.data_ptr()) % templates.SHARED_ALIGNMENT == 0 for address, _ in places)
    # All of it is freed with the last reader, and the output is not.
    assert lives(template)[-1] == 1


def test_what_must_not_be_shared():
    def outputs(x):
        a, b, c = (x.new_empty((n,)) for n in (2, 3, 4))
        emit(x, launch_of(a=a, b=b, c=c))
        return a[1:], (b, None)

    def cleared(x):
        a, b = x.new_empty((2,)), x.new_zeros((3,))
        emit(x, launch_of(a=a, b=b))
        return x.new_empty((1,))

    def computed(x):
        a, b = x.new_empty((2,)), x.new_empty((3,))
        emit(x, launch_of(a=a, b=b))
        return compute(torch.clone, a, shape=(2,), dtype=x.dtype), b.add_(b)

    def outlived(x):
        """One dies before something else is allocated: together they would keep its memory."""
        a, b = x.new_empty((2,)), x.new_empty((3,))
        emit(x, launch_of(a=a))
        c = x.new_empty((4,))
        emit(x, launch_of(b=b, c=c))
        return c

    for plan in (outputs, cleared, computed, outlived):
        assert shares(made(plan, (8,))) == [], plan.__name__


@pytest.mark.parametrize("declared", [((4,), torch.float32), ((3,), torch.float64)], ids=str)
def test_a_computation_that_gives_something_else_raises(on_the_cpu, declared):
    shape, dtype = declared
    template = made(lambda x: compute(torch.clone, x, shape=shape, dtype=dtype), (3,))
    with pytest.raises(RuntimeError, match="its plan expected contiguous.*report"):
        template.run([torch.ones(3)])
    apart = made(lambda x: compute(torch.t, x, shape=(3, 2), dtype=x.dtype), (2, 3))
    with pytest.raises(RuntimeError, match="strides"):
        apart.run([torch.ones(2, 3)])


def test_a_tensor_added_in_place_is_what_comes_back(on_the_cpu):
    def plan(x):
        copy = compute(torch.clone, x, shape=x.shape, dtype=x.dtype)
        return copy.add_(x), None, x

    total, nothing, same = made(plan, (3,)).run([x := torch.ones(3)])
    assert torch.equal(total, torch.full((3,), 2.0))
    assert nothing is None
    assert same is x
