"""The methods of a tensor that take more than one element at a time: reductions, arrangement, matrices, rows, images,
attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mytorch import dtypes
from mytorch.device import Device
from mytorch.ops import attention, image, index, matrix, reduce, rows, shape

if TYPE_CHECKING:
    from mytorch.tensor import Tensor

Axis = int | tuple[int, ...] | None
Pair = int | tuple[int, int]


def pair(value: Pair, name: str, least: int) -> tuple[int, int]:
    """(height, width) from one number or two."""
    found = (value, value) if isinstance(value, int) else tuple(value)
    if len(found) != 2 or min(found) < least:
        raise ValueError(f"{name} is one integer or two, of at least {least}, not {value!r}")
    return found


def spread(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers given one by one or as one sequence."""
    return numbers if len(numbers) != 1 or isinstance(numbers[0], int) else tuple(numbers[0])


def one_float_type(what: str, *tensors: Tensor) -> None:
    """Refuse tensors of several types or of integers where a backend takes one floating-point type."""
    if len({x.dtype for x in tensors}) > 1 or not dtypes.is_float(tensors[0].dtype):
        raise TypeError(
            f"{what} wants one floating-point type, got {', '.join(str(x.dtype) for x in tensors)}: convert with astype"
        )


def numbered(what: str, table: Tensor, numbers: Tensor, count: int) -> None:
    """Refuse numbers that are no int64 in 0 .. count - 1.

    On CUDA asking would wait for the device: there they give NaN, where the table has it.
    """
    if numbers.dtype != dtypes.int64:
        raise TypeError(f"{what} takes int64 numbers, not {numbers.dtype}")
    if numbers.size and (numbers.device is Device.CPU or not dtypes.is_float(table.dtype)):
        least, most = -(-numbers).max().item(), numbers.max().item()
        if least < 0 or most >= count:
            raise IndexError(f"{what} has numbers from {least} to {most}, and only 0 to {count - 1} are there")


class Methods:
    """Part of Tensor."""

    # Reductions.

    def sum(self: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The sum over axes, all by default; of bool, how many are true."""
        x = self.astype(dtypes.int64) if self.dtype == dtypes.bool_ else self
        return reduce.Sum(axis, keepdims).apply(x)

    def mean(self: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The mean over axes, all by default."""
        if not dtypes.is_float(self.dtype):
            raise TypeError(f"the mean of {self.dtype} is not of that type: convert with astype first")
        return reduce.Mean(axis, keepdims).apply(self)

    def max(self: Any, axis: Axis = None, keepdims: bool = False) -> Tensor:
        """The largest over axes, all by default; equals share the gradient."""
        return reduce.Max(axis, keepdims).apply(self)

    # Arrangement.

    def reshape(self: Any, *to: int | Sequence[int]) -> Tensor:
        """Another shape of as many elements; one length may be -1, for whatever is left."""
        lengths = spread(to)
        known = math.prod(n for n in lengths if n != -1)
        if lengths.count(-1) > 1 or min(lengths, default=0) < -1:
            raise ValueError(f"reshape takes lengths of at least 0, and -1 once, not {list(lengths)}")
        if -1 in lengths and known and self.size % known == 0:
            lengths = tuple(self.size // known if n == -1 else n for n in lengths)
        if math.prod(lengths) != self.size or -1 in lengths:
            raise ValueError(f"shape {list(self.shape)} has {self.size} elements, which do not make {list(lengths)}")
        return shape.Reshape(lengths).apply(self)

    def flatten(self: Any, start: int = 0) -> Tensor:
        """The axes from `start` on as one."""
        (start,) = reduce.axes_of(start, len(self.shape))
        return self.reshape(*self.shape[:start], math.prod(self.shape[start:]))

    def permute(self: Any, *axes: int | Sequence[int]) -> Tensor:
        """All axes in another order."""
        given = spread(axes)
        found = reduce.axes_of(given, len(self.shape))
        if len(found) != len(self.shape):
            raise ValueError(f"permute names every axis once: {len(self.shape)} are there, and {list(given)} came")
        return shape.Permute(found).apply(self)

    def transpose(self: Any, first: int = -2, second: int = -1) -> Tensor:
        """Two axes exchanged, the last two by default."""
        i, j = reduce.axes_of(first, len(self.shape)) + reduce.axes_of(second, len(self.shape))
        axes = list(range(len(self.shape)))
        axes[i], axes[j] = j, i
        return shape.Permute(tuple(axes)).apply(self)

    @property
    def T(self: Any) -> Tensor:  # noqa: N802
        """All axes in reverse order."""
        return shape.Permute(tuple(range(len(self.shape)))[::-1]).apply(self)

    def slice(self: Any, key: Any) -> Tensor:
        """`x[key]`: integers, slices of positive step, and one ellipsis."""
        given = key if isinstance(key, tuple) else (key,)
        for part in given:
            if not (
                part is Ellipsis or isinstance(part, slice) or (isinstance(part, int) and not isinstance(part, bool))
            ):
                raise TypeError(
                    f"a tensor is indexed by integers and slices, not by {type(part).__name__}: see gather and"
                    " embedding"
                )
            if isinstance(part, slice) and part.step is not None and part.step < 1:
                raise ValueError(f"slices step forward, not by {part.step}")
        if given.count(Ellipsis) > 1:
            raise IndexError("an index has one ellipsis at most")
        missing = len(self.shape) - len(given) + given.count(Ellipsis)
        if missing < 0:
            raise IndexError(f"{len(given)} indices for a tensor of {len(self.shape)} axes")
        at = given.index(Ellipsis) if Ellipsis in given else len(given)
        whole = (*given[:at], *(slice(None),) * missing, *given[at + 1 :])
        for i, (part, n) in enumerate(zip(whole, self.shape, strict=True)):
            if isinstance(part, int) and not -n <= part < n:
                raise IndexError(f"index {part} is outside axis {i}, which has {n}")
        return shape.Slice(
            tuple(p % n if isinstance(p, int) else p for p, n in zip(whole, self.shape, strict=True))
        ).apply(self)

    __getitem__ = slice

    @staticmethod
    def cat(tensors: Sequence[Tensor], axis: int = 0) -> Tensor:
        """Tensors concatenated along an axis; the other axes must be equal."""
        if not tensors:
            raise ValueError("cat() wants at least one tensor")
        (found,) = reduce.axes_of(axis, len(tensors[0].shape))
        if len({(x.shape[:found], x.shape[found + 1 :]) for x in tensors}) != 1:
            raise ValueError(
                f"cat() along axis {axis} wants the other axes equal, got"
                f" {', '.join(str(list(x.shape)) for x in tensors)}"
            )
        dtype = dtypes.promote(*(x.dtype for x in tensors))
        return shape.Cat(found).apply(*(x.astype(dtype) for x in tensors))

    # By number.

    def gather(self: Any, axis: int, numbers: Tensor) -> Tensor:
        """One element along an axis for each number, which stand in a tensor of as many axes, nowhere longer but along
        that axis.
        """
        (found,) = reduce.axes_of(axis, len(self.shape))
        fits = len(numbers.shape) == len(self.shape) and all(
            i == found or a <= b for i, (a, b) in enumerate(zip(numbers.shape, self.shape, strict=True))
        )
        if not fits:
            raise ValueError(
                f"gather along axis {axis} of {list(self.shape)} wants numbers of that shape but for the axis, got"
                f" {list(numbers.shape)}"
            )
        numbered("gather", self, numbers, self.shape[found])
        return index.Gather(found).apply(self, numbers)

    def embedding(self: Any, numbers: Tensor) -> Tensor:
        """Rows of this table for each number: `[*numbers.shape, *self.shape[1:]]`."""
        numbered("embedding", self, numbers, len(self))
        return index.Take().apply(self, numbers)

    # Matrices.

    def matmul(self: Any, other: Tensor) -> Tensor:
        """`[..., M, K] @ [..., K, N]` with leading axes broadcast; a vector counts as one row on the left, one column
        on the right.
        """
        if not self.shape or not other.shape:
            raise ValueError("matmul wants at least one axis on both sides")
        x = self.reshape(1, -1) if len(self.shape) == 1 else self
        y = other.reshape(-1, 1) if len(other.shape) == 1 else other
        if x.shape[-1] != y.shape[-2]:
            raise ValueError(
                f"matmul of {list(self.shape)} and {list(other.shape)}: {x.shape[-1]} columns meet {y.shape[-2]} rows"
            )
        dtype = dtypes.promote(x.dtype, y.dtype)
        out = matrix.MatMul().apply(x.astype(dtype), y.astype(dtype))
        if len(self.shape) == 1:
            out = out.reshape(*out.shape[:-2], out.shape[-1])
        return out.reshape(out.shape[:-1]) if len(other.shape) == 1 else out

    __matmul__ = matmul

    def linear(self: Any, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`self [..., K] @ weight [K, N] + bias [N]`, in one operation."""
        given = (weight,) if bias is None else (weight, bias)
        one_float_type("linear", self, *given)
        right = (
            len(weight.shape) == 2
            and self.shape[-1:] == weight.shape[:1]
            and (bias is None or bias.shape == weight.shape[1:])
        )
        if not right:
            shapes = ", ".join(str(list(x.shape)) for x in (self, *given))
            raise ValueError(f"linear wants x [..., K], weight [K, N] and bias [N], got {shapes}")
        return matrix.Linear().apply(self, *given)

    # Rows.

    def _along_last(self: Any, axis: int, operation: Any) -> Tensor:
        (found,) = reduce.axes_of(axis, len(self.shape))
        x = self._float()
        last = len(self.shape) - 1
        return operation.apply(x) if found == last else operation.apply(x.transpose(found, last)).transpose(found, last)

    def softmax(self: Any, axis: int = -1) -> Tensor:
        """Exponentials over their sum along an axis."""
        return self._along_last(axis, rows.Softmax())

    def log_softmax(self: Any, axis: int = -1) -> Tensor:
        """The logarithm of softmax along an axis."""
        return self._along_last(axis, rows.LogSoftmax())

    def layer_norm(self: Any, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
        """Mean 0 and variance 1 along the last axis, times a weight, plus a bias, both as long as that axis."""
        one_float_type("layer_norm", self, weight, bias)
        if not self.shape or weight.shape != self.shape[-1:] or bias.shape != self.shape[-1:]:
            raise ValueError(
                f"layer_norm of {list(self.shape)} wants weight and bias {list(self.shape[-1:])}, got {weight.shape}"
                f" and {bias.shape}"
            )
        return rows.LayerNorm(eps).apply(self, weight, bias)

    # Images.

    def conv2d(self: Any, weight: Tensor, bias: Tensor | None = None, stride: Pair = 1, padding: Pair = 0) -> Tensor:
        """Images `[B, C, H, W]` with a weight `[O, C, h, w]` and a bias `[O]`."""
        given = (weight,) if bias is None else (weight, bias)
        one_float_type("conv2d", self, *given)
        steps, border = pair(stride, "stride", 1), pair(padding, "padding", 0)
        right = (
            len(self.shape) == len(weight.shape) == 4
            and self.shape[1] == weight.shape[1]
            and (bias is None or bias.shape == weight.shape[:1])
        )
        if not right:
            shapes = ", ".join(str(list(x.shape)) for x in (self, *given))
            raise ValueError(f"conv2d wants images [B, C, H, W], weight [O, C, h, w] and bias [O], got {shapes}")
        if any(n + 2 * p < m for n, p, m in zip(self.shape[2:], border, weight.shape[2:], strict=True)):
            raise ValueError(
                f"a window of {list(weight.shape[2:])} does not fit into {list(self.shape[2:])} with padding"
                f" {list(border)}"
            )
        return image.Conv2D(steps, border).apply(self, *given)

    def max_pool2d(self: Any, size: Pair, stride: Pair | None = None) -> Tensor:
        """The largest of each window of images `[B, C, H, W]`; windows stand side by side unless a stride is given."""
        window = pair(size, "size", 1)
        steps = window if stride is None else pair(stride, "stride", 1)
        if len(self.shape) != 4 or any(n < m for n, m in zip(self.shape[2:], window, strict=True)):
            raise ValueError(
                f"max_pool2d of size {list(window)} wants images [B, C, H, W] no smaller than that, got"
                f" {list(self.shape)}"
            )
        return image.MaxPool2D(window, steps).apply(self)

    # Attention.

    def attention(self: Any, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None) -> Tensor:
        """This as queries `[B, Tq, Hq, D]` over keys `[B, Tk, Hk, D]` and values `[B, Tk, Hk, Dv]`; Hq is a multiple of
        Hk, scale 1/sqrt(D).
        """
        one_float_type("attention", self, k, v)
        right = (
            len(self.shape) == len(k.shape) == len(v.shape) == 4
            and self.shape[0] == k.shape[0] == v.shape[0]
            and k.shape[1:3] == v.shape[1:3]
            and self.shape[3] == k.shape[3]
            and k.shape[2] > 0
            and k.shape[3] > 0
            and self.shape[2] % k.shape[2] == 0
        )
        if not right:
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in (("q", self), ("k", k), ("v", v)))
            raise ValueError(
                "attention wants q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], Hq a multiple of Hk, D above"
                f" 0, got {shapes}"
            )
        return attention.Attention(causal, self.shape[3] ** -0.5 if scale is None else scale).apply(self, k, v)
