"""Records every assignment of unmodified Triton kernels in the interpreter, by launch, program and loop step; nested
helpers included.

The interpreter rewrites a kernel's source before it runs it. Here the rewritten source also gets a call after each
assignment, at the start of each iteration and at the end of each loop; values are only read, never changed.
"""

import ast
import contextlib
import threading
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilewise.interpreter import repair, widen_bf16

# In place of a variable's name: a loop iteration begins, or a loop has ended.
TURN, END = "(turn)", "(end)"
_HOOK = "__tilewise_record__"


class Event(NamedTuple):
    """One assignment of one program: the kernel's launch, the function and line that made it, the variable and its
    value; or a loop marker.
    """

    launch: int
    function: str
    name: str
    line: int
    value: Any = None


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

    def of_kernel(self, name: str) -> list[Event]:
        """The events of the first launch of a kernel."""
        return self.of_launch(self.kernels.index(name))

    def hit(self, function: str, name: str, value: Any, line: int) -> None:
        """Called from the rewritten kernels."""
        if not self.kernels or _program() != (
            self.program if isinstance(self.program, int) else self.program.get(self.kernels[-1])
        ):
            return
        plain = None if name in (TURN, END) else _plain(value)
        if plain is not None or name in (TURN, END):
            self.events.append(Event(len(self.kernels) - 1, function, name, line, plain))


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
        yield recording
    finally:
        _active.reset(token)


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
                return ast.fix_missing_locations(_Recorder().visit(super()._transform_ast(source)))

        def recorded_rewrite(self: Any) -> Any:
            if _active.get() is None:
                return rewrite(self)
            if self.fn not in rewritten:
                self.fn.__globals__[_HOOK] = _dispatch
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


class _Recorder(ast.NodeTransformer):
    """Adds a call after each assignment of a function, in the order of its statements."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self._function = node.name
        node.body = self._block(node.body)
        return node

    def _block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        result: list[ast.stmt] = []
        for statement in body:
            for part in ("body", "orelse"):
                if getattr(statement, part, None):
                    setattr(statement, part, self._block(getattr(statement, part)))
            result.append(statement)
            if isinstance(statement, ast.For | ast.While):
                targets = _names(statement.target) if isinstance(statement, ast.For) else []
                statement.body = [
                    self._mark(TURN, statement),
                    *(self._call(name, statement) for name in targets),
                    *statement.body,
                ]
                result.append(self._mark(END, statement))
            result += [self._call(name, statement) for target in _targets(statement) for name in _names(target)]
        return result

    def _call(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Name(name, ast.Load()), statement)

    def _mark(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Constant(None), statement)

    def _expression(self, name: str, value: ast.expr, statement: ast.stmt) -> ast.stmt:
        arguments: list[ast.expr] = [
            ast.Constant(self._function),
            ast.Constant(name),
            value,
            ast.Constant(statement.lineno),
        ]
        return ast.copy_location(ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), arguments, [])), statement)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) else []


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
