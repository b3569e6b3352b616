"""Matrix products: tiles by type and size, leading axes folded into rows where one matrix serves all."""

import math
from typing import NamedTuple

import numpy as np
import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.elementwise import expanded
from mytorch.backends.gpu.kernels_matmul import mytorch_matmul_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, ENOUGH_PROGRAMS, Array, Plan, blocks, collapsed, planned
from mytorch.backends.gpu.memory import Memory
from mytorch.backends.gpu.reduce import Reduce, plan_parts

# How tensor cores multiply a type; those they do not take are multiplied element by element.
PRECISIONS = {torch.float16: "ieee", torch.float32: "tf32x3"}


class Tile(NamedTuple):
    """Rows, columns and products a step; warps and stages of the pipeline."""

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int


# By type, large tiles for results that have enough of them, and small ones.
TILES = {
    torch.float16: (Tile(128, 128, 64, 8, 3), Tile(64, 64, 64, 4, 3)),
    torch.float32: (Tile(128, 64, 32, 8, 3), Tile(64, 64, 32, 4, 3)),
    torch.float64: (Tile(32, 32, 16, 8, 1), Tile(32, 32, 16, 8, 1)),
    torch.int64: (Tile(32, 32, 16, 8, 1), Tile(32, 32, 16, 8, 1)),
}
# A chunk of a split-K product has at least this many steps.
LEAST_STEPS = 8


def choose_tile(dtype: torch.dtype, batch: int, m: int, n: int) -> Tile:
    """The large tile where it leaves no SM idle."""
    large, small = TILES[dtype]
    return large if batch * blocks(m, large.m) * blocks(n, large.n) >= ENOUGH_PROGRAMS // 2 else small


def divide(programs: int, length: int, step: int) -> tuple[int, int]:
    """Into how many chunks a sum of a length, done in steps, is split, and how long each is: more than one where there
    are few programs.
    """
    steps = blocks(length, step)
    wanted = min(blocks(ENOUGH_PROGRAMS, max(1, programs)), steps // LEAST_STEPS)
    chunk = blocks(steps, max(1, wanted)) * step
    return max(1, blocks(length, max(1, chunk))), chunk


@planned
def plan_product(
    dtype: torch.dtype, x_shape: Shape, y_shape: Shape, x_strides: Shape, y_strides: Shape, whole: bool
) -> tuple[Plan, ...]:
    """For a product of two arrays; unless it must be whole, its sums may be split into chunks."""
    leading = np.broadcast_shapes(x_shape[:-2], y_shape[:-2])
    (m, k), n = x_shape[-2:], y_shape[-1]
    batch = math.prod(leading)
    steps = expanded(x_shape[:-2], x_strides[:-2], leading), expanded(y_shape[:-2], y_strides[:-2], leading)
    batch_sizes, (x_batch, y_batch) = collapsed(leading, *steps)
    tile = choose_tile(dtype, batch, m, n)
    tiles_m, tiles_n = blocks(m, tile.m), blocks(n, tile.n)
    programs = batch * tiles_m * tiles_n
    parts, chunk = (1, k) if whole else divide(programs, k, tile.k)
    fixed = {
        "batch_sizes": batch_sizes,
        "x_batch": x_batch,
        "y_batch": y_batch,
        "x_strides": x_strides[-2:],
        "y_strides": y_strides[-2:],
        "n_batch": batch,
        "M": m,
        "N": n,
        "K": k,
        "chunk": chunk,
        "tiles_m": tiles_m,
        "tiles_n": tiles_n,
        "NDIM": len(batch_sizes),
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "ACC": ACCUMULATORS[dtype],
        "PRECISION": PRECISIONS.get(dtype),
        "DIVIDED": parts > 1,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
    return plan_parts(mytorch_matmul_kernel, programs, fixed, (*leading, m, n), dtype, parts)


class Matrix(Reduce, Memory):
    """The protocol's matrix products."""

    def matmul(self, x: Array, y: Array) -> Array:
        if y.dim() == 2 and x.dim() > 2 and x.is_contiguous() and x.numel():
            return self._product(x.view(-1, x.shape[-1]), y, None).view(*x.shape[:-1], y.shape[-1])
        return self._product(x, y, None)

    def linear(self, x: Array, weight: Array, bias: Array | None) -> Array:
        return self._product(x, weight, bias if bias is None else self.contiguous(bias))

    def _product(self, x: Array, y: Array, bias: Array | None) -> Array:
        """`[batch, M, N]`, or `[M, N]` where there is no batch."""
        plans = plan_product(x.dtype, x.shape, y.shape, x.stride(), y.stride(), bias is not None)
        return self._results(plans, x=x, y=y, bias=bias)
