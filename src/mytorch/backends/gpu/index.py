"""Elements and rows by number, and their gradients."""

import math

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_index import mytorch_gather_grad_kernel, mytorch_gather_kernel, mytorch_take_grad_kernel, mytorch_take_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, blocks, readable, wide
from mytorch.backends.gpu.matrix import divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce
from tilewise.ops._host.launching import power_of_2

TAKE_TILE, WIDEST_TAKE = 4096, 1024
# Rows of the table, numbers, and columns a tile.
GRAD_V, GRAD_N, GRAD_D = 16, 32, 32


# One object: a launch is known again by its constants, and NaN equals only itself.
NAN = float("nan")


def outside(x: Array) -> float:
    """What a number that names nothing gives: NaN, where the type has it, so that the mistake shows."""
    return NAN if x.is_floating_point() else 0


class Index(Reduce, Memory):
    """The protocol's access by number."""

    def take(self, table: Array, index: Array) -> Array:
        n, width = index.numel(), math.prod(table.shape[1:])
        out = self._empty((*index.shape, *table.shape[1:]), table.dtype)
        block_d = min(power_of_2(width), WIDEST_TAKE)
        block_r = min(power_of_2(n), TAKE_TILE // block_d)
        n_tiles = blocks(width, block_d)
        self._launch(
            mytorch_take_kernel,
            blocks(n, block_r) * n_tiles,
            table=readable(self._contiguous(table)),
            index=self._contiguous(index),
            out=readable(out),
            n=n,
            n_tiles=n_tiles,
            rows=table.shape[0],
            D=width,
            OUTSIDE=outside(table),
            BLOCK_R=block_r,
            BLOCK_D=block_d,
            num_warps=8,
        )
        return out

    def take_grad(self, grad: Array, index: Array, rows: int) -> Array:
        shape = (rows, *grad.shape[index.dim() :])
        n, width = index.numel(), math.prod(shape[1:])
        tiles_v, tiles_d = blocks(rows, GRAD_V), blocks(width, GRAD_D)
        parts, chunk = divide(tiles_v * tiles_d, n, GRAD_N)
        out = self._empty(shape, grad.dtype) if parts == 1 else self._empty((parts, *shape), wide(grad.dtype))
        self._launch(
            mytorch_take_grad_kernel,
            tiles_v * tiles_d * parts,
            grad=self._contiguous(grad),
            index=self._contiguous(index),
            out=out,
            rows=rows,
            n=n,
            chunk=chunk,
            tiles_v=tiles_v,
            tiles_d=tiles_d,
            D=width,
            ACC=ACCUMULATORS[grad.dtype],
            BLOCK_V=GRAD_V,
            BLOCK_N=GRAD_N,
            BLOCK_D=GRAD_D,
            num_warps=8,
        )
        return out if parts == 1 else self._sum_parts(out, grad.dtype)

    def gather(self, x: Array, axis: int, index: Array) -> Array:
        out = self._empty(index.shape, x.dtype)
        self._launch_by_elements(
            mytorch_gather_kernel,
            out.numel(),
            x=readable(x),
            index=self._contiguous(index),
            out=readable(out),
            sizes=tuple(index.shape),
            x_strides=tuple(0 if i == axis else step for i, step in enumerate(x.stride())),
            x_stride=x.stride(axis),
            length=x.shape[axis],
            OUTSIDE=outside(x),
            NDIM=x.dim(),
        )
        return out

    def gather_grad(self, grad: Array, axis: int, index: Array, shape: Shape) -> Array:
        grad, index = self._contiguous(grad), self._contiguous(index)
        out = self._empty(shape, grad.dtype)
        self._launch_by_elements(
            mytorch_gather_grad_kernel,
            out.numel(),
            grad=grad,
            index=index,
            out=out,
            sizes=tuple(shape),
            lengths=tuple(shape[i] if i == axis else length for i, length in enumerate(index.shape)),
            index_strides=tuple(0 if i == axis else step for i, step in enumerate(index.stride())),
            inner=math.prod(shape[axis + 1 :]),
            length=shape[axis],
            count=index.shape[axis],
            index_stride=index.stride(axis),
            ACC=ACCUMULATORS[grad.dtype],
            NDIM=len(shape),
        )
        return out
