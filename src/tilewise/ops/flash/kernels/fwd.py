"""Flash attention forward, for any GPU that Triton serves.

Tile plan, one program a query tile of BLOCK_M rows of one head: Q stays on chip; K and V tiles of BLOCK_N rows stream
through.
Operations: 2 · BLOCK_M · BLOCK_N · (D + Dv) a step. Bytes from memory: Q, O and LSE once; K and V once for each query
tile, from the L2 cache for all but the first. On chip: BLOCK_M · D + stages · BLOCK_N · (D + Dv) elements of shared
memory, BLOCK_M · (Dv + BLOCK_N) fp32 in registers.
"""

import triton
import triton.language as tl

from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.mask import diagonal, keep, key_range, keys_seen
from tilewise.ops._device.records import Rows
from tilewise.ops._device.softmax import cap_scores, online_softmax_step, softmax_finish
from tilewise.ops._device.tap import tap
from tilewise.ops._device.varlen import locate_tile, other_side

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_batch", "n_tiles", "n_heads", "group", "n_queries", "n_keys", "left", "right")


@triton.jit
def flash_fwd_step(
    b_q, acc, m, l, k_rows, v_rows, i_m, i_n, off, left, right, scale_log2, score_scale, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile: scores, online softmax, sum with the values."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, D, BLOCK_N, BLOCK_D, TMA, not MASKED)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 1, b_k)
    tap(taps, i_n // BLOCK_N, 2, b_s)
    b_s = cap_scores(b_s, score_scale)
    if MASKED:
        o_m = i_m + tl.arange(0, BLOCK_M)
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_s = tl.where(
            keep(o_m[:, None], o_n[None, :], k_rows.n_rows, off, left, right, KEY_STRIDE), b_s, float("-inf")
        )
    b_p, m, l, rescale = online_softmax_step(b_s, m, l, scale_log2, MASKED)
    tap(taps, i_n // BLOCK_N, 3, m)
    tap(taps, i_n // BLOCK_N, 4, l)
    tap(taps, i_n // BLOCK_N, 5, b_p)
    # [N, DV]
    b_v = load_rows(v_rows, i_n, DV, BLOCK_N, BLOCK_DV, TMA, not MASKED)
    acc = acc * rescale[:, None]
    tap(taps, i_n // BLOCK_N, 6, b_v)
    tap(taps, i_n // BLOCK_N, 7, acc)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 8, acc)
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def flash_fwd_kernel(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, cu_q, cu_k, n_batch, n_tiles, n_heads, group,
    n_queries, n_keys, scale_log2, score_scale, left, right, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, SIGN: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its window reaches.
    # Writes: its rows of o and lse.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu_q, right is not None, BLOCK_M
    )
    i_b, start_k, Tk = other_side(cu_k, i_b, n_keys, i_m, Tq)
    Tk = keys_seen(Tq, Tk, right, KEY_STRIDE)
    k_rows = Rows(k, k_strides, i_b, i_h // group, start_k, Tk)
    v_rows = Rows(v, v_strides, i_b, i_h // group, start_k, Tk)
    # [M, D]
    b_q = load_rows(Rows(q, q_strides, i_b, i_h, start_q, Tq), i_m, D, BLOCK_M, BLOCK_D, TMA)
    if SIGN != 1:
        # The row maximum is taken before scaling, which wants a positive scale: its sign (or 0) goes into q, exactly.
        b_q = (b_q * SIGN).to(b_q.dtype)
    tap(taps, 0, 0, b_q)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    ends = key_range(i_m, Tq, Tk, left, right, BLOCK_M, BLOCK_N, KEY_STRIDE)
    for PART in tl.static_range(3):
        if PART != 0 or left is not None:
            for i_n in range(ends[PART], ends[PART + 1], BLOCK_N):
                acc, m, l = flash_fwd_step(
                    b_q, acc, m, l, k_rows, v_rows, i_m, i_n, off, left, right, scale_log2, score_scale, taps,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KEY_STRIDE, TMA, PRECISION, PART != 1,
                )  # fmt: skip
    b_o, b_lse = softmax_finish(acc, m, l)
    store_rows(Rows(o, o_strides, i_b, i_h, start_q, Tq), i_m, b_o, DV, BLOCK_M, BLOCK_DV)
    o_m = i_m + tl.arange(0, BLOCK_M)
    tl.store(lse + (tl.cast(i_b, tl.int64) * n_heads + i_h) * n_queries + start_q + o_m, b_lse, mask=o_m < Tq)
