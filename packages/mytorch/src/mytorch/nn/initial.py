"""Initial values of parameters, drawn from the source that `mytorch.manual_seed` starts."""

import math

from mytorch import random
from mytorch.tensor import Tensor


def normal(shape: tuple[int, ...], deviation: float) -> Tensor:
    """A parameter of normal numbers of mean 0."""
    return Tensor.create(random.generator().standard_normal(shape) * deviation, requires_grad=True, dtype="float32")


def kaiming_he(shape: tuple[int, ...], inputs: int) -> Tensor:
    """A weight whose every output is a sum over `inputs`: variance 2 / inputs keeps the size of what goes through it
    and a ReLU.
    """
    return normal(shape, math.sqrt(2 / inputs))


def zeros(*shape: int) -> Tensor:
    """A parameter of zeros."""
    return Tensor.zeros(shape, requires_grad=True)


def ones(*shape: int) -> Tensor:
    """A parameter of ones."""
    return Tensor.ones(shape, requires_grad=True)


def check_sizes(layer: str, **sizes: int) -> None:
    """Refuse a size that is no integer of at least 1."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{layer}'s {name} is an integer of at least 1, not {size!r}")
