"""The methods of a tensor that go element by element, and Python's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mytorch import dtypes, random
from mytorch.autograd import repeated_axes
from mytorch.ops import elementwise

if TYPE_CHECKING:
    from mytorch.tensor import Tensor

Scalar = int | float | bool


class Operators:
    """Part of Tensor."""

    # Equality is element by element: as a key, a tensor is itself.
    __hash__ = object.__hash__
    # NumPy's arrays and numbers leave operators with a tensor to the tensor.
    __array_ufunc__ = None

    def _pair(self: Any, other: Any, divides: bool = False) -> tuple[Tensor, Tensor]:
        """This and another, of one type: a Python number takes the tensor's, but a float makes integers fp32, as
        division does.
        """
        if not isinstance(other, Operators):
            if isinstance(other, np.generic):
                other = other.item()
            if not isinstance(other, int | float):
                raise TypeError(f"a tensor combines with tensors and numbers, not with {type(other).__name__}")
            kind = (
                dtypes.float32
                if isinstance(other, float)
                else dtypes.bool_
                if isinstance(other, bool)
                else dtypes.int64
            )
            dtype = self.dtype if dtypes.is_float(self.dtype) else dtypes.promote(self.dtype, kind)
            other = type(self)._wrap(self._backend.full((), other, dtype), self._device)
        dtype = dtypes.promote(self.dtype, other.dtype)
        if divides and not dtypes.is_float(dtype):
            dtype = dtypes.float32
        if repeated_axes(self.shape, other.shape) is None and repeated_axes(other.shape, self.shape) is None:
            try:
                np.broadcast_shapes(self.shape, other.shape)
            except ValueError:
                raise ValueError(
                    f"shapes {list(self.shape)} and {list(other.shape)} do not broadcast: each axis, from the last,"
                    " must be equal or 1"
                ) from None
        return self.astype(dtype), other.astype(dtype)

    def _float(self: Any) -> Tensor:
        return self if dtypes.is_float(self.dtype) else self.astype(dtypes.float32)

    def __add__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Add().apply(*self._pair(other))

    def __sub__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Sub().apply(*self._pair(other))

    def __rsub__(self: Any, other: Scalar) -> Tensor:
        return elementwise.Sub().apply(*self._pair(other)[::-1])

    def __mul__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Mul().apply(*self._pair(other))

    def __truediv__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Div().apply(*self._pair(other, divides=True))

    def __rtruediv__(self: Any, other: Scalar) -> Tensor:
        return elementwise.Div().apply(*self._pair(other, divides=True)[::-1])

    def __pow__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Pow().apply(*self._pair(other))

    def __rpow__(self: Any, other: Scalar) -> Tensor:
        return elementwise.Pow().apply(*self._pair(other)[::-1])

    def __neg__(self: Any) -> Tensor:
        return elementwise.Neg().apply(self)

    def __eq__(self: Any, other: object) -> Any:
        if not isinstance(other, Operators | int | float | np.generic):
            return NotImplemented
        return elementwise.Compare("eq").apply(*self._pair(other))

    def __ne__(self: Any, other: object) -> Any:
        found = self.__eq__(other)
        return found if found is NotImplemented else found._not()

    def __lt__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Compare("lt").apply(*self._pair(other))

    def __gt__(self: Any, other: Tensor | Scalar) -> Tensor:
        return elementwise.Compare("gt").apply(*self._pair(other))

    def __le__(self: Any, other: Tensor | Scalar) -> Tensor:
        return (self < other).where(True, self == other)

    def __ge__(self: Any, other: Tensor | Scalar) -> Tensor:
        return (self > other).where(True, self == other)

    def _not(self: Any) -> Tensor:
        return elementwise.Compare("eq").apply(*self._pair(False))

    def __bool__(self: Any) -> bool:
        if self.size != 1:
            raise ValueError(
                f"{self.size} elements are not true or false together: say which with max(), or sum() == size"
            )
        return bool(self.item())

    add, sub, mul, div, pow, neg = __add__, __sub__, __mul__, __truediv__, __pow__, __neg__
    __radd__, __rmul__ = __add__, __mul__

    def exp(self: Any) -> Tensor:
        """e to the power of each."""
        return elementwise.Unary("exp").apply(self._float())

    def log(self: Any) -> Tensor:
        """The natural logarithm."""
        return elementwise.Unary("log").apply(self._float())

    def sqrt(self: Any) -> Tensor:
        """The square root."""
        return elementwise.Unary("sqrt").apply(self._float())

    def tanh(self: Any) -> Tensor:
        """The hyperbolic tangent."""
        return elementwise.Unary("tanh").apply(self._float())

    def sigmoid(self: Any) -> Tensor:
        """1 / (1 + exp(-x))."""
        return elementwise.Unary("sigmoid").apply(self._float())

    def relu(self: Any) -> Tensor:
        """The positive part."""
        return elementwise.Unary("relu").apply(self._float())

    def gelu(self: Any) -> Tensor:
        """GELU, in its tanh form."""
        return elementwise.Unary("gelu").apply(self._float())

    def silu(self: Any) -> Tensor:
        """x * sigmoid(x)."""
        return elementwise.Unary("silu").apply(self._float())

    def where(self: Any, x: Tensor | Scalar, y: Tensor | Scalar) -> Tensor:
        """X where this bool tensor is true, else y; one of them at least is a tensor."""
        if isinstance(x, Operators):
            left, right = x._pair(y)
        elif isinstance(y, Operators):
            right, left = y._pair(x)
        else:
            raise TypeError("where() wants a tensor among what it chooses from")
        return elementwise.Where().apply(self.astype(dtypes.bool_), left, right)

    def abs(self: Any) -> Tensor:
        """The absolute value; its gradient at 0 is 0."""
        if self.dtype == dtypes.bool_:
            raise TypeError("abs is not defined on bool: convert with astype first")
        return elementwise.Abs().apply(self)

    __abs__ = abs

    def clamp(self: Any, min: Tensor | Scalar | None = None, max: Tensor | Scalar | None = None) -> Tensor:
        """Each raised to min and lowered to max, of which one may be left out; max where they cross.

        Within the bounds and on them the gradient goes to the element, beyond them to a bound that is a tensor.
        """
        if min is None and max is None:
            raise TypeError("clamp wants a min, a max or both, and neither came")
        x, least = self._pair(min) if min is not None else (self, None)
        x, most = x._pair(max) if max is not None else (x, None)
        bounds = [bound.astype(x.dtype) for bound in (least, most) if bound is not None]
        return elementwise.Clamp(least is not None, most is not None).apply(x, *bounds)

    def masked_fill(self: Any, mask: Tensor, value: Tensor | Scalar) -> Tensor:
        """A number, or a tensor of one without axes, where the bool mask is true, else the element; in its own type."""
        if not isinstance(mask, Operators) or mask.dtype != dtypes.bool_:
            came = mask.dtype if isinstance(mask, Operators) else type(mask).__name__
            raise TypeError(f"masked_fill wants a bool tensor as its mask, not {came}: compare, as in x == 0")
        if isinstance(value, Operators):
            if value.shape:
                raise ValueError(
                    f"masked_fill takes a number or a tensor without axes, not one of shape {list(value.shape)}: use"
                    " mask.where(value, x)"
                )
            return mask.where(value.astype(self.dtype), self)
        with np.errstate(all="ignore"):
            found = np.asarray(value).astype(self.dtype)
        if np.isfinite(found) != np.isfinite(value):
            raise ValueError(
                f"masked_fill's {value} is beyond {self.dtype}: fill with a number that it has, or convert with astype"
            )
        return mask.where(type(self)._wrap(self._backend.full((), found.item(), self.dtype), self._device), self)

    def dropout(self: Any, p: float = 0.5, training: bool = True) -> Tensor:
        """0 with probability p and the rest divided by 1 - p, in training; otherwise as it is."""
        if not 0 <= p <= 1:
            raise ValueError(f"dropout's p is a probability, not {p}")
        return elementwise.Dropout(p, random.next_seed()).apply(self._float()) if training and p > 0 else self
