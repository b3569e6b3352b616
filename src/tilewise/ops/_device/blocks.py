"""Which blocks of keys a token names, and the rows of queries that a list of tokens stands for.

An entry is one naming: a token and one of its SLOTS. Token by token, the S slots that `indices` holds come first, then
OWN slots for the blocks that make up the token's own stretch of OWN * BLOCK_SIZE keys. A row is a token and one of the
GROUP query heads that share its choice; tiles hold GROUP_P (a power of two) rows a token.
"""

import triton
import triton.language as tl

from tilewise.ops._device.varlen import first_slot, locate_slot


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
def named_blocks(
    indices, i_t, start, n_rows, i_h, n_heads, BLOCK_SIZE: tl.constexpr, S: tl.constexpr, OWN: tl.constexpr,
    TOKENS: tl.constexpr, SLOTS_P: tl.constexpr,
):  # fmt: skip
    """The blocks that tokens `i_t .. i_t + TOKENS` of one sequence name, [TOKENS * SLOTS_P], -1 where there is none or
    it lies outside.
    """
    o_e = tl.arange(0, TOKENS * SLOTS_P)
    o_s = o_e % SLOTS_P
    o_t = i_t + o_e // SLOTS_P
    m_e = (o_t < n_rows) & (o_s < S)
    b_block = tl.load(indices + ((start + o_t).to(tl.int64) * n_heads + i_h) * S + o_s, mask=m_e, other=-1)
    b_block = tl.where((b_block >= 0) & (b_block < tl.cdiv(n_rows, BLOCK_SIZE)), b_block, -1)
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
    """Entries of a tile sorted by block, then as they come: block, entry, which count, where its run of equal blocks
    begins, whether it ends it.

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
    return block, entry, counts, first, ends


@triton.jit
def within_run(b_x, first):
    """Sums of `b_x` from the beginning of each one's run up to it, itself not included."""
    before = tl.cumsum(b_x, 0) - b_x
    return before - tl.gather(before, first, 0)


@triton.jit
def locate_segment(
    segments, i_segment, n_slots, p_cu, n_batch, n_tokens, first_tile, BLOCK_SIZE: tl.constexpr, TOKENS: tl.constexpr
):
    """Segment `i_segment`: first entry, entries, which one of those that are not their list's first (0: it is), index
    head, and where its block lies.

    That is batch entry and first token to index tensors with, the sequence's first token of all, its length, the
    block's first key, and by how much a token's number in the sequence exceeds its number in the chunk.
    """
    p_segment = segments + i_segment.to(tl.int64) * 4
    i_list = tl.load(p_segment + 2)
    i_b, i_block, start, n_keys = locate_slot(i_list % n_slots, p_cu, n_batch, n_tokens, BLOCK_SIZE)
    offset = (first_tile - first_slot(i_b, p_cu, n_tokens, TOKENS)) * TOKENS
    start_q = 0
    if p_cu is not None:
        i_b, start_q = 0, start
    first, n_entries, i_extra = tl.load(p_segment), tl.load(p_segment + 1), tl.load(p_segment + 3)
    return first, n_entries, i_extra, i_list // n_slots, i_b, start_q, start, n_keys, i_block * BLOCK_SIZE, offset


@triton.jit
def listed_rows(
    perm,
    first,
    i_entry,
    n_entries,
    offset,
    n_tokens,
    p_cu,
    SLOTS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """BLOCK_M rows from entry `i_entry` of a list on: which exist, the token of the chunk, its slot, and their head in
    the group.
    """
    o_r = tl.arange(0, BLOCK_M)
    i_e = i_entry + o_r // GROUP_P
    o_g = o_r % GROUP_P
    m_r = i_e < n_entries
    if GROUP != GROUP_P:
        m_r = m_r & (o_g < GROUP)
    entry = tl.load(perm + first + i_e, mask=m_r, other=0)
    o_c = entry // SLOTS
    if p_cu is not None:
        # Offsets that decrease may give a tile of tokens and a block of keys to different sequences.
        m_r = m_r & (o_c + offset >= 0) & (o_c + offset < n_tokens)
    return m_r, o_c, entry % SLOTS, o_g


@triton.jit
def head_pointer(x, strides, i_b, i_t, i_h):
    """Where token `i_t` (negative too) of head `i_h` lies."""
    return x + (
        tl.cast(i_b, tl.int64) * strides.batch
        + tl.cast(i_t, tl.int64) * strides.token
        + tl.cast(i_h, tl.int64) * strides.head
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
def keys_kept(
    o_s, o_t, i_key, n_keys, S: tl.constexpr, OWN: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """How many keys of the block that begins at `i_key` each row sees, counted from its first: all, or where causal
    those up to the token.
    """
    n_kept = tl.minimum(n_keys - i_key, BLOCK_SIZE)
    causal = tl.minimum(o_t - i_key + 1, n_kept)
    if CAUSAL:
        kept = causal
    elif OWN > 0:
        kept = tl.where(o_s >= S, causal, n_kept)
    else:
        kept = tl.zeros_like(o_t) + n_kept
    return kept
