"""Launch templates: slots say what tensors say, and memory is shared and freed as steps allow."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.ops._host import template as templates
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.program import emit
from tilewise.ops._host.symbol import Slot, compute
from tilewise.ops._host.template import Template

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


def test_a_slot_is_flattened_where_that_needs_no_copy():
    x = torch.empty(3, 4, 6, 5)
    for view, axes in ((x, (0, 1)), (x, (1, 3)), (x[:, :, 2:4], (0, 1)), (x[1:2, :2], (0, 1))):
        assert_alike(slot_of(view).flatten(*axes), view.flatten(*axes), view)
    with pytest.raises(ValueError, match="need a copy"):
        slot_of(x[:, :2]).flatten(0, 1)


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
        bool(slot[0])


def launch_of(**arguments):
    return Launch(None, 1, arguments)


def made(plan, *shapes):
    """The template of a plan for tensors of these shapes."""
    return templates.make(plan, tuple(torch.empty(shape) for shape in shapes), CPU)


def test_what_no_step_reads_is_not_allocated():
    def plan(x):
        x.new_empty((100,))
        emit(x, Launch(None, 0, {"x": x.new_empty((100,))}))
        return x.new_empty((3,))

    template = made(plan, (8,))
    assert [step.slot.shape for step in template.steps] == [(3,)]


def shares(template):
    """Which allocations become one, by their shapes."""
    return [[slot.shape for slot in slots] for slots in template.share_memory(dict(template.last)).values() if slots]


def test_scratch_side_by_side_is_one_allocation():
    def plan(x):
        out = x.new_empty((1,))
        a, b, c = x.new_empty((2,)), x.new_empty((300,)), x.new_empty((4,), dtype=torch.int32)
        emit(x, launch_of(x=x, a=a, b=b[5:], c=(c, 1), o=out))
        return out

    assert shares(made(plan, (8,))) == [[(2,), (300,), (4,)]]


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
