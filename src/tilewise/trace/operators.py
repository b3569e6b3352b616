"""Operators that can be traced, by name: each has a module of its own here, imported when it is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.trace.request import Request, Traced
from tilewise.workbench.operator import UsageError

# Each of these has an OPERATOR.
MODULES = {
    "flash": "tilewise.trace.flash",
    "nsa-compressed": "tilewise.trace.nsa_compressed",
    "nsa-selected": "tilewise.trace.nsa_selected",
    "hstu": "tilewise.trace.hstu",
    "bsa": "tilewise.trace.bsa",
}


@dataclass(frozen=True)
class Operator:
    """How an operator is traced: `trace` gives its programs, and in words what they work on.

    `refuses` are the fields of a request that mean nothing to it; without `taps` its kernels can be traced interpreted
    alone.
    """

    trace: Callable[[Request], tuple[list[Traced], dict[str, str]]]
    refuses: tuple[str, ...] = ()
    taps: bool = True


def find(name: str) -> Operator:
    """The operator called `name`; a UsageError lists the names there are."""
    if name not in MODULES:
        raise UsageError(f"there is no trace of {name!r}: expected one of {', '.join(MODULES)}")
    operator = importlib.import_module(MODULES[name]).OPERATOR
    assert isinstance(operator, Operator)
    return operator
