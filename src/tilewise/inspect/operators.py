"""Operators whose kernels can be inspected, by name: each has a module here, imported when it is asked for, in a
process that compiles.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.inspect.launches import Labelled

# Module and name of each operator's launches.
PLACES = {
    "flash": "flash:OPERATOR",
    "flash-hopper": "flash:HOPPER",
    "nsa": "nsa:WHOLE",
    "nsa-compressed": "nsa:COMPRESSED",
    "nsa-selected": "nsa:SELECTED",
    "nsa-attend": "nsa:ATTEND",
    "hstu": "hstu:OPERATOR",
    "bsa": "bsa:OPERATOR",
    "hstu-bsa": "bsa:HSTU_BSA",
}


@dataclass(frozen=True)
class Operator:
    """What is launched for usual problems on an architecture, and with one tile configuration of the table that
    `tilewise sanity` lists.
    """

    defaults: Callable[[int, torch.dtype], list[Labelled]]
    configuration: Callable[[Any, str, int, torch.dtype], list[Labelled]] | None = None


def find(name: str) -> Operator:
    """The operator called `name`."""
    module, variable = PLACES[name].split(":")
    operator = getattr(importlib.import_module(f"tilewise.inspect.{module}"), variable)
    assert isinstance(operator, Operator)
    return operator
