"""Before and after the backward kernel for Hopper: what it reads of each query row, and dq from the sums that it leaves
in memory.

Both keep a head's rows in slots of BLOCK_M, as many as `tile_slots` says: a tile of a packed sequence is whole there
too, so that TMA reads it whole. The `inside` heads that the backward visits tile by tile lie inside of a slot, in its
order.
"""

import triton
import triton.language as tl

from tilewise.ops._device.delta import row_gradients
from tilewise.ops._device.load import store_rows
from tilewise.ops._device.reach import by_head, key_blocks
from tilewise.ops._device.records import Rows
from tilewise.ops._device.varlen import locate_tile, other_side

SIZES = ("n_batch", "n_slots", "n_heads", "inside", "n_queries", "n_keys", "left", "right")


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_prepare_kernel(
    o, do, lse, dlse, delta, lse_log2, sums, turns, tickets, o_strides, do_strides, dlse_strides, cu_q, n_batch,
    n_slots, n_heads, inside, n_queries, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, CLEARS: tl.constexpr,
):  # fmt: skip
    # Grid: slots of BLOCK_M queries x query heads x batch, in one axis.
    # Owns: one slot.
    # Loops over: nothing.
    # Writes: its rows of delta and lse_log2, its counter of turns, 0 to its tile of sums if it CLEARS them, and the
    # first program the one of tickets.
    pid = tl.program_id(0)
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        by_head(pid, n_slots, inside), n_slots, n_heads, n_batch, n_queries, cu_q, False, BLOCK_M
    )
    if cu_q is not None:
        i_b = 0
    o_rows = Rows(o, o_strides, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, do_strides, i_b, i_h, start_q, Tq)
    b_delta, b_lse, _, _ = row_gradients(
        o_rows, do_rows, lse, dlse, dlse_strides, i_m, n_heads, n_queries, DV, BLOCK_M, BLOCK_DV
    )
    o_row = pid.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(delta + o_row, b_delta)
    tl.store(lse_log2 + o_row, b_lse)
    tl.store(turns + pid, 0)
    if CLEARS:
        o_sum = pid.to(tl.int64) * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
        tl.store(sums + o_sum, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))
    if pid == 0:
        tl.store(tickets, 0)


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_finish_kernel(
    sums, dq, dq_strides, cu_q, cu_k, n_batch, n_slots, n_heads, inside, n_queries, n_keys, left, right, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    # Grid: slots of BLOCK_M queries x query heads x batch, in one axis.
    # Owns: one slot.
    # Loops over: nothing.
    # Writes: its rows of dq, 0 where no key meets them: nobody has added to such a tile of sums.
    pid = tl.program_id(0)
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        by_head(pid, n_slots, inside), n_slots, n_heads, n_batch, n_queries, cu_q, False, BLOCK_M
    )
    i_b, _, Tk = other_side(cu_k, i_b, n_keys, i_m, Tq)
    first, end = key_blocks(i_m, Tq, Tk, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    o_m = tl.arange(0, BLOCK_M)[:, None]
    o_d = tl.arange(0, BLOCK_D)[None, :]
    # [D / 8, M, 8] as the backward kernel has it
    o_sum = pid.to(tl.int64) * (BLOCK_M * BLOCK_D) + (o_d // 8 * (8 * BLOCK_M) + o_m * 8 + o_d % 8)
    n_summed = tl.where(first < end, Tq, 0)
    b_dq = tl.load(sums + o_sum, mask=(i_m + o_m < n_summed) & (o_d < D), other=0.0)
    store_rows(Rows(dq, dq_strides, i_b, i_h, start_q, Tq), i_m, b_dq * scale, D, BLOCK_M, BLOCK_D)
