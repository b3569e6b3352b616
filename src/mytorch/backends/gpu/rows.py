"""Over the last axis: softmax, its logarithm, layer norm, and their gradients."""

from typing import Any, NamedTuple

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_rows import (
    mytorch_layer_norm_columns_kernel,
    mytorch_layer_norm_grad_kernel,
    mytorch_layer_norm_kernel,
    mytorch_softmax_grad_kernel,
    mytorch_softmax_kernel,
)
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, blocks, collapsed, wide
from mytorch.backends.gpu.matrix import divide
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce
from tilewise.ops._host.launching import power_of_2

TILE = 4096
COLUMNS, COLUMN_ROWS = 64, 32


class RowsOf(NamedTuple):
    """Where an array's rows lie: the axes before the last, collapsed, their strides, and that of the last."""

    sizes: Shape
    strides: Shape
    stride: int

    @staticmethod
    def find(x: Array) -> "RowsOf":
        sizes, (strides,) = collapsed(tuple(x.shape[:-1]), x.stride()[:-1])
        return RowsOf(sizes, strides, x.stride(-1))

    def arguments(self, name: str) -> dict[str, Any]:
        """As kernels take them that read several arrays."""
        return {f"{name}_sizes": self.sizes, f"{name}_strides": self.strides, f"{name}_stride": self.stride, f"{name.upper()}_NDIM": len(self.sizes)}


class Rows(Reduce, Memory):
    """The protocol's operations on rows."""

    def softmax(self, x: Array) -> Array:
        return self._softmax(x, False)

    def log_softmax(self, x: Array) -> Array:
        return self._softmax(x, True)

    def softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._softmax_grad(grad, y, False)

    def log_softmax_grad(self, grad: Array, y: Array) -> Array:
        return self._softmax_grad(grad, y, True)

    def _softmax(self, x: Array, log: bool) -> Array:
        out, rows = self._empty(x.shape, x.dtype), RowsOf.find(x)
        self._by_rows(
            mytorch_softmax_kernel, x, x=x, out=out, sizes=rows.sizes, x_strides=rows.strides, x_stride=rows.stride, NDIM=len(rows.sizes), LOG=log
        )
        return out

    def _softmax_grad(self, grad: Array, y: Array, log: bool) -> Array:
        out = self._empty(y.shape, y.dtype)
        where = RowsOf.find(grad).arguments("grad") | RowsOf.find(y).arguments("y")
        self._by_rows(mytorch_softmax_grad_kernel, y, grad=grad, y=y, out=out, LOG=log, **where)
        return out

    def layer_norm(self, x: Array, weight: Array, bias: Array, eps: float) -> tuple[Array, Array, Array]:
        out, rows = self._empty(x.shape, x.dtype), RowsOf.find(x)
        mean, rstd = (self._empty(x.shape[:-1], wide(x.dtype)) for _ in range(2))
        self._by_rows(
            mytorch_layer_norm_kernel,
            x,
            x=x,
            weight=self._contiguous(weight),
            bias=self._contiguous(bias),
            out=out,
            mean=mean,
            rstd=rstd,
            sizes=rows.sizes,
            x_strides=rows.strides,
            x_stride=rows.stride,
            eps=float(eps),
            NDIM=len(rows.sizes),
        )
        return out, mean, rstd

    def layer_norm_grad(self, grad: Array, x: Array, weight: Array, mean: Array, rstd: Array) -> tuple[Array, Array, Array]:
        out = self._empty(x.shape, x.dtype)
        where = RowsOf.find(grad).arguments("grad") | RowsOf.find(x).arguments("x")
        given = {"grad": grad, "x": x, "mean": self._contiguous(mean), "rstd": self._contiguous(rstd)} | where
        self._by_rows(mytorch_layer_norm_grad_kernel, x, weight=self._contiguous(weight), out=out, **given)
        length = x.shape[-1]
        n_rows, n_tiles = x.numel() // length if length else 0, blocks(length, COLUMNS)
        parts, chunk = divide(n_tiles, n_rows, COLUMN_ROWS)
        dweight, dbias = (self._empty((parts, length), wide(x.dtype)) for _ in range(2))
        self._launch(
            mytorch_layer_norm_columns_kernel,
            n_tiles * parts,
            dweight=dweight,
            dbias=dbias,
            n_rows=n_rows,
            N=length,
            chunk=chunk,
            n_tiles=n_tiles,
            ACC=ACCUMULATORS[x.dtype],
            BLOCK_R=COLUMN_ROWS,
            BLOCK_N=COLUMNS,
            num_warps=4,
            **given,
        )
        return out, self._sum_parts(dweight, weight.dtype), self._sum_parts(dbias, weight.dtype)

    def _by_rows(self, kernel: Any, like: Array, /, **arguments: Any) -> None:
        """Launch a kernel that has blocks of an array's rows a program."""
        length = like.shape[-1]
        n_rows = like.numel() // length if length else 0
        block_n = min(power_of_2(length), TILE)
        block_r = min(power_of_2(n_rows), max(1, TILE // 2 // block_n))
        self._launch(
            kernel,
            blocks(n_rows, block_r),
            n_rows=n_rows,
            N=length,
            ACC=ACCUMULATORS[like.dtype],
            BLOCK_R=block_r,
            BLOCK_N=block_n,
            num_warps=8 if block_n > 1024 else 4,
            **arguments,
        )
