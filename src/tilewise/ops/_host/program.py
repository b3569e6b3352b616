"""Programs: a template as two functions in Python, written once and run by every call that its plan decides alike for.

`solve` takes a call's tensors and whole numbers and computes what differs from call to call: sizes, strides, grids. It
returns None where a decision of the plan comes out differently. `run` allocates, computes and launches in order, with
what `solve` returned.

Where there is no program, a plan runs as it stands: `emit` starts its launches, or records them in a template.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tilewise.ops._host import backend, compiling, start, template
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.symbol import ALIGNMENT, NAMES, Slot, Trace
from tilewise.ops._host.template import Start, Template, Writer

# Kinds of arguments kept per plan; beyond that the least recently used one is evicted.
MOST_KINDS = 256
# Programs kept per kind, one for each path through its plan: some 70 for native sparse attention's backward. Beyond
# that the least recently used one is evicted.
MOST_PROGRAMS = 128

Values = tuple[Any, ...]
Run = Callable[[Sequence[torch.Tensor], Values], Any]


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run launches of tensors in order on `device`: compiled on a GPU, interpreted on the CPU."""
    found = backend.collected()
    if found is not None:
        found.extend(launch.for_triton() for launch in launches)
    elif device.type == "cuda":
        if device.index in (None, torch._C._cuda_getDevice()):
            for launch in launches:
                start.run(launch)
        else:
            with torch.cuda.device(device):
                run_all(launches, device)
    else:
        for launch in launches:
            launch.run()


def run_repeated(repeated: start.Repeated, varying: Mapping[str, Any], device: torch.device) -> None:
    """The same for one of a launch that is repeated."""
    if device.type == "cuda" and device.index == torch._C._cuda_getDevice() and backend.collected() is None:
        repeated.run(varying)
    else:
        run_all((repeated.launch(varying),), device)


def emit(beside: Any, *launches: Launch) -> None:
    """Launch in order on a tensor's device; given a slot, record in its template."""
    if isinstance(beside, Slot):
        beside.template.add_launches(launches)
    else:
        run_all(launches, beside.device)


def note(beside: Any, why: Callable[..., str | None], *arguments: Any) -> None:
    """Where a plan takes the slower of two paths: the reason, if any, is kept in the template.

    Given a tensor, nothing is kept.
    """
    if isinstance(beside, Slot) and beside.template.trace is None:
        reason = why(*arguments)
        if reason is not None and reason not in beside.template.notes:
            beside.template.notes.append(reason)


class Program:
    """Runs a template, for all calls whose numbers lead its plan to the same decisions."""

    def __init__(self, made: Template) -> None:
        # Which kernel is launched may depend on a number too.
        found = {i: start.find(step.launch) for i, step in enumerate(made.steps) if isinstance(step, Start)}
        self.template = made
        writers = [Writer(made, found, careful) for careful in (False, True)]
        self._values = list({name: None for writer in writers for name in writer.symbols})
        fast, self._careful_source = [
            (writer.source(self._values), writer.globals | {"elsewhere": self._elsewhere}) for writer in writers
        ]
        self._careful: Run | None = None
        self.run: Run = _defined("run", *fast)
        self.solve: Callable[[Sequence[torch.Tensor], Sequence[float]], Values | None] = self._write_solve()

    def _elsewhere(self, tensors: Sequence[torch.Tensor], values: Values) -> Any:
        device = self.template.device
        if torch._C._cuda_getDevice() != device.index:
            with torch.cuda.device(device):
                return self.run(tensors, values)
        if self._careful is None:
            self._careful = _defined("run", *self._careful_source)
        return self._careful(tensors, values)

    def _write_solve(self) -> Callable[[Sequence[torch.Tensor], Sequence[float]], Values | None]:
        made = self.template
        lines, needed = ([], set()) if made.trace is None else made.trace.source(self._values)
        head = []
        for i in range(made.given_count):
            for what, read in (("size", "shape"), ("stride", "stride()")):
                names = [f"{what}{i}_{axis}" for axis in range(made.slots[i].dim())]
                if not needed.isdisjoint(names):
                    head.append(f"{''.join(f'{name}, ' for name in names)}= tensors[{i}].{read}")
        names = [f"number{i}" for i in range(made.number_count)]
        head += [f"{''.join(f'{name}, ' for name in names)}= numbers"] if not needed.isdisjoint(names) else []
        result = f"return ({''.join(f'{name}, ' for name in self._values)})"
        return _defined("solve", "\n    ".join(["def solve(tensors, numbers):", *head, *lines, result]), dict(NAMES))


def _defined(name: str, source: str, names: dict[str, Any]) -> Any:
    """The function of this name that source text defines."""
    exec(compile(source, f"<tilewise {name}>", "exec"), names)
    return names[name]


def _read(arguments: Sequence[Any], kind: list[Any], tensors: list[torch.Tensor], numbers: list[float]) -> None:
    """Append what decides which programs may run `arguments`, their tensors, and their numbers."""
    for x in arguments:
        if x is None:
            kind.append(None)
        elif isinstance(x, torch.Tensor):
            tensors.append(x)
            kind += (x.dtype, x.dim(), x.device, x.data_ptr() % ALIGNMENT)
        elif x.__class__ is int or x.__class__ is float:
            numbers.append(x)
            kind.append(x.__class__)
        elif isinstance(x, tuple):
            kind += (x.__class__, len(x))
            _read(x, kind, tensors, numbers)
        else:
            # True and 1 are equal, but not the same option.
            kind += (x.__class__, x)


class Found(NamedTuple):
    """A program for a call, and its arguments."""

    program: Program
    tensors: list[torch.Tensor]
    values: Values

    def run(self) -> Any:
        """What the plan returns."""
        return self.program.run(self.tensors, self.values)


class Planned:
    """A plan and the programs that run it on a GPU: by kind of arguments, then by path through the plan."""

    def __init__(self, plan: Callable[..., Any]) -> None:
        self.plan = plan
        self._kinds: Kept[list[Program]] = Kept(MOST_KINDS)
        self._changing = threading.Lock()

    def known(self, arguments: tuple[Any, ...]) -> Found | None:
        """The program for arguments; None where there is none yet."""
        kind: list[Any] = []
        tensors: list[torch.Tensor] = []
        numbers: list[float] = []
        _read(arguments, kind, tensors, numbers)
        key = tuple(kind)
        for i, program in enumerate(self._kinds.get(key) or ()):
            values = program.solve(tensors, numbers)
            if values is not None:
                if i > 0:
                    # Most recently used first.
                    with self._changing:
                        others = [one for one in self._kinds.get(key) or () if one is not program]
                        self._kinds.add(key, [program, *others])
                return Found(program, tensors, values)
        return None

    def make(self, arguments: tuple[Any, ...], expected: Callable[[], Sequence[Launch]] | None = None) -> Found:
        """The same where there is none; where a kernel is missing, what `expected` lists is compiled with it."""
        kind: list[Any] = []
        tensors: list[torch.Tensor] = []
        numbers: list[float] = []
        _read(arguments, kind, tensors, numbers)
        device, key = tensors[0].device, tuple(kind)
        with (
            compiling.expecting(expected or (lambda: template.make(self.plan, arguments, device).launches)),
            torch.cuda.device(device),
        ):
            program = Program(template.make(self.plan, arguments, device, Trace()))
        with self._changing:
            programs = self._kinds.get(key) or []
            # Another thread may have added it meanwhile.
            if all(one.solve(tensors, numbers) is None for one in programs):
                self._kinds.add(key, [program, *programs][:MOST_PROGRAMS])
        values = program.solve(tensors, numbers)
        assert values is not None, "a plan decides by what its arguments say, and by nothing else"
        return Found(program, tensors, values)

    def forget(self) -> None:
        """Drop all programs: after a change of what the plan reads besides its arguments."""
        self._kinds.clear()


class Operation:
    """A plan, callable with tensors; on a GPU, run by its programs."""

    def __init__(self, plan: Callable[..., Any]) -> None:
        functools.update_wrapper(self, plan)
        self._planned = Planned(plan)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """What the plan does with these arguments: tensors, numbers, and tuples of both; the first is a tensor, or
        begins with one.
        """
        plan = self._planned.plan
        if named:
            bound = inspect.signature(plan).bind(*arguments, **named)
            bound.apply_defaults()
            arguments = bound.args
        device = _first(arguments).device
        explained = backend.explained()
        if explained is not None:
            # Outside an operator of torch's plans write to what they are given, and return nothing.
            explained.templates.append((plan.__name__, template.make(plan, arguments, device)))
            return None
        if device.type != "cuda" or backend.observed():
            return plan(*arguments)
        return (self._planned.known(arguments) or self._planned.make(arguments)).run()

    def forget(self) -> None:
        """Drop all programs: after a change of what the plan reads besides its arguments."""
        self._planned.forget()


def _first(arguments: Any) -> torch.Tensor:
    """The first tensor."""
    return arguments if isinstance(arguments, torch.Tensor) else _first(arguments[0])
