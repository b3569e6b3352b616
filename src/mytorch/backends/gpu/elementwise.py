"""Element by element: shapes broadcast, axes collapsed, one launch."""

import functools

import numpy as np
import torch

from mytorch.backends.base import COMPARISONS, Shape
from mytorch.backends.gpu.kernels_elementwise import mytorch_binary_kernel, mytorch_dropout_kernel, mytorch_unary_kernel, mytorch_where_kernel
from mytorch.backends.gpu.launcher import TORCH_TYPES, Array, collapsed, readable
from mytorch.backends.gpu.reduce import Reduce
from mytorch.dtypes import DType


@functools.lru_cache(maxsize=4096)
def broadcast(*shapes: Shape) -> Shape:
    """The shape that several make together, as NumPy has it."""
    return np.broadcast_shapes(*shapes)


def common(*arrays: Array) -> tuple[Shape, Shape, tuple[Shape, ...]]:
    """The shape that arrays make together; its axes and each array's strides over them, collapsed."""
    shape = arrays[0].shape
    if all(x.shape == shape for x in arrays):
        return tuple(shape), *collapsed(tuple(shape), *(x.stride() for x in arrays))
    together = broadcast(*(tuple(x.shape) for x in arrays))
    return together, *collapsed(together, *(x.expand(together).stride() for x in arrays))


class Elementwise(Reduce):
    """The protocol's element-wise part."""

    def unary(self, name: str, x: Array) -> Array:
        if x.dtype == torch.bool:
            raise TypeError(f"{name} is not defined on bool: convert with astype first")
        out = self._empty(x.shape, x.dtype)
        sizes, (x_strides,) = collapsed(tuple(x.shape), x.stride())
        self._launch_by_elements(
            mytorch_unary_kernel, out.numel(), out=readable(out), x=x, sizes=sizes, x_strides=x_strides, NAME=name, NDIM=len(sizes)
        )
        return out

    def binary(self, name: str, x: Array, y: Array) -> Array:
        if x.dtype == torch.bool and name not in (*COMPARISONS, "add", "mul"):
            raise TypeError(f"{name} is not defined on bool: convert with astype first")
        if name == "pow" and x.dtype == torch.int64:
            self._refuse_negative(y)
        return self._binary(name, x, y)

    def _refuse_negative(self, exponent: Array) -> None:
        """Integers have no integer powers to negative exponents. This waits for the device."""
        least = -int(self.max(self.unary("neg", exponent), tuple(range(exponent.dim())), False)) if exponent.numel() else 0
        if least < 0:
            raise ValueError(f"int64 to the power of {least} is no int64: convert the base with astype first")

    def _binary(self, name: str, x: Array, y: Array) -> Array:
        """The operation, without a look at values."""
        shape, sizes, (x_strides, y_strides) = common(x, y)
        out = self._empty(shape, torch.bool if name in COMPARISONS else x.dtype)
        self._launch_by_elements(
            mytorch_binary_kernel,
            out.numel(),
            out=readable(out),
            x=readable(x),
            y=readable(y),
            sizes=sizes,
            x_strides=x_strides,
            y_strides=y_strides,
            NAME=name,
            NDIM=len(sizes),
            AS_BOOL=out.dtype == torch.bool,
        )
        return out

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        shape, sizes, (condition_strides, x_strides, y_strides) = common(condition, x, y)
        out = self._empty(shape, x.dtype)
        self._launch_by_elements(
            mytorch_where_kernel,
            out.numel(),
            out=readable(out),
            condition=readable(condition),
            x=readable(x),
            y=readable(y),
            sizes=sizes,
            condition_strides=condition_strides,
            x_strides=x_strides,
            y_strides=y_strides,
            NDIM=len(sizes),
        )
        return out

    def dropout_mask(self, shape: Shape, p: float, seed: int, dtype: DType) -> Array:
        out = self._empty(shape, TORCH_TYPES[dtype])
        self._launch_by_elements(mytorch_dropout_kernel, out.numel(), out=readable(out), seed=seed, p=float(p), scale=1 / (1 - p) if p < 1 else 0.0)
        return out
