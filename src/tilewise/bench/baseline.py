"""What a user would pick instead: how it is called on an operator's inputs, and why it cannot be where it cannot."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tilewise.verify.problem import Problem, Tensors


class CannotRunError(Exception):
    """Why something is not timed on this machine or this case."""


class Call(NamedTuple):
    """One implementation on one set of inputs.

    `run` gives its outputs, the first of which is the operator's, in a layout of its own; `leaves` are what the
    backward differentiates; `lay_out` brings the first output into the operator's layout. `pairs` is set where the work
    is not the operator's.
    """

    run: Callable[[], Sequence[torch.Tensor]]
    leaves: Sequence[torch.Tensor]
    lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    pairs: int | None = None


class Baseline(NamedTuple):
    """`build` makes its call from a problem and inputs by name; a CannotRunError says why there is none. `on` are the
    devices it is timed on unless it is asked for by name; one that is `dense` computes dense attention beside a sparse
    operator, so that its output is another.
    """

    name: str
    about: str
    build: Callable[[Problem, Tensors], Call]
    on: tuple[str, ...] = ("cuda", "cpu")
    dense: bool = False


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that a backward differentiates."""
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def floating_leaves(tensors: Tensors) -> Tensors:
    """The same inputs, the floating ones as leaves with their strides as they are."""
    return {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in tensors.items()}
