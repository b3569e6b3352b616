"""Launch templates: what a call allocates and launches, as data, made of metadata alone and run for all tensors that have it.

A plan is an ordinary function that allocates, launches and returns tensors. Given a `Slot` for each tensor it allocates and launches nothing: it
leaves an ordered list of steps, the template. Plans decide from shapes, strides, dtypes, alignment and options: a slot has no values to look at.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.ops._host import backend, compiling, launching, start
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launch import Descriptor, Launch
from tilewise.ops._host.slot import ALIGNMENT, Slot, Strides, contiguous_strides

# Templates of one operation; beyond, the least recently used one goes.
MOST_TEMPLATES = 1024
# As torch aligns memory on a GPU.
SHARED_ALIGNMENT = 512
# What the code that torch.compile makes allocates with, a third of torch.empty's time. It fills no fresh memory, on whatever request.
EMPTY_STRIDED: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "_empty_strided_cuda", None)


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.empty, in less time where it may."""
    if (
        EMPTY_STRIDED is None
        or device.type != "cuda"
        or device.index != torch._C._cuda_getDevice()
        or torch._C._get_deterministic_algorithms()
        or backend.watched()
    ):
        return torch.empty(shape, dtype=dtype, device=device)
    return EMPTY_STRIDED(shape, contiguous_strides(shape), dtype)


# A step as it runs: the call's tensors and their addresses, to read and to add to, and the stream.
Run = Callable[[list[Any], list[int], int], None]


def emit(beside: Any, *launches: Launch) -> None:
    """Launch in order, on the device of a tensor; beside a slot, in its template."""
    if isinstance(beside, Slot):
        beside.template.add_launches(launches)
    else:
        launching.run_all(launches, beside.device)


def note(beside: Any, why: Callable[..., str | None], *arguments: Any) -> None:
    """Where a plan takes the slower of two ways: why, if anything, is kept in the template. Beside a tensor nobody asks."""
    if isinstance(beside, Slot):
        reason = why(*arguments)
        if reason is not None and reason not in beside.template.notes:
            beside.template.notes.append(reason)


class _Allocation:
    """Fresh memory, from a function of torch's: `empty` or `zeros`."""

    def __init__(self, function: str, slot: Slot) -> None:
        self.function, self.slot = function, slot
        self.reads: list[int] = []

    def runner(self, careful: bool) -> Run:
        """The step as a template runs it; careful, by the function's name in torch, where a watch over fresh memory sees it."""
        function, shape, made, dtype, device = self.function, self.slot.shape, self.slot.base, self.slot.dtype, self.slot.device
        strides, fresh = self.slot.stride(), EMPTY_STRIDED

        def run(tensors: list[Any], addresses: list[int], _stream: int) -> None:
            tensors[made] = x = getattr(torch, function)(shape, dtype=dtype, device=device)
            addresses[made] = x.data_ptr()

        def run_empty(tensors: list[Any], addresses: list[int], _stream: int) -> None:
            tensors[made] = x = fresh(shape, strides, dtype)
            addresses[made] = x.data_ptr()

        return run if careful or function != "empty" or fresh is None else run_empty


class _Shared:
    """One piece of memory for several slots, each at a multiple of SHARED_ALIGNMENT."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self.slots = slots

    def runner(self) -> Run:
        """The step as a template runs it."""
        places, size = [], 0
        for slot in self.slots:
            places.append((slot.base, size))
            size += -(-slot.numel() * slot.dtype.itemsize // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        holder, device, bytes_, fresh = self.slots[0].base, self.slots[0].device, torch.uint8, EMPTY_STRIDED

        def run(tensors: list[Any], addresses: list[int], _stream: int) -> None:
            tensors[holder] = x = fresh((size,), (1,), bytes_) if fresh else torch.empty(size, dtype=bytes_, device=device)
            address = x.data_ptr()
            for base, offset in places:
                addresses[base] = address + offset

        return run


class _Computation:
    """A function of torch's. What it makes is compared once with what the plan said."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], slot: Slot) -> None:
        self.function, self.arguments, self.slot = function, arguments, slot
        self.reads = [x.base for x in arguments if isinstance(x, Slot)]
        self._compared = False

    def runner(self, _careful: bool) -> Run:
        """The step as a template runs it."""
        return self.run

    def run(self, tensors: list[Any], addresses: list[int], _stream: int) -> None:
        """Compute."""
        made = self.function(*(x.of(tensors) if isinstance(x, Slot) else x for x in self.arguments))
        if not self._compared:
            slot = self.slot
            if made.shape != slot.shape or made.dtype != slot.dtype or not made.is_contiguous():
                raise RuntimeError(
                    f"{self.function} gave {made.dtype} {list(made.shape)} with strides {made.stride()}: its plan expected contiguous "
                    f"{slot.dtype} {list(slot.shape)}; please report this"
                )
            self._compared = True
        tensors[self.slot.base] = made
        addresses[self.slot.base] = made.data_ptr()


class _Start:
    """A kernel's launch. What is compiled for it is found at its first run."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.reads = _bases_in(launch.arguments.values())


def _bases_in(values: Any) -> list[int]:
    """Of which of the call's tensors there are slots among a launch's arguments."""
    found = []
    for value in values:
        kind = value.__class__
        if kind is Slot:
            found.append(value.base)
        elif kind is Descriptor:
            found.append(value.base.base)
        elif kind is tuple:
            found += [x.base for x in value if x.__class__ is Slot]
    return found


def _bases_of(result: Any) -> list[int]:
    """The same of a plan's result: a slot, None, or tuples of them."""
    if isinstance(result, tuple):
        return [base for x in result for base in _bases_of(x)]
    return [result.base] if isinstance(result, Slot) else []


def fill(value: Any, tensors: Sequence[Any]) -> Any:
    """A value with tensors in place of slots."""
    if isinstance(value, Slot):
        return value.of(tensors)
    if isinstance(value, Descriptor):
        return value._replace(base=value.base.of(tensors))
    if isinstance(value, tuple):
        filled = [fill(x, tensors) for x in value]
        return type(value)._make(filled) if hasattr(value, "_make") else tuple(filled)
    return value


class Template:
    """What a call allocates, launches and returns, in order. Made by running a plan on slots; then only run."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[Any] = []
        # Why a faster way was not taken, where a plan says so.
        self.notes: list[str] = []
        self._size = 0
        self._given = 0
        self._result: Any = None
        # The last step that reads memory which is made here and not returned.
        self._last: dict[int, int] = {}
        # The steps as they run on a GPU, each with what is freed after it; others where allocations are filled or watched.
        self._runs: dict[bool, list[tuple[Run, list[int]]]] = {}
        # Where the results are whole tensors: which.
        self._outputs: list[int] | None = None

    def given(self, x: torch.Tensor) -> Slot:
        """The slot of an argument like this one."""
        self._given += 1
        return self._slot(tuple(x.shape), x.stride(), x.dtype, x.data_ptr() % ALIGNMENT)

    def _slot(self, shape: tuple[int, ...], strides: Strides, dtype: torch.dtype, address: int = 0) -> Slot:
        self._size += 1
        return Slot(self, self._size - 1, shape, strides, dtype, address)

    def allocate(self, function: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Fresh memory from torch's `empty` or `zeros`, which begins at a multiple of ALIGNMENT."""
        slot = self._slot(shape, contiguous_strides(shape), dtype)
        self.steps.append(_Allocation(function, slot))
        return slot

    def compute(self, function: Callable[..., Any], arguments: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """A contiguous result of a function of torch's."""
        slot = self._slot(shape, contiguous_strides(shape), dtype)
        self.steps.append(_Computation(function, arguments, slot))
        return slot

    def add_launches(self, launches: Sequence[Launch]) -> None:
        """Kernels; a grid of 0 programs is none."""
        self.steps += [_Start(launch) for launch in launches if launch.grid]

    @property
    def launches(self) -> list[Launch]:
        """What is launched, with slots in place of tensors."""
        return [step.launch for step in self.steps if isinstance(step, _Start)]

    @property
    def scratch_bytes(self) -> int:
        """The most memory at a time that is allocated here and not returned."""
        kept, held, most = set(_bases_of(self._result)), {}, 0
        for i, step in enumerate(self.steps):
            if not isinstance(step, _Start) and step.slot.base not in kept:
                held[step.slot.base] = step.slot.numel() * step.slot.dtype.itemsize
            most = max(most, sum(held.values()))
            held = {base: size for base, size in held.items() if self._last.get(base) != i}
        return most

    def finish(self, result: Any) -> "Template":
        """Done: this is what the plan returned."""
        self._result = result
        kept = set(_bases_of(result))
        used = kept.union(*(step.reads for step in self.steps))
        self.steps = [step for step in self.steps if not isinstance(step, _Allocation) or step.slot.base in used]
        # Memory is free for the next step as soon as none reads it any more.
        self._last = {base: i for i, step in enumerate(self.steps) for base in step.reads if base >= self._given and base not in kept}
        made = {step.slot.base: step.slot for step in self.steps if not isinstance(step, _Start)}
        if type(result) is tuple and all(isinstance(x, Slot) and made.get(x.base) is x for x in result):
            self._outputs = [x.base for x in result]
        return self

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """The result for the tensors of one call, on their GPU."""
        held: list[Any] = [*tensors, *(None,) * (self._size - self._given)]
        if self.device.index == torch._C._cuda_getDevice():
            self._run_on_gpu(held)
        else:
            with torch.cuda.device(self.device):
                self._run_on_gpu(held)
        if self._outputs is not None:
            return tuple([held[base] for base in self._outputs])
        return fill(self._result, held)

    def _run_on_gpu(self, held: list[Any]) -> None:
        # Where torch fills fresh memory on request, and where it is watched.
        careful = torch._C._get_deterministic_algorithms() or backend.watched()
        runs = self._runs.get(careful)
        if runs is None:
            runs = self._runs[careful] = self._find_kernels(careful)
        addresses = [x.data_ptr() for x in held[: self._given]] + [0] * (self._size - self._given)
        stream = torch._C._cuda_getCurrentRawStream(self.device.index)
        for run, freed in runs:
            run(held, addresses, stream)
            for base in freed:
                held[base] = None

    def _find_kernels(self, careful: bool) -> list[tuple[Run, list[int]]]:
        """The steps as they run on the current GPU, each with what is freed after it; compiles what is not compiled yet."""
        last = dict(self._last)
        runs: list[tuple[int, Run]] = []
        shared = {} if careful else self._share_memory(last)
        for i, step in enumerate(self.steps):
            if i not in shared:
                runs.append((i, start.find(step.launch) if isinstance(step, _Start) else step.runner(careful)))
            elif (memory := shared[i]) is not None:
                runs.append((i, memory.runner()))
        freed: dict[int, list[int]] = {}
        for base, i in last.items():
            freed.setdefault(i, []).append(base)
        return [(run, freed.get(i, [])) for i, run in runs]

    def _share_memory(self, last: dict[int, int]) -> dict[int, "_Shared | None"]:
        """Allocations side by side that kernels alone read become one, which takes as long as one: by step, in place of it; None for the others.

        Only where that keeps no memory from anybody: nothing is allocated between the deaths of the first and the last of them. `last`, when
        each dies, is changed accordingly.
        """
        elsewhere = {base for step in self.steps if isinstance(step, _Computation) for base in (*step.reads, step.slot.base)}
        made_at = [i for i, step in enumerate(self.steps) if not isinstance(step, _Start)]
        found: dict[int, _Shared | None] = {}
        group: list[int] = []

        def close() -> None:
            slots = [self.steps[i].slot for i in group]
            deaths = [last[slot.base] for slot in slots]
            if len(group) > 1 and not any(min(deaths) < i < max(deaths) for i in made_at):
                found.update(dict.fromkeys(group))
                found[group[0]] = _Shared(slots)
                for slot in slots:
                    del last[slot.base]
                last[slots[0].base] = max(deaths)
            group.clear()

        for i, step in enumerate(self.steps):
            if isinstance(step, _Allocation):
                base = step.slot.base
                if step.function == "empty" and base in last and base not in elsewhere:
                    group.append(i)
            else:
                close()
        close()
        return found


def _read(arguments: Sequence[Any], key: list[Any], tensors: list[torch.Tensor]) -> None:
    """Append all that may decide what a plan does with `arguments` to `key`, and their tensors to `tensors`."""
    for x in arguments:
        if x is None:
            key.append(None)
        elif isinstance(x, torch.Tensor):
            tensors.append(x)
            key += (x.dtype, x.shape, x.stride(), x.data_ptr() % ALIGNMENT)
        elif isinstance(x, tuple):
            key += (x.__class__, len(x))
            _read(x, key, tensors)
        else:
            # 1, True and 1.0 are equal, and not the same option.
            key += (x.__class__, x)


def _with_slots(x: Any, template: Template) -> Any:
    """Arguments with a slot in place of each tensor."""
    if isinstance(x, torch.Tensor):
        return template.given(x)
    if isinstance(x, tuple):
        items = [_with_slots(y, template) for y in x]
        return type(x)._make(items) if hasattr(x, "_make") else tuple(items)
    return x


def make(plan: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device) -> Template:
    """The template of a plan for arguments like these."""
    template = Template(device)
    return template.finish(plan(*(_with_slots(x, template) for x in arguments)))


# What came once and has no template yet.
ONCE = Template(torch.device("meta"))


class Operation:
    """A plan, callable with tensors. What is called again with the same metadata on a GPU is run by its template.

    The first call runs the plan itself: where every call has another shape, no template is made for nothing.
    """

    def __init__(self, plan: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plan)
        self._plan = plan
        self._templates: Kept[Template] = Kept(MOST_TEMPLATES)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the plan does with these arguments: tensors, numbers, and tuples of both."""
        if named:
            bound = inspect.signature(self._plan).bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        parts: list[Any] = []
        tensors: list[torch.Tensor] = []
        _read(arguments, parts, tensors)
        device = tensors[0].device
        if device.type != "cuda" or backend.observed():
            return self._plan(*arguments)
        key = (device, *parts)
        template = self._templates.get(key)
        if template is None:
            self._templates.add(key, ONCE)
            with compiling.expecting(lambda: make(self._plan, arguments, device).launches):
                return self._plan(*arguments)
        if template is ONCE:
            template = self._templates.add(key, make(self._plan, arguments, device))
        return template.run(tensors)

    def forget(self) -> None:
        """Drop all templates: after a change of what the plan reads beside its arguments."""
        self._templates.clear()
