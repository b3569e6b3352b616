"""Keep-masks of windowed attention, and the ranges of tiles that follow from them.

Key j takes part for query i where `i + off - left <= j <= i + off + right` with `off = Tk - Tq`: a `Window`. A limit of
None does not exist; causal is `right = 0`. The same predicate serves forward, dQ and dK/dV.

With a KEY_STRIDE (None elsewhere) key j stands at `j * KEY_STRIDE`, counted from the first query (`off = 0`): it takes
part where `j * KEY_STRIDE <= i + right`. There is no left limit then, and right may be negative.

Which query tiles meet which blocks of keys in windowed attention, seen from both sides, and in which order a
backward visits them.

A backward that owns keys walks the query tiles that meet its block; the accumulator of a query tile's gradient needs to
know, from the same rule, which blocks add to it and which of them is the first. The mask is that of `mask.keep`.
"""

import triton
import triton.language as tl

from tilewise.ops._device.records import Runs, TailRuns


@triton.jit
def diagonal(n_queries, n_keys, KEY_STRIDE: tl.constexpr):
    """`off`: where query 0 stands among the keys' positions."""
    off = n_keys - n_queries
    if KEY_STRIDE is not None:
        off = 0
    return off


@triton.jit
def key_position(o_n, KEY_STRIDE: tl.constexpr):
    """Position of key `o_n`."""
    if KEY_STRIDE is not None:
        o_n = o_n * KEY_STRIDE
    return o_n


@triton.jit
def keep(o_m, o_n, n_keys, window, KEY_STRIDE: tl.constexpr = None):
    """True where key `o_n` takes part for query `o_m`; the two broadcast against each other."""
    left, right, off = window
    m_keep = o_n < n_keys
    o_n = key_position(o_n, KEY_STRIDE)
    if right is not None:
        m_keep = m_keep & (o_n <= o_m + (off + right))
    if left is not None:
        m_keep = m_keep & (o_n >= o_m + (off - left))
    return m_keep


@triton.jit
def split_range(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Bounds of three runs of tiles, in order and on multiples of BLOCK but for ends: masked, whole, masked."""
    high = tl.maximum(high, 0)
    low = tl.minimum(tl.maximum(low, 0), high) // BLOCK * BLOCK
    full_low = tl.maximum(low, tl.cdiv(tl.minimum(tl.maximum(full_low, 0), high), BLOCK) * BLOCK)
    full_high = tl.maximum(full_high, full_low)
    return Runs(low, full_low, full_high, high)


@triton.jit
def split_tail(runs, n_rows, BLOCK: tl.constexpr):
    """Bounds of four runs from split_range's three: masked, whole, masked, and at last the tile that reaches past the
    last row, if one does.
    """
    low, full_low, full_high, high = runs
    inside = tl.maximum(low, n_rows // BLOCK * BLOCK)
    full_low = tl.minimum(full_low, inside)
    full_high = tl.minimum(tl.maximum(full_high, full_low), inside)
    return TailRuns(low, full_low, full_high, tl.minimum(inside, high), high)


@triton.jit
def keys_before(position, KEY_STRIDE: tl.constexpr):
    """How many keys stand before `position`: 0 or less where there is none, whichever way `//` rounds below 0."""
    if KEY_STRIDE is not None:
        position = (position + (KEY_STRIDE - 1)) // KEY_STRIDE
    return position


@triton.jit
def keys_seen(n_queries, n_keys, right, KEY_STRIDE: tl.constexpr):
    """Keys up to the last that any query sees, where they have a stride, else all.

    A packed sequence has room for one key more, or not, depending on its start: how tiles are masked, and so how sums
    round, must not depend on that.
    """
    if KEY_STRIDE is not None:
        n_keys = tl.minimum(n_keys, tl.maximum(keys_before(n_queries + right, KEY_STRIDE), 0))
    return n_keys


@triton.jit
def zero_unseen(b_x, i_n, n_seen, KEY_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of keys `i_n .. i_n + BLOCK_N`, 0 for those that no query sees: a tile that needs no mask for the others
    leaves something there.
    """
    if KEY_STRIDE is not None:
        b_x = tl.where((i_n + tl.arange(0, BLOCK_N) < n_seen)[:, None], b_x, 0.0)
    return b_x


@triton.jit
def key_range(i_m, n_keys, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr = None):
    """The key tiles that query tile `i_m` reaches, as split_range gives them: only the middle run needs no mask."""
    left, right, off = window
    low = 0
    full_low = 0
    high = n_keys
    full_high = n_keys
    if right is not None:
        high = tl.minimum(n_keys, keys_before(i_m + BLOCK_M + off + right, KEY_STRIDE))
        full_high = tl.minimum(n_keys, keys_before(i_m + 1 + off + right, KEY_STRIDE))
    if left is not None:
        low = i_m + off - left
        full_low = i_m + BLOCK_M - 1 + off - left
    return split_range(low, full_low, tl.maximum(full_high, 0) // BLOCK_N * BLOCK_N, high, BLOCK_N)


@triton.jit
def query_range(
    i_n, n_queries, n_keys, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr = None
):
    """The query tiles that reach key tile `i_n`, likewise.

    A tile that runs past the last query counts as whole: those rows are zero.
    """
    left, right, off = window
    low = 0
    full_low = 0
    high = n_queries
    full_high = n_queries
    if right is not None:
        low = key_position(i_n, KEY_STRIDE) - off - right
        last = i_n + BLOCK_N - 1
        if KEY_STRIDE is not None:
            # Keys past the end stand far beyond the queries: they would leave no whole tile, and what is made of them
            # is not stored.
            last = tl.minimum(last, n_keys - 1)
        full_low = key_position(last, KEY_STRIDE) - off - right
    if left is not None:
        high = tl.minimum(n_queries, i_n + BLOCK_N - off + left)
        full_high = tl.maximum(tl.minimum(n_queries, i_n + 1 - off + left), 0) // BLOCK_M * BLOCK_M
    return split_range(low, full_low, full_high, high, BLOCK_M)


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
    """Head and slot at a position in the work order: `together` heads at a time, and of those all with the same slot in
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
    """Whether a block of keys is the first that meets a query tile, of those that it meets; `first` comes from
    `first_from`.

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
