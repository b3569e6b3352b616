"""Attention to the blocks that tokens name, forward, in two loop orders.

*Key order*: a program owns a block of keys and a segment of its list, gathers the queries that name it, BLOCK_M rows a
step, and writes a result for each entry and head: an output normalised over this block alone, and its LSE. A second
kernel merges each token's entries. K and V are read once a segment, queries once an entry, and a result is written and
read once an entry: 3 · SLOTS · T · Hq · D elements in all, so tokens come in chunks that keep the results small.
*Query order*: a program owns TOKENS tokens with all heads of a group, BLOCK_M rows, and walks the union of their
blocks; a row whose token did not name the block has its scores shifted by +inf, which makes its probabilities 0. Bytes:
K and V once for each block of each union; the rest once. Operations, both: 2 · BLOCK_M · BLOCK_N · (D + Dv) a step; the
query order does U / SLOTS times the work that is needed, U being the mean union.
"""

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
from tilewise.ops._device.rows import load_rows
from tilewise.ops._device.scores import softmax_finish

SIZES = ("n_batch", "n_tokens", "n_keys", "n_heads", "heads_a_key", "n_slots", "first_tile", "n_rows", "n_tiles")


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_fwd_lists_kernel(
    q, k, v, partial_o, partial_lse, lists, sel_scale, flag, cu, n_batch, n_tokens, n_keys, n_heads, heads_a_key,
    n_slots, first_tile, scale_log2, WANTED: tl.constexpr, SIGN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: segments, at most.
    # Owns: one block of keys and SEGMENT entries of its list.
    # Loops over: its entries, BLOCK_M rows at a time.
    # Writes: for each row the output and LSE (base 2) over this block alone.
    if no_segment(flag, WANTED, lists.ends + n_heads * n_slots - 1, tl.program_id(0)):
        return
    segment = locate_segment(
        lists.segments, tl.program_id(0), n_slots, cu, n_batch, n_tokens, n_keys, first_tile, SHAPE
    )
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    DV: tl.constexpr = SHAPE.DV
    # [N, D], [N, DV]
    b_k = load_rows(
        segment_rows(k, segment, segment.i_h // heads_a_key), segment.i_key, SHAPE.D, BLOCK_N, SHAPE.BLOCK_D, False
    )
    b_v = load_rows(
        segment_rows(v, segment, segment.i_h // heads_a_key), segment.i_key, DV, BLOCK_N, SHAPE.BLOCK_DV, False
    )
    p_q = head_pointer(q, segment.i_b, segment.start_q + segment.offset, segment.i_h * SHAPE.GROUP)
    o_d = tl.arange(0, SHAPE.BLOCK_DV)
    for i_entry in range(0, segment.n_entries, SHAPE.BLOCK_M // SHAPE.GROUP_P):
        rows = listed_rows(lists.perm, segment, i_entry, cu.q, SHAPE)
        # [M, D]
        b_q = gather_rows(p_q, q.strides, rows.o_c, rows.o_g, rows.m_r, SHAPE.D, SHAPE.BLOCK_D, SHAPE.INDEX)
        # [M, D] @ [D, N] -> [M, N]
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION)
        if sel_scale is not None:
            o_token = (segment.start + segment.offset + rows.o_c).to(tl.int64)
            p_sel = sel_scale + (o_token * n_heads + segment.i_h) * SHAPE.S + rows.o_s
            b_s = b_s * tl.load(p_sel, mask=rows.m_r & (rows.o_s < SHAPE.S), other=1.0)[:, None]
        if SIGN != 1:
            b_s = b_s * SIGN
        kept = keys_kept(rows, segment, SHAPE)
        b_s = tl.where(tl.arange(0, BLOCK_N)[None, :] < kept[:, None], b_s, float("-inf"))
        m = tl.max(b_s, 1) * scale_log2
        shift = tl.where(m == float("-inf"), 0.0, m)
        b_p = tl.exp2(b_s * scale_log2 - shift[:, None])
        l = tl.sum(b_p, 1)
        # [M, N] @ [N, DV] -> [M, DV]
        b_o = tl.dot(b_p.to(b_v.dtype), b_v, input_precision=SHAPE.PRECISION)
        b_o = b_o * (1.0 / tl.where(l != 0.0, l, 1.0))[:, None]
        # A chunk's results are fewer than 2^31.
        o_named = (rows.o_c * n_heads + segment.i_h) * (SHAPE.S + SHAPE.OWN) + rows.o_s
        o_row = o_named * SHAPE.GROUP + rows.o_g
        m_x = rows.m_r[:, None]
        if DV != SHAPE.BLOCK_DV:
            m_x = m_x & (o_d < DV)[None, :]
        tl.store(partial_o + (o_row[:, None] * DV + o_d[None, :]), b_o.to(partial_o.dtype.element_ty), mask=m_x)
        tl.store(partial_lse + o_row, m + tl.log2(l), mask=rows.m_r)


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_fwd_merge_kernel(
    partial_o, partial_lse, ranks, tokens, o, lse, flag, n_heads, n_tokens, n_rows,
    WANTED: tl.constexpr, PACKED: tl.constexpr, SLOTS: tl.constexpr, SLOTS_P: tl.constexpr, GROUP: tl.constexpr,
    DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R rows of the chunk: tokens x index heads x group.
    # Owns: BLOCK_R rows.
    # Loops over: the slots of each row's token.
    # Writes: its rows of o and lse.
    if skipped(flag, WANTED):
        return
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    o_named = (o_r // GROUP).to(tl.int64)
    o_g = o_r % GROUP
    i_token = tl.load(tokens + o_named // n_heads, mask=m_r, other=-1)
    o_s = tl.arange(0, SLOTS_P)
    o_slot = o_named[:, None] * SLOTS + o_s[None, :]
    m_slot = m_r[:, None] & (o_s < SLOTS)[None, :]
    # No load waits for another: what was not written is dropped after the load.
    b_lse = tl.load(partial_lse + o_slot * GROUP + o_g[:, None], mask=m_slot, other=float("-inf"))
    b_lse = tl.where(tl.load(ranks + o_slot, mask=m_slot, other=-1) >= 0, b_lse, float("-inf"))
    m = tl.max(b_lse, 1)
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = tl.sum(tl.exp2(b_lse - shift[:, None]), 1)
    seen = l != 0.0
    total = tl.where(seen, shift + tl.log2(tl.where(seen, l, 1.0)), float("-inf"))
    o_d = tl.arange(0, BLOCK_DV)
    m_x = m_r[:, None] & (o_d < DV)[None, :]
    acc = tl.zeros([BLOCK_R, BLOCK_DV], tl.float32)
    for i_s in range(SLOTS):
        o_one = (o_named * SLOTS + i_s) * GROUP + o_g
        b_o = tl.load(partial_o + o_one[:, None] * DV + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        present = tl.load(ranks + o_named * SLOTS + i_s, mask=m_r, other=-1) >= 0
        b_one = tl.load(partial_lse + o_one, mask=m_r, other=float("-inf"))
        weight = tl.where(present & (b_one != float("-inf")), tl.exp2(b_one - total), 0.0)[:, None]
        acc += tl.where(weight != 0.0, weight * b_o, 0.0)
    i_head = (o_named % n_heads) * GROUP + o_g
    m_r = m_r & (i_token >= 0)
    o_out = i_token.to(tl.int64) * (n_heads * GROUP) + i_head
    tl.store(
        o + o_out[:, None] * DV + o_d[None, :], acc.to(o.dtype.element_ty), mask=m_r[:, None] & (o_d < DV)[None, :]
    )
    o_lse = i_head * n_tokens + i_token
    if not PACKED:
        o_lse = ((i_token // n_tokens).to(tl.int64) * (n_heads * GROUP) + i_head) * n_tokens + i_token % n_tokens
    tl.store(lse + o_lse, total * 0.6931471805599453, mask=m_r)


@triton.jit
def nsa_selected_fwd_union_step(
    b_q, acc, m, l, k_rows, v_rows, i_key, named, o_t, scale_log2, SHAPE: tl.constexpr, MASKED: tl.constexpr
):
    """One block of the union: scores, online softmax over the rows whose token named it, sum with the values."""
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
    o_n = tl.arange(0, BLOCK_N)
    if MASKED:
        kept = tl.minimum(o_t + 1, n_keys) - i_key
        b_s = tl.where(o_n[None, :] < kept[:, None], b_s, float("-inf"))
    elif BLOCK_SIZE != BLOCK_N:
        b_s = tl.where((o_n < BLOCK_SIZE)[None, :], b_s, float("-inf"))
    m_new = tl.maximum(m, tl.where(named, tl.max(b_s, 1) * scale_log2, float("-inf")))
    # +inf for a row whose token did not name the block: its probabilities are 0. A row that has seen nothing yet must
    # not be shifted by -inf.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale_log2 - tl.where(named, shift, float("inf"))[:, None])
    rescale = tl.exp2(m - shift)
    l = l * rescale + tl.sum(b_p, 1)
    # [N, DV]
    b_v = load_rows(v_block, i_key, SHAPE.DV, BLOCK_N, SHAPE.BLOCK_DV, SHAPE.TMA, INSIDE)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=SHAPE.PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=SIZES)
def nsa_selected_fwd_union_kernel(
    q, k, v, k_strides, v_strides, o, lse, unions, flag, cu, n_batch, n_tokens, n_keys, n_heads, heads_a_key,
    n_tiles, scale_log2, WANTED: tl.constexpr, SIGN: tl.constexpr, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M / GROUP_P tokens x index heads.
    # Owns: its tokens, with all heads of the group.
    # Loops over: the union of their blocks.
    # Writes: its rows of o and lse.
    if skipped(flag, WANTED):
        return
    i_h = tl.program_id(0) // n_tiles
    tile = locate_union_tile(tl.program_id(0) % n_tiles, i_h, cu, n_batch, n_tokens, n_keys, SHAPE)
    # [M, D]
    b_q = gather_union_rows(q, tile, SHAPE.D, SHAPE.BLOCK_D, SHAPE)
    if SIGN != 1:
        b_q = (b_q * SIGN).to(b_q.dtype)
    k_rows = Rows(k, k_strides, tile.i_b, i_h // heads_a_key, tile.start_k, tile.n_seen)
    v_rows = Rows(v, v_strides, tile.i_b, i_h // heads_a_key, tile.start_k, tile.n_seen)
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    BLOCK_DV: tl.constexpr = SHAPE.BLOCK_DV
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    union = locate_union(unions, SHAPE)
    ends = (0, union.n_masked, union.n_blocks)
    for PART in tl.static_range(2):
        for i_u in range(ends[PART], ends[PART + 1]):
            i_key = tl.load(unions.blocks + union.first + i_u) * SHAPE.BLOCK_SIZE
            named = named_by(unions.bits + union.first + i_u, SHAPE)
            acc, m, l = nsa_selected_fwd_union_step(
                b_q, acc, m, l, k_rows, v_rows, i_key, named, tile.o_at, scale_log2, SHAPE, PART == 0
            )
    b_o, b_lse = softmax_finish(acc, m, l)
    # A row that saw nothing gives 0, also where a neighbour saw NaN.
    b_o = tl.where((l != 0.0)[:, None], b_o, 0.0)
    o_d = tl.arange(0, BLOCK_DV)
    o_out = (tile.start + tile.o_t).to(tl.int64) * (n_heads * SHAPE.GROUP) + tile.o_h
    p_o = o + o_out[:, None] * SHAPE.DV + o_d[None, :]
    tl.store(p_o, b_o.to(o.dtype.element_ty), mask=tile.m_r[:, None] & (o_d < SHAPE.DV)[None, :])
    o_lse = (tl.cast(tile.i_b, tl.int64) * (n_heads * SHAPE.GROUP) + tile.o_h) * n_tokens + tile.start_q + tile.o_t
    tl.store(lse + o_lse, b_lse, mask=tile.m_r)
