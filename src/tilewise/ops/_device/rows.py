"""Which sequence, and which tile of it, a program owns; loads and stores of tiles; taps.

A tile is BLOCK consecutive tokens of one head of one sequence (`Rows`). Rows that lie end to end are loaded and stored
by their numbers.

Taps are named values of one program, written out for `tilewise trace`. A kernel declares what a step has to show as a
NamedTuple: a field is a slot, and `tilewise trace` takes the slots' names from it. `taps` is None (off: nothing of this
is compiled) or a `Taps`.
"""

import triton
import triton.language as tl

from tilewise.ops._device.records import Place


@triton.jit
def tile_pointers(rows, i_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows `i_row .. i_row + BLOCK`.

    From tile to tile one scalar changes, so that the rest is hoisted out of loops.
    """
    strides = rows.strides
    p_head = (
        rows.x
        + tl.cast(rows.i_b, tl.int64) * strides.batch
        + tl.cast(rows.start, tl.int64) * strides.token
        + tl.cast(rows.i_h, tl.int64) * strides.head
    )
    o_r = tl.arange(0, BLOCK).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    return (p_head + tl.cast(i_row, tl.int64) * strides.token) + (o_r[:, None] * strides.token + o_d[None, :])


@triton.jit
def load_rows(
    rows,
    i_row,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    INSIDE: tl.constexpr = False,
):
    """Rows `i_row .. i_row + BLOCK` as [BLOCK, BLOCK_D]; what lies past the last row or past D is 0.

    INSIDE promises that no row lies past the last. TMA is 1 where the last row is the tensor's last: the descriptor
    zeroes what lies behind by itself; and 2 where other rows lie there.
    """
    if TMA:
        b_x = rows.x.load([rows.i_b, rows.i_h, rows.start + i_row, 0]).reshape([BLOCK, BLOCK_D])
        if TMA == 2 and not INSIDE:
            b_x = tl.where((i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None], b_x, tl.zeros_like(b_x))
    else:
        p_x = tile_pointers(rows, i_row, BLOCK, BLOCK_D)
        m_r = (i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None]
        m_d = (tl.arange(0, BLOCK_D) < D)[None, :]
        if INSIDE and D == BLOCK_D:
            b_x = tl.load(p_x)
        elif INSIDE:
            b_x = tl.load(p_x, mask=m_d, other=0.0)
        elif D == BLOCK_D:
            b_x = tl.load(p_x, mask=m_r, other=0.0)
        else:
            b_x = tl.load(p_x, mask=m_r & m_d, other=0.0)
    return b_x


@triton.jit
def store_rows(rows, i_row, b_x, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [BLOCK, BLOCK_D] to rows `i_row .. i_row + BLOCK`, leaving out what lies past the last row or past D."""
    m_r = (i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None]
    m_d = (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(tile_pointers(rows, i_row, BLOCK, BLOCK_D), b_x.to(rows.x.dtype.element_ty), mask=m_r & m_d)


@triton.jit
def plain_rows(x, o_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows [N, BLOCK_D] of width D, end to end, and which elements exist."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_row[:, None]
    if D != BLOCK_D:
        m_x = m_x & (o_d < D)[None, :]
    return x + (o_row[:, None] * D + o_d[None, :]), m_x


@triton.jit
def store_plain(x, o_row, m_row, b_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows [N, BLOCK_D] of width D."""
    p_x, m_x = plain_rows(x, o_row, m_row, D, BLOCK_D)
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_x)


@triton.jit
def store_sums(sums, o_row, m_row, acc_dk, acc_dv, WIDTHS: tl.constexpr):
    """Store the rows of dK and dV; WIDTHS is any record of D, DV, BLOCK_D and BLOCK_DV."""
    store_plain(sums.dk, o_row, m_row, acc_dk, WIDTHS.D, WIDTHS.BLOCK_D)
    store_plain(sums.dv, o_row, m_row, acc_dv, WIDTHS.DV, WIDTHS.BLOCK_DV)


@triton.jit
def load_plain(x, o_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [N, BLOCK_D] of width D, 0 where there is none."""
    p_x, m_x = plain_rows(x, o_row, m_row, D, BLOCK_D)
    return tl.load(p_x, mask=m_x, other=0.0)


@triton.jit
def load_offset(p_cu, i_b, n_tokens):
    """Offset `i_b`, clamped to 0 .. n_tokens, so that bad offsets in memory never lead
    out of bounds.
    """
    return tl.minimum(tl.maximum(tl.load(p_cu + i_b), 0), n_tokens).to(tl.int32)


@triton.jit
def sequence_bounds(p_cu, i_b, n_tokens):
    """First token and length of sequence `i_b`."""
    first = load_offset(p_cu, i_b, n_tokens)
    return first, tl.maximum(load_offset(p_cu, i_b + 1, n_tokens) - first, 0)


@triton.jit
def find_tile(p_cu, i_slot, n_batch, n_tokens, BLOCK: tl.constexpr):
    """The sequence that owns tile slot `i_slot`, and which of its tiles that is.

    Sequence b owns the slots from `cu[b] // BLOCK + b` on: at least as many as it has tiles, and known without looking
    at the other lengths, so that the host needs no lengths (no synchronisation) to choose a grid of
    `n_tokens // BLOCK + n_batch` slots.
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
    """What a program of the grid `n_tiles * heads * (1 if packed else batch)` owns, as a `Place`.

    Tiles of one head are neighbours, so that they share its keys in the L2 cache. LAST_FIRST starts with the last tile:
    the longest under a causal mask. A packed program may own a slot past its sequence's last tile: its first row is
    then not below the number of rows.
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
    return Place(i_b, i_h, i_tile * BLOCK, start, n_rows)


@triton.jit
def other_side(p_cu, i_b, n_tokens, i_row, n_rows):
    """Batch entry to index with, first token and length of the sequence's other side (keys for a query tile, queries
    for a key tile).

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
    """Sequence, which of its tiles, its first token of all and its length, for tile slot `i_slot` of all sequences
    together.

    The order is that of tokens. Dense sequences of n_tokens have as many slots as tiles; packed ones as `find_tile`
    says.
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


@triton.jit
def first_position(p_first, i_b):
    """Position of sequence `i_b`'s first query, at most 2^30: 0 where queries are their sequences whole."""
    first = 0
    if p_first is not None:
        first = tl.minimum(tl.maximum(tl.load(p_first + i_b), 0), 1 << 30)
    return first


@triton.jit
def locate_key_slot(i_slot, cu, n_batch, n_tokens, n_keys, BLOCK: tl.constexpr):
    """As `locate_slot`, of keys; those of a sequence are its `n_tokens` queries' own where n_keys is None."""
    return locate_slot(i_slot, cu.q if cu.k is None else cu.k, n_batch, n_tokens if n_keys is None else n_keys, BLOCK)


@triton.jit
def first_key_slot(i_b, cu, n_tokens, n_keys, BLOCK: tl.constexpr):
    """As `first_slot`, likewise."""
    return first_slot(i_b, cu.q if cu.k is None else cu.k, n_tokens if n_keys is None else n_keys, BLOCK)


@triton.jit
def locate_ordered(pid, tiles, n_tiles, n_heads, n_rows, p_cu, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr):
    """As `locate_tile`, in work order: the longest sequences first, by `tiles` (see `order_tiles_kernel`); dense
    ones have none.

    All heads of a tile are neighbours.
    """
    i_h = pid % n_heads
    i_slot = pid // n_heads
    start = 0
    if p_cu is None:
        i_b = i_slot // n_tiles
        i_tile = i_slot % n_tiles
        if LAST_FIRST:
            i_tile = n_tiles - 1 - i_tile
    else:
        p_tile = tiles + i_slot * 4
        i_b = tl.load(p_tile)
        i_tile = tl.load(p_tile + 1)
        start = tl.load(p_tile + 2)
        n_rows = tl.load(p_tile + 3)
    return Place(i_b, i_h, i_tile * BLOCK, start, n_rows)


@triton.jit(do_not_specialize=("n_batch", "n_tokens", "n_slots"))
def order_tiles_kernel(
    cu, tiles, n_batch, n_tokens, n_slots, LAST_FIRST: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr
):
    # Grid: sequences.
    # Owns: one sequence's tiles of BLOCK tokens.
    # Loops over: all sequences, to find how many tiles those before it have: the longer ones, and of equals the
    # earlier.
    # Writes: for each tile its sequence, number, and the sequence's first token and length; LAST_FIRST from the last
    # tile down. The last program also fills the slots left over, with tiles past the end of a sequence.
    i_b = tl.program_id(0)
    start, n_mine = sequence_bounds(cu, i_b, n_tokens)
    first = 0
    n_before = 0
    for i in range(0, n_batch, BLOCK_B):
        o_b = i + tl.arange(0, BLOCK_B)
        m_b = o_b < n_batch
        low = tl.minimum(tl.maximum(tl.load(cu + o_b, mask=m_b, other=0), 0), n_tokens).to(tl.int32)
        high = tl.minimum(tl.maximum(tl.load(cu + o_b + 1, mask=m_b, other=0), 0), n_tokens).to(tl.int32)
        length = tl.maximum(high - low, 0)
        before = m_b & ((length > n_mine) | ((length == n_mine) & (o_b < i_b)))
        # Offsets that decrease may add up to more tiles than there are slots; clamped, they cannot overflow.
        first = tl.minimum(first + tl.sum(tl.where(before, tl.cdiv(length, BLOCK), 0).to(tl.int64), 0), n_slots).to(
            tl.int32
        )
        n_before += tl.sum(before.to(tl.int32), 0)
    n_tiles = tl.cdiv(n_mine, BLOCK)
    last = tl.minimum(first + n_tiles, n_slots)
    if n_before == n_batch - 1:
        last = n_slots
    for i in range(first, last, BLOCK_B):
        o_slot = i + tl.arange(0, BLOCK_B)
        o_t = o_slot - first
        if LAST_FIRST:
            o_t = tl.where(o_t < n_tiles, n_tiles - 1 - o_t, o_t)
        p_tile = tiles + o_slot * 4
        tl.store(p_tile, i_b + tl.zeros_like(o_t), mask=o_slot < last)
        tl.store(p_tile + 1, o_t, mask=o_slot < last)
        tl.store(p_tile + 2, start + tl.zeros_like(o_t), mask=o_slot < last)
        tl.store(p_tile + 3, n_mine + tl.zeros_like(o_t), mask=o_slot < last)


@triton.jit
def same_or_other_side(p_cu, p_cu_other, i_b, start, n_rows, n_others):
    """Batch entry to index with, first token and length of the sequence's other side. A packed tensor has no batch
    axis: entry 0.

    Packed sequences whose other side has no offsets of its own have the same on both; dense ones have `n_others` rows.
    """
    if p_cu is None:
        start = 0
    else:
        if p_cu_other is not None:
            start, n_others = sequence_bounds(p_cu_other, i_b, n_others)
        else:
            n_others = n_rows
        i_b = 0
    return i_b, start, n_others


@triton.jit
def write_slot(taps, i_step, i_slot, b_x):
    """Write tile or row vector `b_x` to a slot of step `i_step`, if this is the tapped program."""
    if tl.program_id(0) == taps.i_program:
        p_slot = taps.buffer + (i_step * taps.n_slots + i_slot) * taps.n_elements
        if len(b_x.shape) == 1:
            o_x = tl.arange(0, b_x.shape[0])
        else:
            o_x = tl.arange(0, b_x.shape[0])[:, None] * b_x.shape[1] + tl.arange(0, b_x.shape[1])[None, :]
        tl.store(p_slot + o_x, b_x.to(tl.float32), mask=o_x < taps.n_elements)


@triton.jit
def tap_once(taps, b_x):
    """What does not change from step to step, in slot 0 of step 0; the steps' own slots follow it."""
    if taps is not None:
        write_slot(taps, 0, 0, b_x)


@triton.jit
def tap_step(taps, i_step, step, FIRST: tl.constexpr = 0):
    """All that one step has to show: field i in slot FIRST + i."""
    if taps is not None:
        for SLOT in tl.static_range(len(step)):
            write_slot(taps, i_step, FIRST + SLOT, step[SLOT])
