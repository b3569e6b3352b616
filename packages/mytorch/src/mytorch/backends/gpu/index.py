"""Elements and rows by number, and their gradients."""

import math

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_index import (
    mytorch_gather_grad_kernel,
    mytorch_gather_kernel,
    mytorch_take_grad_kernel,
    mytorch_take_kernel,
)
from mytorch.backends.gpu.launcher import (
    ACCUMULATORS,
    Array,
    Plan,
    blocks,
    plan_elements,
    plan_launch,
    planned,
    readable,
)
from mytorch.backends.gpu.matrix import divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce, plan_parts
from tilewise.ops._host.launching import power_of_2

TAKE_TILE, WIDEST_TAKE = 4096, 1024
# Rows of the table, numbers, and columns a tile.
GRAD_V, GRAD_N, GRAD_D = 16, 32, 32


# One object: a launch is known again by its constants, and NaN equals only itself.
NAN = float("nan")


def outside(x: Array) -> float:
    """What a number that names nothing gives: NaN, where the type has it, so that the mistake shows."""
    return NAN if x.is_floating_point() else 0


def without(axis: int, strides: Shape) -> Shape:
    """Strides with 0 along an axis."""
    return tuple(0 if i == axis else step for i, step in enumerate(strides))


@planned
def plan_take(dtype: torch.dtype, table: Shape, index: Shape, outside: float) -> Plan:
    """For `take`, from the shapes of the table and the numbers."""
    n, width = math.prod(index), math.prod(table[1:])
    block_d = min(power_of_2(width), WIDEST_TAKE)
    block_r = min(power_of_2(n), TAKE_TILE // block_d)
    n_tiles = blocks(width, block_d)
    counts = {"n": n, "n_tiles": n_tiles, "rows": table[0], "D": width}
    fixed = counts | {"OUTSIDE": outside, "BLOCK_R": block_r, "BLOCK_D": block_d, "num_warps": 8}
    return plan_launch(mytorch_take_kernel, blocks(n, block_r) * n_tiles, fixed, (*index, *table[1:]), dtype)


@planned
def plan_take_grad(dtype: torch.dtype, grad: Shape, index: Shape, rows: int) -> tuple[Plan, ...]:
    """For `take_grad`, from the shapes of the gradient and the numbers."""
    shape = (rows, *grad[len(index) :])
    n, width = math.prod(index), math.prod(shape[1:])
    tiles_v, tiles_d = blocks(rows, GRAD_V), blocks(width, GRAD_D)
    parts, chunk = divide(tiles_v * tiles_d, n, GRAD_N)
    counts = {"rows": rows, "n": n, "chunk": chunk, "tiles_v": tiles_v, "tiles_d": tiles_d, "D": width}
    fixed = counts | {
        "ACC": ACCUMULATORS[dtype],
        "BLOCK_V": GRAD_V,
        "BLOCK_N": GRAD_N,
        "BLOCK_D": GRAD_D,
        "num_warps": 8,
    }
    return plan_parts(mytorch_take_grad_kernel, tiles_v * tiles_d, fixed, shape, dtype, parts)


@planned
def plan_gather(dtype: torch.dtype, shape: Shape, strides: Shape, axis: int, index: Shape, outside: float) -> Plan:
    """For `gather` along an axis of an array of a shape, from that of the numbers."""
    where = {
        "sizes": tuple(index),
        "x_strides": without(axis, strides),
        "x_stride": strides[axis],
        "length": shape[axis],
    }
    return plan_elements(mytorch_gather_kernel, index, dtype, OUTSIDE=outside, NDIM=len(shape), **where)


@planned
def plan_gather_grad(
    dtype: torch.dtype, index: Shape, index_strides: Shape, grad_strides: Shape, axis: int, shape: Shape
) -> Plan:
    """For `gather_grad` along an axis of an array of a shape, from that of the numbers, which the gradient has too."""
    return plan_elements(
        mytorch_gather_grad_kernel,
        shape,
        dtype,
        sizes=tuple(shape),
        lengths=tuple(shape[i] if i == axis else length for i, length in enumerate(index)),
        index_strides=without(axis, index_strides),
        grad_strides=without(axis, grad_strides),
        inner=math.prod(shape[axis + 1 :]),
        length=shape[axis],
        count=index[axis],
        index_stride=index_strides[axis],
        grad_stride=grad_strides[axis],
        ACC=ACCUMULATORS[dtype],
        NDIM=len(shape),
    )


class Index(Reduce, Memory):
    """The protocol's access by number."""

    def take(self, table: Array, index: Array) -> Array:
        plan = plan_take(table.dtype, table.shape, index.shape, outside(table))
        return self._result(plan, table=readable(self.contiguous(table)), index=self.contiguous(index))

    def take_grad(self, grad: Array, index: Array, rows: int) -> Array:
        plans = plan_take_grad(grad.dtype, grad.shape, index.shape, rows)
        return self._results(plans, grad=self.contiguous(grad), index=self.contiguous(index))

    def gather(self, x: Array, axis: int, index: Array) -> Array:
        plan = plan_gather(x.dtype, x.shape, x.stride(), axis, index.shape, outside(x))
        return self._result(plan, x=readable(x), index=self.contiguous(index))

    def gather_grad(self, grad: Array, axis: int, index: Array, shape: Shape) -> Array:
        plan = plan_gather_grad(grad.dtype, index.shape, index.stride(), grad.stride(), axis, shape)
        return self._result(plan, grad=grad, index=index)
