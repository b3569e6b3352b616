"""An implementation: the function to check, one of an operator's backends or a user's; its outputs and gradients on a
problem's inputs, and torch's global settings as the truth needs them.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise.verify.result import HOPPER, Implementation
from tilewise.verify.state import matmul_precision, set_matmul_precision
from tilewise.verify.suite import Case, Problem, Tensors
from tilewise.workbench.operator import Operator, UsageError, place_and_name

FULL = "ieee", "ieee"
# SMs of the Hopper GPU that is simulated.
SIMULATED_SMS = 2


def load_function(operator: Operator, implementation: Implementation) -> Callable[..., Any]:
    """The function that `implementation` names, to be called as the operator's public function is."""
    if implementation.name == HOPPER and not implementation.external:
        return _on_hopper(operator.load("function"))
    if not implementation.external:
        return partial(operator.load("function"), backend=implementation.name)
    place, name = place_and_name(implementation.name)
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


def _on_hopper(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is on such a GPU, whose kernels in Gluon are simulated here: with few SMs, so that a CTA takes
    several work items, and with no thread barriers but their own.
    """
    from tilewise import interpreter
    from tilewise.ops._host import backend

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        with backend.as_if_on(90), backend.few_sms(SIMULATED_SMS), interpreter.written_barriers():
            return function(*arguments, **named, backend="triton")

    return call


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
            **accepted(function, case.problem.returning),
        }
        taken = accepted(function, arguments)
        missing = [argument for argument in arguments if argument not in taken]
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


def declined(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """What does not request what the arguments do: False for each whose default is not that."""
    parameters = _parameters(function) or {}
    return {name: False for name in arguments if name in parameters and parameters[name].default is not False}


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter] | None:
    """Those of compiled functions may be unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None


def accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that `function` has a parameter for, all if that is unknown."""
    parameters = _parameters(function)
    if parameters is None:
        return arguments
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in arguments.items() if any_name or name in parameters}


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


# An incoming gradient for the output of that name and shape, in fp64.
Incoming = Callable[[str, tuple[int, ...]], torch.Tensor]


class WrongReturnError(Exception):
    """The function returned something that is not the operator's outputs."""


class RankError(Exception):
    """Over several processes (over_ranks.py), one raised, ended or did not answer; the message says which."""


class ModifiedError(Exception):
    """The function changed a gradient that it was given."""


def leaves_of(inputs: Tensors, wanted: Collection[str]) -> Tensors:
    """The inputs, detached: those that are `wanted` require grad. Inputs that are one tensor stay one."""
    once = {id(x): x.detach() for x in inputs.values()}
    for name in wanted:
        once[id(inputs[name])].requires_grad_()
    return {name: once[id(x)] for name, x in inputs.items()}


def outputs_of(
    problem: Problem, function: Callable[..., Any], leaves: Tensors, may_lack: Sequence[str] = (), **further: Any
) -> Tensors:
    """What `function` returns, by name, and the inputs that it writes.

    The outputs that it `may_lack`, the last, are all there or none is.
    """
    returned = function(**problem.arguments(leaves), **problem.options(), **further)
    outputs = _named(problem, returned, next(iter(leaves.values())).device, may_lack)
    return outputs | {name: leaves[name] for name in problem.updates}


def copies(outputs: Tensors) -> dict[str, torch.Tensor | None]:
    """Clones: an implementation may hand out the same memory again."""
    return {name: x.detach().clone() for name, x in outputs.items()}


def gradients_of(
    problem: Problem,
    outputs: Tensors,
    leaves: Tensors,
    dtype: torch.dtype,
    incoming: Incoming,
    retain_graph: bool = False,
) -> dict[str, torch.Tensor | None]:
    """The gradients of the leaves that require one, None for those that get none.

    Incoming gradients are rounded to `dtype` (fp32 for the problem's exact outputs), not to the precision of the
    leaves: all runs see the same.
    """
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    heads = {name: x for name, x in outputs.items() if x.requires_grad}
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
    if heads and wanted:
        arriving = [
            incoming(name, tuple(x.shape)).to(torch.float32 if name in problem.exact else dtype)
            for name, x in heads.items()
        ]
        # Where inputs have custom strides, so do the incoming gradients.
        strided = not all(x.is_contiguous() for x in leaves.values())
        arriving = [
            laid_out(gradient.to(x.device, x.dtype), strided)
            for gradient, x in zip(arriving, heads.values(), strict=True)
        ]
        before = [gradient.clone() for gradient in arriving]
        gradients = torch.autograd.grad(
            list(heads.values()),
            [leaves[name] for name in wanted],
            arriving,
            allow_unused=True,
            retain_graph=retain_graph,
        )
        for name, gradient, copy in zip(heads, arriving, before, strict=True):
            if not torch.equal(gradient, copy):
                raise ModifiedError(f"the incoming gradient of {name} is not what it was before the backward")
    return {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def evaluate(
    problem: Problem,
    function: Callable[..., Any],
    inputs: Tensors,
    dtype: torch.dtype,
    incoming: Incoming | None,
    may_lack: Sequence[str] = (),
    **further: Any,
) -> dict[str, torch.Tensor | None]:
    """What `function` returns, by name; with `incoming` also the gradients of its floating inputs."""
    leaves = leaves_of(inputs, floating(inputs) if incoming else ())
    outputs = outputs_of(problem, function, leaves, may_lack, **further)
    results = copies(outputs)
    return results | gradients_of(problem, outputs, leaves, dtype, incoming) if incoming else results


def floating(inputs: Tensors) -> list[str]:
    """Those that are differentiated."""
    return [name for name, x in inputs.items() if x.is_floating_point()]


def laid_out(x: torch.Tensor, strided: bool) -> torch.Tensor:
    """As it is, or with the axes before the last in another order in memory."""
    if not strided or x.ndim < 3:
        return x
    return x.transpose(-2, -3).contiguous().transpose(-2, -3)


def flat_outputs(returned: Any) -> list[Any]:
    """The returned values in order, nested tuples flattened."""
    return [x for part in returned for x in flat_outputs(part)] if isinstance(returned, tuple | list) else [returned]


def _named(problem: Problem, returned: Any, device: torch.device, may_lack: Sequence[str]) -> Tensors:
    values, names = flat_outputs(returned), problem.outputs
    # A last output that the problem does not have, or the function may lack, may be returned as None.
    fewest = len(names) - len(may_lack)
    while len(values) > fewest and values[-1] is None:
        values.pop()
    if len(values) == fewest:
        names = tuple(name for name in names if name not in may_lack)
    if len(values) != len(names) or not all(isinstance(x, torch.Tensor) for x in values):
        got = ", ".join(type(x).__name__ for x in values)
        raise WrongReturnError(
            f"expected {len(problem.outputs)} tensors ({', '.join(problem.outputs)}), got {got or 'nothing'}"
        )
    for name, x in zip(names, values, strict=True):
        if x.device != device or x.layout != torch.strided:
            raise WrongReturnError(f"{name} is a {x.layout} tensor on {x.device}: expected an ordinary one on {device}")
    return dict(zip(names, values, strict=True))


_changing = threading.Lock()
_inside = 0
# What to restore, of the settings that were changed.
_before: dict[str, Any] = {}


@contextlib.contextmanager
def pinned() -> Iterator[None]:
    """Gradients on, autocast off, full-precision matmuls, fp32 and the CPU as defaults; all restored afterwards.

    torch has one default dtype and one matmul precision for all threads. So those are changed only if needed, by the
    first of several threads inside, and restored by the last.
    """
    device = torch.get_default_device()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda"):
            stack.enter_context(torch.autocast(kind, enabled=False))
        stack.enter_context(_for_all_threads())
        # Of this thread.
        torch.set_default_device(None)
        try:
            yield
        finally:
            torch.set_default_device(None if device.type == "cpu" else device)


@contextlib.contextmanager
def _for_all_threads() -> Iterator[None]:
    global _inside
    with _changing:
        _inside += 1
        if torch.get_default_dtype() != torch.float32:
            _before.setdefault("dtype", torch.get_default_dtype())
            torch.set_default_dtype(torch.float32)
        if matmul_precision() != FULL:
            _before.setdefault("precision", matmul_precision())
            set_matmul_precision(FULL)
    try:
        yield
    finally:
        with _changing:
            _inside -= 1
            if _inside == 0:
                if "dtype" in _before:
                    torch.set_default_dtype(_before["dtype"])
                if "precision" in _before:
                    set_matmul_precision(_before["precision"])
                _before.clear()
