"""What each rank computes, sends, receives, holds and takes: counted from an assignment, without processes.

Bytes and memory are those of 16-bit tensors and of this package's own buffers; times are those of rates.json, which
benchmarks/rates.py fits to measured kernels, next to a link that is used at its rate.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any, NamedTuple

import torch

from tilewise.parallel.assignment import Runs, planning, sums
from tilewise.parallel.balance import seen
from tilewise.parallel.traffic import BEFORE, Direction, Layer, Traffic, sparse_memory, traffic

Tensor = torch.Tensor

DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")


class Sparse(NamedTuple):
    """Numbers of native sparse attention, its defaults."""

    compress_size: int = 32
    compress_stride: int = 16
    block_size: int = 64
    block_count: int = 16
    window_size: int = 512


class Costs(NamedTuple):
    """Of one direction, by rank, float64 `[w]`: FLOPs; bytes; bytes at the peak, with inputs and results; seconds."""

    flops: Tensor
    sent: Tensor
    received: Tensor
    memory: Tensor
    seconds: Tensor


class Estimate(NamedTuple):
    """Of one layer: tokens of each rank, and both directions."""

    tokens: Tensor
    forward: Costs
    backward: Costs


def work(seen_keys: Tensor, layer: Layer, direction: Direction) -> Tensor:
    """FLOPs of dense attention over so many pairs of a query and a key: S and O; backward S, dP, dV, dQ and dK."""
    products = (1, 1) if direction == "forward" else (3, 2)
    return seen_keys.double() * (2 * layer.heads * (products[0] * layer.dim + products[1] * layer.value_dim))


class SparseKeys(NamedTuple):
    """How many keys queries see: of compressed windows, which is quadratic in a sequence's length; near them and in
    chosen blocks, which is linear.
    """

    compressed: Tensor
    near: Tensor


def sparse_keys(runs: Runs, bounds: Tensor, sparse: Sparse) -> SparseKeys:
    """Of each run."""
    begins = bounds[runs.sequences]
    windows = _windows_before(runs.stops - begins, sparse) - _windows_before(runs.starts - begins, sparse)
    # Of the blocks as many keys are seen as by a window of their size.
    blocks = seen(runs, bounds, sparse.block_size * sparse.block_count - 1, 0)
    return SparseKeys(windows, blocks + seen(runs, bounds, sparse.window_size - 1, 0))


def sparse_work(keys: SparseKeys, layer: Layer, direction: Direction) -> SparseKeys:
    """FLOPs. The choice of blocks makes S of compressed attention again."""
    compressed = work(keys.compressed, layer, direction)
    if direction == "forward":
        compressed += work(keys.compressed, layer._replace(value_dim=0), direction)
    return SparseKeys(compressed, work(keys.near, layer, direction))


def _windows_before(n: Tensor, sparse: Sparse) -> Tensor:
    """Compressed windows that the first n queries see, all in all: those that end at or before a query."""
    ends = (n - sparse.compress_size + 1).clamp(min=0)
    whole, rest = ends // sparse.compress_stride, ends % sparse.compress_stride
    return ends + sparse.compress_stride * (whole * (whole - 1) // 2) + rest * whole


@functools.cache
def rates() -> dict[str, Any]:
    """The fitted table."""
    found: dict[str, Any] = json.loads(resources.files("tilewise.parallel").joinpath("rates.json").read_text("utf-8"))
    return found


def measured_dim(layer: Layer) -> int:
    """The channels whose rate stands for a layer's."""
    dims = sorted(map(int, rates()["flash"]["forward"]["tflops"]))
    wanted = max(layer.dim, layer.value_dim)
    return next((dim for dim in dims if dim >= wanted), dims[-1])


def overlapped(steps: int, transfers: int, compute: Tensor, coming: Tensor, going: Tensor) -> Tensor:
    """Seconds of steps, in each of which the next one's keys come and the last one's gradients go. Where keys come as
    often as there are steps, the first waits for its own.
    """
    k, c, h = compute / steps, coming / transfers, going / transfers
    begin = c if transfers == steps else torch.zeros_like(c)
    if steps == 1:
        return begin + k + h
    return begin + torch.maximum(k, c) + (steps - 2) * torch.maximum(k, c + h) + torch.maximum(k, h) + h


@planning
def flash_estimate(
    bounds: Tensor, runs: Runs, world: int, layer: Layer, method: str, bytes_a_second: float
) -> Estimate:
    """flash_attention, causal."""
    keys = sums(seen(runs, bounds, *BEFORE), runs.ranks, world)
    held = sums(runs.stops - runs.starts, runs.ranks, world)
    dim = measured_dim(layer)
    # In a ring each query meets every rank's keys in a call of its own.
    channels = held.double() * (layer.heads * dim * (world if method == "ring" else 1))
    found = []
    for direction in DIRECTIONS:
        flops, rate = work(keys, layer, direction), rates()["flash"][direction]
        compute = flops / (rate["tflops"][str(dim)] * 1e12) + channels * rate["picoseconds"] * 1e-12
        found.append(_costs(flops, compute, traffic(runs, bounds, world, layer, method, direction), bytes_a_second))
    return Estimate(held, *found)


@planning
def sparse_estimate(bounds: Tensor, runs: Runs, world: int, layer: Layer, bytes_a_second: float) -> Estimate:
    """native_sparse_attention with its defaults, over keys and values that are gathered as flash_attention's."""
    sparse = Sparse()
    keys = SparseKeys(*(sums(x, runs.ranks, world) for x in sparse_keys(runs, bounds, sparse)))
    held = sums(runs.stops - runs.starts, runs.ranks, world)
    found = []
    for direction in DIRECTIONS:
        parts, tflops = sparse_work(keys, layer, direction), rates()["nsa"][direction]["tflops"]
        compute = parts.compressed / (tflops["compressed"] * 1e12) + parts.near / (tflops["near"] * 1e12)
        moved = traffic(runs, bounds, world, layer, "all_gather", direction)
        beside = sparse_memory(runs, bounds, world, layer, sparse.block_count, direction)
        moved = moved._replace(memory=moved.memory + beside)
        found.append(_costs(parts.compressed + parts.near, compute, moved, bytes_a_second))
    return Estimate(held, *found)


def _costs(flops: Tensor, compute: Tensor, moved: Traffic, bytes_a_second: float) -> Costs:
    coming = torch.maximum(moved.sent, moved.received) / bytes_a_second
    going = torch.maximum(moved.gradients_sent, moved.gradients_received) / bytes_a_second
    return Costs(
        flops,
        moved.sent + moved.gradients_sent,
        moved.received + moved.gradients_received,
        moved.memory,
        overlapped(moved.steps, moved.transfers, compute, coming, going),
    )
