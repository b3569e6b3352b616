"""Runs Triton's front end, and nothing after it, on what verify's cases launch, and prints as JSON what became of it.

`pass_front_end.py ARCHITECTURE OPERATOR...`: of `workbench.names("suite")`, forward and backward, in bf16. Of
launches that the front end cannot tell apart only the first is taken.
"""

import contextlib
import json
import sys
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from triton.compiler.compiler import ASTSource

from tilewise import workbench
from tilewise.inspect.compile import compile_launch
from tilewise.inspect.launches import Labelled, case_launches
from tilewise.ops._host.launching import Launch, capture
from tilewise.verify.implementation import load_function
from tilewise.verify.result import Implementation

# Numbers up to this one are switches and counts that device code compares with; larger ones are sizes.
LARGEST_SWITCH = 2


class PassedError(Exception):
    """Ends a compilation where the front end is done."""


class Seen:
    """Launches that the front end can tell apart, each once.

    It goes by types, by what is None or 1, and by constants. Warps, stages and registers come after it, and so does
    what numbers and addresses can be divided by. Of a size, device code asks whether it fills its tile, a power of two;
    every size of a kernel is seen both ways, but not with every other one both ways: that takes twice as long.
    """

    def __init__(self) -> None:
        self._known: set[Any] = set()

    def is_new(self, launch: Launch) -> bool:
        kernel = launch.kernel.__name__
        sizes: dict[str, bool] = {}
        traits: list[Any] = []
        for parameter in launch.kernel.params:
            value = launch.arguments.get(parameter.name)
            traits.append(
                of_constant(value, parameter.name, sizes)
                if parameter.is_constexpr
                else of_argument(value, may_be_constant=not parameter.do_not_specialize)
            )
        found = {(kernel, *traits), *((kernel, *size) for size in sizes.items())}
        new = not found <= self._known
        self._known |= found
        return new


def of_constant(value: Any, place: str, sizes: dict[str, bool]) -> Any:
    """Its value, a record's field by field; of a size, `sizes` gets whether it is a power of two."""
    if isinstance(value, tuple):
        return type(value).__name__, *(of_constant(x, f"{place}.{i}", sizes) for i, x in enumerate(value))
    if isinstance(value, int) and not isinstance(value, bool) and value > LARGEST_SWITCH:
        sizes[place] = value & (value - 1) == 0
        return "size"
    return repr(value)


def of_argument(value: Any, may_be_constant: bool = True) -> Any:
    """Its type, a record's field by field; 1 becomes a constant, unless the kernel forbids it, and so does None."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype)
    if hasattr(value, "block_shape"):
        # A tensor descriptor, Triton's or Gluon's.
        return str(value.base.dtype), len(value.block_shape)
    if isinstance(value, tuple):
        return type(value).__name__, *map(of_argument, value)
    if isinstance(value, int) and not isinstance(value, bool):
        return may_be_constant and value == 1, -(2**31) <= value < 2**31
    return type(value).__name__


def front_end_only() -> contextlib.ExitStack:
    """Inside, what compiles ends with a PassedError once its front end is done."""

    def ending(make_ir: Callable[..., Any]) -> Callable[..., None]:
        def run(*arguments: Any, **named: Any) -> None:
            make_ir(*arguments, **named)
            raise PassedError

        return run

    patches = contextlib.ExitStack()
    # Gluon's kernels have a front end of their own.
    for source in (ASTSource, *ASTSource.__subclasses__()):
        if "make_ir" in vars(source):
            patches.enter_context(mock.patch.object(source, "make_ir", ending(source.make_ir)))
    return patches


def error(launch: Launch, architecture: int) -> str:
    """Why the front end does not take it."""
    try:
        compile_launch(launch, architecture, always=True)
    except PassedError:
        return ""
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it was compiled without its front end"


def launches(operator: str, architecture: int) -> list[Labelled]:
    declared = workbench.find(operator)
    function = load_function(declared, Implementation("triton", "cpu"))
    return [
        one
        for case in declared.load("suite").cases
        for one in case_launches(function, case, architecture, torch.bfloat16, torch.device("meta"), capture)
    ]


def main(architecture: int, *operators: str) -> None:
    seen = Seen()
    found = [
        (operator, one) for operator in operators for one in launches(operator, architecture) if seen.is_new(one.launch)
    ]
    with front_end_only():
        rows = [
            (one.launch.kernel.__name__, f"{operator} {one.label} {one.direction}", error(one.launch, architecture))
            for operator, one in found
        ]
    print(json.dumps(rows))


main(int(sys.argv[1]), *sys.argv[2:])
