"""Records every assignment of unmodified Triton kernels in the interpreter, by launch, program and step of a loop; nested helpers included.

The interpreter rewrites a kernel's source before it runs it. Here the rewritten source also gets a call behind each assignment, and at the start of
each turn and the end of each loop; values are only looked at, never changed.
"""

import ast
import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tilewise.interpreter import repair, widen_bf16

# In place of a variable's name: a turn of a loop begins, or a loop has ended.
TURN, END = "(turn)", "(end)"
_HOOK = "__tilewise_record__"


class Event(NamedTuple):
    """One assignment of one program: the kernel's launch, the function and line that made it, the variable and its value; or a mark of a loop."""

    launch: int
    function: str
    name: str
    line: int
    value: Any = None


@dataclass
class Recording:
    """What one program of every launch assigned, in order; `program` is its number, or by kernel's name the number for each that is recorded."""

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
        if not self.kernels or _program() != (self.program if isinstance(self.program, int) else self.program.get(self.kernels[-1])):
            return
        plain = None if name in (TURN, END) else _plain(value)
        if plain is not None or name in (TURN, END):
            self.events.append(Event(len(self.kernels) - 1, function, name, line, plain))


_active: list[Recording] = []


@contextlib.contextmanager
def record(program: int | Mapping[str, int] = 0) -> Iterator[Recording]:
    """Inside, kernels that are launched interpreted are recorded: their program number `program` (x fastest, then y, then z).

    A mapping gives a number for each kernel by name; others are not recorded then.
    """
    from triton.runtime import interpreter

    # First of all: what is put aside here and put back at the end is then the mended interpreter.
    repair()
    recording = Recording(program)
    transform, launch = interpreter.FunctionRewriter._transform_ast, interpreter.GridExecutor.__call__
    cached = dict(interpreter.InterpretedFunction.rewritten_fn)

    def recorded_transform(self: Any, source: Any) -> Any:
        return ast.fix_missing_locations(_Recorder().visit(transform(self, source)))

    def recorded_launch(self: Any, *arguments: Any, **named: Any) -> Any:
        recording.kernels.append(self.fn.__name__)
        return launch(self, *arguments, **named)

    # The rewriter copies this module's names into a kernel's own.
    setattr(interpreter, _HOOK, _dispatch)
    interpreter.FunctionRewriter._transform_ast = recorded_transform
    interpreter.GridExecutor.__call__ = recorded_launch
    interpreter.InterpretedFunction.rewritten_fn.clear()
    _active.append(recording)
    try:
        yield recording
    finally:
        _active.pop()
        interpreter.FunctionRewriter._transform_ast = transform
        interpreter.GridExecutor.__call__ = launch
        interpreter.InterpretedFunction.rewritten_fn.clear()
        interpreter.InterpretedFunction.rewritten_fn.update(cached)


def _dispatch(function: str, name: str, value: Any, line: int) -> None:
    if _active:
        _active[-1].hit(function, name, value, line)


def _program() -> int:
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    (x, y, z), (n_x, n_y, _) = builder.grid_idx, builder.grid_dim
    return int(x + n_x * (y + n_y * z))


def _plain(value: Any) -> Any:
    """A tensor's values as a NumPy array of its own, bf16 widened; None for pointers and what is not a number."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    if isinstance(value, bool | int | float):
        return np.asarray(value)
    handle = getattr(value, "handle", None)
    if not isinstance(value, tl.core.tensor) or not isinstance(handle, TensorHandle) or isinstance(handle.dtype, tl.pointer_type):
        return None
    data = np.asarray(handle.data)
    data = widen_bf16(data) if handle.dtype.scalar == tl.bfloat16 else data.copy()
    return data if value.type.is_block() else data.reshape(-1)[:1].reshape(())


class _Recorder(ast.NodeTransformer):
    """Adds a call behind each assignment of a function, in the order of its statements."""

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
                statement.body = [self._mark(TURN, statement), *(self._call(name, statement) for name in targets), *statement.body]
                result.append(self._mark(END, statement))
            result += [self._call(name, statement) for target in _targets(statement) for name in _names(target)]
        return result

    def _call(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Name(name, ast.Load()), statement)

    def _mark(self, name: str, statement: ast.stmt) -> ast.stmt:
        return self._expression(name, ast.Constant(None), statement)

    def _expression(self, name: str, value: ast.expr, statement: ast.stmt) -> ast.stmt:
        arguments: list[ast.expr] = [ast.Constant(self._function), ast.Constant(name), value, ast.Constant(statement.lineno)]
        return ast.copy_location(ast.Expr(ast.Call(ast.Name(_HOOK, ast.Load()), arguments, [])), statement)


def _targets(statement: ast.stmt) -> list[ast.expr]:
    if isinstance(statement, ast.Assign):
        return statement.targets
    return [statement.target] if isinstance(statement, ast.AugAssign | ast.AnnAssign) else []


def _names(target: ast.expr) -> list[str]:
    return [node.id for node in ast.walk(target) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
