"""Before and after the backward kernel for Hopper: what it reads of each query row, and dq from the accumulators that
it leaves in global memory.

Both keep a head's rows in slots of BLOCK_M, as many as `tile_slots` says: a tile of a packed sequence is whole there
too, so that TMA reads it whole. The `inside` heads that the backward visits tile by tile lie inside of a slot, in its
order.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.hopper.semaphore import by_head, key_blocks
from tilewise.ops._device.records import Limits, Rows
from tilewise.ops._device.rows import locate_tile, other_side, store_rows
from tilewise.ops._device.scores import lse_in_base_2, row_gradients, sink_gradient

SIZES = ("n_batch", "n_slots", "n_heads", "inside", "n_queries", "n_keys", "left", "right")


class PrepareTile(NamedTuple):
    """What the kernel before is compiled for."""

    DV: int
    WIDTH: int
    """Channels of an accumulator of dq."""
    BLOCK_DV: int
    BLOCK_M: int
    ZEROES: bool
    """Whether it zeroes the accumulators of dq."""


class FinishTile(NamedTuple):
    """What the kernel after is compiled for."""

    D: int
    WIDTH: int
    """Channels of an accumulator."""
    BLOCK_D: int
    BLOCK_M: int
    BLOCK_N: int
    WIDE: bool
    """As in `BackwardTile`."""


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_prepare_kernel(
    o, do, lse, dlse, delta, lse_log2, sinks, acc_dq, semaphores, counter, o_strides, do_strides, dlse_strides, cu_q,
    n_batch, n_slots, n_heads, inside, n_queries, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: slots of BLOCK_M queries x query heads x batch, in one axis.
    # Owns: one slot.
    # Loops over: nothing.
    # Writes: its rows of delta and lse_log2, what they add to the gradient of the head's sink, 0 to its semaphore and,
    # if it ZEROES it, to its accumulator of dq; the first program also to the counter of blocks taken.
    pid = tl.program_id(0)
    i_slot = by_head(pid, n_slots, inside)
    i_b, i_h, i_m, start_q, Tq = locate_tile(i_slot, n_slots, n_heads, n_batch, n_queries, cu_q, False, TILE.BLOCK_M)
    if cu_q is not None:
        i_b = 0
    o_rows = Rows(o, o_strides, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, do_strides, i_b, i_h, start_q, Tq)
    b_delta, b_lse, _, _ = row_gradients(
        o_rows, do_rows, lse, dlse, dlse_strides, i_m, n_heads, n_queries, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV
    )
    o_row = pid.to(tl.int64) * TILE.BLOCK_M + tl.arange(0, TILE.BLOCK_M)
    tl.store(delta + o_row, b_delta)
    tl.store(lse_log2 + o_row, lse_in_base_2(b_lse))
    if sinks.x is not None:
        tl.store(sinks.parts + i_slot, sink_gradient(sinks.x, i_h, b_delta, b_lse))
    tl.store(semaphores + pid, 0)
    if TILE.ZEROES:
        # A tensor has a power of two elements: 192 channels are three times 64.
        PART: tl.constexpr = TILE.BLOCK_M * (TILE.WIDTH & -TILE.WIDTH)
        for i in tl.static_range(0, TILE.BLOCK_M * TILE.WIDTH, PART):
            o_acc = pid.to(tl.int64) * (TILE.BLOCK_M * TILE.WIDTH) + i + tl.arange(0, PART)
            tl.store(acc_dq + o_acc, tl.zeros([PART], tl.float32))
    if pid == 0:
        tl.store(counter, 0)


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_finish_kernel(
    acc_dq, dq, dq_strides, cu_q, cu_k, n_batch, n_slots, n_heads, inside, n_queries, n_keys, left, right, scale,
    TILE: tl.constexpr,
):  # fmt: skip
    # Grid: slots of BLOCK_M queries x query heads x batch, in one axis.
    # Owns: one slot.
    # Loops over: nothing.
    # Writes: its rows of dq, 0 where no key meets them: no block has added to such an accumulator.
    pid = tl.program_id(0)
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        by_head(pid, n_slots, inside), n_slots, n_heads, n_batch, n_queries, cu_q, False, TILE.BLOCK_M
    )
    i_b, _, Tk = other_side(cu_k, i_b, n_keys, i_m, Tq)
    first, end = key_blocks(i_m, Tq, Tk, Limits(left, right), TILE.BLOCK_M, TILE.BLOCK_N)
    o_m = tl.arange(0, TILE.BLOCK_M)[:, None]
    o_d = tl.arange(0, TILE.BLOCK_D)[None, :]
    if TILE.WIDE:
        # [D / 16, M, 4, 2, 2], as `wide.in_fours` has each 16 channels
        o_column = o_d // 16 * (16 * TILE.BLOCK_M) + o_d % 8 // 2 * 4 + o_d // 8 % 2 * 2 + o_d % 2
        o_tile = o_column + o_m * 16
    else:
        # [D / 8, M, 8]
        o_tile = o_d // 8 * (8 * TILE.BLOCK_M) + o_m * 8 + o_d % 8
    o_acc = pid.to(tl.int64) * (TILE.BLOCK_M * TILE.WIDTH) + o_tile
    n_summed = tl.where(first < end, Tq, 0)
    b_dq = tl.load(acc_dq + o_acc, mask=(i_m + o_m < n_summed) & (o_d < TILE.D), other=0.0)
    store_rows(Rows(dq, dq_strides, i_b, i_h, start_q, Tq), i_m, b_dq * scale, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D)
