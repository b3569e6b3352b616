"""Operators whose tile configurations can be run, by name: each has a module of its own here, imported when it is asked
for.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from tilewise.sanity.outcome import Choice, Outcome
from tilewise.workbench.operator import UsageError

# Each of these has an OPERATOR.
MODULES = {
    "flash": "tilewise.sanity.flash",
    "flash-hopper": "tilewise.sanity.flash_hopper",
    "nsa-compressed": "tilewise.sanity.nsa_compressed",
    "nsa-selected": "tilewise.sanity.nsa_selected",
    "hstu": "tilewise.sanity.hstu",
    "bsa": "tilewise.sanity.bsa",
}


class Entry(Protocol):
    """One configuration."""

    @property
    def short(self) -> str:
        """One word."""

    @property
    def operations(self) -> int:
        """Of one step: 2 for each multiplication and addition of its products."""

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step."""

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count."""

    def fits(self) -> list[str]:
        """Families of GPUs that it is chosen for."""


@dataclass(frozen=True)
class Operator:
    """Every configuration of an operator's table, once; and `run`, which gives what one makes on a problem, small or
    not, filled by a rule.
    """

    entries: Callable[[], Sequence[Entry]]
    run: Callable[[Any, bool, str, torch.device], Sequence[Outcome | Choice]]


def find(name: str) -> Operator:
    """The operator called `name`; a UsageError lists the names there are."""
    if name not in MODULES:
        raise UsageError(f"there are no tile configurations of {name!r}: expected one of {', '.join(MODULES)}")
    operator = importlib.import_module(MODULES[name]).OPERATOR
    assert isinstance(operator, Operator)
    return operator
