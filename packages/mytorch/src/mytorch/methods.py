"""The methods of a tensor that take more than one element at a time: reductions, arrangement, matrices, rows, images,
attention.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from mytorch import contraction, dtypes
from mytorch.arguments import Axis, Pair, either, new_axis, numbered, one_float_type, over, pair, spread
from mytorch.ops import attention, image, matrix, reduce, rows, shape
from mytorch.ops import index as by_number

if TYPE_CHECKING:
    from mytorch.tensor import Tensor


class Methods:
    """Part of Tensor."""

    # Reductions. An axis may be called dim, and keepdims keepdim, as in torch.

    def sum(
        self: Any, axis: Axis = None, keepdims: bool | None = None, *, dim: Axis = None, keepdim: bool | None = None
    ) -> Tensor:
        """The sum over axes, all by default; of bool, how many are true."""
        x = self.astype(dtypes.int64) if self.dtype == dtypes.bool_ else self
        return reduce.Sum(*over(axis, dim, keepdims, keepdim)).apply(x)

    def mean(
        self: Any, axis: Axis = None, keepdims: bool | None = None, *, dim: Axis = None, keepdim: bool | None = None
    ) -> Tensor:
        """The mean over axes, all by default."""
        self._refuse_integers("mean")
        return reduce.Mean(*over(axis, dim, keepdims, keepdim)).apply(self)

    def max(
        self: Any, axis: Axis = None, keepdims: bool | None = None, *, dim: Axis = None, keepdim: bool | None = None
    ) -> Tensor:
        """The largest over axes, all by default; equals share the gradient. Values alone: `argmax` says where."""
        return reduce.Max(*over(axis, dim, keepdims, keepdim)).apply(self)

    def argmax(
        self: Any,
        axis: int | None = None,
        keepdims: bool | None = None,
        *,
        dim: int | None = None,
        keepdim: bool | None = None,
    ) -> Tensor:
        """Where the largest along an axis stands, the first of equals, as int64; by default in the flattened tensor.

        NaN counts as the largest.
        """
        found, keep = over(axis, dim, keepdims, keepdim)
        if found is not None:
            if not isinstance(found, int):
                raise TypeError(f"argmax goes along one axis, or without one over all elements, not along {found!r}")
            return reduce.ArgMax(found, keep).apply(self)
        place = reduce.ArgMax(0).apply(self.reshape(-1))
        return place.reshape((1,) * len(self.shape)) if keep else place

    def var(
        self: Any,
        axis: Axis = None,
        *,
        correction: float = 1,
        keepdims: bool | None = None,
        dim: Axis = None,
        keepdim: bool | None = None,
    ) -> Tensor:
        """The variance over axes, all by default: squared distances from the mean, over their count less a correction.

        The correction 1 estimates the variance of what the numbers were drawn from, 0 is that of the numbers.
        """
        self._refuse_integers("variance")
        return reduce.Var(*over(axis, dim, keepdims, keepdim), correction).apply(self)

    def std(
        self: Any,
        axis: Axis = None,
        *,
        correction: float = 1,
        keepdims: bool | None = None,
        dim: Axis = None,
        keepdim: bool | None = None,
    ) -> Tensor:
        """The square root of `var`; its gradient is 0 where all numbers are equal."""
        self._refuse_integers("standard deviation")
        return reduce.Var(*over(axis, dim, keepdims, keepdim), correction, root=True).apply(self)

    def _refuse_integers(self: Any, what: str) -> None:
        if not dtypes.is_float(self.dtype):
            raise TypeError(f"the {what} of {self.dtype} is not of that type: convert with astype first")

    # Arrangement.

    def reshape(self: Any, *to: int | Sequence[int]) -> Tensor:
        """Another shape of as many elements; one length may be -1, for whatever is left."""
        return shape.Reshape(self._filled("reshape", to)).apply(self)

    def _filled(self: Any, what: str, to: tuple[Any, ...]) -> tuple[int, ...]:
        """A shape of as many elements as there are, with -1 replaced."""
        lengths = spread(to)
        known = math.prod(n for n in lengths if n != -1)
        if lengths.count(-1) > 1 or min(lengths, default=0) < -1:
            raise ValueError(f"{what} takes lengths of at least 0, and -1 once, not {list(lengths)}")
        if -1 in lengths and known and self.size % known == 0:
            lengths = tuple(self.size // known if n == -1 else n for n in lengths)
        if math.prod(lengths) != self.size or -1 in lengths:
            raise ValueError(f"shape {list(self.shape)} has {self.size} elements, which do not make {list(lengths)}")
        return lengths

    def view(self: Any, *to: int | Sequence[int]) -> Tensor:
        """As `reshape`, always of the same memory: refused where that takes a copy, as for transposed axes made one."""
        lengths = self._filled("view", to)
        if not shape.without_copy(self.shape, self.strides, lengths):
            raise ValueError(
                f"shape {list(self.shape)} with strides {list(self.strides)} cannot be viewed as {list(lengths)}"
                " without a copy: use reshape, which copies where it must"
            )
        return shape.Reshape(lengths).apply(self)

    def unsqueeze(self: Any, axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """With a new axis of length 1, at a place from `-n - 1` to `n` for a tensor of n axes."""
        at = new_axis("unsqueeze", either(None, axis=axis, dim=dim), len(self.shape))
        return self.reshape(*self.shape[:at], 1, *self.shape[at:])

    def squeeze(self: Any, axis: Axis = None, *, dim: Axis = None) -> Tensor:
        """Without its axes of length 1, or without those of them that are named; longer ones stay."""
        named = reduce.axes_of(either(None, axis=axis, dim=dim), len(self.shape))
        return self.reshape(tuple(n for i, n in enumerate(self.shape) if n != 1 or i not in named))

    def clone(self: Any) -> Tensor:
        """A copy in memory of its own; the gradient comes back through it."""
        return shape.Clone().apply(self)

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
        """`x[key]`: integers, slices of positive step, one ellipsis, and None for a new axis of length 1."""
        given = key if isinstance(key, tuple) else (key,)
        for part in given:
            if not (
                part is Ellipsis
                or part is None
                or isinstance(part, slice)
                or (isinstance(part, int) and not isinstance(part, bool))
            ):
                raise TypeError(
                    f"a tensor is indexed by integers, slices, an ellipsis and None, not by {type(part).__name__}: see"
                    " gather and embedding"
                )
            if isinstance(part, slice) and part.step is not None and part.step < 1:
                raise ValueError(f"slices step forward, not by {part.step}")
        if given.count(Ellipsis) > 1:
            raise IndexError("an index has one ellipsis at most")
        count = len(given) - given.count(Ellipsis) - given.count(None)
        missing = len(self.shape) - count
        if missing < 0:
            raise IndexError(f"{count} indices for a tensor of {len(self.shape)} axes")
        at = given.index(Ellipsis) if Ellipsis in given else len(given)
        spelt = (*given[:at], *(slice(None),) * missing, *given[at + 1 :])
        whole = tuple(part for part in spelt if part is not None)
        for i, (part, n) in enumerate(zip(whole, self.shape, strict=True)):
            if isinstance(part, int) and not -n <= part < n:
                raise IndexError(f"index {part} is outside axis {i}, which has {n}")
        places = tuple(p % n if isinstance(p, int) else p for p, n in zip(whole, self.shape, strict=True))
        if len(whole) == len(spelt):
            return shape.Slice(places).apply(self)
        # New axes alone need no copy in the backward, as a slice does.
        out = self if all(part == slice(None) for part in whole) else shape.Slice(places).apply(self)
        lengths = iter(out.shape)
        return out.reshape(tuple(1 if part is None else next(lengths) for part in spelt if not isinstance(part, int)))

    __getitem__ = slice

    def split(
        self: Any, sizes: int | Sequence[int], axis: int | None = None, *, dim: int | None = None
    ) -> tuple[Tensor, ...]:
        """Parts along an axis, the first by default: of one size, the last maybe smaller, or of the sizes given."""
        (found,) = reduce.axes_of(either(0, axis=axis, dim=dim), len(self.shape))
        length = self.shape[found]
        if isinstance(sizes, int):
            if sizes < 0 or (sizes == 0 and length):
                raise ValueError(f"split wants parts of at least 1 of axis {found}, which has {length}, not of {sizes}")
            # Of nothing there is one part.
            sizes = [min(sizes, length - start) for start in range(0, length, max(1, sizes))] or [0]
        if min(sizes, default=0) < 0 or sum(sizes) != length:
            raise ValueError(
                f"split wants sizes of at least 0 that add up to {length}, the length of axis {found}, got"
                f" {list(sizes)}, which make {sum(sizes)}"
            )
        before = (slice(None),) * found
        ends = list(accumulate(sizes))
        return tuple(self[(*before, slice(end - size, end))] for size, end in zip(sizes, ends, strict=True))

    def chunk(self: Any, count: int, axis: int | None = None, *, dim: int | None = None) -> tuple[Tensor, ...]:
        """At most `count` parts along an axis, the first by default: all but the last of one size, the least that
        suffices.
        """
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"chunk wants a number of parts of at least 1, not {count!r}")
        (found,) = reduce.axes_of(either(0, axis=axis, dim=dim), len(self.shape))
        length = self.shape[found]
        return self.split(-(-length // count) if length else (0,) * count, found)

    @staticmethod
    def stack(tensors: Sequence[Tensor], axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """Tensors of one shape side by side along a new axis, the first by default."""
        if not tensors:
            raise ValueError("stack() wants at least one tensor")
        if len({x.shape for x in tensors}) != 1:
            raise ValueError(
                f"stack() wants tensors of one shape, got {', '.join(str(list(x.shape)) for x in tensors)}: cat() joins"
                " those that differ along one axis"
            )
        at = new_axis("stack", either(0, axis=axis, dim=dim), len(tensors[0].shape))
        return Methods.cat([x.unsqueeze(at) for x in tensors], at)

    @staticmethod
    def cat(tensors: Sequence[Tensor], axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """Tensors concatenated along an axis, the first by default; the other axes must be equal."""
        if not tensors:
            raise ValueError("cat() wants at least one tensor")
        (found,) = reduce.axes_of(either(0, axis=axis, dim=dim), len(tensors[0].shape))
        if len({(x.shape[:found], x.shape[found + 1 :]) for x in tensors}) != 1:
            raise ValueError(
                f"cat() along axis {found} wants the other axes equal, got"
                f" {', '.join(str(list(x.shape)) for x in tensors)}"
            )
        dtype = dtypes.promote(*(x.dtype for x in tensors))
        return shape.Cat(found).apply(*(x.astype(dtype) for x in tensors))

    # By number.

    def gather(
        self: Any,
        axis: int | None = None,
        numbers: Tensor | None = None,
        *,
        dim: int | None = None,
        index: Tensor | None = None,
    ) -> Tensor:
        """One element along an axis for each number, which stand in a tensor of as many axes, nowhere longer but along
        that axis; numbers may be called index, as in torch.
        """
        axis, numbers = either(None, axis=axis, dim=dim), either(None, numbers=numbers, index=index)
        if axis is None or numbers is None:
            raise TypeError("gather wants an axis and a tensor of numbers, as in x.gather(1, numbers)")
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
        return by_number.Gather(found).apply(self, numbers)

    def embedding(self: Any, numbers: Tensor) -> Tensor:
        """Rows of this table for each number: `[*numbers.shape, *self.shape[1:]]`."""
        numbered("embedding", self, numbers, len(self))
        return by_number.Take().apply(self, numbers)

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

    @staticmethod
    def einsum(equation: str, *tensors: Tensor) -> Tensor:
        """Einstein's summation: products of elements, summed over the letters that the result does not name.

        `einsum("bij,bjk->bik", x, y)` multiplies matrices. One letter an axis, `...` for any number of them; without an
        arrow the result has the letters that stand once, in their order. As torch's, without its form of lists.
        """
        return contraction.contract(equation, tensors)

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

    def softmax(self: Any, axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """Exponentials over their sum along an axis, the last by default."""
        return self._along_last(either(-1, axis=axis, dim=dim), rows.Softmax())

    def log_softmax(self: Any, axis: int | None = None, *, dim: int | None = None) -> Tensor:
        """The logarithm of softmax along an axis, the last by default."""
        return self._along_last(either(-1, axis=axis, dim=dim), rows.LogSoftmax())

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
