"""What all of the CUDA backend builds on: how a kernel is launched, types as torch and Triton name them, and
axes that can be merged.

What a launch needs besides its arrays follows from their types, shapes and strides. A `planned` function finds it
once for each of those: a training loop has the same ones in every step, and finding them takes longer than launching.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton.language as tl

from mytorch.backends.base import Shape
from mytorch.dtypes import DType
from tilewise.ops._host.start import Repeated
from tilewise.ops._host.template import empty

Array = torch.Tensor

TORCH_TYPES = {np.dtype(name): getattr(torch, name) for name in ("float16", "float32", "float64", "int64", "bool")}
NUMPY_TYPES = {found: name for name, found in TORCH_TYPES.items()}
# What is added up, or compared, in which type.
WIDE_TYPES = {torch.float16: torch.float32, torch.bool: torch.int32}
ACCUMULATORS = {
    torch.float16: tl.float32,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
    torch.int64: tl.int64,
    torch.int32: tl.int32,
    torch.bool: tl.int32,
}

# Where fewer programs than this would run, long sums are split among more: about two per SM of a large
# GPU. The same on every GPU, so that a sum's order, and its result to the last bit, is too.
ENOUGH_PROGRAMS = 256
# Elements a program where each is computed by itself.
BLOCK, BLOCK_WARPS = 2048, 8

# Marks a pure function of metadata.
planned = functools.lru_cache(maxsize=1024)


class Plan(NamedTuple):
    """A launch, and what it writes: of which shape and type."""

    launch: Repeated
    shape: Shape
    dtype: torch.dtype


def plan_launch(kernel: Any, grid: int, fixed: dict[str, Any], shape: Shape, dtype: torch.dtype) -> Plan:
    """Of a kernel, with arguments that are the same each time: all but arrays, and numbers that change from call to
    call.
    """
    return Plan(Repeated(kernel, grid, {**fixed, "enable_fp_fusion": True}), shape, dtype)


def plan_elements(kernel: Any, shape: Shape, dtype: torch.dtype, **fixed: Any) -> Plan:
    """For a kernel with one program per block of the elements it writes."""
    n = math.prod(shape)
    fixed |= {"n": n, "BLOCK": BLOCK, "WIDE": n >= 2**31 - BLOCK, "num_warps": BLOCK_WARPS}
    return plan_launch(kernel, blocks(n, BLOCK), fixed, tuple(shape), dtype)


# Of a kernel that is passed only the shape.
plan_whole = planned(plan_elements)


class Launcher:
    """The base of the backend's parts."""

    device: torch.device

    def _launch(self, plan: Plan, **arrays: Any) -> None:
        """Run a kernel on arrays, and on numbers that change from call to call; without programs, nothing."""
        raise NotImplementedError

    def _result(self, plan: Plan, **arrays: Any) -> Array:
        """What a kernel writes into new memory."""
        out = empty(plan.shape, plan.dtype, self.device)
        self._launch(plan, out=readable(out), **arrays)
        return out

    def _results(self, plans: tuple[Plan, ...], **arrays: Any) -> Array:
        """What the last of several kernels writes: the first reads arrays, each of the others what the one before it
        wrote.
        """
        x = self._result(plans[0], **arrays)
        for plan in plans[1:]:
            x = self._result(plan, x=x)
        return x

    def _empty(self, shape: Shape, dtype: torch.dtype) -> Array:
        """New memory in C order."""
        return empty(tuple(shape), dtype, self.device)

    def dtype(self, x: Array) -> DType:
        return NUMPY_TYPES[x.dtype]


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type that values are added up in."""
    return WIDE_TYPES.get(dtype, dtype)


def readable(x: Array) -> Array:
    """What a kernel gets: bool as the bytes that it lies in memory as."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def blocks(count: int, block: int) -> int:
    """How many blocks hold a count."""
    return -(-count // block)


def collapsed(shape: Shape, *strides: Shape) -> tuple[Shape, tuple[Shape, ...]]:
    """A shape, and each array's strides, with axes of length 1 left out and those that are contiguous in every array
    merged.
    """
    sizes: list[int] = []
    steps: list[tuple[int, ...]] = []
    for n, step in zip(shape, zip(*strides, strict=True), strict=True):
        if n == 1:
            continue
        if sizes and all(before == after * n for before, after in zip(steps[-1], step, strict=True)):
            sizes[-1], steps[-1] = sizes[-1] * n, step
        else:
            sizes.append(n)
            steps.append(step)
    if not sizes:
        return (1,), ((0,),) * len(strides)
    return tuple(sizes), tuple(zip(*steps, strict=True))
