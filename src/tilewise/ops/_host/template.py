"""Launch templates: what a call allocates and launches, as data, made of metadata alone.

A plan is an ordinary function that allocates, launches and returns tensors. Given a `Slot` for each tensor it allocates
and launches nothing: it leaves an ordered list of steps, the template. Plans decide from shapes, strides, dtypes,
alignment and options: a slot has no values to look at.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewise.ops._host import backend, launching
from tilewise.ops._host.launch import Descriptor, Launch
from tilewise.ops._host.symbol import ALIGNMENT, Slot, Strides, Trace, contiguous_strides

# What the code that torch.compile makes allocates with, a third of torch.empty's time. It fills no fresh memory, on
# whatever request.
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


def emit(beside: Any, *launches: Launch) -> None:
    """Launch in order, on the device of a tensor; beside a slot, in its template."""
    if isinstance(beside, Slot):
        beside.template.add_launches(launches)
    else:
        launching.run_all(launches, beside.device)


def note(beside: Any, why: Callable[..., str | None], *arguments: Any) -> None:
    """Where a plan takes the slower of two ways: why, if anything, is kept in the template.

    Beside a tensor nobody asks.
    """
    if isinstance(beside, Slot) and beside.template.trace is None:
        reason = why(*arguments)
        if reason is not None and reason not in beside.template.notes:
            beside.template.notes.append(reason)


class Allocation:
    """Fresh memory, from a function of torch's: `empty` or `zeros`."""

    def __init__(self, function: str, slot: Slot) -> None:
        self.function, self.slot = function, slot
        self.reads: list[int] = []


class Computation:
    """A function of torch's. What it makes is compared once with what the plan said."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], slot: Slot) -> None:
        self.function, self.arguments, self.slot = function, arguments, slot
        self.reads = _bases_of(arguments)
        self.compared = False

    def compare(self, made: torch.Tensor, shape: tuple[int, ...]) -> None:
        """Raise where the plan did not say that this is made."""
        dtype = self.slot.dtype
        if made.shape != shape or made.dtype != dtype or not made.is_contiguous():
            raise RuntimeError(
                f"{self.function} gave {made.dtype} {list(made.shape)} with strides {made.stride()}: its plan expected"
                f" contiguous {dtype} {list(shape)}; please report this"
            )
        self.compared = True


class Start:
    """A kernel's launch."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.reads = _bases_in(launch.arguments.values())


Step = Allocation | Computation | Start


def _bases_in(values: Any) -> list[int]:
    """Of which of the call's tensors there are slots among a launch's arguments."""
    found = []
    for value in values:
        kind = value.__class__
        if kind is Slot:
            found.append(value.base)
        elif kind is Descriptor:
            found.append(value.base.base)
        elif isinstance(value, tuple):
            found += _bases_in(value)
    return found


def _bases_of(result: Any) -> list[int]:
    """The same of a plan's result: a slot, None, or tuples of them."""
    if isinstance(result, tuple):
        return [base for x in result for base in _bases_of(x)]
    return [result.base] if isinstance(result, Slot) else []


class Template:
    """What a call allocates, launches and returns, in order. Made by running a plan on slots."""

    def __init__(self, device: torch.device, trace: Trace | None = None) -> None:
        self.device = device
        # Where sizes are symbols: what the plan made of them.
        self.trace = trace
        self.steps: list[Step] = []
        # Why a faster way was not taken, where a plan says so.
        self.notes: list[str] = []
        # The call's tensors: the given ones first, then what is made.
        self.slots: list[Slot] = []
        self.given_count = 0
        self.number_count = 0
        self.result: Any = None
        # The last step that reads memory which is made here and not returned.
        self.last: dict[int, int] = {}

    def given(self, x: torch.Tensor) -> Slot:
        """The slot of an argument like this one."""
        shape, strides, i, trace = tuple(x.shape), x.stride(), self.given_count, self.trace
        self.given_count += 1
        if trace is not None:
            shape = tuple([trace.argument(f"size{i}_{axis}", size) for axis, size in enumerate(shape)])
            strides = tuple([trace.argument(f"stride{i}_{axis}", stride) for axis, stride in enumerate(strides)])
        return self._slot(shape, strides, x.dtype, x.data_ptr() % ALIGNMENT)

    def number(self, x: float) -> Any:
        """An argument like this number."""
        self.number_count += 1
        return x if self.trace is None else self.trace.argument(f"number{self.number_count - 1}", x)

    def _slot(self, shape: tuple[int, ...], strides: Strides, dtype: torch.dtype, address: int = 0) -> Slot:
        self.slots.append(Slot(self, len(self.slots), shape, strides, dtype, address))
        return self.slots[-1]

    def allocate(self, function: str, shape: tuple[int, ...], dtype: torch.dtype) -> Slot:
        """Fresh memory from torch's `empty` or `zeros`, which begins at a multiple of ALIGNMENT."""
        slot = self._slot(shape, contiguous_strides(shape), dtype)
        self.steps.append(Allocation(function, slot))
        return slot

    def compute(
        self, function: Callable[..., Any], arguments: tuple[Any, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> Slot:
        """A contiguous result of a function of torch's."""
        slot = self._slot(shape, contiguous_strides(shape), dtype)
        self.steps.append(Computation(function, arguments, slot))
        return slot

    def add_launches(self, launches: Sequence[Launch]) -> None:
        """Kernels; a grid of 0 programs is none."""
        self.steps += [Start(launch) for launch in launches if launch.grid]

    @property
    def launches(self) -> list[Launch]:
        """What is launched, with slots in place of tensors."""
        return [step.launch for step in self.steps if isinstance(step, Start)]

    @property
    def scratch_bytes(self) -> int:
        """The most memory at a time that is allocated here and not returned."""
        kept, held, most = set(_bases_of(self.result)), {}, 0
        for i, step in enumerate(self.steps):
            if not isinstance(step, Start) and step.slot.base not in kept:
                held[step.slot.base] = step.slot.numel() * step.slot.dtype.itemsize
            most = max(most, sum(held.values()))
            held = {base: size for base, size in held.items() if self.last.get(base) != i}
        return most

    def finish(self, result: Any) -> "Template":
        """Done: this is what the plan returned."""
        self.result = result
        kept = set(_bases_of(result))
        used = kept.union(*(step.reads for step in self.steps))
        self.steps = [step for step in self.steps if not isinstance(step, Allocation) or step.slot.base in used]
        # Memory is free for the next step as soon as none reads it any more.
        self.last = {
            base: i
            for i, step in enumerate(self.steps)
            for base in step.reads
            if base >= self.given_count and base not in kept
        }
        return self

    def share_memory(self, last: dict[int, int]) -> dict[int, list[Slot]]:
        """Allocations side by side that kernels alone read become one, which takes as long as one: by step, its slots;
        none for all but the first.

        Only where that keeps no memory from anybody: nothing is allocated between the deaths of the first and the last
        of them. `last`, when each dies, is changed accordingly.
        """
        elsewhere = {
            base for step in self.steps if isinstance(step, Computation) for base in (*step.reads, step.slot.base)
        }
        made_at = [i for i, step in enumerate(self.steps) if not isinstance(step, Start)]
        found: dict[int, list[Slot]] = {}
        group: dict[int, Slot] = {}

        def close() -> None:
            slots = list(group.values())
            deaths = [last[slot.base] for slot in slots]
            if len(group) > 1 and not any(min(deaths) < i < max(deaths) for i in made_at):
                found.update({i: [] for i in group})
                found[next(iter(group))] = slots
                for slot in slots:
                    del last[slot.base]
                last[slots[0].base] = max(deaths)
            group.clear()

        for i, step in enumerate(self.steps):
            if isinstance(step, Allocation):
                base = step.slot.base
                if step.function == "empty" and base in last and base not in elsewhere:
                    group[i] = step.slot
            else:
                close()
        close()
        return found


def _with_slots(x: Any, template: Template) -> Any:
    """Arguments with a slot in place of each tensor, and a symbol in place of each number where sizes are symbols."""
    if isinstance(x, torch.Tensor):
        return template.given(x)
    if isinstance(x, tuple):
        items = [_with_slots(y, template) for y in x]
        return type(x)._make(items) if hasattr(x, "_make") else tuple(items)
    return template.number(x) if x.__class__ in (int, float) else x


def make(
    plan: Callable[..., Any], arguments: tuple[Any, ...], device: torch.device, trace: Trace | None = None
) -> Template:
    """The template of a plan for arguments like these; with a trace, for others too by which it decides the same."""
    template = Template(device, trace)
    return template.finish(plan(*(_with_slots(x, template) for x in arguments)))
