"""The serial CPU backend: plain NumPy, one line an operation where possible.

It is the definition that the others are held to.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from mytorch.backends.base import Key, Shape
from mytorch.backends.words import WordsAreNoMethods, unknown
from mytorch.dtypes import DType

Array = np.ndarray

SQRT_2_OVER_PI, CUBIC = 0.7978845608028654, 0.044715


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow for any x."""
    e = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, e) / (1 + e)


def gelu(x: Array) -> Array:
    """Its tanh form."""
    return 0.5 * x * (1 + np.tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x)))


def gelu_grad(grad: Array, x: Array) -> Array:
    """By x, of its tanh form."""
    t = np.tanh(SQRT_2_OVER_PI * (x + CUBIC * x * x * x))
    return grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * SQRT_2_OVER_PI * (1 + 3 * CUBIC * x * x))


def silu_grad(grad: Array, x: Array) -> Array:
    """By x."""
    s = sigmoid(x)
    return grad * s * (1 + x * (1 - s))


UNARY: dict[str, Callable[[Array], Array]] = {
    "neg": np.negative,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": gelu,
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
}
BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    # 0 for p = 0, also at x = 0, where x ** -1 is infinite; 0 at x = 0 for the exponent, where the logarithm is, unless
    # y is too.
    "pow_base": lambda x, p: np.where(p == 0, 0, p * np.power(x, p - 1)),
    "pow_exponent": lambda x, y: np.where((x == 0) & (y != np.inf), 0, y * np.log(x)),
    "eq": np.equal,
    "lt": np.less,
    "gt": np.greater,
    "sqrt_grad": lambda grad, y: grad / (2 * y),
    "tanh_grad": lambda grad, y: grad * (1 - y * y),
    "relu_grad": lambda grad, x: np.where(x > 0, grad, 0),
    "gelu_grad": gelu_grad,
    "silu_grad": silu_grad,
    "sigmoid_grad": lambda grad, y: grad * y * (1 - y),
}


def wide(x: Array) -> Array:
    """fp16 as fp32, to add up in; other types as they are."""
    return x.astype(np.float32) if x.dtype == np.float16 else x


def windows(x: Array, size: Shape, stride: tuple[int, int], padding: tuple[int, int]) -> Array:
    """Every window of an image, `[B, C, rows, columns, h, w]`: a view of x, or of x with a border of zeros."""
    if padding != (0, 0):
        x = np.pad(x, ((0, 0), (0, 0), (padding[0],) * 2, (padding[1],) * 2))
    return sliding_window_view(x, size, axis=(2, 3))[:, :, :: stride[0], :: stride[1]]


class SerialBackend(WordsAreNoMethods):
    """The protocol of `base.Backend` in NumPy."""

    name = "serial"

    def from_numpy(self, x: np.ndarray) -> Array:
        return np.array(x, order="C")

    def to_numpy(self, x: Array) -> np.ndarray:
        return np.array(x, order="C")

    def full(self, shape: Shape, value: float, dtype: DType) -> Array:
        return np.full(shape, value, dtype)

    def copy(self, x: Array) -> Array:
        return np.array(x, order="C")

    def contiguous(self, x: Array) -> Array:
        return np.asarray(x, order="C")

    def cast(self, x: Array, dtype: DType) -> Array:
        return x if x.dtype == dtype else x.astype(dtype, order="C")

    def copy_(self, x: Array, source: Array) -> None:
        x[...] = source

    def data_ptr(self, x: Array) -> int:
        return x.ctypes.data

    def dtype(self, x: Array) -> DType:
        return x.dtype

    def strides(self, x: Array) -> Shape:
        return tuple(stride // x.itemsize for stride in x.strides)

    def reshape(self, x: Array, shape: Shape) -> Array:
        return x.reshape(shape)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.transpose(axes)

    def broadcast_to(self, x: Array, shape: Shape) -> Array:
        return np.broadcast_to(x, shape)

    def slice(self, x: Array, key: Key) -> Array:
        # The ellipsis makes a view of what would be a number.
        return x[(*key, ...)]

    def unary(self, name: str, x: Array) -> Array:
        if name not in UNARY:
            raise unknown("unary", name, tuple(UNARY))
        with np.errstate(all="ignore"):
            return np.asarray(UNARY[name](wide(x)), dtype=x.dtype, order="C")

    def binary(self, name: str, x: Array, y: Array) -> Array:
        if name not in BINARY:
            raise unknown("binary", name, tuple(BINARY))
        with np.errstate(all="ignore"):
            out = BINARY[name](wide(x), wide(y))
        return np.asarray(out, dtype=out.dtype if out.dtype == np.bool_ else x.dtype, order="C")

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        return np.asarray(np.where(condition, x, y), order="C")

    def dropout_mask(self, shape: Shape, p: float, seed: int, dtype: DType) -> Array:
        keep = np.random.default_rng(seed).random(shape, dtype=np.float32) >= p
        return keep.astype(dtype) * dtype.type(1 / (1 - p) if p < 1 else 0)

    def sum(self, x: Array, axes: Shape, keepdims: bool, divisor: float | None = None) -> Array:
        total = wide(x).sum(axes, keepdims=keepdims)
        if divisor is not None:
            with np.errstate(all="ignore"):
                total = total / divisor
        return np.asarray(total, dtype=x.dtype)

    def max(self, x: Array, axes: Shape, keepdims: bool) -> Array:
        return np.asarray(x.max(axes, keepdims=keepdims))

    def matmul(self, x: Array, y: Array) -> Array:
        return np.asarray(np.matmul(wide(x), wide(y)), dtype=x.dtype, order="C")

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        out = np.matmul(wide(x), wide(weight))
        if bias is not None:
            out += bias
        return out.astype(x.dtype, copy=False)

    def cat(self, arrays: Sequence[Array], axis: int) -> Array:
        return np.concatenate(arrays, axis)

    def slice_grad(self, grad: Array, key: Key, shape: Shape) -> Array:
        out = np.zeros(shape, grad.dtype)
        out[key] = grad
        return out

    def take(self, table: Array, index: Array) -> Array:
        return np.asarray(table[index])

    def take_grad(self, grad: Array, index: Array, rows: int) -> Array:
        out = np.zeros((rows, *grad.shape[index.ndim :]), wide(grad).dtype)
        np.add.at(out, index, grad)
        return out.astype(grad.dtype, copy=False)

    def gather(self, x: Array, axis: int, index: Array) -> Array:
        return np.asarray(x[self._places(axis, index)], order="C")

    def gather_grad(self, grad: Array, axis: int, index: Array, shape: Shape) -> Array:
        out = np.zeros(shape, wide(grad).dtype)
        np.add.at(out, self._places(axis, index), grad)
        return out.astype(grad.dtype, copy=False)

    def _places(self, axis: int, index: Array) -> tuple[Array, ...]:
        return tuple(index if i == axis else place for i, place in enumerate(np.ogrid[tuple(map(slice, index.shape))]))

    def softmax(self, x: Array) -> Array:
        e = np.exp(wide(x) - x.max(-1, keepdims=True, initial=-np.inf))
        return (e / e.sum(-1, keepdims=True)).astype(x.dtype)

    def softmax_grad(self, grad: Array, y: Array) -> Array:
        grad_, y_ = wide(grad), wide(y)
        return (y_ * (grad_ - (grad_ * y_).sum(-1, keepdims=True))).astype(y.dtype)

    def log_softmax(self, x: Array) -> Array:
        shifted = wide(x) - x.max(-1, keepdims=True, initial=-np.inf)
        return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))).astype(x.dtype)

    def log_softmax_grad(self, grad: Array, y: Array) -> Array:
        grad_ = wide(grad)
        return (grad_ - np.exp(wide(y)) * grad_.sum(-1, keepdims=True)).astype(y.dtype)

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
        x_ = wide(x)
        mean = x_.mean(-1)
        # The sum's rounding, which would pass for deviation where all are about equal.
        mean = mean + (x_ - mean[..., None]).mean(-1)
        centred = x_ - mean[..., None]
        rstd = 1 / np.sqrt((centred * centred).mean(-1) + eps)
        return (centred * rstd[..., None] * weight + bias).astype(x.dtype), mean, rstd.astype(mean.dtype)

    def layer_norm_grad(
        self, grad: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        grad_, rows = wide(grad), tuple(range(x.ndim - 1))
        normed = (wide(x) - mean[..., None]) * rstd[..., None]
        scaled = grad_ * weight
        dx = rstd[..., None] * (
            scaled - scaled.mean(-1, keepdims=True) - normed * (scaled * normed).mean(-1, keepdims=True)
        )
        return dx.astype(x.dtype), (grad_ * normed).sum(rows).astype(weight.dtype), grad_.sum(rows).astype(weight.dtype)

    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        seen = windows(wide(x), weight.shape[2:], stride, padding)
        out = np.tensordot(seen, wide(weight), ([1, 4, 5], [1, 2, 3])).transpose(0, 3, 1, 2)
        if bias is not None:
            out = out + bias[:, None, None]
        return np.asarray(out, dtype=x.dtype, order="C")

    def conv2d_grad_input(
        self, grad: Array, weight: Array, shape: Shape, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        rows, columns = grad.shape[2:]
        out = np.zeros((*shape[:2], shape[2] + 2 * padding[0], shape[3] + 2 * padding[1]), wide(grad).dtype)
        for i, j in np.ndindex(*weight.shape[2:]):
            part = np.tensordot(wide(grad), wide(weight)[:, :, i, j], ([1], [0])).transpose(0, 3, 1, 2)
            out[:, :, i : i + rows * stride[0] : stride[0], j : j + columns * stride[1] : stride[1]] += part
        out = out[:, :, padding[0] : padding[0] + shape[2], padding[1] : padding[1] + shape[3]]
        return np.asarray(out, dtype=grad.dtype, order="C")

    def conv2d_grad_weight(
        self, grad: Array, x: Array, shape: Shape, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        seen = windows(wide(x), shape[2:], stride, padding)
        return np.tensordot(wide(grad), seen, ([0, 2, 3], [0, 2, 3])).astype(grad.dtype, copy=False)

    def max_pool2d(self, x: Array, size: tuple[int, int], stride: tuple[int, int]) -> tuple[Array, Array]:
        seen = windows(x, size, stride, (0, 0))
        flat = seen.reshape(*seen.shape[:4], size[0] * size[1])
        best = flat.argmax(-1)
        out = np.take_along_axis(flat, best[..., None], -1)[..., 0]
        row = np.arange(seen.shape[2])[:, None] * stride[0] + best // size[1]
        column = np.arange(seen.shape[3]) * stride[1] + best % size[1]
        return out, row * x.shape[3] + column

    def max_pool2d_grad(
        self, grad: Array, where: Array, shape: Shape, size: tuple[int, int], stride: tuple[int, int]
    ) -> Array:
        out = np.zeros((shape[0] * shape[1], shape[2] * shape[3]), wide(grad).dtype)
        image = np.arange(len(out))[:, None]
        pixels = grad.shape[2] * grad.shape[3]
        np.add.at(out, (image, where.reshape(len(out), pixels)), grad.reshape(len(out), pixels))
        return out.reshape(shape).astype(grad.dtype, copy=False)

    def attention(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
        scores = self._scores(q, k, causal, scale)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        top = np.where(np.isfinite(top), top, 0)
        p = np.exp(scores - top)
        total = p.sum(-1, keepdims=True)
        with np.errstate(divide="ignore"):
            lse = (np.log(total) + top)[..., 0]
        out = np.matmul(p / np.where(total == 0, 1, total), self._heads_first(v, q.shape[2]))
        return np.asarray(out.transpose(0, 2, 1, 3), dtype=q.dtype, order="C"), lse

    def attention_grad(
        self, grad: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        heads = q.shape[2]
        q_, k_, v_, grad_, output_ = (self._heads_first(x, heads) for x in (q, k, v, grad, output))
        p = np.exp(self._scores(q, k, causal, scale) - np.where(np.isfinite(lse), lse, 0)[..., None])
        dp = np.matmul(grad_, v_.swapaxes(-1, -2))
        ds = p * (dp - (grad_ * output_).sum(-1, keepdims=True)) * scale
        dq, dk, dv = np.matmul(ds, k_), np.matmul(ds.swapaxes(-1, -2), q_), np.matmul(p.swapaxes(-1, -2), grad_)
        return (
            self._heads_back(dq, heads, q.dtype),
            self._heads_back(dk, k.shape[2], k.dtype),
            self._heads_back(dv, k.shape[2], v.dtype),
        )

    def _scores(self, q: Array, k: Array, causal: bool, scale: float) -> Array:
        """`[B, H, Tq, Tk]`, -inf where a query does not see a key."""
        scores = np.matmul(self._heads_first(q, q.shape[2]), self._heads_first(k, q.shape[2]).swapaxes(-1, -2)) * scale
        if causal:
            rows, columns = scores.shape[-2:]
            scores = np.where(
                np.tri(rows, columns, columns - rows, dtype=np.bool_), scores, np.asarray(-np.inf, scores.dtype)
            )
        return scores

    def _heads_first(self, x: Array, heads: int) -> Array:
        """`[B, H, T, D]`, each head repeated until there are as many as q's."""
        return (
            np.repeat(wide(x).transpose(0, 2, 1, 3), heads // x.shape[2], axis=1)
            if x.shape[2]
            else wide(x).transpose(0, 2, 1, 3)
        )

    def _heads_back(self, grad: Array, heads: int, dtype: DType) -> Array:
        """`[B, T, heads, D]`: the gradients of repeated heads added up."""
        batch, _, tokens, channels = grad.shape
        grad = grad.reshape(batch, heads, grad.shape[1] // heads, tokens, channels).sum(2)
        return np.asarray(grad.transpose(0, 2, 1, 3), dtype=dtype, order="C")

    def sgd_(
        self, x: Array, grad: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float
    ) -> None:
        update = wide(grad) + weight_decay * wide(x) if weight_decay else wide(grad)
        if velocity is not None:
            update = momentum * wide(velocity) + update
            velocity[...] = update
        x[...] = wide(x) - lr * update

    def adam_(
        self,
        x: Array,
        grad: Array,
        first: Array,
        second: Array,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        x_, grad_, first_, second_ = wide(x), wide(grad), wide(first), wide(second)
        if decoupled:
            x_ = x_ * (1 - lr * weight_decay)
        elif weight_decay:
            grad_ = grad_ + weight_decay * x_
        first_ = first_ + (1 - betas[0]) * (grad_ - first_)
        second_ = second_ + (1 - betas[1]) * (grad_ * grad_ - second_)
        corrected = np.sqrt(second_ / (1 - betas[1] ** step)) + eps
        x[...] = x_ - lr / (1 - betas[0] ** step) * first_ / corrected
        first[...], second[...] = first_, second_
