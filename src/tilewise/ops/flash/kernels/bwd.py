"""Flash attention backward, for any GPU that Triton supports: no atomics, so the same inputs give the same bits.

Three kernels. `prepare` makes delta = rowsum(o · do) - dlse, and each tile's part of the gradient of sinks, which the
launcher adds up: it takes no product. `dkdv` owns a key tile and loops over the query tiles of its group's heads (4
products: Sᵀ, dV, dPᵀ, dK); where key tiles are few, the GQA group is divided into chunks with a program each, and the
launcher adds them up. `dq` owns a query tile and loops over key tiles (3 products: S, dP, dQ). Seven products where one
pass with dQ summed in memory would do five: the price of a fixed order of sums without locks. The key side computes
Sᵀ = K Qᵀ directly, so that no result of a product has to be transposed.

In base 2: p = exp2(s · scale_log2 - lse_log2), where a row that saw nothing, or lies past the end, has lse_log2 = +inf
and so p = 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows, Window
from tilewise.ops._device.rows import first_position, load_rows, locate_tile, other_side, store_rows, tap_step
from tilewise.ops._device.scores import (
    cap_scores,
    diagonal,
    keep,
    key_range,
    keys_seen,
    lse_in_base_2,
    query_range,
    row_gradients,
    score_gradient,
    sink_gradient,
    zero_unseen,
)

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
# Not n_queries (a multiple of 16 lets rows of lse and delta be read in whole vectors), group (of 1 it needs no loop)
# nor chunks (of 1, no division): dK/dV is short of registers.
SIZES = ("n_batch", "n_tiles", "n_heads", "n_heads_k", "n_keys", "left", "right")


class DkdvStep(NamedTuple):
    """A step's tapped values, under the names that `tilewise trace` gives them; `t`: transposed."""

    Q: Any
    St: Any
    Pt: Any
    dO: Any
    dV: Any
    dPt: Any
    dSt: Any
    dK: Any


class DqStep(NamedTuple):
    """The same for dQ."""

    K: Any
    S: Any
    V: Any
    dP: Any
    P: Any
    dS: Any
    dQ: Any
    delta: Any


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_prepare_kernel(
    o, do, lse, dlse, delta, lse_log2, sinks, cu_q, n_batch, n_tiles, n_heads, n_queries,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: nothing.
    # Writes: its rows of delta and lse_log2, and what they add to the gradient of the head's sink.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu_q, False, BLOCK_M
    )
    if cu_q is not None:
        i_b = 0
    o_rows = Rows(o.x, o.strides, i_b, i_h, start_q, Tq)
    do_rows = Rows(do.x, do.strides, i_b, i_h, start_q, Tq)
    b_delta, b_lse, o_row, m_row = row_gradients(
        o_rows, do_rows, lse, dlse.x, dlse.strides, i_m, n_heads, n_queries, DV, BLOCK_M, BLOCK_DV
    )
    tl.store(delta + o_row, b_delta, mask=m_row)
    tl.store(lse_log2 + o_row, lse_in_base_2(b_lse), mask=m_row)
    if sinks.x is not None:
        tl.store(sinks.parts + tl.program_id(0), sink_gradient(sinks.x, i_h, b_delta, b_lse))


@triton.jit
def flash_bwd_dkdv_step(
    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, p_lse, p_delta, i_m, i_n, Tk, window, scales, taps, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """What one query tile adds to dK and dV."""
    o_m = i_m + tl.arange(0, TILE.BLOCK_M)
    # [M, D]
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA)
    # [N, D] @ [D, M] -> [N, M]
    b_sT = tl.dot(b_k, tl.trans(b_q), input_precision=TILE.PRECISION)
    b_lse = tl.load(p_lse + o_m, mask=o_m < q_rows.n_rows, other=float("inf"))
    b_sT = cap_scores(b_sT, scales.score_scale)
    b_pT = tl.exp2(b_sT * scales.scale_log2 - b_lse[None, :])
    if MASKED:
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        b_pT = tl.where(keep(o_m[None, :], o_n[:, None], Tk, window, TILE.KEY_STRIDE), b_pT, 0.0)
    # [M, DV]
    b_do = load_rows(do_rows, i_m, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV, TILE.TMA)
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = tl.dot(b_pT.to(b_do.dtype), b_do, acc_dv, input_precision=TILE.PRECISION)
    # [N, DV] @ [DV, M] -> [N, M]
    b_dpT = tl.dot(b_v, tl.trans(b_do), input_precision=TILE.PRECISION)
    b_delta = tl.load(p_delta + o_m, mask=o_m < q_rows.n_rows, other=0.0)
    b_dsT = score_gradient(b_pT, b_dpT, b_delta[None, :], b_sT, scales.score_scale)
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = tl.dot(b_dsT.to(b_q.dtype), b_q, acc_dk, input_precision=TILE.PRECISION)
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    i_step = q_rows.i_h * tl.cdiv(q_rows.n_rows, BLOCK_M) + i_m // BLOCK_M
    tap_step(taps, i_step, DkdvStep(b_q, b_sT, b_pT, b_do, acc_dv, b_dpT, b_dsT, acc_dk))
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dkdv_kernel(
    q, k, v, do, strides, stats, dk, dv, cu, n_batch, n_tiles, n_heads_k, heads, n_queries, n_keys, left, right,
    scales, taps, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: key tiles x KV heads · chunks x batch, in one axis.
    # Owns: BLOCK_N keys of one KV head, for one chunk of its GQA group: `group` query heads.
    # Loops over: those heads, and the query tiles that reach it.
    # Writes: its rows of dk and dv, which have a head for each chunk.
    i_b, i_hk, i_n, start_k, Tk = locate_tile(
        tl.program_id(0), n_tiles, n_heads_k, n_batch, n_keys, cu.k, False, TILE.BLOCK_N
    )
    first = first_position(cu.first, i_b)
    i_b, start_q, Tq = other_side(cu.q, i_b, n_queries, i_n, Tk)
    n_seen = keys_seen(first + Tq, Tk, right, TILE.KEY_STRIDE)
    k_rows = Rows(k, strides.k, i_b, i_hk // heads.chunks, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_hk // heads.chunks, start_k, Tk)
    # [N, D], [N, DV]
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA)
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA)
    acc_dk = tl.full([TILE.BLOCK_N, TILE.BLOCK_D], 0.0, tl.float32)
    acc_dv = tl.full([TILE.BLOCK_N, TILE.BLOCK_DV], 0.0, tl.float32)
    window = Window(left, right, first + diagonal(Tq, Tk, TILE.KEY_STRIDE))
    runs = query_range(i_n, Tq, n_seen, window, TILE.BLOCK_M, TILE.BLOCK_N, TILE.KEY_STRIDE)
    for i_h in range(i_hk * heads.group, i_hk * heads.group + heads.group):
        q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
        do_rows = Rows(do, strides.do, i_b, i_h, start_q, Tq)
        o_row = (tl.cast(i_b, tl.int64) * (n_heads_k * heads.group) + i_h) * n_queries + start_q
        for RUN in tl.static_range(3):
            if RUN == 1 or (RUN == 0 and right is not None) or (RUN == 2 and left is not None):
                for i_m in range(runs[RUN], runs[RUN + 1], TILE.BLOCK_M):
                    acc_dk, acc_dv = flash_bwd_dkdv_step(
                        acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, stats.lse_log2 + o_row, stats.delta + o_row, i_m,
                        i_n, n_seen, window, scales, taps, TILE, RUN != 1,
                    )  # fmt: skip
    acc_dk = zero_unseen(acc_dk, i_n, n_seen, TILE.KEY_STRIDE, TILE.BLOCK_N)
    acc_dv = zero_unseen(acc_dv, i_n, n_seen, TILE.KEY_STRIDE, TILE.BLOCK_N)
    dk_rows = Rows(dk.x, dk.strides, i_b, i_hk, start_k, Tk)
    dv_rows = Rows(dv.x, dv.strides, i_b, i_hk, start_k, Tk)
    store_rows(dk_rows, i_n, acc_dk * scales.scale, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D)
    store_rows(dv_rows, i_n, acc_dv, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV)


@triton.jit
def flash_bwd_dq_step(
    acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_m, i_n, window, scales, taps, TILE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """What one key tile adds to dQ."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA, not MASKED)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=TILE.PRECISION)
    # [N, DV]
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA, not MASKED)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=TILE.PRECISION)
    b_s = cap_scores(b_s, scales.score_scale)
    b_p = tl.exp2(b_s * scales.scale_log2 - b_lse[:, None])
    if MASKED:
        o_m = i_m + tl.arange(0, TILE.BLOCK_M)
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        b_p = tl.where(keep(o_m[:, None], o_n[None, :], k_rows.n_rows, window, TILE.KEY_STRIDE), b_p, 0.0)
    b_ds = score_gradient(b_p, b_dp, b_delta[:, None], b_s, scales.score_scale)
    # [M, N] @ [N, D] -> [M, D]
    acc_dq = tl.dot(b_ds.to(b_k.dtype), b_k, acc_dq, input_precision=TILE.PRECISION)
    tap_step(taps, i_n // TILE.BLOCK_N, DqStep(b_k, b_s, b_v, b_dp, b_p, b_ds, acc_dq, b_delta))
    return acc_dq


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dq_kernel(
    q, k, v, do, strides, stats, dq, cu, n_batch, n_tiles, n_heads, group, n_queries, n_keys, left, right, scales,
    taps, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its window reaches.
    # Writes: its rows of dq.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu.q, right is not None, TILE.BLOCK_M
    )
    first = first_position(cu.first, i_b)
    i_b, start_k, Tk = other_side(cu.k, i_b, n_keys, i_m, Tq)
    Tk = keys_seen(first + Tq, Tk, right, TILE.KEY_STRIDE)
    q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, strides.do, i_b, i_h, start_q, Tq)
    k_rows = Rows(k, strides.k, i_b, i_h // group, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_h // group, start_k, Tk)
    # [M, D], [M, DV]
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA)
    b_do = load_rows(do_rows, i_m, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV, TILE.TMA)
    o_m = i_m + tl.arange(0, TILE.BLOCK_M)
    o_row = (tl.cast(i_b, tl.int64) * n_heads + i_h) * n_queries + start_q + o_m
    b_lse = tl.load(stats.lse_log2 + o_row, mask=o_m < Tq, other=float("inf"))
    b_delta = tl.load(stats.delta + o_row, mask=o_m < Tq, other=0.0)
    acc_dq = tl.full([TILE.BLOCK_M, TILE.BLOCK_D], 0.0, tl.float32)
    window = Window(left, right, first + diagonal(Tq, Tk, TILE.KEY_STRIDE))
    runs = key_range(i_m, Tk, window, TILE.BLOCK_M, TILE.BLOCK_N, TILE.KEY_STRIDE)
    for RUN in tl.static_range(3):
        if RUN != 0 or left is not None:
            for i_n in range(runs[RUN], runs[RUN + 1], TILE.BLOCK_N):
                acc_dq = flash_bwd_dq_step(
                    acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_m, i_n, window, scales, taps, TILE, RUN != 1
                )
    dq_rows = Rows(dq.x, dq.strides, i_b, i_h, start_q, Tq)
    store_rows(dq_rows, i_m, acc_dq * scales.scale, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D)
