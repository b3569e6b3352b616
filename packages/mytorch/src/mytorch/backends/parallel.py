"""The parallel CPU backend: the serial one, with loops on OpenMP threads where they are worth it.

What is small, in fp16 or of integers, or laid out in a way no loop is written for goes to NumPy: the results are those
of the serial backend but for rounding. Matrix products are BLAS's, which has its own threads.
"""

import functools
import math

import numba
import numpy as np

from mytorch.backends.base import Shape
from mytorch.backends.loops import attention, attention_grad, elementwise, image, optimiser, reductions
from mytorch.backends.loops import rows as row_loops
from mytorch.backends.loops.tiles import ROWS, lanes
from mytorch.backends.serial import SerialBackend

Array = np.ndarray
Pair = tuple[int, int]

# Elements from which threads pay, measured on two cores: starting them takes about 10 microseconds.
# Cheap is what NumPy does with vector instructions in one pass.
CHEAP, COSTLY = 1 << 17, 1 << 14
# Multiplications from which convolution and attention leave NumPy: below, finding out what to do takes as long as doing
# it.
PRODUCTS = 1 << 17
# Rows shorter than this are not worth a loop of their own.
SHORT = 32
# Into how many sums a long one is split, for any number of threads, so that the result does not depend on it.
PARTS = 16

UNARY = {name: number for number, name in enumerate(elementwise.UNARY)}
BINARY = {name: number for number, name in enumerate(elementwise.BINARY)}
# Operations whose operands may be exchanged, and the name they then have.
EXCHANGED = {"add": "add", "mul": "mul", "sub": "sub from", "div": "div from"}
COSTLY_NAMES = {"gelu", "silu", "sigmoid", "relu_grad", "gelu_grad", "silu_grad"}


def suits(least: int, *arrays: Array) -> bool:
    """Whether loops exist for the type that these have, all the same, and the first is large enough, the others not
    empty.
    """
    kind = arrays[0].dtype
    right = kind in (np.float32, np.float64) and all(x.dtype == kind and x.size for x in arrays)
    return right and arrays[0].size >= least


def beside(x: Array, y: Array) -> tuple[int, int, bool] | None:
    """How x's elements meet y's: x in segments of a length, segment i against `y[i * step]`, one for all of it or the
    first of as many.

    None where y is broadcast in another way, or x is.
    """
    if x.shape == y.shape:
        return x.size, 0, False
    if y.ndim > x.ndim:
        return None
    if y.size == 1:
        return x.size, 0, True
    shape = (1,) * (x.ndim - y.ndim) + y.shape
    first = next(i for i, n in enumerate(shape) if n != 1)
    last = next(i for i in range(len(shape), 0, -1) if shape[i - 1] != 1)
    if shape[first:] == x.shape[first:] and y.size >= SHORT:
        return y.size, 0, False
    length = math.prod(x.shape[last:])
    return (length, 1, True) if shape[:last] == x.shape[:last] and length >= SHORT else None


def flat(x: Array) -> Array:
    """In C order, with one axis."""
    return np.ascontiguousarray(x).reshape(-1)


def in_rows(x: Array) -> Array:
    """In C order, with two axes, the last one kept."""
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def heads_first(x: Array) -> Array:
    """`[B, T, H, D]` as `[B, H, T, D]` in C order: rows far apart would share few cache sets."""
    return np.ascontiguousarray(x.transpose(0, 2, 1, 3))


def places(channels: int, size: Shape, plane: Shape, step: Pair = (1, 1)) -> Array:
    """Offsets of `[channels, *size]` in planes of a size, a step apart."""
    c, i, j = np.ogrid[:channels, : size[0], : size[1]]
    return (c * plane[0] + i * step[0]) * plane[1] + j * step[1]


def whole_rows(offsets: Array) -> Array:
    """Flat, the last one repeated up to whole ROWS."""
    found = offsets.reshape(-1)
    return np.append(found, np.repeat(found[-1:], -len(found) % ROWS))


@functools.lru_cache(maxsize=64)
def convolution_plan(
    channels: int, window: Shape, size: Shape, plane: Shape, step: Pair, band: Pair
) -> tuple[Array, Array, Array]:
    """Pixels, taps, and which range of the taps each group of pixels needs: rows of the plane outside a band are 0.

    Taps are ordered by the window's rows first, so that a range of them leaves rows out.
    """
    pixels = whole_rows(places(1, size, plane, step))
    taps = places(channels, window, plane).transpose(1, 0, 2).reshape(-1)
    top = pixels.reshape(-1, ROWS)[:, [0, -1]] // plane[1]
    first = np.clip(band[0] - top[:, 1], 0, window[0])
    last = np.clip(band[1] - top[:, 0], first, window[0])
    return pixels, taps, np.stack([first, last], 1) * (channels * window[1])


@functools.lru_cache(maxsize=64)
def weight_plan(channels: int, window: Shape, size: Shape, plane: Shape, step: Pair) -> tuple[Array, Array]:
    """Pixels and taps for the weight's gradient."""
    return places(1, size, plane, step).reshape(-1), whole_rows(places(channels, window, plane))


def whole_vectors(columns: Array) -> Array:
    """A copy in C order, the last axis filled up with zeros to whole vectors."""
    count = columns.shape[-1]
    out = np.zeros((*columns.shape[:-1], count + -count % lanes(columns.dtype)), columns.dtype)
    out[..., :count] = columns
    return out


class ParallelBackend(SerialBackend):
    """The protocol of `base.Backend` on threads."""

    name = "parallel"

    @property
    def _threads(self) -> int:
        return numba.get_num_threads()

    def unary(self, name: str, x: Array) -> Array:
        if name not in UNARY or not suits(COSTLY if name in COSTLY_NAMES else CHEAP, x):
            return super().unary(name, x)
        out = np.empty(x.shape, x.dtype)
        elementwise.unary(UNARY[name], flat(x), self._threads, out.reshape(-1))
        return out

    def binary(self, name: str, x: Array, y: Array) -> Array:
        if name in EXCHANGED and y.size > x.size:
            return self._binary(EXCHANGED[name], y, x, name, (x, y))
        return self._binary(name, x, y, name, (x, y))

    def _binary(self, name: str, x: Array, y: Array, given: str, operands: tuple[Array, Array]) -> Array:
        found = beside(x, y) if name in BINARY and suits(COSTLY if name in COSTLY_NAMES else CHEAP, x, y) else None
        if found is None or (given not in EXCHANGED and x.shape != y.shape):
            return super().binary(given, *operands)
        out = np.empty(x.shape, x.dtype)
        elementwise.binary(BINARY[name], flat(x), flat(y), *found, self._threads, out.reshape(-1))
        return out

    def sum(self, x: Array, axes: Shape, keepdims: bool, divisor: float | None = None) -> Array:
        kept = [i for i in range(x.ndim) if i not in axes]
        if not axes or not suits(max(CHEAP, PARTS), x) or (kept and kept[-1] - kept[0] >= len(kept)):
            return super().sum(x, axes, keepdims, divisor)
        shape = tuple(1 if i in axes else n for i, n in enumerate(x.shape) if keepdims or i not in axes)
        total = self._sum(x, kept) if divisor is None else self._sum(x, kept) / divisor
        return total.astype(x.dtype, copy=False).reshape(shape)

    def _sum(self, x: Array, kept: list[int]) -> Array:
        """Flat, over all axes but those kept, which stand side by side."""
        if not kept:
            parts = np.empty(PARTS)
            count = x.size // PARTS * PARTS
            reductions.sum_around(flat(x)[:count], PARTS, count // PARTS, parts)
            return np.asarray(parts.sum() + flat(x)[count:].sum(dtype=np.float64))
        inner, middle = math.prod(x.shape[kept[-1] + 1 :]), math.prod(x.shape[i] for i in kept)
        if inner == 1:
            table = np.ascontiguousarray(x).reshape(-1, middle)
            leading = np.empty((min(PARTS, len(table)), middle), x.dtype)
            reductions.sum_leading(table, leading)
            return leading.sum(0)
        out = np.empty(middle, x.dtype)
        reductions.sum_around(flat(x), middle, inner, out)
        return out

    def take_grad(self, grad: Array, index: Array, rows: int) -> Array:
        if not suits(COSTLY, grad):
            return super().take_grad(grad, index, rows)
        out = np.empty((rows, *grad.shape[index.ndim :]), grad.dtype)
        numbers = flat(index)
        # Stable: rows of one number are added in the order in which they came.
        order = np.argsort(numbers, kind="stable")
        starts = np.searchsorted(numbers[order], np.arange(rows + 1))
        row_loops.add_rows(flat(grad).reshape(len(numbers), -1), order, starts, out.reshape(rows, -1))
        return out

    def softmax(self, x: Array) -> Array:
        return self._softmax(x, False) if suits(COSTLY, x) else super().softmax(x)

    def log_softmax(self, x: Array) -> Array:
        return self._softmax(x, True) if suits(COSTLY, x) else super().log_softmax(x)

    def _softmax(self, x: Array, logarithm: bool) -> Array:
        out = np.empty(x.shape, x.dtype)
        row_loops.softmax(in_rows(x), logarithm, self._threads, in_rows(out))
        return out

    def softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._softmax_grad(grad, y, False) if suits(COSTLY, y, grad) else super().softmax_grad(grad, y)

    def log_softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._softmax_grad(grad, y, True) if suits(COSTLY, y, grad) else super().log_softmax_grad(grad, y)

    def _softmax_grad(self, grad: Array, y: Array, logarithm: bool) -> Array:
        out = np.empty(y.shape, y.dtype)
        row_loops.softmax_grad(in_rows(grad), in_rows(y), logarithm, self._threads, in_rows(out))
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
        if not suits(COSTLY, x, weight, bias):
            return super().layer_norm(x, weight, bias, eps)
        out, mean, rstd = np.empty(x.shape, x.dtype), np.empty(x.shape[:-1], x.dtype), np.empty(x.shape[:-1], x.dtype)
        row_loops.layer_norm(
            in_rows(x), flat(weight), flat(bias), eps, self._threads, in_rows(out), mean.reshape(-1), rstd.reshape(-1)
        )
        return out, mean, rstd

    def layer_norm_grad(
        self, grad: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        if not suits(COSTLY, x, grad, weight, mean, rstd):
            return super().layer_norm_grad(grad, x, weight, mean, rstd)
        out, x_ = np.empty(x.shape, x.dtype), in_rows(x)
        sums = np.empty((2, min(PARTS, len(x_)), len(weight)), x.dtype)
        row_loops.layer_norm_grad(in_rows(grad), x_, flat(weight), flat(mean), flat(rstd), in_rows(out), *sums)
        return out, *sums.sum(1)

    def conv2d(self, x: Array, weight: Array, bias: Array | None, stride: Pair, padding: Pair) -> Array:
        plane = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
        size = tuple((n - m) // step + 1 for n, m, step in zip(plane, weight.shape[2:], stride, strict=True))
        if not suits(1, x, weight) or len(x) * math.prod(size) * weight.size < PRODUCTS:
            return super().conv2d(x, weight, bias, stride, padding)
        start = np.zeros(len(weight), x.dtype) if bias is None else bias
        return self._convolve(
            x, (1, 1), padding, plane, weight.transpose(2, 1, 3, 0), start, stride, (len(x), len(weight), *size)
        )

    def conv2d_grad_input(self, grad: Array, weight: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        window = weight.shape[2:]
        corner = window[0] - 1 - padding[0], window[1] - 1 - padding[1]
        if (
            not suits(1, grad, weight)
            or min(corner) < 0
            or math.prod(shape) // max(1, shape[1]) * weight.size < PRODUCTS
        ):
            return super().conv2d_grad_input(grad, weight, shape, stride, padding)
        plane = shape[2] + window[0] - 1, shape[3] + window[1] - 1
        turned = weight[:, :, ::-1, ::-1].transpose(2, 0, 3, 1)
        return self._convolve(grad, stride, corner, plane, turned, np.zeros(shape[1], grad.dtype), (1, 1), shape)

    def _convolve(
        self, x: Array, spread: Pair, corner: Pair, plane: Pair, weight: Array, start: Array, step: Pair, shape: Shape
    ) -> Array:
        """Weight is `[h, C, w, O]`, start what each channel of the result begins with."""
        height, channels, width = weight.shape[:3]
        band = corner[0], corner[0] + (x.shape[2] - 1) * spread[0] + 1
        plan = convolution_plan(channels, (height, width), shape[2:], plane, step, band)
        right = whole_vectors(weight.reshape(height * channels * width, -1))
        out = np.empty(shape, x.dtype)
        parts = min(self._threads, len(x))
        whole = out.reshape(*shape[:2], -1)
        image.convolve(np.ascontiguousarray(x), spread, corner, plane, right, whole_vectors(start), *plan, parts, whole)
        return out

    def conv2d_grad_weight(self, grad: Array, x: Array, shape: Shape, stride: Pair, padding: Pair) -> Array:
        if not suits(1, x, grad) or len(x) * math.prod(grad.shape[2:]) * math.prod(shape) < PRODUCTS:
            return super().conv2d_grad_weight(grad, x, shape, stride, padding)
        plane = x.shape[2] + 2 * padding[0], x.shape[3] + 2 * padding[1]
        pixels, taps = weight_plan(shape[1], shape[2:], grad.shape[2:], plane, stride)
        lane = lanes(x.dtype)
        sums = np.empty((min(PARTS, len(x)), len(taps), -(-shape[0] // lane) * lane), x.dtype)
        image.convolve_weight(
            np.ascontiguousarray(x), padding, plane, flat(grad).reshape(*grad.shape[:2], -1), pixels, taps, sums
        )
        return np.ascontiguousarray(sums.sum(0)[: math.prod(shape[1:]), : shape[0]].T).reshape(shape)

    def max_pool2d(self, x: Array, size: Pair, stride: Pair) -> tuple[Array, Array]:
        if not suits(COSTLY, x):
            return super().max_pool2d(x, size, stride)
        shape = (*x.shape[:2], *((n - m) // step + 1 for n, m, step in zip(x.shape[2:], size, stride, strict=True)))
        out, where = np.empty(shape, x.dtype), np.empty(shape, np.int64)
        planes = np.ascontiguousarray(x).reshape(-1, *x.shape[2:])
        image.pool(planes, size, stride, out.reshape(-1, *shape[2:]), where.reshape(-1, *shape[2:]))
        return out, where

    def max_pool2d_grad(self, grad: Array, where: Array, shape: Shape, size: Pair, stride: Pair) -> Array:
        if not suits(COSTLY // 4, grad):
            return super().max_pool2d_grad(grad, where, shape, size, stride)
        out = np.empty(shape, grad.dtype)
        planes = shape[0] * shape[1]
        image.pool_grad(flat(grad).reshape(planes, -1), flat(where).reshape(planes, -1), out.reshape(planes, -1))
        return out

    def attention(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
        if not suits(1, q, k, v) or q.size * k.shape[1] < PRODUCTS:
            return super().attention(q, k, v, causal, scale)
        out, lse = (
            np.empty((*q.shape[:3], v.shape[3]), q.dtype),
            np.empty((q.shape[0], q.shape[2], q.shape[1]), q.dtype),
        )
        attention.forward(*map(np.ascontiguousarray, (q, k, v)), causal, scale, self._threads, out, lse)
        return out, lse

    def attention_grad(
        self, grad: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        if not suits(1, grad, q, k, v, output, lse) or q.size * k.shape[1] < PRODUCTS:
            return super().attention_grad(grad, q, k, v, output, lse, causal, scale)
        delta = np.einsum("bthd,bthd->bht", grad, output, order="C")
        dq, dk, dv = (np.empty(x.shape, x.dtype) for x in (q, k, v))
        tokens, channels = (
            -(-n // whole) * whole for n, whole in ((q.shape[1], attention.TOKENS), (q.shape[3], lanes(q.dtype)))
        )
        added = np.empty((attention_grad.chunks(q, k, PARTS), len(q), q.shape[2], tokens, channels), q.dtype)
        attention_grad.backward(
            heads_first(grad),
            heads_first(q),
            np.ascontiguousarray(k),
            np.ascontiguousarray(v),
            np.ascontiguousarray(np.where(np.isfinite(lse), lse, 0) * lse.dtype.type(attention.LOG2_E)),
            delta,
            causal,
            scale,
            self._threads,
            added,
            dk,
            dv,
        )
        attention_grad.add_up(added, scale, dq)
        return dq, dk, dv

    def sgd_(
        self, x: Array, grad: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float
    ) -> None:
        speed = np.empty(0, x.dtype) if velocity is None else velocity
        if suits(CHEAP, x, grad) and speed.dtype == x.dtype and x.flags.c_contiguous and speed.flags.c_contiguous:
            optimiser.sgd(x.reshape(-1), flat(grad), speed.reshape(-1), lr, momentum, weight_decay, self._threads)
        else:
            super().sgd_(x, grad, velocity, lr, momentum, weight_decay)

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
        if not suits(COSTLY, x, grad, first, second) or not all(a.flags.c_contiguous for a in (x, first, second)):
            super().adam_(x, grad, first, second, step, lr, betas, eps, weight_decay, decoupled)
            return
        decay = (1 - lr * weight_decay, 0.0) if decoupled else (1.0, float(weight_decay))
        rates = (*betas, lr / (1 - betas[0] ** step), 1 - betas[1] ** step, eps)
        optimiser.adam(x.reshape(-1), flat(grad), first.reshape(-1), second.reshape(-1), *decay, *rates, self._threads)
