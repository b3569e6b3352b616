"""Over the last axis: softmax, its logarithm, layer norm, and their gradients."""

import math
from typing import Any

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_rows import (
    mytorch_layer_norm_columns_kernel,
    mytorch_layer_norm_grad_kernel,
    mytorch_layer_norm_kernel,
    mytorch_softmax_grad_kernel,
    mytorch_softmax_kernel,
)
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, Plan, blocks, collapsed, plan_launch, planned, wide
from mytorch.backends.gpu.matrix import divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce
from tilewise.ops._host.launching import power_of_2

TILE = 4096
COLUMNS, COLUMN_ROWS = 64, 32


def rows_of(shape: Shape, strides: Shape, prefix: str = "") -> dict[str, Any]:
    """Where an array's rows lie, as kernels take it: the axes before the last, collapsed, their strides, and that of
    the last.
    """
    sizes, (steps,) = collapsed(shape[:-1], strides[:-1])
    whose = prefix or "x_"
    return {
        f"{prefix}sizes": sizes,
        f"{whose}strides": steps,
        f"{whose}stride": strides[-1],
        f"{prefix.upper()}NDIM": len(sizes),
    }


def plan_rows(kernel: Any, shape: Shape, dtype: torch.dtype, **fixed: Any) -> Plan:
    """For a kernel with one program per block of an array's rows."""
    length = shape[-1]
    n_rows = math.prod(shape) // length if length else 0
    block_n = min(power_of_2(length), TILE)
    block_r = min(power_of_2(n_rows), max(1, TILE // 2 // block_n))
    fixed |= {"n_rows": n_rows, "N": length, "ACC": ACCUMULATORS[dtype], "BLOCK_R": block_r, "BLOCK_N": block_n}
    return plan_launch(
        kernel, blocks(n_rows, block_r), fixed | {"num_warps": 8 if block_n > 1024 else 4}, tuple(shape), dtype
    )


@planned
def plan_softmax(dtype: torch.dtype, shape: Shape, strides: Shape, log: bool) -> Plan:
    """For softmax or its logarithm."""
    return plan_rows(mytorch_softmax_kernel, shape, dtype, LOG=log, **rows_of(shape, strides))


@planned
def plan_softmax_grad(dtype: torch.dtype, shape: Shape, grad_strides: Shape, y_strides: Shape, log: bool) -> Plan:
    """For the gradient of either, from strides of the result's gradient and the result."""
    where = rows_of(shape, grad_strides, "grad_") | rows_of(shape, y_strides, "y_")
    return plan_rows(mytorch_softmax_grad_kernel, shape, dtype, LOG=log, **where)


@planned
def plan_layer_norm(dtype: torch.dtype, shape: Shape, strides: Shape, eps: float) -> Plan:
    """For `layer_norm`."""
    return plan_rows(mytorch_layer_norm_kernel, shape, dtype, eps=float(eps), **rows_of(shape, strides))


@planned
def plan_layer_norm_grad(dtype: torch.dtype, shape: Shape, grad_strides: Shape, x_strides: Shape) -> tuple[Plan, Plan]:
    """For the gradient of x, and for those of weight and bias, in parts."""
    where = rows_of(shape, grad_strides, "grad_") | rows_of(shape, x_strides, "x_")
    length = shape[-1]
    n_rows, n_tiles = math.prod(shape) // length if length else 0, blocks(length, COLUMNS)
    parts, chunk = divide(n_tiles, n_rows, COLUMN_ROWS)
    counts = {"n_rows": n_rows, "N": length, "chunk": chunk, "n_tiles": n_tiles}
    fixed = counts | {"ACC": ACCUMULATORS[dtype], "BLOCK_R": COLUMN_ROWS, "BLOCK_N": COLUMNS, "num_warps": 4} | where
    columns = plan_launch(mytorch_layer_norm_columns_kernel, n_tiles * parts, fixed, (parts, length), wide(dtype))
    return plan_rows(mytorch_layer_norm_grad_kernel, shape, dtype, **where), columns


class Rows(Reduce, Memory):
    """The protocol's operations on rows."""

    def softmax(self, x: Array) -> Array:
        return self._result(plan_softmax(x.dtype, x.shape, x.stride(), False), x=x)

    def log_softmax(self, x: Array) -> Array:
        return self._result(plan_softmax(x.dtype, x.shape, x.stride(), True), x=x)

    def softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._result(plan_softmax_grad(y.dtype, y.shape, grad.stride(), y.stride(), False), grad=grad, y=y)

    def log_softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._result(plan_softmax_grad(y.dtype, y.shape, grad.stride(), y.stride(), True), grad=grad, y=y)

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
        mean, rstd = (self._empty(x.shape[:-1], wide(x.dtype)) for _ in range(2))
        plan = plan_layer_norm(x.dtype, x.shape, x.stride(), eps)
        return (
            self._result(plan, x=x, weight=self.contiguous(weight), bias=self.contiguous(bias), mean=mean, rstd=rstd),
            mean,
            rstd,
        )

    def layer_norm_grad(
        self, grad: Array, x: Array, weight: Array, mean: Array, rstd: Array
    ) -> tuple[Array, Array, Array]:
        rows, columns = plan_layer_norm_grad(x.dtype, x.shape, grad.stride(), x.stride())
        given = {"grad": grad, "x": x, "mean": self.contiguous(mean), "rstd": self.contiguous(rstd)}
        out = self._result(rows, weight=self.contiguous(weight), **given)
        dweight, dbias = (self._empty(columns.shape, columns.dtype) for _ in range(2))
        self._launch(columns, dweight=dweight, dbias=dbias, **given)
        return out, self._sum_parts(dweight, weight.dtype), self._sum_parts(dbias, weight.dtype)
