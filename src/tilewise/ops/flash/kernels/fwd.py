"""Flash attention forward, for any GPU that Triton supports.

Tile plan, one program per query tile of BLOCK_M rows of one head: Q stays on chip; K and V tiles of BLOCK_N rows stream
through.
Operations: 2 · BLOCK_M · BLOCK_N · (D + Dv) a step. Bytes from memory: Q, O and LSE once; K and V once for each query
tile, from the L2 cache for all but the first. On chip: BLOCK_M · D + stages · BLOCK_N · (D + Dv) elements of shared
memory, BLOCK_M · (Dv + BLOCK_N) fp32 in registers.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows, Window
from tilewise.ops._device.rows import (
    first_position,
    load_rows,
    locate_tile,
    other_side,
    store_rows,
    tap_once,
    tap_step,
)
from tilewise.ops._device.scores import (
    add_sink,
    cap_scores,
    diagonal,
    keep,
    key_range,
    keys_seen,
    online_softmax_step,
    softmax_finish,
)

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_batch", "n_tiles", "n_heads", "group", "n_queries", "n_keys", "left", "right")


class FwdStep(NamedTuple):
    """A step's tapped values, under the names that `tilewise trace` gives them."""

    K: Any
    S_pre_scaling: Any
    M: Any
    L: Any
    P: Any
    V: Any
    O_scale: Any
    O: Any


@triton.jit
def flash_fwd_step(
    b_q, acc, m, l, k_rows, v_rows, i_m, i_n, window, scales, taps, TILE: tl.constexpr, MASKED: tl.constexpr
):
    """One key tile: scores, online softmax, sum with the values."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA, not MASKED)
    # [M, D] @ [D, N] -> [M, N]
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision=TILE.PRECISION)
    b_s = cap_scores(b_qk, scales.score_scale)
    if MASKED:
        o_m = i_m + tl.arange(0, TILE.BLOCK_M)
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        m_keep = keep(o_m[:, None], o_n[None, :], k_rows.n_rows, window, TILE.KEY_STRIDE)
        b_s = tl.where(m_keep, b_s, float("-inf"))
    b_p, m, l, rescale = online_softmax_step(b_s, m, l, scales.scale_log2, MASKED)
    # [N, DV]
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA, not MASKED)
    acc_scaled = acc * rescale[:, None]
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc_scaled, input_precision=TILE.PRECISION)
    tap_step(taps, i_n // TILE.BLOCK_N, FwdStep(b_k, b_qk, m, l, b_p, b_v, acc_scaled, acc), 1)
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def flash_fwd_kernel(
    q, k, v, sinks, strides, o, lse, cu, n_batch, n_tiles, n_heads, group, n_queries, n_keys, left, right, scales,
    taps, TILE: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its window reaches.
    # Writes: its rows of o and lse.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu.q, right is not None, TILE.BLOCK_M
    )
    first = first_position(cu.first, i_b)
    i_b, start_k, Tk = other_side(cu.k, i_b, n_keys, i_m, Tq)
    Tk = keys_seen(first + Tq, Tk, right, TILE.KEY_STRIDE)
    q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
    k_rows = Rows(k, strides.k, i_b, i_h // group, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_h // group, start_k, Tk)
    # [M, D]
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA)
    if SIGN != 1:
        # The row maximum is taken before scaling, which needs a positive scale: its sign (or 0) goes into q, exactly.
        b_q = (b_q * SIGN).to(b_q.dtype)
    tap_once(taps, b_q)
    m = tl.full([TILE.BLOCK_M], float("-inf"), tl.float32)
    l = tl.full([TILE.BLOCK_M], 0.0, tl.float32)
    acc = tl.full([TILE.BLOCK_M, TILE.BLOCK_DV], 0.0, tl.float32)
    window = Window(left, right, first + diagonal(Tq, Tk, TILE.KEY_STRIDE))
    runs = key_range(i_m, Tk, window, TILE.BLOCK_M, TILE.BLOCK_N, TILE.KEY_STRIDE)
    for RUN in tl.static_range(3):
        if RUN != 0 or left is not None:
            for i_n in range(runs[RUN], runs[RUN + 1], TILE.BLOCK_N):
                acc, m, l = flash_fwd_step(
                    b_q, acc, m, l, k_rows, v_rows, i_m, i_n, window, scales, taps, TILE, RUN != 1
                )
    if sinks is not None:
        m, l, rescale = add_sink(m, l, tl.load(sinks + i_h))
        acc = acc * rescale[:, None]
    b_o, b_lse = softmax_finish(acc, m, l, sinks is not None)
    o_rows = Rows(o.x, o.strides, i_b, i_h, start_q, Tq)
    store_rows(o_rows, i_m, b_o, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV)
    o_m = i_m + tl.arange(0, TILE.BLOCK_M)
    tl.store(lse + (tl.cast(i_b, tl.int64) * n_heads + i_h) * n_queries + start_q + o_m, b_lse, mask=o_m < Tq)
