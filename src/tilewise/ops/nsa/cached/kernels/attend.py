"""Attention of new tokens over an NSACache: scores of windows by splits, blocks from them, selected and near keys by
parts, and all of it merged.

Tile plan. A tile of queries is one token with HEADS of the query heads that share a KV head: what lies in memory is
read once for all of them. Keys stream through in tiles of BLOCK_N rows, in fixed parts of a token's own keys: windows
in splits that follow from how many the token sees, selected and near keys in parts of CHUNK keys. Each part leaves its
output in fp32 and its LSE, and the last kernel adds them up in order: bits depend on nothing but the token.
Scores of windows stay in memory, for what a window weighs in the choice of blocks is known only after the merge of
their LSEs: 4 bytes a window and head, next to 2 · (D + Dv) a window of its group in 16 bits.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.cached import SIZES, locate_rows, locate_token, split_windows
from tilewise.ops._device.choice import ScoredRows, write_best
from tilewise.ops._device.scores import online_softmax_step, softmax_finish
from tilewise.ops._device.windows import whole_windows


class Tile(NamedTuple):
    """A tile of queries: the token of all in this launch, its heads, and which rows exist."""

    i_row: Any
    o_h: Any
    m_r: Any


@triton.jit
def query_tile(i_row, i_h, SHAPE: tl.constexpr):
    """Tile `i_h` of a token's query heads."""
    o_r = tl.arange(0, SHAPE.BLOCK_M)
    return Tile(i_row, i_h * SHAPE.HEADS + o_r, o_r < SHAPE.HEADS)


@triton.jit
def load_queries(q, token, tile, SHAPE: tl.constexpr):
    """The tile's queries, [BLOCK_M, BLOCK_D]."""
    o_d = tl.arange(0, SHAPE.BLOCK_D)
    p_q = q.x + (tl.cast(token.i_b, tl.int64) * q.strides.batch + tl.cast(token.i_i, tl.int64) * q.strides.token)
    p_q += tile.o_h.to(tl.int64) * q.strides.head
    # [M, D]
    return tl.load(p_q[:, None] + o_d[None, :], mask=tile.m_r[:, None] & (o_d < SHAPE.D)[None, :], other=0.0)


@triton.jit
def load_keys(x, p_rows, m_n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows of keys or values at these offsets as a tile, 0 where there is none."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_n[:, None]
    if D != BLOCK_D:
        m_x = m_x & (o_d < D)[None, :]
    return tl.load(x.x + (p_rows[:, None] + o_d[None, :]), mask=m_x, other=0.0)


@triton.jit
def store_part(parts, tile, i_part, n_parts, n_heads, b_o, b_lse, SHAPE: tl.constexpr):
    """A part's output and LSE, of the heads of the tile."""
    o_part = (tl.cast(tile.i_row, tl.int64) * n_parts + i_part) * n_heads + tile.o_h
    o_dv = tl.arange(0, SHAPE.BLOCK_DV)
    m_o = tile.m_r[:, None] & (o_dv < SHAPE.DV)[None, :]
    tl.store(parts.o + (o_part[:, None] * SHAPE.DV + o_dv[None, :]), b_o, mask=m_o)
    tl.store(parts.lse + o_part, b_lse, mask=tile.m_r)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_scores_kernel(
    q, k_cmp, v_cmp, parts, scores, sequences, n_new, n_piece, first, n_rows, n_heads, n_windows, n_parts, room,
    scale_log2, SHAPE: tl.constexpr, RULE: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of query heads x new tokens x splits.
    # Owns: one split of the windows for one token and HEADS of a KV head's query heads.
    # Loops over: the windows of its split, BLOCK_N at a time.
    # Writes: their scores in base 2, its LSE, and its part of the output; unless scores or v_cmp are None.
    n_tiles = n_heads // SHAPE.HEADS
    i_h = tl.program_id(0) % n_tiles
    i_row = tl.program_id(0) // n_tiles % n_rows
    i_split = tl.program_id(0) // n_tiles // n_rows
    token = locate_token(i_row, sequences, n_new, n_piece, first, room)
    n_seen = whole_windows((token.t + 1) * token.there, WINDOWS.SIZE, WINDOWS.STRIDE)
    chunk, count = split_windows(n_seen, RULE)
    if i_split < count:
        tile = query_tile(i_row, i_h, SHAPE)
        b_q = load_queries(q, token, tile, SHAPE)
        m = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
        l = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
        acc = tl.full([SHAPE.BLOCK_M, SHAPE.BLOCK_DV], 0.0, tl.float32)
        i_b = tl.cast(token.i_b, tl.int64)
        i_hk = tl.cast(i_h // SHAPE.CHUNKS, tl.int64)
        for i_n in range(i_split * chunk, tl.minimum(i_split * chunk + chunk, n_seen), SHAPE.BLOCK_N):
            o_c = i_n + tl.arange(0, SHAPE.BLOCK_N)
            m_c = o_c < n_seen
            p_k = i_b * k_cmp.strides.batch + o_c.to(tl.int64) * k_cmp.strides.token + i_hk * k_cmp.strides.head
            # [N, D]
            b_k = load_keys(k_cmp, p_k, m_c, SHAPE.D, SHAPE.BLOCK_D)
            # [M, D] @ [D, N] -> [M, N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION) * scale_log2
            if scores is not None:
                o_s = (tl.cast(i_row, tl.int64) * n_windows + o_c) * n_heads
                tl.store(scores + (tile.o_h[:, None] + o_s[None, :]), b_s, mask=tile.m_r[:, None] & m_c[None, :])
            b_s = tl.where(m_c[None, :], b_s, float("-inf"))
            b_p, m, l, rescale = online_softmax_step(b_s, m, l, 1.0, True)
            if v_cmp is not None:
                p_v = i_b * v_cmp.strides.batch + o_c.to(tl.int64) * v_cmp.strides.token + i_hk * v_cmp.strides.head
                # [N, DV]
                b_v = load_keys(v_cmp, p_v, m_c, SHAPE.DV, SHAPE.BLOCK_DV)
                # [M, N] @ [N, DV] -> [M, DV]
                acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=SHAPE.PRECISION)
        b_o, b_lse = softmax_finish(acc, m, l)
        if v_cmp is not None:
            store_part(parts, tile, i_split, n_parts, n_heads, b_o, b_lse, SHAPE)
        else:
            o_part = (tl.cast(i_row, tl.int64) * n_parts + i_split) * n_heads + tile.o_h
            tl.store(parts.lse + o_part, b_lse, mask=tile.m_r)


@triton.jit
def merged_lse(p_lse, o_h, m_h, count, n_heads, BLOCK_S: tl.constexpr):
    """The LSE in base 2 over `count` parts of each of some heads, BLOCK_S at a time; 0 where no window was seen."""
    o_s = tl.arange(0, BLOCK_S)
    m = tl.full([o_h.shape[0]], float("-inf"), tl.float32)
    l = tl.full([o_h.shape[0]], 0.0, tl.float32)
    for i_s in range(0, count, BLOCK_S):
        p_s = p_lse + ((i_s + o_s).to(tl.int64) * n_heads)[:, None] + o_h[None, :]
        # [S, G]
        b_lse = tl.load(p_s, mask=(i_s + o_s < count)[:, None] & m_h[None, :], other=float("-inf"))
        b_lse = b_lse * 1.4426950408889634
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        l = l * tl.exp2(m - shift) + tl.sum(tl.exp2(b_lse - shift[None, :]), 0)
        m = m_new
    return tl.where(l != 0.0, m + tl.log2(l), 0.0)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_importance_kernel(
    scores, parts_lse, importance, sequences, n_new, n_piece, first, n_heads, n_windows, n_parts, n_blocks, n_tiles,
    room,
    SHAPE: tl.constexpr, RULE: tl.constexpr, WINDOWS: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_J blocks x KV heads x new tokens.
    # Owns: BLOCK_J blocks for one token and KV head.
    # Loops over: the query heads of the group, BLOCK_G at a time; the splits, for their LSEs; the windows that reach
    # into a block.
    # Writes: what each block scores, up to the token's own.
    i_j = tl.program_id(0) % n_tiles * BLOCK_J
    n_heads_k = n_heads // SHAPE.GROUP
    i_hk = tl.program_id(0) // n_tiles % n_heads_k
    i_row = tl.program_id(0) // n_tiles // n_heads_k
    token = locate_token(i_row, sequences, n_new, n_piece, first, room)
    if (token.there > 0) & (i_j <= token.t // (WINDOWS.COUNT * WINDOWS.STRIDE)):
        n_seen = whole_windows(token.t + 1, WINDOWS.SIZE, WINDOWS.STRIDE)
        _, count = split_windows(n_seen, RULE)
        o_j = i_j + tl.arange(0, BLOCK_J)
        # Windows that reach into a block: so many begin before it.
        BEFORE: tl.constexpr = WINDOWS.SIZE // WINDOWS.STRIDE - 1
        acc = tl.full([BLOCK_J], 0.0, tl.float32)
        p_lse = parts_lse + tl.cast(i_row, tl.int64) * n_parts * n_heads
        for i_g in range(0, SHAPE.GROUP, BLOCK_G):
            o_g = i_g + tl.arange(0, BLOCK_G)
            m_g = o_g < SHAPE.GROUP
            o_h = i_hk * SHAPE.GROUP + o_g
            b_lse = merged_lse(p_lse, o_h, m_g, count, n_heads, BLOCK_S)
            for i_c in range(WINDOWS.COUNT + BEFORE):
                o_c = o_j * WINDOWS.COUNT + (i_c - BEFORE)
                m_c = (o_c >= 0) & (o_c < n_seen)
                # Strides that the window shares with the block.
                o_i = i_c + tl.zeros_like(o_j)
                shared = tl.minimum(o_i + 1, WINDOWS.COUNT) - tl.maximum(o_i - BEFORE, 0)
                o_s = (tl.cast(i_row, tl.int64) * n_windows + o_c) * n_heads
                # [J, G]
                p_s = scores + (o_s[:, None] + o_h[None, :])
                b_s = tl.load(p_s, mask=m_c[:, None] & m_g[None, :], other=float("-inf"))
                acc += shared.to(tl.float32) * tl.sum(tl.exp2(b_s - b_lse[None, :]), 1)
        o_row = tl.cast(i_row, tl.int64) * n_heads_k + i_hk
        tl.store(importance + (o_row * n_blocks + o_j), acc, mask=o_j < n_blocks)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_choose_kernel(
    importance, indices, sequences, n_new, n_piece, first, n_heads, n_blocks, room, CHOICE: tl.constexpr
):
    # Grid: KV heads x new tokens.
    # Owns: one token of one KV head.
    # Loops over: the bits of a score; and over tiles of blocks, where not all fit one.
    # Writes: its blocks, ascending, -1 behind the last; -1 for a token that is not there.
    i_hk = tl.program_id(0) % n_heads
    i_row = tl.program_id(0) // n_heads
    token = locate_token(i_row, sequences, n_new, n_piece, first, room)
    o_r = tl.arange(0, 1)
    i_own = tl.where(token.there > 0, token.t // CHOICE.BLOCK_SIZE, -1) + o_r
    o_row = (tl.cast(i_row, tl.int64) * n_heads + i_hk) + o_r
    i_out = (tl.cast(token.i_b, tl.int64) * n_new + token.i_i) * n_heads + i_hk
    rows = ScoredRows(importance, o_row, o_r == 0, i_own, n_blocks)
    write_best(rows, indices + (i_out + o_r) * CHOICE.COUNT, CHOICE)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_attend_kernel(
    q, k, v, parts, chosen, sequences, n_new, n_piece, first, n_rows, n_heads, n_splits, n_parts, room, n_pages,
    width, window, scale_log2, SHAPE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of query heads x new tokens x parts: BLOCKS.PARTS of the selected keys, then those of the window.
    # Owns: one part, CHUNK keys, for one token and HEADS of a KV head's query heads.
    # Loops over: its keys, BLOCK_N at a time.
    # Writes: its part of the output, and its LSE.
    n_tiles = n_heads // SHAPE.HEADS
    i_h = tl.program_id(0) % n_tiles
    i_row = tl.program_id(0) // n_tiles % n_rows
    i_part = tl.program_id(0) // n_tiles // n_rows
    token = locate_token(i_row, sequences, n_new, n_piece, first, room)
    if token.there > 0:
        tile = query_tile(i_row, i_h, SHAPE)
        b_q = load_queries(q, token, tile, SHAPE)
        m = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
        l = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
        acc = tl.full([SHAPE.BLOCK_M, SHAPE.BLOCK_DV], 0.0, tl.float32)
        i_hk = tl.cast(i_h // SHAPE.CHUNKS, tl.int64)
        n_heads_k = n_heads // SHAPE.GROUP
        i_list = (tl.cast(token.i_b, tl.int64) * n_new + token.i_i) * n_heads_k + i_hk
        # Key x of the window stands at low + x; key x of the selected blocks in block x // SIZE of the list.
        low = tl.maximum(token.t - (window - 1), 0)
        i_low = (i_part - BLOCKS.PARTS) * SHAPE.CHUNK
        n_mine = token.t - low + 1
        if i_part < BLOCKS.PARTS:
            i_low = i_part * SHAPE.CHUNK
            n_mine = tl.minimum(token.t // BLOCKS.SIZE + 1, BLOCKS.COUNT) * BLOCKS.SIZE
        for i_n in range(i_low, tl.minimum(i_low + SHAPE.CHUNK, n_mine), SHAPE.BLOCK_N):
            o_x = i_n + tl.arange(0, SHAPE.BLOCK_N)
            m_n = o_x < n_mine
            o_n = low + o_x
            if BLOCKS.PARTS > 0:
                m_list = m_n & (i_part < BLOCKS.PARTS)
                o_block = tl.load(chosen + (i_list * BLOCKS.COUNT + o_x // BLOCKS.SIZE), mask=m_list, other=0)
                m_n = m_n & (o_block >= 0)
                o_n = tl.where(i_part < BLOCKS.PARTS, o_block * BLOCKS.SIZE + o_x % BLOCKS.SIZE, o_n)
            m_n = m_n & (o_n <= token.t)
            e_n, r_n, m_n = locate_rows(sequences, token.i_b, o_n, m_n, n_pages, width, SHAPE.PAGE)
            # [N, D]
            p_k = e_n * k.strides.batch + r_n * k.strides.token + i_hk * k.strides.head
            b_k = load_keys(k, p_k, m_n, SHAPE.D, SHAPE.BLOCK_D)
            # [M, D] @ [D, N] -> [M, N]
            b_s = tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION) * scale_log2
            b_s = tl.where(m_n[None, :], b_s, float("-inf"))
            b_p, m, l, rescale = online_softmax_step(b_s, m, l, 1.0, True)
            # [N, DV]
            p_v = e_n * v.strides.batch + r_n * v.strides.token + i_hk * v.strides.head
            b_v = load_keys(v, p_v, m_n, SHAPE.DV, SHAPE.BLOCK_DV)
            # [M, N] @ [N, DV] -> [M, DV]
            acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=SHAPE.PRECISION)
        b_o, b_lse = softmax_finish(acc, m, l)
        store_part(parts, tile, n_splits + i_part, n_parts, n_heads, b_o, b_lse, SHAPE)
