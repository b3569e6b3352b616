"""Sums, means, variances and the largest, over axes."""

import math

import numpy as np

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array, Shape
from mytorch.dtypes import bool_, float32, int64, is_float, promote


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
        self.count = math.prod(self.shape[i] for i in self.axes)
        return self.backend.sum(x, self.axes, self.keepdims, self.count)

    def _backward(self, grad: Array) -> Array:
        return self._spread(self.backend.sum(grad, (), False, self.count))


class Max(Reduction):
    """The largest over axes; its gradient goes to all that equal it, in equal shares."""

    def _forward(self, x: Array) -> Array:
        self._start(x)
        if not all(self.shape[i] for i in self.axes):
            raise ValueError(f"there is no largest of nothing: shape {list(self.shape)} over axes {list(self.axes)}")
        y = self.backend.max(x, self.axes, self.keepdims)
        self.save(x, y)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        x, y = self.saved
        b = self.backend
        # In fp32 at least: counts outgrow fp16.
        wide = promote(b.dtype(x), float32)
        largest = b.cast(b.binary("eq", x, self._spread(y)), wide)
        share = b.binary("div", b.cast(b.reshape(grad, self.kept), wide), b.sum(largest, self.axes, True))
        return b.binary("mul", largest, share)


class Var(Reduction):
    """The sum of squared distances from the mean over axes, divided by their count less a correction; or its root."""

    def __init__(
        self, axis: int | tuple[int, ...] | None, keepdims: bool, correction: float = 1, root: bool = False
    ) -> None:
        super().__init__(axis, keepdims)
        self.correction, self.root = correction, root

    def _forward(self, x: Array) -> Array:
        self._start(x)
        b = self.backend
        count = math.prod(self.shape[i] for i in self.axes)
        # In fp32 at least: squares outgrow fp16.
        wide = promote(b.dtype(x), float32)
        centred = b.cast(x, wide)
        # Twice: what rounding leaves of the mean would pass for deviation where all are about equal.
        for _ in range(2):
            centred = b.binary("sub", centred, b.sum(centred, self.axes, True, max(1, count)))
        self.divisor = b.full((), max(0, count - self.correction), wide)
        y = b.binary("div", b.sum(b.binary("mul", centred, centred), self.axes, self.keepdims), self.divisor)
        if self.root:
            y = b.unary("sqrt", y)
        self.save(centred, y)
        return b.cast(y, b.dtype(x))

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        centred, y = self.saved
        b = self.backend
        grad = b.cast(grad, b.dtype(y))
        if self.root:
            # 0 where all are equal, as torch has it: there the root has no slope.
            zero = b.full((), 0, b.dtype(y))
            slope = b.where(b.binary("eq", y, zero), zero, b.binary("div", grad, y))
        else:
            slope = b.binary("add", grad, grad)
        return b.binary("mul", centred, self._spread(b.binary("div", slope, self.divisor)))


class ArgMax(Reduction):
    """Where the largest along one axis stands, the first of equals; NaN counts as the largest. Has no gradient."""

    def _forward(self, x: Array) -> Array:
        self._start(x)
        b = self.backend
        (axis,) = self.axes
        count = self.shape[axis]
        if not count:
            raise ValueError(f"there is no largest of nothing: shape {list(self.shape)} along axis {axis}")
        largest = b.binary("eq", x, b.max(x, self.axes, True))
        if is_float(b.dtype(x)):
            # NaN equals nothing, not even itself.
            largest = b.where(b.binary("eq", x, x), largest, b.full((), True, bool_))
        # Places are counted from the end: the first has the largest number.
        left = b.from_numpy(np.arange(count, 0, -1).reshape(count, *(1,) * (len(self.shape) - axis - 1)))
        last = b.max(b.where(largest, left, b.full((), 0, int64)), self.axes, self.keepdims)
        return b.binary("sub", b.full((), count, int64), last)
