"""Programs: a template as two functions in Python, written once and run by every call that its plan decides alike for.

`solve` takes a call's tensors and whole numbers and computes what differs from call to call: sizes, strides, grids. It
returns None where a decision of the plan comes out differently. `run` allocates, computes and launches in order, with
what `solve` returned.
"""

import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from triton import knobs

from tilewise.ops._host import backend, compiling, start, template
from tilewise.ops._host.kept import Kept
from tilewise.ops._host.launch import Descriptor, Launch
from tilewise.ops._host.symbol import ALIGNMENT, NAMES, Slot, Symbol, Trace
from tilewise.ops._host.template import Allocation, Computation, Start, Template

# Kinds of arguments kept per plan; beyond that the least recently used one is evicted.
MOST_KINDS = 256
# Programs kept per kind, one for each path through its plan: some 70 for native sparse attention's backward. Beyond
# that the least recently used one is evicted.
MOST_PROGRAMS = 128
# Encoded descriptors that a launch keeps, by address.
MOST_ENCODED = 64
# As torch aligns memory on a GPU.
SHARED_ALIGNMENT = 512

Values = tuple[Any, ...]
Run = Callable[[Sequence[torch.Tensor], Values], Any]


class _Encoded:
    """A descriptor among a launch's arguments.

    Its encoded form is reused while addresses and sizes stay the same.
    """

    def __init__(self, encoder: start.Encoder) -> None:
        self.encoder = encoder
        self.kept: dict[Any, Any] = {}

    def encode(self, key: Any, address: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """Encode one that is not kept."""
        if len(self.kept) >= MOST_ENCODED:
            self.kept.clear()
        self.kept[key] = encoded = self.encoder(address, shape, strides)
        return encoded


class _Writer:
    """Source text of the function that runs a template; careful, so that a watch over fresh memory and hooks around
    launches see all.
    """

    def __init__(self, made: Template, found: Mapping[int, start.Found], careful: bool) -> None:
        self._template, self._found, self._careful = made, found, careful
        self._fresh = None if careful else template.EMPTY_STRIDED
        self.globals: dict[str, Any] = {"torch": torch, **NAMES}
        self._names: dict[int, str] = {}
        # Names of symbols whose values it needs, in order.
        self.symbols: dict[str, None] = {}
        # Given tensors whose addresses it needs.
        self._addressed: set[int] = set()
        self._lines: list[str] = []
        self._write_steps()

    def source(self, values: Sequence[str]) -> str:
        """The function, which takes the values of these symbols."""
        made = self._template
        head = [f"{''.join(f'x{i}, ' for i in range(made.given_count))}= tensors"]
        head += [f"{''.join(f'{name}, ' for name in values)}= values"] if values else []
        head += [f"a{i} = x{i}.data_ptr()" for i in sorted(self._addressed)]
        head += (
            [f"stream = {self._constant(torch._C._cuda_getCurrentRawStream)}({made.device.index})"]
            if self._found
            else []
        )
        return "\n    ".join(["def run(tensors, values):", *self._unless_elsewhere(), *head, *self._lines])

    def _unless_elsewhere(self) -> list[str]:
        """Another device may be current, and something may be watching."""
        asked = [f"{self._constant(torch._C._cuda_getDevice)}() != {self._template.device.index}"]
        if not self._careful:
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            asked += [
                f"{self._constant(torch._C._get_deterministic_algorithms)}()",
                f"{self._constant(backend.watched)}()",
            ]
            asked += [f"{self._constant(hook)}.calls" for hook in hooks]
        return [f"if {' or '.join(asked)}: return elsewhere(tensors, values)"]

    def _constant(self, value: Any) -> str:
        name = self._names.get(id(value))
        if name is None:
            # The globals keep it alive, so its id stays valid.
            name = self._names[id(value)] = f"c{len(self._names)}"
            self.globals[name] = value
        return name

    def _text(self, value: Any) -> str:
        """A value of the template as an expression: a slot as its address."""
        kind = value.__class__
        if kind is Symbol and not value.fixed:
            self.symbols[value.name] = None
            return str(value.name)
        if kind is Symbol:
            return repr(value.value)
        if value is None or kind in (int, bool, float):
            return repr(value)
        if kind is Slot:
            return self._address(value)
        if isinstance(value, tuple):
            # A record too: its field names are no longer needed.
            return f"({''.join(f'{self._text(x)}, ' for x in value)})"
        return self._constant(value)

    def _address(self, slot: Slot) -> str:
        if slot.base < self._template.given_count:
            self._addressed.add(slot.base)
        offset = self._text(slot.offset)
        return f"a{slot.base}" if offset == "0" else f"a{slot.base} + {offset}"

    def _tensor(self, slot: Slot) -> str:
        """A slot as the tensor or the view that it stands for."""
        whole, name, offset = self._template.slots[slot.base], f"x{slot.base}", self._text(slot.offset)
        shape, strides = self._text(slot.shape), self._text(slot.stride())
        if offset == "0" and (shape, strides) == (self._text(whole.shape), self._text(whole.stride())):
            return name
        return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {offset} // {slot.dtype.itemsize})"

    def _filled(self, value: Any) -> str:
        """A value of the template as an expression: a slot as its tensor."""
        if isinstance(value, Slot):
            return self._tensor(value)
        if isinstance(value, tuple):
            items = f"({''.join(f'{self._filled(x)}, ' for x in value)})"
            return f"{self._constant(type(value))}._make({items})" if hasattr(value, "_make") else items
        return self._text(value)

    def _write_steps(self) -> None:
        made, last = self._template, dict(self._template.last)
        shared = {} if self._careful else made.share_memory(last)
        freed: dict[int, list[int]] = {}
        for base, i in last.items():
            freed.setdefault(i, []).append(base)
        for i, step in enumerate(made.steps):
            if i in shared:
                self._share(shared[i])
            elif isinstance(step, Allocation):
                self._allocate(step)
            elif isinstance(step, Computation):
                self._compute(step)
            else:
                self._launch(self._found[i], step.launch.grid)
            self._lines += [f"x{base} = None" for base in freed.get(i, ())]
        self._lines.append(f"return {self._filled(made.result)}")

    def _allocate(self, step: Allocation) -> None:
        slot = step.slot
        name, shape, dtype = f"x{slot.base}", self._text(slot.shape), self._constant(slot.dtype)
        if self._fresh is None:
            self._lines.append(
                f"{name} = torch.{step.function}({shape}, dtype={dtype}, device={self._constant(slot.device)})"
            )
        else:
            self._lines.append(f"{name} = {self._constant(self._fresh)}({shape}, {self._text(slot.stride())}, {dtype})")
            self._lines += [f"{name}.zero_()"] if step.function == "zeros" else []
        self._lines.append(f"a{slot.base} = {name}.data_ptr()")

    def _share(self, slots: Sequence[Slot]) -> None:
        """One allocation for several slots, each at a multiple of SHARED_ALIGNMENT; for none, none."""
        if not slots:
            return
        places: list[tuple[int, Any]] = []
        size: Any = 0
        for slot in slots:
            places.append((slot.base, size))
            size += -(-slot.numel() * slot.dtype.itemsize // SHARED_ALIGNMENT) * SHARED_ALIGNMENT
        holder, dtype = slots[0].base, self._constant(torch.uint8)
        if self._fresh is None:
            self._lines.append(
                f"x{holder} = torch.empty({self._text(size)}, dtype={dtype}, device={self._constant(slots[0].device)})"
            )
        else:
            self._lines.append(f"x{holder} = {self._constant(self._fresh)}(({self._text(size)},), (1,), {dtype})")
        self._lines.append(f"a{holder} = x{holder}.data_ptr()")
        self._lines += [f"a{base} = a{holder} + {self._text(offset)}" for base, offset in places[1:]]

    def _compute(self, step: Computation) -> None:
        arguments = ", ".join(self._filled(x) for x in step.arguments)
        name, known = f"x{step.slot.base}", self._constant(step)
        self._lines += [
            f"{name} = {self._constant(step.function)}({arguments})",
            f"if not {known}.compared: {known}.compare({name}, {self._text(step.slot.shape)})",
            f"a{step.slot.base} = {name}.data_ptr()",
        ]

    def _launch(self, found: start.Found, grid: Any) -> None:
        kernel, values = found
        if kernel.direct is None:
            self._lines.append(self._through_triton(found, grid))
            return
        lines: list[str] = []
        arguments: list[str] = []
        encoders = iter(kernel.encoders)
        for value in values:
            if value.__class__ is Descriptor:
                arguments += [
                    self._encoded(value, next(encoders), lines),
                    *map(self._text, (*value.shape, *value.strides)),
                ]
            else:
                arguments.append(self._text(value))
        direct = kernel.direct
        given = f"[{', '.join(arguments)}]" if direct.listed else ", ".join(arguments)
        before = ", ".join(map(self._text, direct.before))
        lines.append(f"{self._constant(direct.launch)}({self._text(grid)}, 1, 1, stream, {before}, {given})")
        if self._careful:
            hooks = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
            self._lines.append(
                f"if {' or '.join(f'{self._constant(hook)}.calls' for hook in hooks)}:"
                f" {self._through_triton(found, grid)}"
            )
            self._lines += ["else:", *(f"    {line}" for line in lines)]
        else:
            self._lines += lines

    def _encoded(self, described: Descriptor, encoder: start.Encoder, lines: list[str]) -> str:
        """The name of a descriptor's encoded form."""
        one = _Encoded(encoder)
        address, shape, strides = self._text(described.base), self._text(described.shape), self._text(described.strides)
        sizes: tuple[Any, ...] = (*described.shape, *described.strides)
        varying = dict.fromkeys(x.name for x in sizes if x.__class__ is Symbol and not x.fixed)
        key = f"({', '.join((address, *varying))})"
        name = f"d{len(self._names)}"
        kept, encode = self._constant(one.kept), self._constant(one.encode)
        lines.append(f"{name} = {kept}.get({key}) or {encode}({key}, {address}, {shape}, {strides})")
        return name

    def _through_triton(self, found: start.Found, grid: Any) -> str:
        """Launch through Triton, with all that it does around a launch."""
        placed = self._constant(start.Placed)
        arguments = [
            (
                f"{placed}({self._text(x.base)}, {self._text(x.shape)}, {self._text(x.strides)})"
                if x.__class__ is Descriptor
                else self._text(x)
            )
            for x in found.values
        ]
        return f"{self._constant(found.kernel.compiled)}[{self._text(grid)}, 1, 1]({', '.join(arguments)})"


class Program:
    """Runs a template, for all calls whose numbers lead its plan to the same decisions."""

    def __init__(self, made: Template) -> None:
        # Which kernel is launched may depend on a number too.
        found = {i: start.find(step.launch) for i, step in enumerate(made.steps) if isinstance(step, Start)}
        self.template = made
        writers = [_Writer(made, found, careful) for careful in (False, True)]
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
        if _first(arguments).device.type != "cuda" or backend.observed():
            return plan(*arguments)
        return (self._planned.known(arguments) or self._planned.make(arguments)).run()

    def forget(self) -> None:
        """Drop all programs: after a change of what the plan reads besides its arguments."""
        self._planned.forget()


def _first(arguments: Any) -> torch.Tensor:
    """The first tensor."""
    return arguments if isinstance(arguments, torch.Tensor) else _first(arguments[0])
