"""Element by element: shapes broadcast, axes collapsed, one launch."""

import numpy as np
import torch

from mytorch.backends.base import BINARY, COMPARISONS, UNARY, Shape
from mytorch.backends.gpu.kernels_elementwise import (
    mytorch_binary_kernel,
    mytorch_dropout_kernel,
    mytorch_unary_kernel,
    mytorch_where_kernel,
)
from mytorch.backends.gpu.launcher import (
    TORCH_TYPES,
    Array,
    Plan,
    collapsed,
    plan_elements,
    plan_whole,
    planned,
    readable,
)
from mytorch.backends.gpu.reduce import Reduce
from mytorch.backends.words import unknown
from mytorch.dtypes import DType


def expanded(shape: Shape, strides: Shape, to: Shape) -> Shape:
    """An array's strides under the shape that it is broadcast to."""
    new = len(to) - len(shape)
    return (0,) * new + tuple(0 if n == 1 else step for n, step in zip(shape, strides, strict=True))


@planned
def plan_unary(name: str, dtype: torch.dtype, shape: Shape, strides: Shape) -> Plan:
    """For `unary`."""
    if name not in UNARY:
        raise unknown("unary", name, UNARY)
    sizes, (x_strides,) = collapsed(shape, strides)
    return plan_elements(
        mytorch_unary_kernel, shape, dtype, sizes=sizes, x_strides=x_strides, NAME=name, NDIM=len(sizes)
    )


@planned
def plan_binary(
    name: str, dtype: torch.dtype, x_shape: Shape, y_shape: Shape, x_strides: Shape, y_strides: Shape
) -> Plan:
    """For `binary`."""
    if name not in BINARY:
        raise unknown("binary", name, BINARY)
    shape = np.broadcast_shapes(x_shape, y_shape)
    sizes, (x_steps, y_steps) = collapsed(
        shape, expanded(x_shape, x_strides, shape), expanded(y_shape, y_strides, shape)
    )
    out = torch.bool if name in COMPARISONS else dtype
    named = {"NAME": name, "NDIM": len(sizes), "AS_BOOL": out == torch.bool}
    return plan_elements(mytorch_binary_kernel, shape, out, sizes=sizes, x_strides=x_steps, y_strides=y_steps, **named)


@planned
def plan_where(dtype: torch.dtype, shapes: tuple[Shape, ...], strides: tuple[Shape, ...]) -> Plan:
    """For `where`: of the condition and of both that are chosen from."""
    shape = np.broadcast_shapes(*shapes)
    sizes, steps = collapsed(
        shape, *(expanded(before, step, shape) for before, step in zip(shapes, strides, strict=True))
    )
    named = dict(zip(("condition_strides", "x_strides", "y_strides"), steps, strict=True))
    return plan_elements(mytorch_where_kernel, shape, dtype, sizes=sizes, NDIM=len(sizes), **named)


class Elementwise(Reduce):
    """The protocol's element-wise part."""

    def unary(self, name: str, x: Array) -> Array:
        if x.dtype == torch.bool:
            raise TypeError(f"{name} is not defined on bool: convert with astype first")
        return self._result(plan_unary(name, x.dtype, x.shape, x.stride()), x=x)

    def binary(self, name: str, x: Array, y: Array) -> Array:
        if x.dtype == torch.bool and name not in (*COMPARISONS, "add", "mul"):
            raise TypeError(f"{name} is not defined on bool: convert with astype first")
        if name == "pow" and x.dtype == torch.int64:
            self._refuse_negative(y)
        return self._binary(name, x, y)

    def _refuse_negative(self, exponent: Array) -> None:
        """Integers have no integer powers to negative exponents. This waits for the device."""
        least = (
            -int(self.max(self.unary("neg", exponent), tuple(range(exponent.dim())), False)) if exponent.numel() else 0
        )
        if least < 0:
            raise ValueError(f"int64 to the power of {least} is no int64: convert the base with astype first")

    def _binary(self, name: str, x: Array, y: Array) -> Array:
        """The operation, without a look at values."""
        return self._result(
            plan_binary(name, x.dtype, x.shape, y.shape, x.stride(), y.stride()), x=readable(x), y=readable(y)
        )

    def where(self, condition: Array, x: Array, y: Array) -> Array:
        plan = plan_where(x.dtype, (condition.shape, x.shape, y.shape), (condition.stride(), x.stride(), y.stride()))
        return self._result(plan, condition=readable(condition), x=readable(x), y=readable(y))

    def dropout_mask(self, shape: Shape, p: float, seed: int, dtype: DType) -> Array:
        plan = plan_whole(mytorch_dropout_kernel, tuple(shape), TORCH_TYPES[dtype])
        return self._result(plan, seed=seed, p=float(p), scale=1 / (1 - p) if p < 1 else 0.0)
