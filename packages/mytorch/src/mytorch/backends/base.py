"""What a device must be able to do: the protocol that every backend fulfils and every operation is written in.

An array is the backend's own container: `numpy.ndarray` on the CPU, a torch tensor (memory, shape and
strides, nothing else) on CUDA. Arrays of one shape have equal `shape`s, those of one type equal `dtype`s. Arrays that
come in may have any strides; those that come out of arithmetic are new memory, in C order. Nothing writes to an array
that came in, except the methods whose names end in `_`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from mytorch.dtypes import DType

Array = Any
Shape = tuple[int, ...]
Key = tuple[int | slice, ...]

# Functions of one array, and of two, by name: what `unary` and `binary` take.
UNARY = ("neg", "exp", "log", "sqrt", "tanh", "relu", "gelu", "silu", "sigmoid")
# Of an incoming gradient and, by what is cheaper to have kept, the operation's input x or output y.
GRADIENTS = ("sqrt_grad", "tanh_grad", "relu_grad", "gelu_grad", "silu_grad", "sigmoid_grad")
COMPARISONS = ("eq", "lt", "gt")
# pow_base is the derivative of x ** p by x, pow_exponent that of y = x ** p by p, of x and y.
BINARY = ("add", "sub", "mul", "div", "pow", "pow_base", "pow_exponent", *COMPARISONS, *GRADIENTS)


class Backend(Protocol):
    """The operations of one device."""

    name: str

    # Memory.
    def from_numpy(self, x: np.ndarray) -> Array:
        """A copy on this device, in C order."""

    def to_numpy(self, x: Array) -> np.ndarray:
        """A copy in the host's memory, in C order."""

    def full(self, shape: Shape, value: float, dtype: DType) -> Array:
        """New memory, filled."""

    def copy(self, x: Array) -> Array:
        """New memory in C order with the same values."""

    def contiguous(self, x: Array) -> Array:
        """x in C order: itself where it is already, else a copy."""

    def cast(self, x: Array, dtype: DType) -> Array:
        """The values as another type; of the same type, x itself."""

    def copy_(self, x: Array, source: Array) -> None:
        """Write source's values, of the same shape and type, into x."""

    def data_ptr(self, x: Array) -> int:
        """The address of the first element."""

    def dtype(self, x: Array) -> DType:
        """The element type."""

    def strides(self, x: Array) -> Shape:
        """Elements from one index to the next along each axis."""

    # Views: the same memory where strides can express it.
    def reshape(self, x: Array, shape: Shape) -> Array:
        """The elements in C order under another shape; a copy only where strides cannot express it."""

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        """Axes in another order."""

    def broadcast_to(self, x: Array, shape: Shape) -> Array:
        """Repeated along new axes and axes of length 1."""

    def slice(self, x: Array, key: Key) -> Array:
        """Basic indexing with integers and slices of positive step."""

    # Element by element.
    def unary(self, name: str, x: Array) -> Array:
        """One of UNARY; floating point in and out, of the same type."""

    def binary(self, name: str, x: Array, y: Array) -> Array:
        """One of BINARY, of two arrays of the same type, broadcast as NumPy does; comparisons give bool."""

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        """X where condition, else y; all three broadcast."""

    def dropout_mask(self, shape: Shape, p: float, seed: int, dtype: DType) -> Array:
        """0 with probability p, else 1 / (1 - p); the same for the same seed."""

    # Reductions, in fp32 at least.
    def sum(self, x: Array, axes: Shape, keepdims: bool, divisor: float | None = None) -> Array:
        """The sum over axes (all given, none negative), in x's type; with a divisor, a float's is divided before it is
        rounded to that type.
        """

    def max(self, x: Array, axes: Shape, keepdims: bool) -> Array:
        """The largest over axes; NaN where there is one."""

    # Matrices.
    def matmul(self, x: Array, y: Array) -> Array:
        """`[..., M, K] @ [..., K, N]`, leading axes broadcast; sums in fp32 at least."""

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        """`x [M, K] @ weight [K, N] + bias [N]`."""

    # Parts.
    def cat(self, arrays: Sequence[Array], axis: int) -> Array:
        """Arrays of one type, concatenated along an axis."""

    def slice_grad(self, grad: Array, key: Key, shape: Shape) -> Array:
        """Zeros of a shape with grad at key."""

    def take(self, table: Array, index: Array) -> Array:
        """Rows of table `[V, ...]` by int64 index `[...]`.

        The caller rejects one out of range; on CUDA, where a check would synchronise, it gives NaN.
        """

    def take_grad(self, grad: Array, index: Array, rows: int) -> Array:
        """Grad's rows added up where index says, in a fixed order: `[rows, ...]`."""

    def gather(self, x: Array, axis: int, index: Array) -> Array:
        """`out[i][j] = x[index[i][j]][j]` for axis 0, and so on; index has x's number of axes and is nowhere longer,
        but along axis.
        """

    def gather_grad(self, grad: Array, axis: int, index: Array, shape: Shape) -> Array:
        """Grad added up where gather read."""

    # Rows: over the last axis.
    def softmax(self, x: Array) -> Array:
        """Exponentials over their sum."""

    def softmax_grad(self, grad: Array, y: Array) -> Array:
        """From softmax's output."""

    def log_softmax(self, x: Array) -> Array:
        """The logarithm of softmax, without the rounding of going through it."""

    def log_softmax_grad(self, grad: Array, y: Array) -> Array:
        """From log_softmax's output."""

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
        """`(x - mean) * rstd * weight + bias`, and mean and rstd without the last axis, in fp32 at least."""

    def layer_norm_grad(
        self, grad: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        """Gradients of x, weight and bias."""

    # Images, `[B, C, H, W]`; stride and padding by (height, width).
    def conv2d(
        self, x: Array, weight: Array, bias: Array | None, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        """Cross-correlation with weight `[O, C, h, w]`."""

    def conv2d_grad_input(
        self, grad: Array, weight: Array, shape: Shape, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        """The gradient of x, which had a shape."""

    def conv2d_grad_weight(
        self, grad: Array, x: Array, shape: Shape, stride: tuple[int, int], padding: tuple[int, int]
    ) -> Array:
        """The gradient of the weight, which has a shape."""

    def max_pool2d(self, x: Array, size: tuple[int, int], stride: tuple[int, int]) -> tuple[Array, Array]:
        """The largest of each window, and where it stood (the first of equals): int64 `row * W + column`."""

    def max_pool2d_grad(
        self, grad: Array, where: Array, shape: Shape, size: tuple[int, int], stride: tuple[int, int]
    ) -> Array:
        """Grad added up where the largest stood, in images of a shape."""

    # Attention, `[B, T, H, D]`; the heads of k and v may be fewer, each serving as many of q's.
    def attention(self, q: Array, k: Array, v: Array, causal: bool, scale: float) -> tuple[Array, Array]:
        """Output and the logarithm of each row's sum `[B, H, Tq]`, in fp32 at least; causal is aligned at the end, as
        tilewise.flash_attention.
        """

    def attention_grad(
        self, grad: Array, q: Array, k: Array, v: Array, output: Array, lse: Array, causal: bool, scale: float
    ) -> tuple[Array, Array, Array]:
        """Gradients of q, k and v."""

    # Optimisers, in place.
    def sgd_(
        self, x: Array, grad: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float
    ) -> None:
        """`g = grad + weight_decay * x; velocity = momentum * velocity + g; x -= lr * velocity` (g where there is no
        velocity).
        """

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
        """Adam's step number `step` (from 1).

        Decoupled weight decay shrinks x itself (AdamW), the other is added to the gradient.
        """
