"""Compiles what an operator launches, each kernel once in each direction, and prints as JSON what became of it.

`compile_every_kernel.py ARCHITECTURE OPERATOR...`: of `allowances.operators()`, or `probe`. Narrow problems come first
there, so these are the quickest to compile. What several operators launch is compiled for the first of them.
"""

import json
import sys

import torch

from tilewise.inspect.compile import compile_launch
from tilewise.inspect.facts import Wanted
from tilewise.inspect.launches import Labelled, captured
from tilewise.inspect.worker import wanted_launches
from tilewise.ops.probe.launch import mixed_widths_error


def launches(operator: str, architecture: int) -> list[Labelled]:
    if operator == "probe":
        return captured(architecture, "probe", "forward", lambda: mixed_widths_error(torch.device("cpu")))
    return [one for _, one in wanted_launches(Wanted((operator,), every=False), architecture)]


def error(one: Labelled, architecture: int) -> str:
    """Why it does not compile."""
    try:
        compiled = compile_launch(one.launch, architecture)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "" if compiled.cubin.startswith(b"\x7fELF") else "what came out is no program for a GPU"


def main(architecture: int, *operators: str) -> None:
    first: dict[tuple[str, str], Labelled] = {}
    for one in (one for operator in operators for one in launches(operator, architecture)):
        first.setdefault((one.launch.kernel.__name__, one.direction), one)
    print(json.dumps([(*key, error(one, architecture)) for key, one in first.items()]))


main(int(sys.argv[1]), *sys.argv[2:])
