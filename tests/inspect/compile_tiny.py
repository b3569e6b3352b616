"""Prints as JSON what becomes of each of tiny_implementations.py on sm_90: its kernels, or why there are none; a
process that compiles.
"""

import dataclasses
import json
import sys
from pathlib import Path
from unittest import mock

import torch

from tilewise.inspect import compile as compiling
from tilewise.inspect.compile import inspect_launch
from tilewise.inspect.launches import implementation_launches
from tilewise.workbench.operator import UsageError

FILE = Path(__file__).with_name("tiny_implementations.py")


def rows(function: str) -> list[dict]:
    launches = implementation_launches("flash", f"{FILE}:{function}", "small", 90, torch.bfloat16)
    found = [(one, *inspect_launch(one.launch, 90, mix=True, sass=True)[:2]) for one in launches]
    return [
        {"label": one.label, "direction": one.direction, "name": one.name, "sass": sass} | dataclasses.asdict(facts)
        for one, facts, sass in found
    ]


def attempt(function: str) -> list[dict] | str:
    try:
        return rows(function)
    except UsageError as error:
        return str(error)


def compiled_again(function: str) -> int:
    """How often ptxas runs for a second look at the same function."""
    said = []
    original = compiling.compile_launch

    def compile_launch(launch, architecture, always=False):
        said.append(original(launch, architecture, always))
        return said[-1]

    with mock.patch.object(compiling, "compile_launch", compile_launch):
        assert rows(function)
    return sum(bool(compiled.log) for compiled in said)


names = sys.argv[1:]
print(json.dumps({name: attempt(name) for name in names} | {"compiled again": compiled_again(names[0])}))
