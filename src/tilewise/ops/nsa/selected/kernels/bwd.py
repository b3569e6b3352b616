"""Attention to the blocks that tokens name, backward: no atomics, so the same inputs give the same bits.

dK and dV always come in key order: a program owns a block of keys and a segment of its list, and sums over the rows
that name it. The first segment of a list adds to the block's sums of earlier chunks, in fp32; further segments store
theirs apart, and a second kernel adds them in order. dQ comes from the same program (a fifth product; one result an
entry and head, summed in a second pass over the slots) or, where neighbours name the same blocks, from a kernel in
query order (three products again, no results to store: cheaper where the union is below twice the slots).

In base 2: p = exp2(s · scale_log2 - lse_log2), where a row that saw nothing has lse_log2 = +inf and so p = 0.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.blocks import (
    gather_rows,
    gather_union_rows,
    head_pointer,
    keys_kept,
    listed_rows,
    locate_segment,
    locate_union,
    locate_union_tile,
    named_by,
    no_segment,
    segment_rows,
    skipped,
)
from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import load_plain, load_rows, locate_slot, store_plain, store_sums

SIZES = ("n_batch", "n_tokens", "n_keys", "n_heads", "heads_a_key", "n_slots", "first_tile", "n_rows", "n_tiles")


class Incoming(NamedTuple):
    """What a backward reads for each row of queries: the output's gradient with its strides, LSE in base 2 (+inf where
    the row saw nothing), and delta.
    """

    do: Any
    lse_log2: Any
    delta: Any


class ByEntry(NamedTuple):
    """What an entry has to itself, None where there is none: its rows' parts of dq; its sel_scale (by index head and
    slot) and that one's gradient.
    """

    dq: Any
    sel_scale: Any
    dsel: Any


@triton.jit
def nsa_selected_bwd_lists_step(
    acc_dk, acc_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_sel, kept, scale_log2, PRECISION: tl.constexpr
):
    """What BLOCK_M rows add to dK and dV; also the gradient of the scores, and each row's sum for its sel_scale's."""
    # [M, D] @ [D, N] -> [M, N]
    b_plain = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    b_s = b_plain
    if b_sel is not None:
        b_s = b_plain * b_sel[:, None]
    b_p = tl.exp2(b_s * scale_log2 - b_lse[:, None])
    b_p = tl.where(tl.arange(0, b_p.shape[1])[None, :] < kept[:, None], b_p, 0.0)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    b_ds = b_p * (b_dp - b_delta[:, None])
    b_dsel = b_lse
    if b_sel is not None:
        b_dsel = tl.sum(b_ds * b_plain, 1)
        b_ds = b_ds * b_sel[:, None]
    b_ds = b_ds.to(b_q.dtype)
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, acc_dv, input_precision=PRECISION)
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = tl.dot(tl.trans(b_ds), b_q, acc_dk, input_precision=PRECISION)
    return acc_dk, acc_dv, b_ds, b_dsel


@triton.jit
def store_entry_sums(p_x, b_x, m_x, GROUP_P: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store at each entry the sum over its rows, which lie side by side in one tile."""
    b_sum = tl.sum(tl.reshape(tl.where(m_x, b_x, 0.0), [BLOCK_M // GROUP_P, GROUP_P]), 1)
    b_sum = tl.reshape(tl.broadcast_to(b_sum[:, None], [BLOCK_M // GROUP_P, GROUP_P]), [BLOCK_M])
    tl.store(p_x, b_sum, mask=m_x & (tl.arange(0, BLOCK_M) % GROUP_P == 0))


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_bwd_lists_kernel(
    q, k, v, incoming, sums, aside, by_entry, lists, flag, cu, n_batch, n_tokens, n_keys, n_heads, heads_a_key,
    n_slots, first_tile, scales, WANTED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most.
    # Owns: one block of keys and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M rows at a time.
    # Writes: its part of dk (but for the scale) and dv, added where it is a list's first segment, else set apart; and
    # where wanted each row's part of dq, and each entry's dsel.
    if no_segment(flag, WANTED, lists.ends + n_heads * n_slots - 1, tl.program_id(0)):
        return
    segment = locate_segment(
        lists.segments, tl.program_id(0), n_slots, cu, n_batch, n_tokens, n_keys, first_tile, SHAPE
    )
    i_h = segment.i_h
    i_key = segment.i_key
    PRECISION: tl.constexpr = SHAPE.PRECISION
    D: tl.constexpr = SHAPE.D
    DV: tl.constexpr = SHAPE.DV
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    # [N, D], [N, DV]
    b_k = load_rows(segment_rows(k, segment, i_h // heads_a_key), i_key, D, BLOCK_N, SHAPE.BLOCK_D, False)
    b_v = load_rows(segment_rows(v, segment, i_h // heads_a_key), i_key, DV, BLOCK_N, SHAPE.BLOCK_DV, False)
    # A list's first segment goes on from the sums of earlier chunks.
    o_n = tl.arange(0, BLOCK_N)
    o_key = (segment.start + i_key + o_n).to(tl.int64) * n_heads + i_h
    m_earlier = i_key + o_n < tl.where(segment.i_extra == 0, segment.n_keys, 0)
    acc_dk = load_plain(sums.dk, o_key, m_earlier, D, SHAPE.BLOCK_D)
    acc_dv = load_plain(sums.dv, o_key, m_earlier, DV, SHAPE.BLOCK_DV)
    i_first = segment.start_q + segment.offset
    p_q = head_pointer(q, segment.i_b, i_first, i_h * SHAPE.GROUP)
    p_do = head_pointer(incoming.do, segment.i_b, i_first, i_h * SHAPE.GROUP)
    o_first = (
        (tl.cast(segment.i_b, tl.int64) * n_heads + i_h) * SHAPE.GROUP * n_tokens + segment.start_q + segment.offset
    )
    for i_entry in range(0, segment.n_entries, SHAPE.BLOCK_M // SHAPE.GROUP_P):
        rows = listed_rows(lists.perm, segment, i_entry, cu.q, SHAPE)
        # [M, D], [M, DV]
        b_q = gather_rows(p_q, q.strides, rows.o_c, rows.o_g, rows.m_r, D, SHAPE.BLOCK_D, SHAPE.INDEX)
        b_do = gather_rows(p_do, incoming.do.strides, rows.o_c, rows.o_g, rows.m_r, DV, SHAPE.BLOCK_DV, SHAPE.INDEX)
        o_row = rows.o_g.to(SHAPE.INDEX) * n_tokens + rows.o_c
        b_lse = tl.load(incoming.lse_log2 + o_first + o_row, mask=rows.m_r, other=float("inf"))
        b_delta = tl.load(incoming.delta + o_first + o_row, mask=rows.m_r, other=0.0)
        kept = keys_kept(rows, segment, SHAPE)
        o_token = (segment.start + segment.offset + rows.o_c).to(tl.int64)
        o_sel = (o_token * n_heads + i_h) * SHAPE.S + rows.o_s
        m_sel = rows.m_r & (rows.o_s < SHAPE.S)
        b_sel = None
        if by_entry.sel_scale is not None:
            b_sel = tl.load(by_entry.sel_scale + o_sel, mask=m_sel, other=1.0).to(tl.float32)
        acc_dk, acc_dv, b_ds, b_dsel = nsa_selected_bwd_lists_step(
            acc_dk, acc_dv, b_k, b_v, b_q, b_do, b_lse, b_delta, b_sel, kept, scales.scale_log2, PRECISION
        )
        if by_entry.dsel is not None:
            store_entry_sums(by_entry.dsel + o_sel, b_dsel * scales.scale, m_sel, SHAPE.GROUP_P, SHAPE.BLOCK_M)
        if by_entry.dq is not None:
            # [M, N] @ [N, D] -> [M, D]
            b_dq = tl.dot(b_ds, b_k, input_precision=PRECISION) * scales.scale
            # A chunk's results are fewer than 2^31.
            o_named = (rows.o_c * n_heads + i_h) * (SHAPE.S + SHAPE.OWN) + rows.o_s
            store_plain(by_entry.dq, o_named * SHAPE.GROUP + rows.o_g, rows.m_r, b_dq, D, SHAPE.BLOCK_D)
    if segment.i_extra == 0:
        store_sums(sums, o_key, i_key + o_n < segment.n_keys, acc_dk, acc_dv, SHAPE)
    else:
        o_part = (segment.i_extra - 1).to(tl.int64) * BLOCK_N + o_n
        store_sums(aside, o_part, o_n < BLOCK_N, acc_dk, acc_dv, SHAPE)


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_bwd_keys_kernel(
    aside, sums, ends, extras, flag, cu, n_batch, n_tokens, n_heads, n_slots,
    WANTED: tl.constexpr, WIDTHS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    # Grid: lists x HEADS KV heads that share one x tiles of BLOCK_R keys of a block.
    # Owns: BLOCK_R keys of one block and head.
    # Loops over: its list's segments but the first, in order.
    # Writes: adds them to dk and dv.
    if skipped(flag, WANTED):
        return
    i_n = tl.program_id(0) % (BLOCK_N // BLOCK_R) * BLOCK_R
    i_shared = tl.program_id(0) // (BLOCK_N // BLOCK_R) % HEADS
    i_list = tl.program_id(0) // (BLOCK_N // BLOCK_R) // HEADS
    first = tl.load(extras + i_list)
    n_extras = tl.load(ends + i_list) - 1
    if i_list > 0:
        n_extras -= tl.load(ends + i_list - 1)
    if n_extras > 0:
        _, i_block, start, Tk = locate_slot(i_list % n_slots, cu, n_batch, n_tokens, BLOCK_SIZE)
        o_n = i_n + tl.arange(0, BLOCK_R)
        m_n = (o_n < BLOCK_SIZE) & (i_block * BLOCK_SIZE + o_n < Tk)
        o_key = (
            (start + i_block * BLOCK_SIZE + o_n).to(tl.int64) * (n_heads * HEADS) + i_list // n_slots * HEADS + i_shared
        )
        acc_dk = load_plain(sums.dk, o_key, m_n, WIDTHS.D, WIDTHS.BLOCK_D)
        acc_dv = load_plain(sums.dv, o_key, m_n, WIDTHS.DV, WIDTHS.BLOCK_DV)
        for i in range(first, first + n_extras):
            o_part = (tl.cast(i, tl.int64) * HEADS + i_shared) * BLOCK_N + o_n
            acc_dk += load_plain(aside.dk, o_part, m_n, WIDTHS.D, WIDTHS.BLOCK_D)
            acc_dv += load_plain(aside.dv, o_part, m_n, WIDTHS.DV, WIDTHS.BLOCK_DV)
        store_sums(sums, o_key, m_n, acc_dk, acc_dv, WIDTHS)


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_bwd_queries_kernel(
    partial_dq, ranks, tokens, base, dq, flag, n_heads, n_rows,
    WANTED: tl.constexpr, SLOTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R rows of the chunk: tokens x index heads x group.
    # Owns: BLOCK_R rows.
    # Loops over: the slots of each row's token, in order.
    # Writes: its rows of dq; they begin with those of `base`, where it is given, laid out as dq.
    if skipped(flag, WANTED):
        return
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    o_named = (o_r // GROUP).to(tl.int64)
    i_token = tl.load(tokens + o_named // n_heads, mask=m_r, other=-1)
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_r[:, None] & (o_d < D)[None, :]
    o_out = i_token.to(tl.int64) * (n_heads * GROUP) + (o_named % n_heads) * GROUP + o_r % GROUP
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    if base is not None:
        acc += tl.load(base + o_out[:, None] * D + o_d[None, :], mask=m_x & (i_token >= 0)[:, None], other=0.0).to(
            tl.float32
        )
    for i_s in range(SLOTS):
        o_one = (o_named * SLOTS + i_s) * GROUP + o_r % GROUP
        # The load does not wait for the rank: what was not written is dropped after it.
        b_dq = tl.load(partial_dq + o_one[:, None] * D + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        present = tl.load(ranks + o_named * SLOTS + i_s, mask=m_r, other=-1) >= 0
        acc += tl.where(present[:, None], b_dq, 0.0)
    m_r = m_r & (i_token >= 0)
    tl.store(
        dq + o_out[:, None] * D + o_d[None, :], acc.to(dq.dtype.element_ty), mask=m_r[:, None] & (o_d < D)[None, :]
    )


@triton.jit
def nsa_selected_bwd_union_step(
    acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_key, named, o_t, scale_log2,
    SHAPE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One block of the union: what it adds to dQ."""
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    BLOCK_SIZE: tl.constexpr = SHAPE.BLOCK_SIZE
    n_keys = tl.minimum(k_rows.n_rows, i_key + BLOCK_SIZE)
    k_block = Rows(k_rows.x, k_rows.strides, k_rows.i_b, k_rows.i_h, k_rows.start, n_keys)
    v_block = Rows(v_rows.x, v_rows.strides, v_rows.i_b, v_rows.i_h, v_rows.start, n_keys)
    INSIDE: tl.constexpr = BLOCK_SIZE == BLOCK_N and not MASKED
    # [N, D]
    b_k = load_rows(k_block, i_key, SHAPE.D, BLOCK_N, SHAPE.BLOCK_D, SHAPE.TMA, INSIDE)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION)
    # [N, DV]
    b_v = load_rows(v_block, i_key, SHAPE.DV, BLOCK_N, SHAPE.BLOCK_DV, SHAPE.TMA, INSIDE)
    # [M, DV] @ [DV, N] -> [M, N]
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=SHAPE.PRECISION)
    b_p = tl.exp2(b_s * scale_log2 - tl.where(named, b_lse, float("inf"))[:, None])
    o_n = tl.arange(0, BLOCK_N)
    if MASKED:
        kept = tl.minimum(o_t + 1, n_keys) - i_key
        b_p = tl.where(o_n[None, :] < kept[:, None], b_p, 0.0)
    elif BLOCK_SIZE != BLOCK_N:
        b_p = tl.where((o_n < BLOCK_SIZE)[None, :], b_p, 0.0)
    b_ds = b_p * (b_dp - b_delta[:, None])
    # [M, N] @ [N, D] -> [M, D]
    return tl.dot(b_ds.to(b_k.dtype), b_k, acc_dq, input_precision=SHAPE.PRECISION)


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_bwd_union_kernel(
    q, k, v, k_strides, v_strides, incoming, dq, unions, flag, cu, n_batch, n_tokens, n_keys, n_heads, heads_a_key,
    n_tiles, scales, WANTED: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M / GROUP_P tokens x index heads.
    # Owns: its tokens, with all heads of the group.
    # Loops over: the union of their blocks.
    # Writes: its rows of dq.
    if skipped(flag, WANTED):
        return
    i_h = tl.program_id(0) // n_tiles
    tile = locate_union_tile(tl.program_id(0) % n_tiles, i_h, cu, n_batch, n_tokens, n_keys, SHAPE)
    # [M, D], [M, DV]
    b_q = gather_union_rows(q, tile, SHAPE.D, SHAPE.BLOCK_D, SHAPE)
    b_do = gather_union_rows(incoming.do, tile, SHAPE.DV, SHAPE.BLOCK_DV, SHAPE)
    o_row = (tl.cast(tile.i_b, tl.int64) * (n_heads * SHAPE.GROUP) + tile.o_h) * n_tokens + tile.start_q + tile.o_t
    b_lse = tl.load(incoming.lse_log2 + o_row, mask=tile.m_r, other=float("inf"))
    b_delta = tl.load(incoming.delta + o_row, mask=tile.m_r, other=0.0)
    k_rows = Rows(k, k_strides, tile.i_b, i_h // heads_a_key, tile.start_k, tile.n_seen)
    v_rows = Rows(v, v_strides, tile.i_b, i_h // heads_a_key, tile.start_k, tile.n_seen)
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    BLOCK_D: tl.constexpr = SHAPE.BLOCK_D
    acc_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    union = locate_union(unions, SHAPE)
    ends = (0, union.n_masked, union.n_blocks)
    for PART in tl.static_range(2):
        for i_u in range(ends[PART], ends[PART + 1]):
            i_key = tl.load(unions.blocks + union.first + i_u) * SHAPE.BLOCK_SIZE
            named = named_by(unions.bits + union.first + i_u, SHAPE)
            acc_dq = nsa_selected_bwd_union_step(
                acc_dq, b_q, b_do, b_lse, b_delta, k_rows, v_rows, i_key, named, tile.o_at, scales.scale_log2, SHAPE,
                PART == 0,
            )  # fmt: skip
    o_out = (tile.start + tile.o_t).to(tl.int64) * (n_heads * SHAPE.GROUP) + tile.o_h
    store_plain(dq, o_out, tile.m_r, acc_dq * scales.scale, SHAPE.D, SHAPE.BLOCK_D)
