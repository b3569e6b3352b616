"""Which query tiles meet which blocks of keys in windowed attention, seen from both sides, and in which order a
backward visits them.

A backward that owns keys walks the query tiles that meet its block; the accumulator of a query tile's gradient wants to
know, from the same rule, which blocks add to it and which of them is the first. The mask is that of `mask.keep`.
"""

import triton
import triton.language as tl


@triton.jit
def query_tiles(i_n, n_queries, n_keys, limits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first of the query tiles that meet keys `i_n .. i_n + BLOCK_N`, and the one after the last; none where those
    keys do not exist.
    """
    off = n_keys - n_queries
    low = 0
    high = n_queries
    if limits.right is not None:
        low = tl.maximum(i_n - off - limits.right, 0) // BLOCK_M
    if limits.left is not None:
        high = tl.maximum(tl.minimum(n_queries, i_n + BLOCK_N - off + limits.left), 0)
    high = tl.where(i_n < n_keys, tl.cdiv(high, BLOCK_M), 0)
    return low, tl.maximum(high, low)


@triton.jit
def whole_tiles(i_n, n_queries, n_keys, limits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Of the tiles that `query_tiles` gives, the first that needs no mask and the one after the last; none where a key
    lies past the end.

    A tile that runs past the last query needs none for that: those rows' probabilities are 0.
    """
    off = n_keys - n_queries
    low = 0
    high = tl.cdiv(n_queries, BLOCK_M)
    if limits.right is not None:
        low = tl.cdiv(tl.maximum(i_n + (BLOCK_N - 1) - off - limits.right, 0), BLOCK_M)
    if limits.left is not None:
        high = tl.maximum(i_n + 1 - off + limits.left, 0) // BLOCK_M
    return low, tl.where(i_n + BLOCK_N <= n_keys, high, 0)


@triton.jit
def key_blocks(i_m, n_queries, n_keys, limits, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The first of the blocks of keys that meet the query tile whose first row is `i_m`, and the one after the last."""
    off = n_keys - n_queries
    first = 0
    high = n_keys
    if limits.left is not None:
        first = tl.maximum(i_m + off - limits.left, 0) // BLOCK_N
    if limits.right is not None:
        high = tl.minimum(n_keys, i_m + BLOCK_M + off + limits.right)
    return first, tl.cdiv(tl.maximum(high, 0), BLOCK_N)


@triton.jit
def head_and_slot(place, n_slots, n_heads, together):
    """Head and slot at a place in the order of work: `together` heads at a time, and of those all with the same slot in
    a row.

    Of one head, the slots come in ascending order.
    """
    i_bundle = place // (together * n_slots)
    inside = place - i_bundle * (together * n_slots)
    width = tl.minimum(together, n_heads - i_bundle * together)
    return i_bundle * together + inside % width, inside // width


@triton.jit
def first_from(i_n, off, limits, BLOCK_M: tl.constexpr):
    """Under a left limit, the query tile from which on the block of keys at `i_n` is the first of those that meet a
    tile: see `meets_first`.
    """
    first = 0
    if limits.left is not None:
        first = tl.where(i_n == 0, 0, tl.cdiv(tl.maximum(i_n + limits.left - off, 0), BLOCK_M))
    return first


@triton.jit
def meets_first(i_tile, first, i_block, limits):
    """Whether a block of keys is the first that meets a query tile, of those that it meets; `first` as `first_from` has
    it.

    Without a left limit the first block of all is, so that a loop need not hold `first`.
    """
    is_first = i_block == 0
    if limits.left is not None:
        is_first = i_tile >= first
    return is_first


@triton.jit
def heads_of_sweep(group, SWEEPS: tl.constexpr):
    """Of how many of a group's query heads one sweep over a block's query tiles visits each tile: of one if it SWEEPS
    once for each head.
    """
    inside = group
    if SWEEPS:
        inside = 1
    return inside


@triton.jit
def tile_and_head(i_visit, inside):
    """Query tile, and which of a sweep's `inside` heads, of a visit: those are numbered tile by tile, and inside a tile
    head by head.
    """
    return i_visit // inside, i_visit % inside


@triton.jit
def by_head(i_tile, n_slots, inside):
    """The number of a tile, head by head, of the one that has `i_tile` where the `inside` heads of a sweep come inside
    of a slot.
    """
    i_slot, i_g = tile_and_head(i_tile, inside)
    return (i_slot // n_slots * inside + i_g) * n_slots + i_slot % n_slots
