"""Sums, means and the largest, over axes."""

import math

from mytorch.autograd import Function
from mytorch.backends.base import Array, Shape
from mytorch.dtypes import float32, promote


def axes_of(axis: int | tuple[int, ...] | None, n_axes: int) -> Shape:
    """Axes as they count from 0: all for None; one that is not there or comes twice is an error."""
    given = tuple(range(n_axes)) if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
    for i in given:
        if not -n_axes <= i < n_axes:
            raise IndexError(f"axis {i} is not there: a tensor of {n_axes} axes has axes {-n_axes} to {n_axes - 1}")
    found = tuple(i % n_axes for i in given)
    if len(set(found)) != len(found):
        raise ValueError(f"axis {given} names an axis twice")
    return found


class Reduction(Function):
    """What sums, means and the largest share: their axes, and spreading a result's gradient over them."""

    def __init__(self, axis: int | tuple[int, ...] | None = None, keepdims: bool = False) -> None:
        self.axis, self.keepdims = axis, keepdims

    def _start(self, x: Array) -> None:
        self.shape: Shape = tuple(x.shape)
        self.axes = axes_of(self.axis, len(self.shape))
        self.kept = tuple(1 if i in self.axes else n for i, n in enumerate(self.shape))

    def _wide(self, x: Array) -> Array:
        """fp16 as fp32: sums and counts outgrow it."""
        return self.backend.cast(x, promote(self.backend.dtype(x), float32))

    def _spread(self, x: Array) -> Array:
        return self.backend.broadcast_to(self.backend.reshape(x, self.kept), self.shape)


class Sum(Reduction):
    """The sum over axes."""

    def _forward(self, x: Array) -> Array:
        self._start(x)
        return self.backend.sum(x, self.axes, self.keepdims)

    def _backward(self, grad: Array) -> Array:
        return self._spread(grad)


class Mean(Reduction):
    """The mean over axes."""

    def _forward(self, x: Array) -> Array:
        self._start(x)
        self.dtype = self.backend.dtype(x)
        return self._scaled(self.backend.sum(self._wide(x), self.axes, self.keepdims))

    def _backward(self, grad: Array) -> Array:
        return self._spread(self._scaled(self._wide(grad)))

    def _scaled(self, x: Array) -> Array:
        count = math.prod(self.shape[i] for i in self.axes)
        return self.backend.cast(self.backend.binary("div", x, self.backend.full((), count, self.backend.dtype(x))), self.dtype)


class Max(Reduction):
    """The largest over axes; its gradient goes to all that equal it, in equal shares."""

    def _forward(self, x: Array) -> Array:
        self._start(x)
        if not all(self.shape[i] for i in self.axes):
            raise ValueError(f"there is no largest of nothing: shape {list(self.shape)} over axes {list(self.axes)}")
        y = self.backend.max(x, self.axes, self.keepdims)
        self.save(x, y)
        return y

    def _backward(self, grad: Array) -> Array:
        x, y = self.saved
        b = self.backend
        largest = b.cast(b.binary("eq", x, self._spread(y)), promote(b.dtype(x), float32))
        share = b.binary("div", self._wide(b.reshape(grad, self.kept)), b.sum(largest, self.axes, True))
        return b.binary("mul", largest, share)
