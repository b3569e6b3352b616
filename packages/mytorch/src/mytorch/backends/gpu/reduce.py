"""Sums and the largest over axes: the shape of tiles, and two passes where one would leave most of the card idle."""

import math
from typing import Any, NamedTuple

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_reduce import mytorch_reduce_kernel
from mytorch.backends.gpu.launcher import (
    ACCUMULATORS,
    ENOUGH_PROGRAMS,
    Array,
    Launcher,
    Plan,
    blocks,
    collapsed,
    plan_launch,
    planned,
    readable,
    wide,
)
from tilewise.ops._host.launching import power_of_2

TILE = 2048
LONGEST_ROW, WIDEST_COLUMNS = 1024, 64
# A chunk of a split reduction has at least this many steps; with 8, the second pass is the last.
LEAST_STEPS = 8
LOWEST = {
    torch.float16: float("-inf"),
    torch.float32: float("-inf"),
    torch.float64: float("-inf"),
    torch.int64: -(2**63),
    torch.bool: 0,
}


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


@planned
def plan_reduction(
    shape: Shape,
    strides: Shape,
    axes: Shape,
    keepdims: bool,
    dtype: torch.dtype,
    result: torch.dtype,
    lowest: float | None,
    divisor: float | None,
) -> tuple[Plan, ...]:
    """For `_reduce`, of an array of a type into a result of another: launches in order."""
    kept = [i for i in range(len(shape)) if i not in axes]
    kept_sizes, (kept_strides,) = collapsed(tuple(shape[i] for i in kept), tuple(strides[i] for i in kept))
    gone = sorted(axes)
    sizes, (steps,) = collapsed(tuple(shape[i] for i in gone), tuple(strides[i] for i in gone))
    n_kept, n = math.prod(kept_sizes), math.prod(sizes)
    tiles = choose_tiles(n_kept, n, n_kept == 1 or (n > 1 and steps[-1] <= kept_strides[-1]))
    parts, n_tiles = max(1, blocks(n, tiles.chunk)), blocks(n_kept, tiles.block_m)
    out = tuple(1 if i in axes else length for i, length in enumerate(shape) if keepdims or i not in axes)
    into = result if parts == 1 else wide(dtype)
    fixed = {
        "kept_sizes": kept_sizes,
        "kept_strides": kept_strides,
        "sizes": sizes,
        "strides": steps,
        "n_kept": n_kept,
        "n": n,
        "chunk": tiles.chunk,
        "n_tiles": n_tiles,
        "divisor": 1.0 if divisor is None else float(divisor),
        "LARGEST": lowest is not None,
        "START": 0 if lowest is None else lowest,
        # Partial sums are divided after they have been added up.
        "MEAN": divisor is not None and parts == 1,
        "ACC": ACCUMULATORS[dtype],
        "AS_BOOL": into == torch.bool,
        "KEPT_NDIM": len(kept_sizes),
        "NDIM": len(sizes),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        # Indices up to a chunk beyond the last element are computed.
        "WIDE": math.prod(shape) >= 2**31 - TILE - tiles.chunk,
        "num_warps": 4,
    }
    if parts == 1:
        return (plan_launch(mytorch_reduce_kernel, n_tiles, fixed, out, result),)
    return joined(
        plan_launch(mytorch_reduce_kernel, n_tiles * parts, fixed, (parts, *out), into), result, lowest, divisor
    )


def joined(
    first: Plan, dtype: torch.dtype, lowest: float | None = None, divisor: float | None = None
) -> tuple[Plan, ...]:
    """A launch that writes partial results along the first axis, and those that make the result, in a
    type, from them.
    """
    shape = first.shape[1:]
    n = math.prod(shape)
    *others, last = plan_reduction((first.shape[0], n), (n, 1), (0,), False, first.dtype, dtype, lowest, divisor)
    return first, *others, last._replace(shape=shape)


def plan_parts(
    kernel: Any, programs: int, fixed: dict[str, Any], shape: Shape, dtype: torch.dtype, parts: int
) -> tuple[Plan, ...]:
    """For a kernel whose sums are split into parts, with this many programs per part, and a result of a
    shape and type.
    """
    if parts == 1:
        return (plan_launch(kernel, programs, fixed, tuple(shape), dtype),)
    return joined(plan_launch(kernel, programs * parts, fixed, (parts, *shape), wide(dtype)), dtype)


class Reduce(Launcher):
    """The protocol's reductions."""

    def sum(self, x: Array, axes: Shape, keepdims: bool, divisor: float | None = None) -> Array:
        return self._reduce(x, axes, keepdims, x.dtype, None, divisor)

    def max(self, x: Array, axes: Shape, keepdims: bool) -> Array:
        return self._reduce(x, axes, keepdims, x.dtype, LOWEST[x.dtype])

    def _sum_parts(self, parts: Array, dtype: torch.dtype) -> Array:
        """Results, in a type, from partial ones along the first axis, added in a fixed order."""
        return self._reduce(parts, (0,), False, dtype, None)

    def _reduce(
        self,
        x: Array,
        axes: Shape,
        keepdims: bool,
        dtype: torch.dtype,
        lowest: float | None,
        divisor: float | None = None,
    ) -> Array:
        """The largest where a lowest value is given, else the sum, divided; in as many passes as it takes."""
        return self._results(
            plan_reduction(x.shape, x.stride(), axes, keepdims, x.dtype, dtype, lowest, divisor), x=readable(x)
        )
