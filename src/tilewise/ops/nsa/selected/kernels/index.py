"""Two ways to group what tokens name, both without atomics, so that the same indices give the same order.

*Lists* (key order): for every block of keys the entries that name it, in the order of tokens. A tile of tokens sorts
its entries by block: how many name the same one, and how many of them come before. Counts by (block, tile) are summed
up along the tiles, then along the blocks; an entry's place is the sum of the three. Bytes: 4 an entry for each of
index, rank and list, and three passes over the counts, 4 bytes for each pair of block and
tile: so tokens come in chunks.

*Unions* (query order): for every tile of queries the blocks that any of its tokens names, from the last down, each with
a bit a token. Those that reach past the tile's first token, which come first, alone need a mask.
"""

import triton
import triton.language as tl

from tilewise.ops._device.blocks import keys_seen_by, named_blocks, skipped, sorted_entries, within_run
from tilewise.ops._device.rows import first_key_slot, locate_slot

SIZES = ("n_batch", "n_tokens", "n_keys", "n_heads", "n_slots", "first_tile", "n_tiles", "n_lists")


@triton.jit(do_not_specialize=SIZES)
def nsa_index_count_kernel(
    indices, ranks, counts, tokens, flag, cu, n_batch, n_tokens, n_keys, n_heads, n_slots, first_tile, n_tiles,
    WANTED: tl.constexpr, ONCE: tl.constexpr, NAMING: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of TOKENS tokens of the chunk x index heads.
    # Owns: the entries of one tile.
    # Loops over: nothing.
    # Writes: each entry's rank among its tile's entries of the same block (-1 where it names none), the counts by
    # block, and each token's number.
    if skipped(flag, WANTED):
        return
    TOKENS: tl.constexpr = NAMING.TOKENS
    SLOTS_P: tl.constexpr = NAMING.SLOTS_P
    SLOTS: tl.constexpr = NAMING.S + NAMING.OWN
    i_tile = tl.program_id(0) % n_tiles
    i_h = tl.program_id(0) // n_tiles
    i_b, i_local, start, n_rows = locate_slot(first_tile + i_tile, cu.q, n_batch, n_tokens, TOKENS)
    i_t = i_local * TOKENS
    _, _, n_seen, _ = keys_seen_by(cu, i_b, start, n_rows, n_tokens, n_keys)
    b_named = named_blocks(indices, i_t, start, n_rows, n_seen, i_h, n_heads, NAMING)
    entries = sorted_entries(b_named, TOKENS * SLOTS_P, SLOTS_P, ONCE)
    b_rank = within_run(entries.counted.to(tl.int32), entries.first)
    o_s = entries.entry % SLOTS_P
    o_entry = ((i_tile * TOKENS + entries.entry // SLOTS_P).to(tl.int64) * n_heads + i_h) * SLOTS + o_s
    tl.store(ranks + o_entry, tl.where(entries.counted, b_rank, -1), mask=o_s < SLOTS)
    o_list = (i_h * n_slots + first_key_slot(i_b, cu, n_tokens, n_keys, NAMING.BLOCK_SIZE) + entries.block).to(tl.int64)
    tl.store(counts + o_list * n_tiles + i_tile, b_rank + entries.counted.to(tl.int32), mask=entries.ends)
    if i_h == 0:
        o_t = tl.arange(0, TOKENS)
        tl.store(tokens + i_tile * TOKENS + o_t, tl.where(i_t + o_t < n_rows, start + i_t + o_t, -1))


@triton.jit(do_not_specialize=SIZES)
def nsa_index_tiles_kernel(counts, totals, flag, n_tiles, WANTED: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: lists.
    # Owns: one list's counts by tile.
    # Loops over: tiles of tokens.
    # Writes: in place of each count the sum of those before it, and the list's total.
    if skipped(flag, WANTED):
        return
    p_counts = counts + tl.program_id(0).to(tl.int64) * n_tiles
    total = 0
    for i in range(0, n_tiles, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_count = tl.load(p_counts + o_i, mask=o_i < n_tiles, other=0)
        tl.store(p_counts + o_i, total + tl.cumsum(b_count, 0) - b_count, mask=o_i < n_tiles)
        total += tl.sum(b_count, 0)
    tl.store(totals + tl.program_id(0), total)


@triton.jit(do_not_specialize=SIZES)
def nsa_index_lists_kernel(list_sizes, flag, n_lists, WANTED: tl.constexpr, SEGMENT: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: one program.
    # Owns: all lists' totals.
    # Loops over: lists.
    # Writes: each list's first place, how many segments of SEGMENT entries there are up to its end, and how many before
    # it are not a list's first.
    if skipped(flag, WANTED):
        return
    n_entries = 0
    n_segments = 0
    n_extras = 0
    for i in range(0, n_lists, BLOCK):
        o_i = i + tl.arange(0, BLOCK)
        b_total = tl.load(list_sizes.totals + o_i, mask=o_i < n_lists, other=0)
        b_segments = (b_total + (SEGMENT - 1)) // SEGMENT
        tl.store(list_sizes.firsts + o_i, n_entries + tl.cumsum(b_total, 0) - b_total, mask=o_i < n_lists)
        tl.store(list_sizes.ends + o_i, n_segments + tl.cumsum(b_segments, 0), mask=o_i < n_lists)
        b_extras = tl.maximum(b_segments - 1, 0)
        tl.store(list_sizes.extras + o_i, n_extras + tl.cumsum(b_extras, 0) - b_extras, mask=o_i < n_lists)
        n_entries += tl.sum(b_total, 0)
        n_segments += tl.sum(b_segments, 0)
        n_extras += tl.sum(b_extras, 0)


@triton.jit(do_not_specialize=SIZES)
def nsa_index_place_kernel(
    indices, ranks, counts, list_sizes, perm, segments, flag, cu, n_batch, n_tokens, n_keys, n_heads, n_slots,
    first_tile, n_tiles, n_lists, WANTED: tl.constexpr, SEGMENT: tl.constexpr, NAMING: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of TOKENS tokens of the chunk x index heads, or lists, whichever is more.
    # Owns: the entries of one tile, and one list.
    # Loops over: the list's segments.
    # Writes: its entries into their lists; for each segment first place, entries, list, and its number from 1 among
    # those not first, else 0.
    if skipped(flag, WANTED):
        return
    pid = tl.program_id(0)
    if pid < n_lists:
        n_entries = tl.load(list_sizes.totals + pid)
        first = tl.load(list_sizes.firsts + pid)
        n_extras = tl.load(list_sizes.extras + pid)
        n_segments = (n_entries + (SEGMENT - 1)) // SEGMENT
        p_segment = segments + (tl.load(list_sizes.ends + pid) - n_segments).to(tl.int64) * 4
        for i in range(n_segments):
            tl.store(p_segment + i * 4, first + i * SEGMENT)
            tl.store(p_segment + i * 4 + 1, tl.minimum(n_entries - i * SEGMENT, SEGMENT))
            tl.store(p_segment + i * 4 + 2, pid)
            tl.store(p_segment + i * 4 + 3, tl.where(i == 0, 0, n_extras + i))
    if pid < n_tiles * n_heads:
        TOKENS: tl.constexpr = NAMING.TOKENS
        SLOTS_P: tl.constexpr = NAMING.SLOTS_P
        SLOTS: tl.constexpr = NAMING.S + NAMING.OWN
        i_tile = pid % n_tiles
        i_h = pid // n_tiles
        i_b, i_local, start, n_rows = locate_slot(first_tile + i_tile, cu.q, n_batch, n_tokens, TOKENS)
        _, _, n_seen, _ = keys_seen_by(cu, i_b, start, n_rows, n_tokens, n_keys)
        b_block = named_blocks(indices, i_local * TOKENS, start, n_rows, n_seen, i_h, n_heads, NAMING)
        o_e = tl.arange(0, TOKENS * SLOTS_P)
        o_s = o_e % SLOTS_P
        o_token = i_tile * TOKENS + o_e // SLOTS_P
        b_rank = tl.load(ranks + (o_token.to(tl.int64) * n_heads + i_h) * SLOTS + o_s, mask=o_s < SLOTS, other=-1)
        m_e = b_rank >= 0
        o_list = i_h * n_slots + first_key_slot(i_b, cu, n_tokens, n_keys, NAMING.BLOCK_SIZE) + b_block
        b_before = tl.load(counts + o_list.to(tl.int64) * n_tiles + i_tile, mask=m_e, other=0)
        b_first = tl.load(list_sizes.firsts + o_list, mask=m_e, other=0)
        tl.store(perm + (b_first + b_before + b_rank), o_token * SLOTS + o_s, mask=m_e)


@triton.jit(do_not_specialize=SIZES)
def nsa_index_union_kernel(indices, unions, cu, n_batch, n_tokens, n_keys, n_heads, n_tiles, NAMING: tl.constexpr):
    # Grid: tiles of TOKENS tokens x index heads.
    # Owns: the entries of one tile.
    # Loops over: nothing.
    # Writes: the tile's blocks from the last down, a bit for each token that named it, how many there are and how many
    # need a mask.
    TOKENS: tl.constexpr = NAMING.TOKENS
    SLOTS_P: tl.constexpr = NAMING.SLOTS_P
    i_tile = tl.program_id(0) % n_tiles
    i_h = tl.program_id(0) // n_tiles
    i_b, i_local, start, n_rows = locate_slot(i_tile, cu.q, n_batch, n_tokens, TOKENS)
    _, _, n_seen, first = keys_seen_by(cu, i_b, start, n_rows, n_tokens, n_keys)
    i_t = i_local * TOKENS
    b_named = named_blocks(indices, i_t, start, n_rows, n_seen, i_h, n_heads, NAMING)
    entries = sorted_entries(b_named, TOKENS * SLOTS_P, SLOTS_P, True)
    # A token counts once in a run, so that the sum of bits is their union.
    b_bit = tl.where(entries.counted, 1 << (entries.entry // SLOTS_P), 0)
    b_bits = within_run(b_bit, entries.first) + b_bit
    ends = entries.ends
    n_union = tl.sum(ends.to(tl.int32), 0)
    o_union = tl.program_id(0).to(tl.int64) * (TOKENS * SLOTS_P) + (n_union - tl.cumsum(ends.to(tl.int32), 0))
    tl.store(unions.blocks + o_union, entries.block, mask=ends)
    tl.store(unions.bits + o_union, b_bits, mask=ends)
    # A block that ends before the tile's first token, or at it, is seen whole by every token.
    i_at = first + i_t
    if n_keys is not None:
        i_at = tl.minimum(i_at, n_seen - 1)
    n_masked = tl.sum((ends & (entries.block >= (i_at + 1) // NAMING.BLOCK_SIZE)).to(tl.int32), 0)
    tl.store(unions.sizes + tl.program_id(0) * 2, n_union)
    tl.store(unions.sizes + tl.program_id(0) * 2 + 1, n_masked)
