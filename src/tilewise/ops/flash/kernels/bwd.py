"""Flash attention backward, for any GPU that Triton serves: no atomics, so the same inputs give the same bits.

Three kernels. `prepare` makes delta = rowsum(o · do) - dlse. `dkdv` owns a key tile and loops over the query tiles of
its group's heads (4 products: Sᵀ, dV, dPᵀ, dK); where key tiles are few, the heads are divided into parts with a
program each, and the launcher adds them up. `dq` owns a query tile and loops over key tiles (3 products: S, dP, dQ).
Seven products where one pass with dQ summed in memory would do five: the price of a fixed order of sums without locks.
The key side computes Sᵀ = K Qᵀ directly, so that no result of a product has to be transposed.

In base 2: p = exp2(s · scale_log2 - lse_log2), where a row that saw nothing, or lies past the end, has lse_log2 = +inf
and so p = 0.
"""

import triton
import triton.language as tl

from tilewise.ops._device.delta import row_gradients
from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.mask import diagonal, keep, key_range, keys_seen, query_range, zero_unseen
from tilewise.ops._device.records import Rows
from tilewise.ops._device.softmax import cap_scores, score_gradient
from tilewise.ops._device.tap import tap
from tilewise.ops._device.varlen import locate_tile, other_side

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
# Not n_queries (a multiple of 16 lets rows of lse and delta be read in whole vectors), group (of 1 it needs no loop)
# nor parts (of 1, no division): dK/dV is short of registers.
SIZES = ("n_batch", "n_tiles", "n_heads", "n_heads_k", "n_keys", "left", "right")


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_prepare_kernel(
    o, do, lse, dlse, delta, lse_log2, o_strides, do_strides, dlse_strides, cu_q, n_batch, n_tiles, n_heads, n_queries,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: nothing.
    # Writes: its rows of delta and lse_log2.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu_q, False, BLOCK_M
    )
    if cu_q is not None:
        i_b = 0
    o_rows = Rows(o, o_strides, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, do_strides, i_b, i_h, start_q, Tq)
    b_delta, b_lse, o_row, m_row = row_gradients(
        o_rows, do_rows, lse, dlse, dlse_strides, i_m, n_heads, n_queries, DV, BLOCK_M, BLOCK_DV
    )
    tl.store(delta + o_row, b_delta, mask=m_row)
    tl.store(lse_log2 + o_row, b_lse, mask=m_row)


@triton.jit
def flash_bwd_dkdv_step(
    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, p_lse, p_delta, i_m, i_n, Tk, off, left, right, scale_log2, score_scale,
    taps, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One query tile's part of dK and dV."""
    o_m = i_m + tl.arange(0, BLOCK_M)
    i_step = q_rows.i_h * tl.cdiv(q_rows.n_rows, BLOCK_M) + i_m // BLOCK_M
    # [M, D]
    b_q = load_rows(q_rows, i_m, D, BLOCK_M, BLOCK_D, TMA)
    # [N, D] @ [D, M] -> [N, M]
    b_sT = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    tap(taps, i_step, 0, b_q)
    b_lse = tl.load(p_lse + o_m, mask=o_m < q_rows.n_rows, other=float("inf"))
    b_sT = cap_scores(b_sT, score_scale)
    tap(taps, i_step, 1, b_sT)
    b_pT = tl.exp2(b_sT * scale_log2 - b_lse[None, :])
    if MASKED:
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_pT = tl.where(keep(o_m[None, :], o_n[:, None], Tk, off, left, right, KEY_STRIDE), b_pT, 0.0)
    # [M, DV]
    b_do = load_rows(do_rows, i_m, DV, BLOCK_M, BLOCK_DV, TMA)
    tap(taps, i_step, 2, b_pT)
    tap(taps, i_step, 3, b_do)
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = tl.dot(b_pT.to(b_do.dtype), b_do, acc_dv, input_precision=PRECISION)
    tap(taps, i_step, 4, acc_dv)
    # [N, DV] @ [DV, M] -> [N, M]
    b_dpT = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_delta = tl.load(p_delta + o_m, mask=o_m < q_rows.n_rows, other=0.0)
    b_dsT = score_gradient(b_pT, b_dpT, b_delta[None, :], b_sT, score_scale)
    tap(taps, i_step, 5, b_dpT)
    tap(taps, i_step, 6, b_dsT)
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = tl.dot(b_dsT.to(b_q.dtype), b_q, acc_dk, input_precision=PRECISION)
    tap(taps, i_step, 7, acc_dk)
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dkdv_kernel(
    q, k, v, do, lse_log2, delta, dk, dv, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, cu_q,
    cu_k, n_batch, n_tiles, n_heads_k, group, parts, n_queries, n_keys, scale, scale_log2, score_scale, left, right,
    taps, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: key tiles x key heads · parts x batch, in one axis.
    # Owns: BLOCK_N keys of one key head, for one part of its group: `group` query heads.
    # Loops over: those heads, and the query tiles that reach it.
    # Writes: its rows of dk and dv, which have a head for each part.
    i_b, i_hk, i_n, start_k, Tk = locate_tile(
        tl.program_id(0), n_tiles, n_heads_k, n_batch, n_keys, cu_k, False, BLOCK_N
    )
    i_b, start_q, Tq = other_side(cu_q, i_b, n_queries, i_n, Tk)
    n_seen = keys_seen(Tq, Tk, right, KEY_STRIDE)
    # [N, D], [N, DV]
    b_k = load_rows(Rows(k, k_strides, i_b, i_hk // parts, start_k, Tk), i_n, D, BLOCK_N, BLOCK_D, TMA)
    b_v = load_rows(Rows(v, v_strides, i_b, i_hk // parts, start_k, Tk), i_n, DV, BLOCK_N, BLOCK_DV, TMA)
    acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    ends = query_range(i_n, Tq, n_seen, left, right, BLOCK_M, BLOCK_N, KEY_STRIDE)
    for i_h in range(i_hk * group, i_hk * group + group):
        q_rows = Rows(q, q_strides, i_b, i_h, start_q, Tq)
        do_rows = Rows(do, do_strides, i_b, i_h, start_q, Tq)
        o_row = (tl.cast(i_b, tl.int64) * (n_heads_k * group) + i_h) * n_queries + start_q
        for PART in tl.static_range(3):
            if PART == 1 or (PART == 0 and right is not None) or (PART == 2 and left is not None):
                for i_m in range(ends[PART], ends[PART + 1], BLOCK_M):
                    acc_dk, acc_dv = flash_bwd_dkdv_step(
                        acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, lse_log2 + o_row, delta + o_row, i_m, i_n, n_seen,
                        off, left, right, scale_log2, score_scale, taps, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N,
                        KEY_STRIDE, TMA, PRECISION, PART != 1,
                    )  # fmt: skip
    acc_dk = zero_unseen(acc_dk, i_n, n_seen, KEY_STRIDE, BLOCK_N)
    acc_dv = zero_unseen(acc_dv, i_n, n_seen, KEY_STRIDE, BLOCK_N)
    store_rows(Rows(dk, dk_strides, i_b, i_hk, start_k, Tk), i_n, acc_dk * scale, D, BLOCK_N, BLOCK_D)
    store_rows(Rows(dv, dv_strides, i_b, i_hk, start_k, Tk), i_n, acc_dv, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def flash_bwd_dq_step(
    acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_m, i_n, off, left, right, scale_log2, score_scale, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One key tile's part of dQ."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, D, BLOCK_N, BLOCK_D, TMA, not MASKED)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # [N, DV]
    b_v = load_rows(v_rows, i_n, DV, BLOCK_N, BLOCK_DV, TMA, not MASKED)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_s = cap_scores(b_s, score_scale)
    tap(taps, i_n // BLOCK_N, 0, b_k)
    tap(taps, i_n // BLOCK_N, 1, b_s)
    tap(taps, i_n // BLOCK_N, 2, b_v)
    tap(taps, i_n // BLOCK_N, 3, b_dp)
    b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
    if MASKED:
        o_m = i_m + tl.arange(0, BLOCK_M)
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_p = tl.where(keep(o_m[:, None], o_n[None, :], k_rows.n_rows, off, left, right, KEY_STRIDE), b_p, 0.0)
    b_ds = score_gradient(b_p, b_dp, b_delta[:, None], b_s, score_scale)
    tap(taps, i_n // BLOCK_N, 4, b_p)
    tap(taps, i_n // BLOCK_N, 5, b_ds)
    # [M, N] @ [N, D] -> [M, D]
    acc_dq = tl.dot(b_ds.to(b_k.dtype), b_k, acc_dq, input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 6, acc_dq)
    tap(taps, i_n // BLOCK_N, 7, b_delta)
    return acc_dq


@triton.jit(do_not_specialize=SIZES)
def flash_bwd_dq_kernel(
    q, k, v, do, lse_log2, delta, dq, q_strides, k_strides, v_strides, do_strides, dq_strides, cu_q, cu_k, n_batch,
    n_tiles, n_heads, group, n_queries, n_keys, scale, scale_log2, score_scale, left, right, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x query heads x batch, in one axis.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its window reaches.
    # Writes: its rows of dq.
    i_b, i_h, i_m, start_q, Tq = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_queries, cu_q, right is not None, BLOCK_M
    )
    i_b, start_k, Tk = other_side(cu_k, i_b, n_keys, i_m, Tq)
    Tk = keys_seen(Tq, Tk, right, KEY_STRIDE)
    k_rows = Rows(k, k_strides, i_b, i_h // group, start_k, Tk)
    v_rows = Rows(v, v_strides, i_b, i_h // group, start_k, Tk)
    # [M, D], [M, DV]
    b_q = load_rows(Rows(q, q_strides, i_b, i_h, start_q, Tq), i_m, D, BLOCK_M, BLOCK_D, TMA)
    b_do = load_rows(Rows(do, do_strides, i_b, i_h, start_q, Tq), i_m, DV, BLOCK_M, BLOCK_DV, TMA)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_row = (tl.cast(i_b, tl.int64) * n_heads + i_h) * n_queries + start_q + o_m
    b_lse = tl.load(lse_log2 + o_row, mask=o_m < Tq, other=float("inf"))
    b_delta = tl.load(delta + o_row, mask=o_m < Tq, other=0.0)
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    ends = key_range(i_m, Tq, Tk, left, right, BLOCK_M, BLOCK_N, KEY_STRIDE)
    for PART in tl.static_range(3):
        if PART != 0 or left is not None:
            for i_n in range(ends[PART], ends[PART + 1], BLOCK_N):
                acc_dq = flash_bwd_dq_step(
                    acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_m, i_n, off, left, right, scale_log2,
                    score_scale, taps, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KEY_STRIDE, TMA, PRECISION,
                    PART != 1,
                )  # fmt: skip
    store_rows(Rows(dq, dq_strides, i_b, i_h, start_q, Tq), i_m, acc_dq * scale, D, BLOCK_M, BLOCK_D)
