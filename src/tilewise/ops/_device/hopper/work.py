"""Work items of the forward for Hopper: which there are and in which order, the key tiles that each reaches, and the
warp that fetches them.

An item is a query tile of one head: 64 rows for each of GROUPS warpgroups. CTAs are persistent, one per SM, and take
item after item: every n-th, or the next from a work counter in global memory. Only the fetching warp computes what an
item is; it tells the warpgroups through a mailbox in shared memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.ops._device.hopper.ring import HeadRows, first_of_ring, load_tile, thread_barrier, tile_bytes
from tilewise.ops._device.records import Window
from tilewise.ops._device.rows import find_tile, sequence_bounds
from tilewise.ops._device.scores import key_range

# Rows of one warpgroup.
ROWS = gl.constexpr(64)


class ItemSizes(NamedTuple):
    """Defines which work items there are, and their order."""

    n_batch: Any
    n_tiles: Any
    """Query tiles of a head; of all packed sequences together."""
    n_heads: Any
    n_all_heads: Any
    """Of all batch entries."""
    together: Any
    """Heads that are interleaved."""
    group: Any
    """GQA group size."""
    n_queries: Any
    n_keys: Any


class Item(NamedTuple):
    """A work item: its first row (-1: no item is left), head, batch entry, and its sequence."""

    row: Any
    i_h: Any
    i_b: Any
    start: Any
    """The sequence's first query token."""
    n_queries: Any
    n_keys: Any


# A message in the mailbox is an item.
ITEM_FIELDS = gl.constexpr(Item(*range(len(Item._fields))))
ITEM_SIZE = gl.constexpr(len(Item._fields))


class KeyTiles(NamedTuple):
    """Key tiles `first .. end`, of which `whole_first .. whole_end` need no mask."""

    first: Any
    whole_first: Any
    whole_end: Any
    end: Any


class ItemFetch(NamedTuple):
    """The fetching warp's arguments."""

    q: Any
    k: Any
    v: Any
    shared: Any
    sizes: Any
    limits: Any
    offsets: Any
    counter: Any


@gluon.jit
def post_item(mailbox, slot, item):
    """Write an item into the mailbox, in a partition of one warp."""
    mailbox.put(slot, mailbox.FIELDS.row, item.row)
    mailbox.put(slot, mailbox.FIELDS.i_h, item.i_h)
    mailbox.put(slot, mailbox.FIELDS.i_b, item.i_b)
    mailbox.put(slot, mailbox.FIELDS.start, item.start)
    mailbox.put(slot, mailbox.FIELDS.n_queries, item.n_queries)
    mailbox.put(slot, mailbox.FIELDS.n_keys, item.n_keys)
    thread_barrier()


@gluon.jit
def read_item(mailbox, slot, WARPS: gl.constexpr):
    """The item in a slot, in a partition of WARPS warps; where none is left, one with -1 queries."""
    row = mailbox.get(slot, mailbox.FIELDS.row, WARPS)
    i_h = mailbox.get(slot, mailbox.FIELDS.i_h, WARPS)
    i_b = mailbox.get(slot, mailbox.FIELDS.i_b, WARPS)
    start = mailbox.get(slot, mailbox.FIELDS.start, WARPS)
    n_queries = mailbox.get(slot, mailbox.FIELDS.n_queries, WARPS)
    n_keys = mailbox.get(slot, mailbox.FIELDS.n_keys, WARPS)
    # All threads have read the message before one of them releases the slot.
    thread_barrier()
    return Item(row, i_h, i_b, start, gl.where(row >= 0, n_queries, -1), n_keys)


@gluon.jit
def locate_item(number, sizes, offsets, LAST_FIRST: gl.constexpr, TILE: gl.constexpr):
    """An item by its number, and the first key token of its sequence.

    Heads (of all batch entries) come `together` at a time; of those, all tiles with the same number are neighbours,
    LAST_FIRST from the last tile down: under a causal mask the longest come first. A packed item may be a slot past its
    sequence's last tile: its first row is then not below the number of queries.
    """
    i_part = number // (sizes.n_tiles * sizes.together)
    first = i_part * sizes.together
    here = gl.minimum(sizes.together, sizes.n_all_heads - first)
    rest = number - i_part * (sizes.n_tiles * sizes.together)
    i_tile = rest // here
    i_bh = first + rest % here
    if LAST_FIRST:
        i_tile = sizes.n_tiles - 1 - i_tile
    i_b = i_bh // sizes.n_heads
    i_h = i_bh % sizes.n_heads
    start_q = 0
    start_k = 0
    n_queries = sizes.n_queries
    n_keys = sizes.n_keys
    if TILE.PACKED:
        i_b, i_tile = find_tile(offsets.q, i_tile, sizes.n_batch, n_queries, TILE.GROUPS * ROWS)
        start_q, n_queries = sequence_bounds(offsets.q, i_b, n_queries)
        start_k, n_keys = sequence_bounds(offsets.k, i_b, n_keys)
        i_b = 0
    return Item(i_tile * (TILE.GROUPS * ROWS), i_h, i_b, start_q, n_queries, n_keys), start_k


@gluon.jit
def key_tiles(row, n_queries, n_keys, limits, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """The key tiles that rows `row .. row + BLOCK_M` reach."""
    window = Window(limits.left, limits.right, n_keys - n_queries)
    runs = key_range(row, n_keys, window, BLOCK_M, BLOCK_N)
    return KeyTiles(
        runs.low // BLOCK_N, runs.full_low // BLOCK_N, runs.full_high // BLOCK_N, gl.cdiv(runs.high, BLOCK_N)
    )


@gluon.jit
def own_tiles(row, first, end, item, limits, BLOCK_N: gl.constexpr):
    """Of an item's key tiles `first .. end` those that one warpgroup's rows from `row` on reach; none where there is no
    such row.
    """
    tiles = key_tiles(row, item.n_queries, item.n_keys, limits, ROWS, BLOCK_N)
    own_end = gl.where(row < item.n_queries, gl.minimum(gl.maximum(tiles.end, first), end), first)
    own_first = gl.minimum(gl.maximum(tiles.first, first), own_end)
    return KeyTiles(own_first, tiles.whole_first, tiles.whole_end, own_end)


@gluon.jit
def fetch_step(given, ring, keys, row, HAS_K: gl.constexpr, HAS_V: gl.constexpr, TILE: gl.constexpr):
    """Start to read what a step multiplies with, once its buffers are empty: K from `row` on, and of V the tile before,
    which lies after it.
    """
    shared = given.shared
    shared.steps.wait_empty(ring)
    K_BYTES: gl.constexpr = tile_bytes(given.k, TILE.BLOCK_D) if HAS_K else 0
    V_BYTES: gl.constexpr = tile_bytes(given.v, TILE.BLOCK_DV) if HAS_V else 0
    shared.steps.expect(ring, K_BYTES + V_BYTES)
    full = shared.steps.full.index(ring.stage)
    if HAS_K:
        load_tile(given.k, shared.k, ring.stage, full, keys, row, TILE.BLOCK_D, TILE.PACKED)
    if HAS_V:
        load_tile(given.v, shared.v, ring.stage, full, keys, row + TILE.BLOCK_N, TILE.BLOCK_DV, TILE.PACKED)


@gluon.jit
def fetch_queries(given, slot, item, TILE: gl.constexpr):
    """Start to read an item's Q into its slot, once that is empty, and post the item."""
    GROUPS: gl.constexpr = TILE.GROUPS
    shared = given.shared
    rows = HeadRows(item.i_b, item.i_h, item.start, item.n_queries)
    shared.items.wait_empty(slot)
    post_item(shared.mailbox, slot.stage, item)
    shared.items.expect(slot, GROUPS * tile_bytes(given.q, TILE.BLOCK_D))
    full = shared.items.full.index(slot.stage)
    for W in gl.static_range(GROUPS):
        i_tile = slot.stage * GROUPS + W
        load_tile(given.q, shared.q, i_tile, full, rows, item.row + W * ROWS, TILE.BLOCK_D, TILE.PACKED)


@gluon.jit
def fetch_items(given, TILE: gl.constexpr):
    """The fetching warp: item after item, Q, and for each step a tile of K with the tile of V before it, since they are
    multiplied in the same step.
    """
    sizes = given.sizes
    limits = given.limits
    ring = first_of_ring(TILE.STAGES)
    slot = first_of_ring(TILE.SLOTS)
    number = gl.program_id(0)
    while number < sizes.n_tiles * sizes.n_all_heads:
        item, start_k = locate_item(number, sizes, given.offsets, limits.right is not None, TILE)
        if item.row < item.n_queries:
            tiles = key_tiles(item.row, item.n_queries, item.n_keys, limits, TILE.GROUPS * ROWS, TILE.BLOCK_N)
            first = tiles.first
            end = tiles.end
            keys = HeadRows(item.i_b, item.i_h // sizes.group, start_k, item.n_keys)
            if first < end:
                fetch_step(given, ring, keys, (end - 1) * TILE.BLOCK_N, True, False, TILE)
                ring = ring.advance()
            fetch_queries(given, slot, item, TILE)
            slot = slot.advance()
            for i in range(first + 1, end):
                fetch_step(given, ring, keys, (end - 1 - i + first) * TILE.BLOCK_N, True, True, TILE)
                ring = ring.advance()
            if first < end:
                fetch_step(given, ring, keys, (first - 1) * TILE.BLOCK_N, False, True, TILE)
                ring = ring.advance()
        if given.counter is not None:
            # Taken as late as possible: a CTA that has finished its items takes the next, however long they were.
            number = gl.num_programs(0) + gl.atomic_add(given.counter, 1, sem="relaxed")
        else:
            number += gl.num_programs(0)
    given.shared.items.wait_empty(slot)
    given.shared.mailbox.put(slot.stage, given.shared.mailbox.FIELDS.row, -1)
    thread_barrier()
    given.shared.items.fill(slot)
