"""Attention through SiLU to the blocks that tokens choose, in key order: a program owns a block of keys and a segment
of the tokens that chose it.

*Forward*: it gathers their queries, BLOCK_M at a time, and writes a result for each; a second kernel adds each token's
results in the order of its slots. *Backward*: it sums dK and dV over those rows, and writes a part of dQ for each.
Lists, segments and both sums are those of native sparse attention's selected branch: no atomics, so the same inputs
give the same bits. There is no softmax, so nothing else is passed between blocks.

Operations: 2 · BLOCK_M · BLOCK_N · (D + Dv) a step forward, 5 products backward. Bytes: K and V once a segment; for
each token and slot a row of q and one of results, written and read again; backward rows of q and do, and a row of dq,
likewise. HEADS heads that share a choice share the lists.
"""

import triton
import triton.language as tl

from tilewise.ops._device.blocks import gather_rows, head_pointer, keys_kept, listed_rows, locate_segment, no_segment
from tilewise.ops._device.load import load_rows
from tilewise.ops._device.plain import load_plain, store_plain, store_sums
from tilewise.ops._device.records import Rows
from tilewise.ops._device.silu import silu_slopes, silu_weights

SIZES = ("n_batch", "n_tokens", "n_heads", "n_slots", "first_tile")


@triton.jit(do_not_specialize=SIZES)
def bsa_selected_fwd_kernel(
    q, k, v, partial_o, perm, segments, ends, q_strides, k_strides, v_strides, cu, n_batch, n_tokens, n_heads, n_slots,
    first_tile, scale_log2, HEADS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TOKENS: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most, x HEADS heads that share a choice.
    # Owns: one block of keys of one head and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M at a time.
    # Writes: for each entry the sum over this block alone.
    i_segment = tl.program_id(0) // HEADS
    if no_segment(None, 0, ends + n_heads * n_slots - 1, i_segment):
        return
    first, n_entries, _, i_shared, i_bq, start_q, _, Tk, i_key, offset = locate_segment(
        segments, i_segment, n_slots, cu, n_batch, n_tokens, first_tile, BLOCK_SIZE, TOKENS
    )
    i_h = i_shared * HEADS + tl.program_id(0) % HEADS
    n_keys = tl.minimum(Tk, i_key + BLOCK_SIZE)
    # [N, D], [N, DV]
    b_k = load_rows(Rows(k, k_strides, i_bq, i_h, start_q, n_keys), i_key, D, BLOCK_N, BLOCK_D, False)
    b_v = load_rows(Rows(v, v_strides, i_bq, i_h, start_q, n_keys), i_key, DV, BLOCK_N, BLOCK_DV, False)
    p_q = head_pointer(q, q_strides, i_bq, start_q + offset, i_h)
    for i_entry in range(0, n_entries, BLOCK_M):
        m_r, o_c, o_s, o_g = listed_rows(perm, first, i_entry, n_entries, offset, Tk, cu, S, 1, 1, BLOCK_M)
        # [M, D]
        b_q = gather_rows(p_q, q_strides, o_c, o_g, m_r, D, BLOCK_D, INDEX)
        # [M, D] @ [D, N] -> [M, N]
        b_p = silu_weights(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), scale_log2, None)
        kept = keys_kept(o_s, o_c + offset, i_key, Tk, S, 0, True, BLOCK_SIZE)
        b_p = tl.where(tl.arange(0, BLOCK_N)[None, :] < kept[:, None], b_p, 0.0)
        # [M, N] @ [N, DV] -> [M, DV]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=PRECISION)
        # A chunk's results are fewer than 2^31.
        store_plain(partial_o, ((o_c * n_heads + i_shared) * S + o_s) * HEADS + i_h % HEADS, m_r, b_o, DV, BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def bsa_selected_bwd_kernel(
    q, k, v, do, dk, dv, partial_dk, partial_dv, partial_dq, perm, segments, ends, q_strides, k_strides, v_strides,
    do_strides, cu, n_batch, n_tokens, n_heads, n_slots, first_tile, scale, scale_log2,
    HEADS: tl.constexpr, S: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    TOKENS: tl.constexpr, INDEX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most, x HEADS heads that share a choice.
    # Owns: one block of keys of one head and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M at a time.
    # Writes: its part of dk and dv, added where it is a list's first segment, else left aside; and each entry's part of
    # dq.
    i_segment = tl.program_id(0) // HEADS
    if no_segment(None, 0, ends + n_heads * n_slots - 1, i_segment):
        return
    first, n_entries, i_extra, i_shared, i_bq, start_q, start, Tk, i_key, offset = locate_segment(
        segments, i_segment, n_slots, cu, n_batch, n_tokens, first_tile, BLOCK_SIZE, TOKENS
    )
    i_h = i_shared * HEADS + tl.program_id(0) % HEADS
    n_keys = tl.minimum(Tk, i_key + BLOCK_SIZE)
    # [N, D], [N, DV]
    b_k = load_rows(Rows(k, k_strides, i_bq, i_h, start_q, n_keys), i_key, D, BLOCK_N, BLOCK_D, False)
    b_v = load_rows(Rows(v, v_strides, i_bq, i_h, start_q, n_keys), i_key, DV, BLOCK_N, BLOCK_DV, False)
    # A list's first segment goes on from the sums of earlier chunks, if there were any.
    o_n = tl.arange(0, BLOCK_N)
    o_key = (start + i_key + o_n).to(tl.int64) * (n_heads * HEADS) + i_h
    m_earlier = i_key + o_n < tl.where((i_extra == 0) & (first_tile > 0), n_keys, 0)
    acc_dk = load_plain(dk, o_key, m_earlier, D, BLOCK_D)
    acc_dv = load_plain(dv, o_key, m_earlier, DV, BLOCK_DV)
    p_q = head_pointer(q, q_strides, i_bq, start_q + offset, i_h)
    p_do = head_pointer(do, do_strides, i_bq, start_q + offset, i_h)
    for i_entry in range(0, n_entries, BLOCK_M):
        m_r, o_c, o_s, o_g = listed_rows(perm, first, i_entry, n_entries, offset, Tk, cu, S, 1, 1, BLOCK_M)
        # [M, D], [M, DV]
        b_q = gather_rows(p_q, q_strides, o_c, o_g, m_r, D, BLOCK_D, INDEX)
        b_do = gather_rows(p_do, do_strides, o_c, o_g, m_r, DV, BLOCK_DV, INDEX)
        # [M, D] @ [D, N] -> [M, N]
        b_p, b_slope = silu_slopes(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION), scale_log2, None, scale)
        m_keep = (
            tl.arange(0, BLOCK_N)[None, :] < keys_kept(o_s, o_c + offset, i_key, Tk, S, 0, True, BLOCK_SIZE)[:, None]
        )
        # [M, DV] @ [DV, N] -> [M, N]
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
        b_p = tl.where(m_keep, b_p, 0.0).to(b_do.dtype)
        b_ds = tl.where(m_keep, b_dp * b_slope, 0.0).to(b_q.dtype)
        # [N, M] @ [M, DV] -> [N, DV]
        acc_dv = tl.dot(tl.trans(b_p), b_do, acc_dv, input_precision=PRECISION)
        # [N, M] @ [M, D] -> [N, D]
        acc_dk = tl.dot(tl.trans(b_ds), b_q, acc_dk, input_precision=PRECISION)
        # [M, N] @ [N, D] -> [M, D]
        b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION)
        store_plain(partial_dq, ((o_c * n_heads + i_shared) * S + o_s) * HEADS + i_h % HEADS, m_r, b_dq, D, BLOCK_D)
    if i_extra == 0:
        store_sums(dk, dv, o_key, i_key + o_n < n_keys, acc_dk, acc_dv, D, DV, BLOCK_D, BLOCK_DV)
    else:
        o_part = ((i_extra - 1).to(tl.int64) * HEADS + i_h % HEADS) * BLOCK_N + o_n
        store_sums(partial_dk, partial_dv, o_part, o_n < BLOCK_N, acc_dk, acc_dv, D, DV, BLOCK_D, BLOCK_DV)
