"""Shows a kernel's assignments to a watcher as they are executed, and shared memory where it is read."""

import ast
import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from types import CodeType
from typing import Any, NamedTuple, Protocol

from tilewise._assignments import Recorder
from tilewise._gluon.order import current


class Assignment(NamedTuple):
    """Where a variable is assigned: the function that does, its name there, and the line."""

    function: str
    name: str
    line: int


class View:
    """A view of shared memory: the variables that it was assigned to, and the view that has the same elements in
    another order.
    """

    def __init__(self, of: "View | None") -> None:
        self.assigned: list[Assignment] = []
        self.of = of


class Watcher(Protocol):
    """What is told of a launch."""

    def launched(self, kernel: str) -> None:
        """A launch begins."""

    def assigned(self, place: Assignment, value: Any, agent: Any) -> None:
        """An agent, a partition of a CTA, assigned a tile or a number, or marks a loop; or a view of shared memory that
        was assigned there is read.
        """


_watcher: ContextVar[Watcher | None] = ContextVar("tilewise_watcher", default=None)


@contextlib.contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Inside, this context's Gluon kernels are watched."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


def watched() -> Watcher | None:
    """The watcher of this context."""
    return _watcher.get()


def with_hooks(function: Callable[..., Any]) -> CodeType:
    """The function's code with a call of the hook after each assignment, on the same lines."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    definition = tree.body[0]
    assert isinstance(definition, ast.FunctionDef)
    # Only its code is taken: defaults and annotations are those of the function.
    definition.decorator_list, definition.returns = [], None
    definition.args.defaults, definition.args.kw_defaults = [], [None] * len(definition.args.kwonlyargs)
    for argument in (*definition.args.posonlyargs, *definition.args.args, *definition.args.kwonlyargs):
        argument.annotation = None
    # Inside of another that has its free variables, so that they stay free.
    tree = ast.parse(f"def around({', '.join(function.__code__.co_freevars)}): pass")
    around = tree.body[0]
    assert isinstance(around, ast.FunctionDef)
    around.body = [Recorder().visit(definition)]
    outer = _only_code(compile(ast.fix_missing_locations(tree), function.__code__.co_filename, "exec"))
    return _only_code(outer)


def _only_code(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))


def hook(function: str, name: str, value: Any, line: int) -> None:
    """Called from a kernel's code."""
    agent = current()
    watcher = agent.machine.watcher
    if watcher is None:
        return
    place = Assignment(function, name, line)
    if not isinstance(value, tuple):
        _show(watcher, place, value, agent)
        return
    fields = getattr(type(value), "_fields", range(len(value)))
    for field, element in zip(fields, value, strict=True):
        _show(watcher, place._replace(name=f"{name}.{field}"), element, agent)


def _show(watcher: Watcher, place: Assignment, value: Any, agent: Any) -> None:
    # What a view of shared memory holds counts when it is read: here a copy may still be in flight.
    if isinstance(value, View):
        value.assigned.append(place)
    else:
        watcher.assigned(place, value, agent)


def show_read(view: View | None) -> None:
    """A view of shared memory is read: under the names that it was assigned to, or the view that it was taken from."""
    agent = current()
    watcher = agent.machine.watcher
    while watcher is not None and view is not None:
        for place in view.assigned:
            watcher.assigned(place, view, agent)
        view = None if view.assigned else view.of
