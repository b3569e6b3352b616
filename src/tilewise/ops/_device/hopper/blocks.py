"""Blocks of keys of the backward for Hopper: which there are and in which order, the query tiles that each meets, and
the warps that fetch and store.

CTAs are persistent and take block after block from a work counter. K and V of a block have a slot in shared memory,
into which dK and dV are written at the end. With two SLOTS the next block's K and V, and its first query tiles, are
fetched during this one's last steps, and dK and dV are stored during the next one's first steps; with one, all of it
starts once dK and dV are stored.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewise.ops._device.hopper.ring import (
    HeadRows,
    aggregate,
    load_tile,
    ring_at,
    store_tile,
    thread_barrier,
    tile_bytes,
    tma_load,
)
from tilewise.ops._device.hopper.semaphore import (
    BlockMessage,
    first_from,
    head_and_slot,
    heads_of_sweep,
    post_block,
    query_tiles,
    read_block,
    tile_and_head,
    zero_accumulator,
)
from tilewise.ops._device.rows import find_tile, first_slot, sequence_bounds


class BlockSizes(NamedTuple):
    """Defines which blocks there are, and their order."""

    n_batch: Any
    n_slots_k: Any
    """Blocks of a head; of all packed sequences together, see `find_tile`."""
    n_slots_q: Any
    """Query tiles, likewise."""
    n_heads_k: Any
    group: Any
    """GQA group size."""
    n_queries: Any
    n_keys: Any
    together: Any
    """KV heads whose blocks are interleaved."""


class Workspace(NamedTuple):
    """Global memory of a launch: fp32 accumulators of dQ, their semaphores, and the counter of blocks taken."""

    acc_dq: Any
    semaphores: Any
    counter: Any


class Tiles(NamedTuple):
    """Shared memory for STAGES tiles of Q and dO with their rows' LSE and delta, and for K and V of SLOTS blocks."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any


@aggregate
class StepBarriers:
    """The mbarriers of the ring of query tiles: Q has arrived, and dO; both warpgroups have released them."""

    q_full: gl.shared_memory_descriptor
    do_full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def wait_q(self, ring):
        """Wait until Q and its LSE have arrived."""
        mbarrier.wait(self.q_full.index(ring.stage), ring.phase)

    @gluon.jit
    def wait_do(self, ring):
        """Wait until dO and its delta have arrived."""
        mbarrier.wait(self.do_full.index(ring.stage), ring.phase)

    @gluon.jit
    def wait_empty(self, ring):
        """Wait until both warpgroups have released the buffers."""
        mbarrier.wait(self.empty.index(ring.stage), ring.phase ^ 1)

    @gluon.jit
    def release(self, ring):
        """Release them."""
        mbarrier.arrive(self.empty.index(ring.stage), count=1)


class BlockFetch(NamedTuple):
    """The fetching warp's arguments: descriptors, shared memory, and the work."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse_log2: Any
    delta: Any
    tiles: Any
    mailbox: Any
    blocks: Any
    steps: Any
    workspace: Any
    n_places: Any
    sizes: Any
    limits: Any
    offsets: Any


class BlockStore(NamedTuple):
    """The storing warp's arguments; `written`: both warpgroups have put dK and dV into a slot."""

    dk: Any
    dv: Any
    tiles: Any
    mailbox: Any
    blocks: Any
    written: Any


@gluon.jit
def locate_block(place, sizes, limits, offsets, TILE: gl.constexpr):
    """The block at a position in the work order, as it is posted, and the first query token of its sequence."""
    n_heads = sizes.n_heads_k
    if not TILE.PACKED:
        n_heads = sizes.n_heads_k * sizes.n_batch
    i_head, i_slot = head_and_slot(place, sizes.n_slots_k, n_heads, sizes.together)
    i_b = i_head // sizes.n_heads_k
    i_h = i_head % sizes.n_heads_k
    i_block = i_slot
    start_q = 0
    start_k = 0
    slot_q = 0
    n_queries = sizes.n_queries
    n_keys = sizes.n_keys
    if TILE.PACKED:
        i_b, i_block = find_tile(offsets.k, i_slot, sizes.n_batch, n_keys, TILE.BLOCK_N)
        slot_q = first_slot(i_b, offsets.q, n_queries, TILE.BLOCK_M)
        start_q, n_queries = sequence_bounds(offsets.q, i_b, n_queries)
        start_k, n_keys = sequence_bounds(offsets.k, i_b, n_keys)
    i_n = i_block * TILE.BLOCK_N
    low, high = query_tiles(i_n, n_queries, n_keys, limits, TILE.BLOCK_M, TILE.BLOCK_N)
    waits = i_slot > 0
    if TILE.PACKED:
        # Offsets out of order may skip earlier blocks: a wait for them would never end. Slots of
        # one sequence are adjacent.
        n_before = gl.minimum(i_block, 1)
        if TILE.ZEROES_LAZILY:
            n_before = i_block
        slot_before = gl.maximum(i_slot - n_before, 0)
        b_before, block_before = find_tile(offsets.k, slot_before, sizes.n_batch, sizes.n_keys, TILE.BLOCK_N)
        waits = (b_before == i_b) & (block_before + n_before == i_block)
    inside = heads_of_sweep(sizes.group, TILE.SWEEPS)
    # Visits number query tiles as their accumulators lie in memory: a sweep's heads inside a slot, and n_slots_q slots
    # to the next sweep's.
    block = BlockMessage(
        i_block=i_block,
        i_b=i_b,
        i_h=i_h,
        start=start_k,
        n_keys=n_keys,
        n_queries=n_queries,
        first_acc=(i_head * (sizes.group // inside) * sizes.n_slots_q + slot_q) * inside,
        last_visit=high * inside - 1,
        n_visits=(high - low) * inside,
        first_from=first_from(i_n, n_keys - n_queries, limits, TILE.BLOCK_M) * inside,
        waits=waits.to(gl.int32),
    )
    return block, start_q


@gluon.jit
def fetch_keys(given, slot, block, TILE: gl.constexpr):
    """Post the CTA's next block, and start to read its K and V, once their slot is empty."""
    ROWS: gl.constexpr = given.k.block_type.shape[-2]
    TILES: gl.constexpr = TILE.BLOCK_N // ROWS
    rows = HeadRows(block.i_b, block.i_h, block.start, block.n_keys)
    given.blocks.wait_empty(slot)
    post_block(given.mailbox, slot.stage, block)
    given.blocks.expect(slot, TILES * (tile_bytes(given.k, TILE.BLOCK_D) + tile_bytes(given.v, TILE.BLOCK_DV)))
    full = given.blocks.full.index(slot.stage)
    for i in gl.static_range(TILES):
        row = (block.i_block * TILES + i) * ROWS
        load_tile(given.k, given.tiles.k, slot.stage * TILES + i, full, rows, row, TILE.BLOCK_D, TILE.PACKED)
        load_tile(given.v, given.tiles.v, slot.stage * TILES + i, full, rows, row, TILE.BLOCK_DV, TILE.PACKED)


@gluon.jit
def fetch_queries(given, ring, rows, row, o_row, TILE: gl.constexpr):
    """Start to read a step's Q, dO and their rows' LSE and delta, once its buffers are empty."""
    stage = ring.stage
    q_full = given.steps.q_full.index(stage)
    do_full = given.steps.do_full.index(stage)
    given.steps.wait_empty(ring)
    mbarrier.expect(q_full, tile_bytes(given.q, TILE.BLOCK_D) + given.lse_log2.block_type.nbytes)
    load_tile(given.q, given.tiles.q, stage, q_full, rows, row, TILE.BLOCK_D, TILE.PACKED)
    tma_load(given.lse_log2, [o_row], q_full, given.tiles.lse.index(stage))
    mbarrier.expect(do_full, tile_bytes(given.do, TILE.BLOCK_DV) + given.delta.block_type.nbytes)
    load_tile(given.do, given.tiles.do, stage, do_full, rows, row, TILE.BLOCK_DV, TILE.PACKED)
    tma_load(given.delta, [o_row], do_full, given.tiles.delta.index(stage))


@gluon.jit
def fetch_blocks(given, TILE: gl.constexpr):
    """The fetching warp: block after block, K and V, and each step's query tile; if it ZEROES_LAZILY, the step's
    accumulator before that.
    """
    sizes = given.sizes
    workspace = given.workspace
    ELEMENTS: gl.constexpr = TILE.BLOCK_M * TILE.BLOCK_D
    inside = heads_of_sweep(sizes.group, TILE.SWEEPS)
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    place = gl.atomic_add(workspace.counter, 1, sem="relaxed", scope="gpu")
    while place < given.n_places:
        block, start_q = locate_block(place, sizes, given.limits, given.offsets, TILE)
        # A packed block may be a slot past its sequence's last.
        if block.i_block * TILE.BLOCK_N < block.n_keys:
            fetch_keys(given, ring_at(i_item, TILE.SLOTS), block, TILE)
            i_item += 1
            first_acc = block.first_acc
            for i_head in range(block.i_h * sizes.group, (block.i_h + 1) * sizes.group, inside):
                for i_step in range(block.n_visits):
                    i_visit = block.last_visit - i_step
                    i_tile, i_g = tile_and_head(i_visit, inside)
                    i_acc = first_acc + i_visit
                    if TILE.ZEROES_LAZILY:
                        p_acc = workspace.acc_dq + i_acc.to(gl.int64) * ELEMENTS
                        p_semaphore = workspace.semaphores + i_acc
                        zero_accumulator(p_acc, p_semaphore, block.i_block == 0, block.waits != 0, ELEMENTS)
                    rows = HeadRows(block.i_b, i_head + i_g, start_q, block.n_queries)
                    ring = ring_at(done + i_step, TILE.STAGES)
                    fetch_queries(given, ring, rows, i_tile * TILE.BLOCK_M, i_acc * TILE.BLOCK_M, TILE)
                done += block.n_visits
                first_acc += sizes.n_slots_q
        # Taken as late as possible: a CTA that has finished its blocks takes the next, however long they were.
        place = gl.atomic_add(workspace.counter, 1, sem="relaxed", scope="gpu")
    slot = ring_at(i_item, TILE.SLOTS)
    given.blocks.wait_empty(slot)
    given.mailbox.put(slot.stage, given.mailbox.FIELDS.i_block, -1)
    thread_barrier()
    given.blocks.fill(slot)


@gluon.jit
def store_blocks(given, TILE: gl.constexpr):
    """The storing warp: dK and dV of block after block, from K's and V's buffers, once both warpgroups have written
    them.
    """
    ROWS: gl.constexpr = given.dk.block_type.shape[-2]
    TILES: gl.constexpr = TILE.BLOCK_N // ROWS
    i_item = gl.to_tensor(0)
    block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 1)
    while block.i_block >= 0:
        rows = HeadRows(block.i_b, block.i_h, block.start, block.n_keys)
        slot = ring_at(i_item, TILE.SLOTS)
        mbarrier.wait(given.written.index(slot.stage), slot.phase)
        for i in gl.static_range(TILES):
            row = (block.i_block * TILES + i) * ROWS
            i_tile = slot.stage * TILES + i
            store_tile(given.dv, given.tiles.v, i_tile, rows, row, TILE.BLOCK_DV, TILE.PACKED)
            store_tile(given.dk, given.tiles.k, i_tile, rows, row, TILE.BLOCK_D, TILE.PACKED)
        # The copies read shared memory until then.
        tma.store_wait(0)
        given.blocks.release(slot)
        i_item += 1
        block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 1)
