"""Which blocks of keys a token names, and the rows of queries that a list of tokens stands for.

An entry is one naming: a token and one of its SLOTS. Token by token, the S slots that `indices` holds come first, then
OWN slots for the blocks that make up the token's own stretch of OWN * BLOCK_SIZE keys. A row is a token and one of the
GROUP query heads that share its choice; tiles hold GROUP_P (a power of two) rows a token.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import (
    first_position,
    first_slot,
    locate_key_slot,
    locate_slot,
    same_or_other_side,
    sequence_bounds,
)


class Naming(NamedTuple):
    """Constants of what tokens name."""

    BLOCK_SIZE: Any
    S: Any
    """Slots of a token that `indices` holds."""
    OWN: Any
    """Slots for the blocks of its own stretch."""
    TOKENS: Any
    """Tokens whose entries are sorted together."""
    SLOTS_P: Any
    """All slots of a token, padded to tiles."""


class ListsShape(NamedTuple):
    """Constants of a kernel in key order."""

    S: Any
    OWN: Any
    CAUSAL: Any
    """Whether every block is seen up to the token, or only the blocks of its own stretch."""
    GROUP: Any
    GROUP_P: Any
    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_SIZE: Any
    BLOCK_M: Any
    BLOCK_N: Any
    TOKENS: Any
    INDEX: Any
    """Type of offsets among the rows of one head: tl.int32 where all lie below 2^31 elements, which saves registers."""
    PRECISION: Any


class Widths(NamedTuple):
    """Constants: channels of keys and of values, and both padded to tiles."""

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any


class Lists(NamedTuple):
    """The entries of a chunk by block: `perm` holds them list by list, `segments` are pieces of lists, `ends` says how
    many segments there are up to each list's end.
    """

    perm: Any
    segments: Any
    ends: Any


class ListSizes(NamedTuple):
    """Of each list: entries, its first place, segments up to its end, and segments before it that are not a list's
    first.
    """

    totals: Any
    firsts: Any
    ends: Any
    extras: Any


class Unions(NamedTuple):
    """The blocks of each tile of queries, from the last down, with a bit for each token; how many there are, and how
    many need a mask.
    """

    blocks: Any
    bits: Any
    sizes: Any


class KeySums(NamedTuple):
    """fp32 accumulators of dK and dV: rows end to end."""

    dk: Any
    dv: Any


class Entries(NamedTuple):
    """The entries of a tile, in a stable sort by block."""

    block: Any
    entry: Any
    counted: Any
    """Which count."""
    first: Any
    """Where the run of equal blocks begins."""
    ends: Any
    """Whether it is its run's last."""


class Segment(NamedTuple):
    """A piece of one block's list, and where that block lies."""

    first: Any
    """Place of the first entry."""
    n_entries: Any
    i_extra: Any
    """Number from 1 among the segments that are not their list's first; 0: it is."""
    i_h: Any
    """Index head."""
    i_b: Any
    """Batch entry, first query and first key to index tensors with."""
    start_q: Any
    start_k: Any
    start: Any
    """The sequence's first key of all: its first token, where queries are whole (as they are with a sel_scale)."""
    n_tokens: Any
    """Its queries, and its keys up to the last query."""
    n_seen: Any
    i_key: Any
    """The block's first key in the sequence, and where the block or what is seen ends."""
    n_keys: Any
    offset: Any
    """By how much a token's number among the sequence's queries exceeds its number in the chunk, and their first
    one's position.
    """
    i_first: Any


class UnionShape(NamedTuple):
    """Constants of a kernel in query order."""

    GROUP: Any
    GROUP_P: Any
    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_SIZE: Any
    BLOCK_M: Any
    BLOCK_N: Any
    SLOTS_P: Any
    TMA: Any
    PRECISION: Any


class UnionTile(NamedTuple):
    """The BLOCK_M rows of a tile of queries: its tokens, with all heads of the group."""

    i_h: Any
    """Index head."""
    i_b: Any
    """Batch entry, first query and first key to index tensors with."""
    start_q: Any
    start_k: Any
    start: Any
    """The sequence's first query of all."""
    n_seen: Any
    """Its keys up to the last query."""
    i_t: Any
    """The tile's first token among them."""
    o_t: Any
    """Each row's token, its position and query head, and which rows exist."""
    o_at: Any
    o_h: Any
    m_r: Any


class Union(NamedTuple):
    """The blocks of one tile: their first place, how many there are, and how many of them, the first, need a mask."""

    first: Any
    n_blocks: Any
    n_masked: Any


class ListedRows(NamedTuple):
    """BLOCK_M rows of a list."""

    m_r: Any
    """Which exist."""
    o_c: Any
    """Token of the chunk."""
    o_s: Any
    """Its slot that names the block."""
    o_g: Any
    """Head in the group."""


@triton.jit
def skipped(flag, WANTED: tl.constexpr):
    """Whether the other loop order was chosen; a flag of None chooses every order."""
    skip = False
    if flag is not None:
        skip = tl.load(flag) != WANTED
    return skip


@triton.jit
def no_segment(flag, WANTED: tl.constexpr, p_segments, i_segment):
    """Whether there is nothing to do: the other order was chosen, or there are fewer segments."""
    idle = skipped(flag, WANTED)
    if not idle:
        idle = i_segment >= tl.load(p_segments)
    return idle


@triton.jit
def keys_seen_by(cu, i_b, start, n_rows, n_tokens, n_keys):
    """For sequence `i_b`, whose n_rows queries begin at `start`: batch entry and first key to index with, how many keys
    there are up to the last query, and the first query's position.

    `cu` are `records.Offsets`; without `n_keys` queries are their sequences whole.
    """
    first = first_position(cu.first, i_b)
    i_b, start, n_seen = same_or_other_side(cu.q, cu.k, i_b, start, n_rows, n_tokens if n_keys is None else n_keys)
    if n_keys is not None:
        # Keys behind the last query may hold anything.
        n_seen = tl.minimum(n_seen, first + n_rows)
    return i_b, start, n_seen, first


@triton.jit
def named_blocks(indices, i_t, start, n_rows, n_keys, i_h, n_heads, NAMING: tl.constexpr):
    """The blocks that tokens `i_t .. i_t + TOKENS` of one sequence name, [TOKENS * SLOTS_P], -1 where there is none or
    it lies outside.
    """
    BLOCK_SIZE: tl.constexpr = NAMING.BLOCK_SIZE
    S: tl.constexpr = NAMING.S
    OWN: tl.constexpr = NAMING.OWN
    o_e = tl.arange(0, NAMING.TOKENS * NAMING.SLOTS_P)
    o_s = o_e % NAMING.SLOTS_P
    o_t = i_t + o_e // NAMING.SLOTS_P
    m_e = (o_t < n_rows) & (o_s < S)
    b_block = tl.load(indices + ((start + o_t).to(tl.int64) * n_heads + i_h) * S + o_s, mask=m_e, other=-1)
    b_block = tl.where((b_block >= 0) & (b_block < tl.cdiv(n_keys, BLOCK_SIZE)), b_block, -1)
    if OWN > 0:
        own = o_t // (OWN * BLOCK_SIZE) * OWN + (o_s - S)
        b_block = tl.where((o_s >= S) & (o_s < S + OWN) & (o_t < n_rows) & (own * BLOCK_SIZE <= o_t), own, b_block)
    return b_block


@triton.jit
def larger(a, b):
    """For scans."""
    return tl.maximum(a, b)


@triton.jit
def sorted_entries(b_block, ENTRIES: tl.constexpr, SLOTS_P: tl.constexpr, ONCE: tl.constexpr):
    """The `Entries` of a tile.

    With ONCE a block that a token has named before does not count. Entries that name none come last and do not count.
    """
    NONE: tl.constexpr = (1 << 31) // ENTRIES - 1
    o_i = tl.arange(0, ENTRIES)
    key = tl.sort(tl.where(b_block >= 0, b_block, NONE) * ENTRIES + o_i)
    block = key // ENTRIES
    entry = key % ENTRIES
    before = tl.gather(key, tl.maximum(o_i - 1, 0), 0)
    leads = (o_i == 0) | (before // ENTRIES != block)
    counts = block < NONE
    if ONCE:
        counts = counts & (leads | (before % ENTRIES // SLOTS_P != entry // SLOTS_P))
    first = tl.associative_scan(tl.where(leads, o_i, 0), 0, larger)
    after = tl.gather(block, tl.minimum(o_i + 1, ENTRIES - 1), 0)
    ends = (block < NONE) & ((o_i == ENTRIES - 1) | (after != block))
    return Entries(block, entry, counts, first, ends)


@triton.jit
def within_run(b_x, first):
    """Sums of `b_x` from the beginning of each one's run up to it, itself not included."""
    before = tl.cumsum(b_x, 0) - b_x
    return before - tl.gather(before, first, 0)


@triton.jit
def locate_segment(segments, i_segment, n_slots, cu, n_batch, n_tokens, n_keys, first_tile, SHAPE: tl.constexpr):
    """Segment `i_segment` of a chunk that begins with tile `first_tile`."""
    p_segment = segments + i_segment.to(tl.int64) * 4
    i_list = tl.load(p_segment + 2)
    i_b, i_block, start, n_seen = locate_key_slot(i_list % n_slots, cu, n_batch, n_tokens, n_keys, SHAPE.BLOCK_SIZE)
    offset = (first_tile - first_slot(i_b, cu.q, n_tokens, SHAPE.TOKENS)) * SHAPE.TOKENS
    i_first = first_position(cu.first, i_b)
    start_q, start_k, n_mine = 0, 0, n_seen
    if cu.q is not None:
        start_q, start_k = start, start
    if n_keys is not None:
        n_mine = n_tokens
        if cu.q is not None:
            start_q, n_mine = sequence_bounds(cu.q, i_b, n_tokens)
        n_seen = tl.minimum(n_seen, i_first + n_mine)
    if cu.q is not None:
        i_b = 0
    first, n_entries, i_extra = tl.load(p_segment), tl.load(p_segment + 1), tl.load(p_segment + 3)
    i_h = i_list // n_slots
    i_key = i_block * SHAPE.BLOCK_SIZE
    n_keys = tl.minimum(n_seen, i_key + SHAPE.BLOCK_SIZE)
    return Segment(
        first, n_entries, i_extra, i_h, i_b, start_q, start_k, start, n_mine, n_seen, i_key, n_keys, offset, i_first
    )


@triton.jit
def listed_rows(perm, segment, i_entry, p_cu, SHAPE: tl.constexpr):
    """The rows from entry `i_entry` of a segment on."""
    o_r = tl.arange(0, SHAPE.BLOCK_M)
    i_e = i_entry + o_r // SHAPE.GROUP_P
    o_g = o_r % SHAPE.GROUP_P
    m_r = i_e < segment.n_entries
    if SHAPE.GROUP != SHAPE.GROUP_P:
        m_r = m_r & (o_g < SHAPE.GROUP)
    entry = tl.load(perm + segment.first + i_e, mask=m_r, other=0)
    o_c = entry // (SHAPE.S + SHAPE.OWN)
    if p_cu is not None:
        # Offsets that decrease may give a tile of tokens and a block of keys to different sequences.
        o_t = o_c + segment.offset
        m_r = m_r & (o_t >= 0) & (o_t < segment.n_tokens)
    return ListedRows(m_r, o_c, entry % (SHAPE.S + SHAPE.OWN), o_g)


@triton.jit
def segment_rows(tensor, segment, i_h):
    """The keys, or values, of head `i_h` up to the end of a segment's block."""
    return Rows(tensor.x, tensor.strides, segment.i_b, i_h, segment.start_k, segment.n_keys)


@triton.jit
def head_pointer(tensor, i_b, i_t, i_h):
    """Where token `i_t` (negative too) of head `i_h` lies."""
    return tensor.x + (
        tl.cast(i_b, tl.int64) * tensor.strides.batch
        + tl.cast(i_t, tl.int64) * tensor.strides.token
        + tl.cast(i_h, tl.int64) * tensor.strides.head
    )


@triton.jit
def gather_rows(p_head, strides, o_t, o_h, m_r, D: tl.constexpr, BLOCK_D: tl.constexpr, INDEX: tl.constexpr):
    """Rows of tokens `o_t` and heads `o_h`, counted from `p_head`, [M, BLOCK_D]; 0 where `m_r` is false or past D.

    INDEX is tl.int32 where all of them lie within 2^31 elements, which saves registers, else tl.int64.
    """
    o_d = tl.arange(0, BLOCK_D)
    o_row = o_t.to(INDEX) * tl.cast(strides.token, INDEX) + o_h.to(INDEX) * tl.cast(strides.head, INDEX)
    m_x = m_r[:, None]
    if D != BLOCK_D:
        m_x = m_x & (o_d < D)[None, :]
    return tl.load(p_head + (o_row[:, None] + o_d[None, :]), mask=m_x, other=0.0)


@triton.jit
def keys_kept(rows, segment, SHAPE: tl.constexpr):
    """How many keys of a segment's block each row sees, counted from its first: all, or where causal those up to the
    token.
    """
    o_t = rows.o_c + (segment.offset + segment.i_first)
    n_kept = tl.minimum(segment.n_seen - segment.i_key, SHAPE.BLOCK_SIZE)
    causal = tl.minimum(o_t - segment.i_key + 1, n_kept)
    if SHAPE.CAUSAL:
        kept = causal
    elif SHAPE.OWN > 0:
        kept = tl.where(rows.o_s >= SHAPE.S, causal, n_kept)
    else:
        kept = tl.zeros_like(o_t) + n_kept
    return kept


@triton.jit
def locate_union(unions, SHAPE: tl.constexpr):
    """The union of this program's tile."""
    first = tl.program_id(0).to(tl.int64) * (SHAPE.BLOCK_M // SHAPE.GROUP_P * SHAPE.SLOTS_P)
    n_blocks = tl.load(unions.sizes + tl.program_id(0) * 2)
    n_masked = tl.load(unions.sizes + tl.program_id(0) * 2 + 1)
    return Union(first, n_blocks, n_masked)


@triton.jit
def named_by(p_bits, SHAPE: tl.constexpr):
    """Which rows' tokens named a block, from its bits."""
    o_r = tl.arange(0, SHAPE.BLOCK_M)
    return ((tl.load(p_bits) >> (o_r // SHAPE.GROUP_P)) & 1) != 0


@triton.jit
def locate_union_tile(i_slot, i_h, cu, n_batch, n_tokens, n_keys, SHAPE: tl.constexpr):
    """The tile of queries in slot `i_slot`, of index head `i_h`."""
    TOKENS: tl.constexpr = SHAPE.BLOCK_M // SHAPE.GROUP_P
    i_b, i_tile, start, n_mine = locate_slot(i_slot, cu.q, n_batch, n_tokens, TOKENS)
    i_b, start_k, n_seen, first = keys_seen_by(cu, i_b, start, n_mine, n_tokens, n_keys)
    start_q = 0
    if cu.q is not None:
        start_q = start
    o_r = tl.arange(0, SHAPE.BLOCK_M)
    o_t = i_tile * TOKENS + o_r // SHAPE.GROUP_P
    o_h = i_h * SHAPE.GROUP + o_r % SHAPE.GROUP_P
    m_r = (o_t < n_mine) & (o_r % SHAPE.GROUP_P < SHAPE.GROUP)
    return UnionTile(i_h, i_b, start_q, start_k, start, n_seen, i_tile * TOKENS, o_t, first + o_t, o_h, m_r)


@triton.jit
def gather_union_rows(tensor, tile, D: tl.constexpr, BLOCK_D: tl.constexpr, SHAPE: tl.constexpr):
    """The rows of a tile of queries, [M, BLOCK_D]."""
    p_x = head_pointer(tensor, tile.i_b, tile.start_q + tile.i_t, tile.i_h * SHAPE.GROUP)
    o_r = tl.arange(0, SHAPE.BLOCK_M)
    return gather_rows(p_x, tensor.strides, o_r // SHAPE.GROUP_P, o_r % SHAPE.GROUP_P, tile.m_r, D, BLOCK_D, tl.int64)
