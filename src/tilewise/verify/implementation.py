"""Finds the function to check: one of an operator's backends, or a user's."""

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tilewise.verify.result import Implementation
from tilewise.verify.suite import Case
from tilewise.workbench.operator import Operator, UsageError


def load_function(operator: Operator, implementation: Implementation) -> Callable[..., Any]:
    """The function that `implementation` names, to be called as the operator's public function is."""
    if not implementation.external:
        return partial(operator.load("function"), backend=implementation.name)
    place, colon, name = implementation.name.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"--impl {implementation.name}: expected FILE.py:FUNCTION or package.module:function")
    if place.endswith(".py") and not Path(place).is_file():
        raise UsageError(f"--impl {implementation.name}: there is no file {place}")
    # A console script does not have the working directory on its path.
    sys.path.append(os.getcwd())
    try:
        module = _import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:
        raise UsageError(
            f"--impl {implementation.name}: {place} does not import: {type(error).__name__}: {error}"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        found = ", ".join(
            sorted(key for key, value in vars(module).items() if callable(value) and not key.startswith("_"))
        )
        raise UsageError(f"--impl {implementation.name}: {place} has no function {name!r}: it has {found or 'none'}")
    return function


def check_signature(function: Callable[..., Any], name: str, cases: Iterable[Case]) -> None:
    """A UsageError if `function` cannot be called with the arguments that `cases` pass."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # Compiled functions may have no signature: calling them will tell.
        return
    lacking: dict[str, list[str]] = {}
    for case in cases:
        arguments = {
            **case.problem.arguments(case.problem.tensors(_no_values)),
            **case.problem.options(),
            **case.problem.returning,
        }
        parameters = signature.parameters
        any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        missing = [] if any_name else [argument for argument in arguments if argument not in parameters]
        for argument in missing:
            lacking.setdefault(argument, []).append(case.name)
        if not missing:
            try:
                signature.bind(**arguments)
            except TypeError as error:
                raise UsageError(f"{name}{signature} cannot be called with {', '.join(arguments)}: {error}") from error
    if lacking:
        needs = "; ".join(f"{argument} (for {_some(names)})" for argument, names in lacking.items())
        raise UsageError(f"{name}{signature} lacks {needs}: accept them, or choose cases that do without by --config")


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _no_values(_name: str, shape: tuple[int, ...], _size: float) -> Any:
    import torch

    return torch.zeros(()).expand(shape)


def _import_file(path: Path) -> Any:
    # A unique name: the file may be named like a standard library module.
    name = f"implementation_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    # Files next to it can be imported, as when it is run itself; and Triton finds its kernels' module by name.
    sys.path.append(str(path.parent.resolve()))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
