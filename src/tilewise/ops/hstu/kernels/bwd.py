"""SiLU attention backward, for any GPU that Triton serves: no atomics, so the same inputs give the same bits.

Two kernels. `dkdv` owns a key tile and loops over the query tiles that reach it (4 products: Sᵀ, dV, dPᵀ, dK). `dq`
owns a query tile and loops over key tiles (3 products: S, dP, dQ). A weight depends on its own score alone, so nothing
of the forward is needed but its inputs. The key side computes Sᵀ = K Qᵀ directly, so that no result of a product has to
be transposed.
"""

import triton
import triton.language as tl

from tilewise.ops._device.history import history_end
from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.mask import diagonal, keys_seen
from tilewise.ops._device.pairs import kept_pairs, keys_of, queries_of
from tilewise.ops._device.records import Rows
from tilewise.ops._device.silu import silu_slopes
from tilewise.ops._device.tap import tap
from tilewise.ops._device.varlen import locate_ordered, same_or_other_side

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_tiles", "n_heads", "n_queries", "n_keys", "left", "right", "context")


@triton.jit
def hstu_bwd_dkdv_step(
    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, i_m, i_n, Tk, off, left, right, history, alpha_log2, gain, ratio, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """One query tile's part of dK and dV. Rows past the last query are zero, and so is what comes of them."""
    # [M, D]
    b_q = load_rows(q_rows, i_m, D, BLOCK_M, BLOCK_D, TMA, INSIDE)
    # [N, D] @ [D, M] -> [N, M]
    b_sT = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
    tap(taps, i_m // BLOCK_M, 0, b_q)
    tap(taps, i_m // BLOCK_M, 1, b_sT)
    b_pT, b_slopeT = silu_slopes(b_sT, alpha_log2, gain, ratio)
    if MASKED:
        o_m = i_m + tl.arange(0, BLOCK_M)
        o_n = i_n + tl.arange(0, BLOCK_N)
        m_keep = kept_pairs(o_m[None, :], o_n[:, None], Tk, off, left, right, history, KEY_STRIDE, CAUSAL, HISTORY)
        b_pT = tl.where(m_keep, b_pT, 0.0)
        b_slopeT = tl.where(m_keep, b_slopeT, 0.0)
    # [M, DV]
    b_do = load_rows(do_rows, i_m, DV, BLOCK_M, BLOCK_DV, TMA, INSIDE)
    tap(taps, i_m // BLOCK_M, 2, b_pT)
    tap(taps, i_m // BLOCK_M, 3, b_do)
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = tl.dot(b_pT.to(b_do.dtype), b_do, acc_dv, input_precision=PRECISION)
    tap(taps, i_m // BLOCK_M, 4, acc_dv)
    # [N, DV] @ [DV, M] -> [N, M]
    b_dpT = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
    b_dsT = b_dpT * b_slopeT
    tap(taps, i_m // BLOCK_M, 5, b_dpT)
    tap(taps, i_m // BLOCK_M, 6, b_dsT)
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = tl.dot(b_dsT.to(b_q.dtype), b_q, acc_dk, input_precision=PRECISION)
    tap(taps, i_m // BLOCK_M, 7, acc_dk)
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=SIZES)
def hstu_bwd_dkdv_kernel(
    q, k, v, do, dk, dv, q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, cu, cu_other, tiles,
    num_targets, n_tiles, n_heads, n_queries, n_keys, left, right, context, alpha_log2, gain, ratio, factor, factor_s,
    taps, parts, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr,
    HISTORY: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: key tiles of all sequences, longest sequences first, x heads x parts, where parts is given.
    # Owns: BLOCK_N keys of one head, for one part of the queries.
    # Loops over: the query tiles that reach it.
    # Writes: its rows of dk and dv, which have rows for each part one after another.
    i_own = tl.program_id(0)
    if parts is not None:
        i_own = tl.program_id(0) // parts
    i_b, i_h, i_n, start_k, Tk = locate_ordered(i_own, tiles, n_tiles, n_heads, n_keys, cu, False, BLOCK_N)
    if i_n >= Tk:
        return
    history = (context, history_end(num_targets, context, i_b, Tk), left)
    i_b, start_q, Tq = same_or_other_side(cu, cu_other, i_b, start_k, Tk, n_queries)
    # Nothing is stored for keys that no query sees: nobody reads it.
    Tk = keys_seen(Tq, Tk, right, KEY_STRIDE)
    # [N, D], [N, DV]; of keys past the last nothing is stored.
    b_k = load_rows(Rows(k, k_strides, i_b, i_h, start_k, Tk), i_n, D, BLOCK_N, BLOCK_D, TMA, TMA != 0)
    b_v = load_rows(Rows(v, v_strides, i_b, i_h, start_k, Tk), i_n, DV, BLOCK_N, BLOCK_DV, TMA, TMA != 0)
    acc_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    context_end, ends = queries_of(i_n, Tq, Tk, left, right, history, KEY_STRIDE, CAUSAL, HISTORY, BLOCK_M, BLOCK_N)
    firsts = (ends[0], ends[1], ends[2], ends[3], 0)
    lasts = (ends[1], ends[2], ends[3], ends[4], context_end)
    i_low = 0
    i_high = Tq
    if parts is not None:
        i_part = tl.program_id(0) % parts
        length = tl.cdiv(tl.cdiv(Tq, BLOCK_M), parts) * BLOCK_M
        i_low = i_part * length
        i_high = i_low + length
        start_k += i_part * n_keys
    q_rows = Rows(q, q_strides, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, do_strides, i_b, i_h, start_q, Tq)
    for PART in tl.static_range(5):
        if (
            (PART == 0 and (right is not None or HISTORY))
            or PART == 1
            or (PART == 2 and (left is not None or HISTORY))
            or PART == 3
            or (PART == 4 and context is not None)
        ):
            for i_m in range(tl.maximum(firsts[PART], i_low), tl.minimum(lasts[PART], i_high), BLOCK_M):
                acc_dk, acc_dv = hstu_bwd_dkdv_step(
                    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, i_m, i_n, Tk, off, left, right, history, alpha_log2,
                    gain, ratio, taps, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KEY_STRIDE, CAUSAL, HISTORY, TMA,
                    PRECISION, PART != 1, PART != 3,
                )  # fmt: skip
    store_rows(Rows(dk, dk_strides, i_b, i_h, start_k, Tk), i_n, acc_dk * factor_s, D, BLOCK_N, BLOCK_D)
    store_rows(Rows(dv, dv_strides, i_b, i_h, start_k, Tk), i_n, acc_dv * factor, DV, BLOCK_N, BLOCK_DV)


@triton.jit
def hstu_bwd_dq_step(
    acc_dq, b_q, b_do, k_rows, v_rows, i_m, i_n, off, left, right, history, alpha_log2, gain, ratio, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """One key tile's part of dQ."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, D, BLOCK_N, BLOCK_D, TMA, INSIDE)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    # [N, DV]; products with rows past the last are masked, whatever a descriptor reads there.
    b_v = load_rows(v_rows, i_n, DV, BLOCK_N, BLOCK_DV, TMA, INSIDE or TMA != 0)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 0, b_k)
    tap(taps, i_n // BLOCK_N, 1, b_s)
    tap(taps, i_n // BLOCK_N, 2, b_v)
    tap(taps, i_n // BLOCK_N, 3, b_dp)
    _, b_slope = silu_slopes(b_s, alpha_log2, gain, ratio)
    b_ds = b_dp * b_slope
    if MASKED:
        o_m = i_m + tl.arange(0, BLOCK_M)
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_ds = tl.where(
            kept_pairs(
                o_m[:, None], o_n[None, :], k_rows.n_rows, off, left, right, history, KEY_STRIDE, CAUSAL, HISTORY
            ),
            b_ds,
            0.0,
        )
    tap(taps, i_n // BLOCK_N, 4, b_ds)
    # [M, N] @ [N, D] -> [M, D]
    acc_dq = tl.dot(b_ds.to(b_k.dtype), b_k, acc_dq, input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 5, acc_dq)
    return acc_dq


@triton.jit(do_not_specialize=SIZES)
def hstu_bwd_dq_kernel(
    q, k, v, do, dq, q_strides, k_strides, v_strides, do_strides, dq_strides, cu, cu_other, tiles, num_targets,
    n_tiles, n_heads, n_queries, n_keys, left, right, context, alpha_log2, gain, ratio, factor_s, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles of all sequences, longest sequences first, x heads.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its mask reaches.
    # Writes: its rows of dq.
    i_b, i_h, i_m, start_q, Tq = locate_ordered(
        tl.program_id(0), tiles, n_tiles, n_heads, n_queries, cu, CAUSAL, BLOCK_M
    )
    if i_m >= Tq:
        return
    history = (context, history_end(num_targets, context, i_b, Tq), left)
    i_b, start_k, Tk = same_or_other_side(cu, cu_other, i_b, start_q, Tq, n_keys)
    Tk = keys_seen(Tq, Tk, right, KEY_STRIDE)
    k_rows = Rows(k, k_strides, i_b, i_h, start_k, Tk)
    v_rows = Rows(v, v_strides, i_b, i_h, start_k, Tk)
    # [M, D], [M, DV]; of rows past the last nothing is stored.
    b_q = load_rows(Rows(q, q_strides, i_b, i_h, start_q, Tq), i_m, D, BLOCK_M, BLOCK_D, TMA, TMA != 0)
    b_do = load_rows(Rows(do, do_strides, i_b, i_h, start_q, Tq), i_m, DV, BLOCK_M, BLOCK_DV, TMA, TMA != 0)
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    ends = keys_of(i_m, Tq, Tk, left, right, history, KEY_STRIDE, CAUSAL, HISTORY, BLOCK_M, BLOCK_N)
    for PART in tl.static_range(4):
        if PART == 1 or PART == 3 or (PART == 0 and left is not None) or (PART == 2 and (right is not None or HISTORY)):
            for i_n in range(ends[PART], ends[PART + 1], BLOCK_N):
                acc_dq = hstu_bwd_dq_step(
                    acc_dq, b_q, b_do, k_rows, v_rows, i_m, i_n, off, left, right, history, alpha_log2, gain, ratio,
                    taps, D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KEY_STRIDE, CAUSAL, HISTORY, TMA, PRECISION,
                    PART != 1, PART != 3,
                )  # fmt: skip
    store_rows(Rows(dq, dq_strides, i_b, i_h, start_q, Tq), i_m, acc_dq * factor_s, D, BLOCK_M, BLOCK_D)
