"""Records every assignment of unmodified kernels in the interpreter, by launch, program and loop step; nested helpers
included. Of kernels in Gluon by partition too.

The interpreter rewrites a kernel's source before it runs it. Here the rewritten source also gets a call after each
assignment, at the start of each iteration and at the end of each loop; values are only read, never changed.
"""

import ast
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilewise._assignments import END, HOOK, TURN, Recorder
from tilewise._gluon.faults import KernelFaultError
from tilewise.interpreter import repair, widen_bf16
from tilewise.ops._host import gluon


class Event(NamedTuple):
    """One assignment of one program: the kernel's launch, the function and line that made it, the variable and its
    value; or a loop marker. In Gluon, the partition of the program, and a variable in shared memory when it is read.
    """

    launch: int
    function: str
    name: str
    line: int
    value: Any = None
    partition: int = 0


@dataclass
class Recording:
    """What one program of every launch assigned, in order; `program` is its number, or by kernel's name the number for
    each that is recorded.
    """

    program: int | Mapping[str, int]
    kernels: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def of_launch(self, launch: int) -> list[Event]:
        """The events of one launch."""
        return [event for event in self.events if event.launch == launch]

    def of_kernel(self, name: str, partition: int = 0) -> list[Event]:
        """The events of the first launch of a kernel."""
        found = self.of_launch(self.kernels.index(name)) if name in self.kernels else []
        return [event for event in found if event.partition == partition]

    def sequences(self) -> list[tuple[int, list[Event]]]:
        """Every launch and its events, by partition."""
        found: list[tuple[int, list[Event]]] = []
        for launch in range(len(self.kernels)):
            events = self.of_launch(launch)
            partitions = sorted({event.partition for event in events}) or [0]
            found += [(launch, [event for event in events if event.partition == one]) for one in partitions]
        return found

    def _wants(self, program: int) -> bool:
        wanted = self.program if isinstance(self.program, int) else self.program.get(self.kernels[-1])
        return program == wanted

    def hit(self, function: str, name: str, value: Any, line: int) -> None:
        """Called from the rewritten kernels."""
        if not self.kernels or not self._wants(_program()):
            return
        plain = None if name in (TURN, END) else _plain(value)
        if plain is not None or name in (TURN, END):
            self.events.append(Event(len(self.kernels) - 1, function, name, line, plain))

    def launched(self, kernel: str) -> None:
        """A kernel in Gluon is launched."""
        self.kernels.append(kernel)

    def assigned(self, place: Any, value: Any, agent: Any) -> None:
        """It assigns, or reads what it has assigned."""
        if not self._wants(agent.cta.number):
            return
        plain = None if place.name in (TURN, END) else _of_tile(value)
        if plain is not None or place.name in (TURN, END):
            function, name, line = place
            self.events.append(Event(len(self.kernels) - 1, function, name, line, plain, agent.index))


# Per context: launches of other threads run unchanged.
_active: ContextVar[Recording | None] = ContextVar("tilewise_recording", default=None)
_installing = threading.Lock()
_installed = False


@contextlib.contextmanager
def record(program: int | Mapping[str, int] = 0) -> Iterator[Recording]:
    """Inside, kernels that this context launches interpreted are recorded: their program number `program` (x fastest,
    then y, then z). What other threads launch meanwhile is not.

    A mapping gives a number for each kernel by name; others are not recorded then. A RuntimeError says that this
    process compiles kernels: there is nothing to record.
    """
    _install()
    recording = Recording(program)
    token = _active.set(recording)
    try:
        with _watching_gluon(recording):
            yield recording
    finally:
        _active.reset(token)


def fault_of(call: Callable[[], Any]) -> KernelFaultError | None:
    """The fault of a kernel in Gluon that ends a call, if one does."""
    try:
        call()
    except KernelFaultError as fault:
        return fault
    return None


def _watching_gluon(recording: Recording) -> contextlib.AbstractContextManager[None]:
    if not gluon.AVAILABLE:
        return contextlib.nullcontext()
    from tilewise._gluon.watching import watching

    return watching(recording)


def _install() -> None:
    """Have the interpreter check, at each launch and each helper call, whether this context records.

    Installed once and never removed: removing it after a recording would stop another thread's too.
    """
    global _installed
    from triton.runtime import interpreter

    repair()
    with _installing:
        if _installed:
            return
        rewrite, launch = interpreter.InterpretedFunction.rewrite, interpreter.GridExecutor.__call__
        rewritten: dict[Any, Any] = {}

        class Rewriter(interpreter.FunctionRewriter):  # type: ignore[misc]
            def _transform_ast(self, source: Any) -> Any:
                return ast.fix_missing_locations(Recorder().visit(super()._transform_ast(source)))

        def recorded_rewrite(self: Any) -> Any:
            if _active.get() is None:
                return rewrite(self)
            if self.fn not in rewritten:
                self.fn.__globals__[HOOK] = _dispatch
                rewritten[self.fn] = Rewriter(self.fn, **self.kwargs).rewrite_ast()
            return rewritten[self.fn]

        def recorded_launch(self: Any, *arguments: Any, **named: Any) -> Any:
            recording = _active.get()
            if recording is not None:
                recording.kernels.append(self.fn.__name__)
            return launch(self, *arguments, **named)

        interpreter.InterpretedFunction.rewrite = recorded_rewrite
        interpreter.GridExecutor.__call__ = recorded_launch
        _installed = True


def _dispatch(function: str, name: str, value: Any, line: int) -> None:
    recording = _active.get()
    if recording is not None:
        recording.hit(function, name, value, line)


def _program() -> int:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    (x, y, z), (n_x, n_y, _) = builder.grid_idx, builder.grid_dim
    return int(x + n_x * (y + n_y * z))


def _of_tile(value: Any) -> Any:
    """The same of a value in Gluon: a tile, a view of shared memory, or a number."""
    import numpy as np
    import torch

    if isinstance(value, bool | int | float):
        return np.asarray(value)
    data = getattr(value, "data", None)
    if isinstance(data, bool | int | float):
        return np.asarray(data)
    if not isinstance(data, torch.Tensor):
        return None
    return (data.double() if data.is_floating_point() else data.clone()).numpy()


def _plain(value: Any) -> Any:
    """A copy of a tensor's values as a NumPy array, bf16 widened; None for pointers and what is not a number."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if isinstance(value, bool | int | float):
        return np.asarray(value)
    handle = getattr(value, "handle", None)
    if (
        not isinstance(value, tl.core.tensor)
        or not isinstance(handle, TensorHandle)
        or isinstance(handle.dtype, tl.pointer_type)
    ):
        return None
    data = np.asarray(handle.data)
    data = widen_bf16(data) if handle.dtype.scalar == tl.bfloat16 else data.copy()
    return data if value.type.is_block() else data.reshape(-1)[:1].reshape(())
