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

from tilewise.ops._device.blocks import (
    gather_rows,
    head_pointer,
    keys_kept,
    listed_rows,
    locate_segment,
    no_segment,
    segment_rows,
)
from tilewise.ops._device.rows import load_plain, load_rows, store_plain, store_sums
from tilewise.ops._device.scores import silu_slopes, silu_weights

SIZES = ("n_batch", "n_tokens", "n_heads", "n_slots", "first_tile")


@triton.jit(do_not_specialize=SIZES)
def bsa_selected_fwd_kernel(
    q, k, v, partial_o, lists, cu, n_batch, n_tokens, n_heads, n_slots, first_tile, scale_log2,
    HEADS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most, x HEADS heads that share a choice.
    # Owns: one block of keys of one head and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M at a time.
    # Writes: for each entry the sum over this block alone.
    i_segment = tl.program_id(0) // HEADS
    if no_segment(None, 0, lists.ends + n_heads * n_slots - 1, i_segment):
        return
    segment = locate_segment(lists.segments, i_segment, n_slots, cu, n_batch, n_tokens, None, first_tile, SHAPE)
    i_h = segment.i_h * HEADS + tl.program_id(0) % HEADS
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    # [N, D], [N, DV]
    b_k = load_rows(segment_rows(k, segment, i_h), segment.i_key, SHAPE.D, BLOCK_N, SHAPE.BLOCK_D, False)
    b_v = load_rows(segment_rows(v, segment, i_h), segment.i_key, SHAPE.DV, BLOCK_N, SHAPE.BLOCK_DV, False)
    p_q = head_pointer(q, segment.i_b, segment.start_q + segment.offset, i_h)
    for i_entry in range(0, segment.n_entries, SHAPE.BLOCK_M):
        rows = listed_rows(lists.perm, segment, i_entry, cu.q, SHAPE)
        # [M, D]
        b_q = gather_rows(p_q, q.strides, rows.o_c, rows.o_g, rows.m_r, SHAPE.D, SHAPE.BLOCK_D, SHAPE.INDEX)
        # [M, D] @ [D, N] -> [M, N]
        b_p = silu_weights(tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION), scale_log2, None)
        kept = keys_kept(rows, segment, SHAPE)
        b_p = tl.where(tl.arange(0, BLOCK_N)[None, :] < kept[:, None], b_p, 0.0)
        # [M, N] @ [N, DV] -> [M, DV]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=SHAPE.PRECISION)
        # A chunk's results are fewer than 2^31.
        o_part = ((rows.o_c * n_heads + segment.i_h) * SHAPE.S + rows.o_s) * HEADS + i_h % HEADS
        store_plain(partial_o, o_part, rows.m_r, b_o, SHAPE.DV, SHAPE.BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def bsa_selected_bwd_kernel(
    q, k, v, do, sums, aside, partial_dq, lists, cu, n_batch, n_tokens, n_heads, n_slots, first_tile, scale,
    scale_log2, HEADS: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most, x HEADS heads that share a choice.
    # Owns: one block of keys of one head and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M at a time.
    # Writes: its part of dk and dv, added where it is a list's first segment, else set apart; and each entry's part of
    # dq.
    i_segment = tl.program_id(0) // HEADS
    if no_segment(None, 0, lists.ends + n_heads * n_slots - 1, i_segment):
        return
    segment = locate_segment(lists.segments, i_segment, n_slots, cu, n_batch, n_tokens, None, first_tile, SHAPE)
    i_h = segment.i_h * HEADS + tl.program_id(0) % HEADS
    i_key = segment.i_key
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    # [N, D], [N, DV]
    b_k = load_rows(segment_rows(k, segment, i_h), i_key, D, BLOCK_N, SHAPE.BLOCK_D, False)
    b_v = load_rows(segment_rows(v, segment, i_h), i_key, DV, BLOCK_N, SHAPE.BLOCK_DV, False)
    # A list's first segment goes on from the sums of earlier chunks, if there were any.
    o_n = tl.arange(0, BLOCK_N)
    o_key = (segment.start + i_key + o_n).to(tl.int64) * (n_heads * HEADS) + i_h
    m_earlier = i_key + o_n < tl.where((segment.i_extra == 0) & (first_tile > 0), segment.n_keys, 0)
    acc_dk = load_plain(sums.dk, o_key, m_earlier, D, SHAPE.BLOCK_D)
    acc_dv = load_plain(sums.dv, o_key, m_earlier, DV, SHAPE.BLOCK_DV)
    p_q = head_pointer(q, segment.i_b, segment.start_q + segment.offset, i_h)
    p_do = head_pointer(do, segment.i_b, segment.start_q + segment.offset, i_h)
    for i_entry in range(0, segment.n_entries, SHAPE.BLOCK_M):
        rows = listed_rows(lists.perm, segment, i_entry, cu.q, SHAPE)
        # [M, D], [M, DV]
        b_q = gather_rows(p_q, q.strides, rows.o_c, rows.o_g, rows.m_r, D, SHAPE.BLOCK_D, SHAPE.INDEX)
        b_do = gather_rows(p_do, do.strides, rows.o_c, rows.o_g, rows.m_r, DV, SHAPE.BLOCK_DV, SHAPE.INDEX)
        # [M, D] @ [D, N] -> [M, N]
        b_p, b_slope = silu_slopes(tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION), scale_log2, None, scale)
        m_keep = tl.arange(0, BLOCK_N)[None, :] < keys_kept(rows, segment, SHAPE)[:, None]
        # [M, DV] @ [DV, N] -> [M, N]
        b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=SHAPE.PRECISION)
        b_p = tl.where(m_keep, b_p, 0.0).to(b_do.dtype)
        b_ds = tl.where(m_keep, b_dp * b_slope, 0.0).to(b_q.dtype)
        # [N, M] @ [M, DV] -> [N, DV]
        acc_dv = tl.dot(tl.trans(b_p), b_do, acc_dv, input_precision=SHAPE.PRECISION)
        # [N, M] @ [M, D] -> [N, D]
        acc_dk = tl.dot(tl.trans(b_ds), b_q, acc_dk, input_precision=SHAPE.PRECISION)
        # [M, N] @ [N, D] -> [M, D]
        b_dq = tl.dot(b_ds, b_k, input_precision=SHAPE.PRECISION)
        o_part = ((rows.o_c * n_heads + segment.i_h) * SHAPE.S + rows.o_s) * HEADS + i_h % HEADS
        store_plain(partial_dq, o_part, rows.m_r, b_dq, D, SHAPE.BLOCK_D)
    if segment.i_extra == 0:
        store_sums(sums, o_key, i_key + o_n < segment.n_keys, acc_dk, acc_dv, SHAPE)
    else:
        o_aside = ((segment.i_extra - 1).to(tl.int64) * HEADS + i_h % HEADS) * BLOCK_N + o_n
        store_sums(aside, o_aside, o_n < BLOCK_N, acc_dk, acc_dv, SHAPE)
