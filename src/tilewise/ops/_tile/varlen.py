"""Which sequence, and which tile of it, a program owns."""

import triton
import triton.language as tl


@triton.jit
def load_offset(p_cu, i_b, n_tokens):
    """Offset `i_b`, kept inside 0 .. n_tokens whatever the memory holds, so that bad offsets never lead out of bounds."""
    return tl.minimum(tl.maximum(tl.load(p_cu + i_b), 0), n_tokens).to(tl.int32)


@triton.jit
def sequence_bounds(p_cu, i_b, n_tokens):
    """First token and length of sequence `i_b`."""
    first = load_offset(p_cu, i_b, n_tokens)
    return first, tl.maximum(load_offset(p_cu, i_b + 1, n_tokens) - first, 0)


@triton.jit
def find_tile(p_cu, i_slot, n_batch, n_tokens, BLOCK: tl.constexpr):
    """The sequence that owns tile slot `i_slot`, and which of its tiles that is.

    Sequence b owns the slots from `cu[b] // BLOCK + b` on: at least as many as it has tiles, and known without a look at the other lengths,
    so that the host needs no lengths (no synchronisation) to choose a grid of `n_tokens // BLOCK + n_batch` slots.
    """
    low = 0
    high = n_batch
    while high - low > 1:
        middle = (low + high) // 2
        owned = load_offset(p_cu, middle, n_tokens) // BLOCK + middle <= i_slot
        low = tl.where(owned, middle, low)
        high = tl.where(owned, high, middle)
    return low, tl.maximum(i_slot - load_offset(p_cu, low, n_tokens) // BLOCK - low, 0)


@triton.jit
def locate_tile(pid, n_tiles, n_heads, n_batch, n_rows, p_cu, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """Batch entry, head, first row, first token and number of rows for a program of the grid `n_tiles * heads * (1 if packed else batch)`.

    Tiles of one head are neighbours, so that they share its keys in the L2 cache. LAST_FIRST starts with the last tile: the longest under a
    causal mask. A packed program may own a slot past its sequence's last tile: its first row is then not below the number of rows.
    """
    i_tile = pid % n_tiles
    i_bh = pid // n_tiles
    if LAST_FIRST:
        i_tile = n_tiles - 1 - i_tile
    i_h = i_bh % n_heads
    i_b = i_bh // n_heads
    start = 0
    if p_cu is not None:
        i_b, i_tile = find_tile(p_cu, i_tile, n_batch, n_rows, BLOCK)
        start, n_rows = sequence_bounds(p_cu, i_b, n_rows)
    return i_b, i_h, i_tile * BLOCK, start, n_rows


@triton.jit
def other_side(p_cu, i_b, n_tokens, i_row, n_rows):
    """Batch entry to index with, first token and length of the sequence's other side (keys for a query tile, queries for a key tile).

    Length 0 where the program owns no row, so that its loop does not run. A packed tensor has no batch axis: entry 0.
    """
    start = 0
    if p_cu is not None:
        start, n_tokens = sequence_bounds(p_cu, i_b, n_tokens)
        n_tokens = tl.where(i_row < n_rows, n_tokens, 0)
        i_b = 0
    return i_b, start, n_tokens


@triton.jit
def locate_slot(i_slot, p_cu, n_batch, n_tokens, BLOCK: tl.constexpr):
    """Sequence, which of its tiles, its first token of all and its length, for tile slot `i_slot` of all sequences together.

    The order is that of tokens. Dense sequences of n_tokens have as many slots as tiles; packed ones as `find_tile` says.
    """
    if p_cu is None:
        per_sequence = tl.cdiv(n_tokens, BLOCK)
        i_b = i_slot // per_sequence
        i_tile = i_slot % per_sequence
        start = i_b * n_tokens
    else:
        i_b, i_tile = find_tile(p_cu, i_slot, n_batch, n_tokens, BLOCK)
        start, n_tokens = sequence_bounds(p_cu, i_b, n_tokens)
    return i_b, i_tile, start, n_tokens


@triton.jit
def first_slot(i_b, p_cu, n_tokens, BLOCK: tl.constexpr):
    """The slot of sequence `i_b`'s first tile."""
    if p_cu is None:
        slot = i_b * tl.cdiv(n_tokens, BLOCK)
    else:
        slot = load_offset(p_cu, i_b, n_tokens) // BLOCK + i_b
    return slot
