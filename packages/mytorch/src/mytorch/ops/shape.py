"""The same elements in another arrangement, or some of them."""

import math
import operator
from itertools import accumulate

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array, Key, Shape


def without_copy(shape: Shape, strides: Shape, to: Shape) -> bool:
    """Whether memory of a shape and strides can be seen under another shape of as many elements."""
    runs: list[int] = []
    step = 0
    for n, stride in zip(shape, strides, strict=True):
        if n == 1:
            continue
        # An axis continues the run before it where no element lies between them.
        if runs and step == n * stride:
            runs[-1] *= n
        else:
            runs.append(n)
        step = stride
    # No new axis may reach from one run into the next.
    return math.prod(shape) == 0 or set(accumulate(runs, operator.mul)) <= set(accumulate(to, operator.mul))


class Clone(Function):
    """The same elements in memory of their own."""

    def _forward(self, x: Array) -> Array:
        return self.backend.copy(x)

    def _backward(self, grad: Array) -> Array:
        return grad


class Reshape(Function):
    """Another shape of as many elements."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape

    def _forward(self, x: Array) -> Array:
        self.before: Shape = tuple(x.shape)
        return self.backend.reshape(x, self.shape)

    def _backward(self, grad: Array) -> Array:
        return self.backend.reshape(grad, self.before)


class Permute(Function):
    """Axes in another order."""

    def __init__(self, axes: Shape) -> None:
        self.axes = axes

    def _forward(self, x: Array) -> Array:
        return self.backend.permute(x, self.axes)

    def _backward(self, grad: Array) -> Array:
        return self.backend.permute(grad, sorted(range(len(self.axes)), key=self.axes.__getitem__))


class Slice(Function):
    """Basic indexing: integers and slices of positive step."""

    def __init__(self, key: Key) -> None:
        self.key = key

    def _forward(self, x: Array) -> Array:
        self.before: Shape = tuple(x.shape)
        return self.backend.slice(x, self.key)

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.slice_grad(grad, self.key, self.before)


class Cat(Function):
    """Tensors concatenated along an axis."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def _forward(self, *arrays: Array) -> Array:
        self.lengths = [x.shape[self.axis] for x in arrays]
        return self.backend.cat(arrays, self.axis)

    def _backward(self, grad: Array) -> tuple[Array, ...]:
        parts, start = [], 0
        for length in self.lengths:
            parts.append(self.backend.slice(grad, (slice(None),) * self.axis + (slice(start, start + length),)))
            start += length
        return tuple(parts)
