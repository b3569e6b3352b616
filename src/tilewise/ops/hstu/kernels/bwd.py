"""SiLU attention backward, for any GPU that Triton supports: no atomics, so the same inputs give the same bits.

Two kernels. `dkdv` owns a key tile and loops over the query tiles that reach it (4 products: Sᵀ, dV, dPᵀ, dK). `dq`
owns a query tile and loops over key tiles (3 products: S, dP, dQ). A weight depends on its own score alone, so nothing
of the forward is needed but its inputs. The key side computes Sᵀ = K Qᵀ directly, so that no result of a product has to
be transposed.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.history import history_end, kept_pairs, keys_of, queries_of
from tilewise.ops._device.records import History, Pairs, Rows, Window
from tilewise.ops._device.rows import load_rows, locate_ordered, same_or_other_side, store_rows, tap_step
from tilewise.ops._device.scores import diagonal, keys_seen, silu_slopes

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_tiles", "n_heads", "n_queries", "n_keys", "left", "right", "context")


class DkdvStep(NamedTuple):
    """A step's tapped values, under the names that `tilewise trace` gives them."""

    Q: Any
    S: Any
    P: Any
    dO: Any
    dV: Any
    dP: Any
    dS: Any
    dK: Any


class DqStep(NamedTuple):
    """The same for dQ."""

    K: Any
    S: Any
    V: Any
    dP: Any
    dS: Any
    dQ: Any


@triton.jit
def hstu_bwd_dkdv_step(
    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, i_m, i_n, Tk, mask, scales, taps, TILE: tl.constexpr,
    MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """What one query tile adds to dK and dV. Rows past the last query are zero, and so are their products."""
    # [M, D]
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA, INSIDE)
    # [N, D] @ [D, M] -> [N, M]
    b_sT = tl.dot(b_k, tl.trans(b_q), input_precision=TILE.PRECISION)
    b_pT, b_slopeT = silu_slopes(b_sT, scales.alpha_log2, scales.gain, scales.ratio)
    if MASKED:
        o_m = i_m + tl.arange(0, TILE.BLOCK_M)
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        m_keep = kept_pairs(o_m[None, :], o_n[:, None], Tk, mask, TILE)
        b_pT = tl.where(m_keep, b_pT, 0.0)
        b_slopeT = tl.where(m_keep, b_slopeT, 0.0)
    # [M, DV]
    b_do = load_rows(do_rows, i_m, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV, TILE.TMA, INSIDE)
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = tl.dot(b_pT.to(b_do.dtype), b_do, acc_dv, input_precision=TILE.PRECISION)
    # [N, DV] @ [DV, M] -> [N, M]
    b_dpT = tl.dot(b_v, tl.trans(b_do), input_precision=TILE.PRECISION)
    b_dsT = b_dpT * b_slopeT
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = tl.dot(b_dsT.to(b_q.dtype), b_q, acc_dk, input_precision=TILE.PRECISION)
    tap_step(taps, i_m // TILE.BLOCK_M, DkdvStep(b_q, b_sT, b_pT, b_do, acc_dv, b_dpT, b_dsT, acc_dk))
    return acc_dk, acc_dv


@triton.jit(do_not_specialize=SIZES)
def hstu_bwd_dkdv_kernel(
    q, k, v, do, strides, dk, dv, packed, num_targets, n_tiles, n_heads, n_queries, n_keys, left, right, context,
    chunks, scales, taps, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: key tiles of all sequences, longest sequences first, x heads x chunks, where chunks is given.
    # Owns: BLOCK_N keys of one head, for one chunk of the queries.
    # Loops over: the query tiles that reach it.
    # Writes: its rows of dk and dv, which hold the chunks' rows end to end.
    i_own = tl.program_id(0)
    if chunks is not None:
        i_own = tl.program_id(0) // chunks
    i_b, i_h, i_n, start_k, Tk = locate_ordered(
        i_own, packed.tiles, n_tiles, n_heads, n_keys, packed.cu, False, TILE.BLOCK_N
    )
    if i_n >= Tk:
        return
    history = None
    if TILE.HISTORY:
        history = History(context, history_end(num_targets, context, i_b, Tk), left)
    i_b, start_q, Tq = same_or_other_side(packed.cu, packed.cu_other, i_b, start_k, Tk, n_queries)
    # Nothing is stored for keys that no query sees: no kernel reads it.
    Tk = keys_seen(Tq, Tk, right, TILE.KEY_STRIDE)
    k_rows = Rows(k, strides.k, i_b, i_h, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_h, start_k, Tk)
    # [N, D], [N, DV]; of keys past the last nothing is stored.
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA, TILE.TMA != 0)
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA, TILE.TMA != 0)
    acc_dk = tl.full([TILE.BLOCK_N, TILE.BLOCK_D], 0.0, tl.float32)
    acc_dv = tl.full([TILE.BLOCK_N, TILE.BLOCK_DV], 0.0, tl.float32)
    mask = Pairs(Window(left, right, diagonal(Tq, Tk, TILE.KEY_STRIDE)), history)
    context_end, runs = queries_of(i_n, Tq, Tk, mask, TILE)
    firsts = (runs.low, runs.full_low, runs.full_high, runs.tail, 0)
    lasts = (runs.full_low, runs.full_high, runs.tail, runs.high, context_end)
    i_low = 0
    i_high = Tq
    if chunks is not None:
        i_chunk = tl.program_id(0) % chunks
        BLOCK_M: tl.constexpr = TILE.BLOCK_M
        length = tl.cdiv(tl.cdiv(Tq, BLOCK_M), chunks) * BLOCK_M
        i_low = i_chunk * length
        i_high = i_low + length
        start_k += i_chunk * n_keys
    q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, strides.do, i_b, i_h, start_q, Tq)
    for RUN in tl.static_range(5):
        if (
            (RUN == 0 and (right is not None or TILE.HISTORY))
            or RUN == 1
            or (RUN == 2 and (left is not None or TILE.HISTORY))
            or RUN == 3
            or (RUN == 4 and context is not None)
        ):
            for i_m in range(tl.maximum(firsts[RUN], i_low), tl.minimum(lasts[RUN], i_high), TILE.BLOCK_M):
                acc_dk, acc_dv = hstu_bwd_dkdv_step(
                    acc_dk, acc_dv, b_k, b_v, q_rows, do_rows, i_m, i_n, Tk, mask, scales, taps, TILE, RUN != 1,
                    RUN != 3,
                )  # fmt: skip
    dk_rows = Rows(dk.x, dk.strides, i_b, i_h, start_k, Tk)
    dv_rows = Rows(dv.x, dv.strides, i_b, i_h, start_k, Tk)
    store_rows(dk_rows, i_n, acc_dk * scales.factor_s, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D)
    store_rows(dv_rows, i_n, acc_dv * scales.factor, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV)


@triton.jit
def hstu_bwd_dq_step(
    acc_dq, b_q, b_do, k_rows, v_rows, i_m, i_n, mask, scales, taps, TILE: tl.constexpr, MASKED: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """What one key tile adds to dQ."""
    # [N, D]
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA, INSIDE)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=TILE.PRECISION)
    # [N, DV]; products with rows past the last are masked, whatever a descriptor reads there.
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA, INSIDE or TILE.TMA != 0)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=TILE.PRECISION)
    _, b_slope = silu_slopes(b_s, scales.alpha_log2, scales.gain, scales.ratio)
    b_ds = b_dp * b_slope
    if MASKED:
        o_m = i_m + tl.arange(0, TILE.BLOCK_M)
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        b_ds = tl.where(kept_pairs(o_m[:, None], o_n[None, :], k_rows.n_rows, mask, TILE), b_ds, 0.0)
    # [M, N] @ [N, D] -> [M, D]
    acc_dq = tl.dot(b_ds.to(b_k.dtype), b_k, acc_dq, input_precision=TILE.PRECISION)
    tap_step(taps, i_n // TILE.BLOCK_N, DqStep(b_k, b_s, b_v, b_dp, b_ds, acc_dq))
    return acc_dq


@triton.jit(do_not_specialize=SIZES)
def hstu_bwd_dq_kernel(
    q, k, v, do, strides, dq, packed, num_targets, n_tiles, n_heads, n_queries, n_keys, left, right, context,
    scales, taps, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles of all sequences, longest sequences first, x heads.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its mask reaches.
    # Writes: its rows of dq.
    i_b, i_h, i_m, start_q, Tq = locate_ordered(
        tl.program_id(0), packed.tiles, n_tiles, n_heads, n_queries, packed.cu, TILE.CAUSAL, TILE.BLOCK_M
    )
    if i_m >= Tq:
        return
    history = None
    if TILE.HISTORY:
        history = History(context, history_end(num_targets, context, i_b, Tq), left)
    i_b, start_k, Tk = same_or_other_side(packed.cu, packed.cu_other, i_b, start_q, Tq, n_keys)
    Tk = keys_seen(Tq, Tk, right, TILE.KEY_STRIDE)
    q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
    do_rows = Rows(do, strides.do, i_b, i_h, start_q, Tq)
    k_rows = Rows(k, strides.k, i_b, i_h, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_h, start_k, Tk)
    # [M, D], [M, DV]; of rows past the last nothing is stored.
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA, TILE.TMA != 0)
    b_do = load_rows(do_rows, i_m, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV, TILE.TMA, TILE.TMA != 0)
    acc_dq = tl.full([TILE.BLOCK_M, TILE.BLOCK_D], 0.0, tl.float32)
    mask = Pairs(Window(left, right, diagonal(Tq, Tk, TILE.KEY_STRIDE)), history)
    runs = keys_of(i_m, Tk, mask, TILE)
    for RUN in tl.static_range(4):
        if (
            RUN == 1
            or RUN == 3
            or (RUN == 0 and left is not None)
            or (RUN == 2 and (right is not None or TILE.HISTORY))
        ):
            for i_n in range(runs[RUN], runs[RUN + 1], TILE.BLOCK_N):
                acc_dq = hstu_bwd_dq_step(
                    acc_dq, b_q, b_do, k_rows, v_rows, i_m, i_n, mask, scales, taps, TILE, RUN != 1, RUN != 3
                )
    dq_rows = Rows(dq.x, dq.strides, i_b, i_h, start_q, Tq)
    store_rows(dq_rows, i_m, acc_dq * scales.factor_s, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D)
