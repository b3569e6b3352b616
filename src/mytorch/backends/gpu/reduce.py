"""Sums and the largest over axes: the shape of tiles, and two passes where one would leave most of the card idle."""

import math
from typing import NamedTuple

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_reduce import mytorch_reduce_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, ENOUGH_PROGRAMS, Array, Launcher, blocks, collapsed, readable, wide
from tilewise.ops._host.launching import power_of_2

TILE = 2048
LONGEST_ROW, WIDEST_COLUMNS = 1024, 64
# A part of a divided reduction has at least so many steps; with 8, the second pass is the last.
LEAST_STEPS = 8
LOWEST = {torch.float16: float("-inf"), torch.float32: float("-inf"), torch.float64: float("-inf"), torch.int64: -(2**63), torch.bool: 0}


class Tiles(NamedTuple):
    """Results and elements a tile, and how many elements of a result one program takes."""

    block_m: int
    block_n: int
    chunk: int


def choose_tiles(n_kept: int, n: int, along_rows: bool) -> Tiles:
    """Tiles that are read along memory: long rows where what is reduced lies side by side, else wide columns."""
    if along_rows:
        block_n = min(power_of_2(n), LONGEST_ROW)
        block_m = min(power_of_2(n_kept), TILE // block_n)
    else:
        block_m = min(power_of_2(n_kept), WIDEST_COLUMNS)
        block_n = min(power_of_2(n), TILE // block_m)
    steps = blocks(n, block_n)
    parts = min(blocks(ENOUGH_PROGRAMS, max(1, blocks(n_kept, block_m))), steps // LEAST_STEPS)
    return Tiles(block_m, block_n, max(1, blocks(steps, max(1, parts))) * block_n)


class Reduce(Launcher):
    """The protocol's reductions."""

    def sum(self, x: Array, axes: Shape, keepdims: bool) -> Array:
        return self._reduce(x, axes, keepdims, x.dtype, None)

    def max(self, x: Array, axes: Shape, keepdims: bool) -> Array:
        return self._reduce(x, axes, keepdims, x.dtype, LOWEST[x.dtype])

    def _sum_parts(self, parts: Array, dtype: torch.dtype) -> Array:
        """Results, in a type, from parts of them along the first axis, added in a fixed order."""
        return self._reduce(parts, (0,), False, dtype, None)

    def _reduce(self, x: Array, axes: Shape, keepdims: bool, dtype: torch.dtype, lowest: float | None) -> Array:
        """The largest where a lowest value is given, else the sum."""
        kept = [i for i in range(x.dim()) if i not in axes]
        out = self._empty([1 if i in axes else n for i, n in enumerate(x.shape)] if keepdims else [x.shape[i] for i in kept], dtype)
        self._reduce_into(out, x.permute((*kept, *sorted(axes))), len(kept), lowest)
        return out

    def _reduce_into(self, out: Array, x: Array, n_axes: int, lowest: float | None) -> None:
        """Reduce all axes of x but the first n_axes, in as many passes as it takes."""
        kept_sizes, (kept_strides,) = collapsed(tuple(x.shape[:n_axes]), x.stride()[:n_axes])
        sizes, (strides,) = collapsed(tuple(x.shape[n_axes:]), x.stride()[n_axes:])
        n_kept, n = math.prod(kept_sizes), math.prod(sizes)
        tiles = choose_tiles(n_kept, n, n_kept == 1 or (n > 1 and strides[-1] <= kept_strides[-1]))
        parts = max(1, blocks(n, tiles.chunk))
        into = out if parts == 1 else self._empty((parts, n_kept), wide(x.dtype))
        n_tiles = blocks(n_kept, tiles.block_m)
        self._launch(
            mytorch_reduce_kernel,
            n_tiles * parts,
            x=readable(x),
            out=readable(into),
            kept_sizes=kept_sizes,
            kept_strides=kept_strides,
            sizes=sizes,
            strides=strides,
            n_kept=n_kept,
            n=n,
            chunk=tiles.chunk,
            n_tiles=n_tiles,
            LARGEST=lowest is not None,
            START=0 if lowest is None else lowest,
            ACC=ACCUMULATORS[x.dtype],
            AS_BOOL=into.dtype == torch.bool,
            KEPT_NDIM=len(kept_sizes),
            NDIM=len(sizes),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            # Numbers up to a part beyond the last element are computed.
            WIDE=x.numel() >= 2**31 - TILE - tiles.chunk,
            num_warps=4,
        )
        if parts > 1:
            self._reduce_into(out, into.T, 1, lowest)
