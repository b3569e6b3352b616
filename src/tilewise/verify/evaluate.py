"""Outputs and gradients of a function on a problem's inputs; and torch's global settings as the truth needs them."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tilewise.verify.problem import Problem, Tensors

# An incoming gradient for the output of that name and shape, in fp64.
Incoming = Callable[[str, tuple[int, ...]], torch.Tensor]


class WrongReturnError(Exception):
    """The function returned something that is not the operator's outputs."""


class ModifiedError(Exception):
    """The function changed a gradient that it was given."""


def evaluate(
    problem: Problem,
    function: Callable[..., Any],
    inputs: Tensors,
    dtype: torch.dtype,
    incoming: Incoming | None,
    **further: Any,
) -> dict[str, torch.Tensor | None]:
    """What `function` returns, by name; with `incoming` also the gradients of its floating inputs, None for those that
    get none.

    Incoming gradients are rounded to `dtype` (fp32 for the problem's exact outputs), not to the precision of `inputs`:
    all runs see the same.
    """
    leaves = {
        name: x.detach().requires_grad_(incoming is not None and x.is_floating_point()) for name, x in inputs.items()
    }
    outputs = _named(
        problem,
        function(**problem.arguments(leaves), **problem.options(), **further),
        next(iter(inputs.values())).device,
    )
    # Clones: an implementation may hand out the same memory again.
    results: dict[str, torch.Tensor | None] = {name: x.detach().clone() for name, x in outputs.items()}
    if incoming is None:
        return results
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    heads = {name: x for name, x in outputs.items() if x.requires_grad}
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(wanted)
    if heads:
        arriving = [
            incoming(name, tuple(x.shape)).to(torch.float32 if name in problem.exact else dtype)
            for name, x in heads.items()
        ]
        # Where inputs have custom strides, so do the incoming gradients.
        strided = not all(x.is_contiguous() for x in inputs.values())
        arriving = [
            _laid_out(gradient.to(x.device, x.dtype), strided)
            for gradient, x in zip(arriving, heads.values(), strict=True)
        ]
        before = [gradient.clone() for gradient in arriving]
        gradients = torch.autograd.grad(
            list(heads.values()), [leaves[name] for name in wanted], arriving, allow_unused=True
        )
        for name, gradient, copy in zip(heads, arriving, before, strict=True):
            if not torch.equal(gradient, copy):
                raise ModifiedError(f"the incoming gradient of {name} is not what it was before the backward")
    return results | {f"d{name}": gradient for name, gradient in zip(wanted, gradients, strict=True)}


def _laid_out(gradient: torch.Tensor, strided: bool) -> torch.Tensor:
    """As it is, or with the axes before the last in another order in memory."""
    if not strided or gradient.ndim < 3:
        return gradient
    return gradient.transpose(-2, -3).contiguous().transpose(-2, -3)


def flat_outputs(returned: Any) -> list[Any]:
    """The returned values in order, nested tuples flattened."""
    return [x for part in returned for x in flat_outputs(part)] if isinstance(returned, tuple | list) else [returned]


def _named(problem: Problem, returned: Any, device: torch.device) -> Tensors:
    values = flat_outputs(returned)
    # A last output that the problem does not have may be returned as None.
    while len(values) > len(problem.outputs) and values[-1] is None:
        values.pop()
    if len(values) != len(problem.outputs) or not all(isinstance(x, torch.Tensor) for x in values):
        got = ", ".join(type(x).__name__ for x in values)
        raise WrongReturnError(
            f"expected {len(problem.outputs)} tensors ({', '.join(problem.outputs)}), got {got or 'nothing'}"
        )
    for name, x in zip(problem.outputs, values, strict=True):
        if x.device != device or x.layout != torch.strided:
            raise WrongReturnError(f"{name} is a {x.layout} tensor on {x.device}: expected an ordinary one on {device}")
    return dict(zip(problem.outputs, values, strict=True))


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
        if torch.get_float32_matmul_precision() != "highest":
            _before.setdefault("precision", torch.get_float32_matmul_precision())
            torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        with _changing:
            _inside -= 1
            if _inside == 0:
                if "dtype" in _before:
                    torch.set_default_dtype(_before["dtype"])
                if "precision" in _before:
                    torch.set_float32_matmul_precision(_before["precision"])
                _before.clear()
