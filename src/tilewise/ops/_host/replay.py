"""A function's allocations and launches, recorded once, and run again for other tensors of the same shapes without the code between them.

That code decides everything from shapes, strides and numbers, never from values, and takes several times as long as the launches themselves.
"""

import enum
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.ops._host import launching

# Plans of one function; with more, all are forgotten.
MOST_PLANS = 1024
# Called by their names in torch, so that whoever watches over fresh memory sees what a plan allocates.
FACTORIES = ("empty", "empty_like", "zeros", "zeros_like")
# Where another function stands in its place, fresh memory is watched.
EMPTY = torch.empty

Slots = list[Any]
# Values of a call, and which of them come out of which slots.
Filler = Callable[[Slots], list[Any]]


class NotReplayableError(Exception):
    """What was recorded depends on more than its arguments' metadata."""


class Step(NamedTuple):
    """One operation or launch on the slots, the slots that it reads and makes, and whether those are all that it does."""

    run: Callable[[Slots], Any]
    reads: frozenset[int]
    made: tuple[int, ...] = ()
    pure: bool = False


def _filler(values: Sequence[Any], slot_of: Callable[[torch.Tensor], int]) -> tuple[Filler, frozenset[int]]:
    """How `values` are put together again from slots: tensors, and descriptors of tensors, come out of them. No tensor is kept alive."""
    kept = list(values)
    tensors, descriptors = [], []
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            tensors.append((i, slot_of(value)))
            kept[i] = None
        elif hasattr(value, "block_shape"):
            # A tensor descriptor, Triton's or Gluon's.
            descriptors.append((i, slot_of(value.base), type(value), vars(value) | {"base": None}))
            kept[i] = None
        elif isinstance(value, (tuple, list)) and any(isinstance(x, torch.Tensor) for x in value):
            raise NotReplayableError("tensors inside a tuple")

    def fill(slots: Slots) -> list[Any]:
        filled = kept.copy()
        for i, slot in tensors:
            filled[i] = slots[slot]
        for i, slot, kind, fields in descriptors:
            # Its checks were made when it was recorded.
            filled[i] = object.__new__(kind)
            filled[i].__dict__ = fields | {"base": slots[slot]}
        return filled

    return fill, frozenset([slot for _, slot in tensors] + [slot for _, slot, _, _ in descriptors])


def _same_address(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a kernel that is given one tensor's memory could be given the other's: a view of it that begins where it begins."""
    same_memory = x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.data_ptr() == y.data_ptr() != 0
    return same_memory and x.dtype == y.dtype and x.device == y.device


class _Recorder(TorchDispatchMode):
    """Inside, torch's operations become steps, and so do launches, which come through `launched`. Tensors are known by their slots."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        # By id, and not kept alive: a plan's memory must not all live at once when it is recorded. A later tensor may have an earlier one's id.
        # Beside a tensor's slot that of the first tensor at the same address, of which it is a view: for a launch they are the same.
        self._slots: dict[int, tuple[weakref.ref[torch.Tensor], int, int]] = {}
        self._launching = False
        self.size = 0
        self.steps: list[Step] = []
        for x in tensors:
            self._place(x, ())

    def _place(self, x: Any, arguments: Sequence[Any]) -> int:
        """The slot of a result: a new one, but for what an operation in place gives back."""
        if not isinstance(x, torch.Tensor):
            raise NotReplayableError(f"a value was looked at: {type(x).__name__}")
        if any(x is y for y in arguments):
            return self.slot_of(x)
        at = next((self.address_of(y) for y in arguments if isinstance(y, torch.Tensor) and _same_address(x, y)), self.size)
        self._slots[id(x)] = weakref.ref(x), self.size, at
        self.size += 1
        return self.size - 1

    def _known(self, x: torch.Tensor) -> tuple[int, int]:
        known, slot, at = self._slots.get(id(x), (None, -1, -1))
        if known is None or known() is not x:
            raise NotReplayableError("a tensor that is no argument and was not made here")
        return slot, at

    def slot_of(self, x: torch.Tensor) -> int:
        """The slot of an argument, or of what was made of it."""
        return self._known(x)[0]

    def address_of(self, x: torch.Tensor) -> int:
        """A slot whose tensor lies at the same address."""
        return self._known(x)[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {name: value for name, value in (kwargs or {}).items() if value is not None}
        result = func(*args, **named)
        if not self._launching:
            self._record(func, args, named, result)
        return result

    def _record(self, func: Any, args: tuple[Any, ...], named: dict[str, Any], result: Any) -> None:
        fill, reads = _filler([*args, *named.values()], self.slot_of)
        several = isinstance(result, (tuple, list))
        made = tuple(self._place(x, args) for x in (result if several else [result]))
        count, names, name = len(args), tuple(named), func.overloadpacket.__name__
        fresh = name in FACTORIES

        def call(slots: Slots) -> Any:
            filled = fill(slots)
            function = getattr(torch, name) if fresh else func
            return function(*filled[:count], **dict(zip(names, filled[count:], strict=True)))

        def allocate(_slots: Slots) -> Any:
            return getattr(torch, name)(*args, **named)

        self.steps.append(Step(allocate if fresh and not reads else call, reads, made, not func._schema.is_mutable))

    def launched(self, launch: launching.Launch, start: Callable[[launching.Launch], launching.Started]) -> None:
        """Start a launch and record it."""
        self._launching = True
        try:
            started = start(launch)
        finally:
            self._launching = False
        fill, reads = _filler(started.values, self.address_of)
        again = started.again
        self.steps.append(Step(lambda slots: again(fill(slots)), reads))


def _needed(steps: Sequence[Step], outputs: Sequence[int | None]) -> list[Step]:
    """The steps without those whose results nobody reads, such as views that are there for their shapes alone."""
    wanted = set(outputs)
    kept = []
    for step in reversed(steps):
        if not step.pure or not wanted.isdisjoint(step.made):
            wanted |= step.reads
            kept.append(step)
    return kept[::-1]


class Plan:
    """What a function does for arguments of the same metadata."""

    def __init__(self, recorder: _Recorder, inputs: int, result: Any) -> None:
        self._several = isinstance(result, tuple)
        self._make = getattr(type(result), "_make", tuple)
        self._outputs = [None if x is None else recorder.slot_of(x) for x in (result if self._several else [result])]
        self._room = recorder.size - inputs
        steps = _needed(recorder.steps, self._outputs)
        last = {slot: i for i, step in enumerate(steps) for slot in step.reads}
        # Memory is free for others as soon as nobody reads it any more.
        self._steps = [
            (step.run, step.made, [slot for slot in step.reads if last[slot] == i and slot not in self._outputs]) for i, step in enumerate(steps)
        ]

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The function's result for other tensors."""
        slots: Slots = [*tensors, *(None,) * self._room]
        for run, made, done in self._steps:
            result = run(slots)
            for slot, x in zip(made, result if isinstance(result, (tuple, list)) else (result,), strict=False):
                slots[slot] = x
            for slot in done:
                slots[slot] = None
        results = [None if slot is None else slots[slot] for slot in self._outputs]
        return self._make(results) if self._several else results[0]


def _read(arguments: tuple[Any, ...], key: list[Any], tensors: list[torch.Tensor]) -> None:
    """Append all that decides what a function does with `arguments` to `key`, and their tensors to `tensors`."""
    for x in arguments:
        if isinstance(x, torch.Tensor):
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % 16)
        elif isinstance(x, tuple):
            _read(x, key, tensors)
        else:
            key.append(x)


def _with_own_tensors(x: Any) -> Any:
    """The same arguments, each tensor an object of its own: a call may give one tensor twice, and the next one two."""
    if isinstance(x, torch.Tensor):
        return x.detach()
    if isinstance(x, tuple):
        items = [_with_own_tensors(y) for y in x]
        return type(x)._make(items) if hasattr(x, "_make") else tuple(items)
    return x


def _record(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Any, Plan] | None:
    """The function's result, and the plan; None where what it does cannot be recorded."""
    own = _with_own_tensors(arguments)
    tensors: list[torch.Tensor] = []
    _read(own, [], tensors)
    recorder = _Recorder(tensors)
    try:
        with launching.recording(recorder.launched), recorder:
            result = function(*own)
        return result, Plan(recorder, len(tensors), result)
    except NotReplayableError:
        return None


class _Mark(enum.Enum):
    """What is known of a call that has no plan: it came once, or cannot be recorded."""

    SEEN = enum.auto()
    NEVER = enum.auto()


def replayed(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors, numbers and tuples of both that runs kernels: after two calls with the same metadata, the third and later ones replay.

    The first only leaves a mark: where every call has other shapes, nothing is recorded.
    """
    plans: dict[tuple[Any, ...], Plan | _Mark] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        if launching.observed() or torch._C._len_torch_dispatch_stack():
            return function(*arguments)
        parts: list[Any] = []
        tensors: list[torch.Tensor] = []
        _read(arguments, parts, tensors)
        device = tensors[0].device
        key = (device, *parts)
        known = plans.get(key)
        if isinstance(known, Plan):
            return launching.on_device(device, known.run, tensors)
        if known is None:
            if len(plans) >= MOST_PLANS:
                plans.clear()
            plans[key] = _Mark.SEEN
        elif known is _Mark.SEEN:
            recorded = _record(function, arguments)
            if recorded is not None:
                result, plan = recorded
                plans[key] = plan
                # Nobody can watch over fresh memory during the recording: who does gets what a replay makes.
                return result if torch.empty is EMPTY else launching.on_device(device, plan.run, tensors)
            plans[key] = _Mark.NEVER
        return function(*arguments)

    return call
