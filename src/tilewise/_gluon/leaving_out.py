"""Statements that synchronise, found as a kernel runs; and one of them left out."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

from tilewise._gluon.faults import Lines, executed
from tilewise._gluon.order import current

# Lines that tell one statement from another: its own, and the caller's where it is in a helper.
DEPTH = 2


class Study:
    """The statements that a kernel's run came to, by their lines, and what they are; and the one that is left out."""

    def __init__(self, left_out: Lines = ()) -> None:
        self.statements: dict[Lines, str] = {}
        self.left_out = left_out


_study: ContextVar[Study | None] = ContextVar("tilewise_study", default=None)


@contextlib.contextmanager
def studying(study: Study) -> Iterator[None]:
    """Inside, this context's Gluon kernels are studied."""
    token = _study.set(study)
    try:
        yield
    finally:
        _study.reset(token)


def studied() -> Study | None:
    """The study of this context."""
    return _study.get()


def synchronises(what: str, otherwise: Callable[..., Any] = lambda *_arguments, **_named: None) -> Callable[..., Any]:
    """A function of the language that synchronises; `otherwise` is done where it is left out."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            study = current().machine.study
            if study is not None:
                lines = executed()[:DEPTH]
                study.statements.setdefault(lines, what)
                if lines == study.left_out:
                    return otherwise(*arguments, **named)
            return function(*arguments, **named)

        return call

    return decorate
