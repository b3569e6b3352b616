"""Blocks of keys that add to dQ in a fixed order, in the backward for Hopper: a block's message in the mailbox, and the
semaphores by which one block waits for another.

Every fp32 accumulator of dQ, a query tile of one query head, has a semaphore in global memory: how many blocks have
added to it. Block n waits for n, adds, and releases n + 1. Two warps do that for the warpgroups, one acquires and one
releases, and talk to them through mbarriers (`Order`).

Which query tiles meet which blocks of keys, seen from both sides: a backward that owns keys walks the query tiles that
meet its block; the accumulator of a query tile's gradient needs to know, from the same rule, which blocks add to it and
which of them is the first. The mask is that of `scores.keep`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._device.hopper.ring import aggregate, ring_at, thread_barrier

# Accumulators of dQ that `acquire` may be ahead of `release`.
ORDER_STAGES = gl.constexpr(4)


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


class BlockMessage(NamedTuple):
    """A block of keys as the fetching warp posts it."""

    i_block: Any
    """Which block of its sequence it is; -1: no block is left."""
    i_b: Any
    i_h: Any
    """KV head."""
    start: Any
    """The sequence's first key token."""
    n_keys: Any
    n_queries: Any
    first_acc: Any
    """Visit 0 of the first sweep, by its number among all accumulators of dQ."""
    last_visit: Any
    n_visits: Any
    """Of one sweep."""
    first_from: Any
    """From this visit on no earlier block adds to the accumulator: see `meets_first`."""
    waits: Any
    """Whether the block waits for earlier ones."""


MESSAGE_FIELDS = gl.constexpr(BlockMessage(*range(len(BlockMessage._fields))))
MESSAGE_SIZE = gl.constexpr(len(BlockMessage._fields))


class Visits(NamedTuple):
    """The query tiles that a block visits in one sweep, from the last to the first; as in `BlockMessage`."""

    first_acc: Any
    last: Any
    count: Any
    first_from: Any


class Block(NamedTuple):
    """A block of keys as other warps read it; `off`: how many more keys than queries the sequence has."""

    i_block: Any
    i_b: Any
    i_h: Any
    start: Any
    n_keys: Any
    off: Any
    visits: Any
    waits: Any


class Ordering(NamedTuple):
    """Arguments of the two warps that keep the order."""

    mailbox: Any
    blocks: Any
    order: Any
    semaphores: Any
    limits: Any
    group: Any
    n_slots_q: Any


@gluon.jit
def post_block(mailbox, slot, block):
    """Write a block's message into the mailbox, in a partition of one warp."""
    mailbox.put(slot, mailbox.FIELDS.i_block, block.i_block)
    mailbox.put(slot, mailbox.FIELDS.i_b, block.i_b)
    mailbox.put(slot, mailbox.FIELDS.i_h, block.i_h)
    mailbox.put(slot, mailbox.FIELDS.start, block.start)
    mailbox.put(slot, mailbox.FIELDS.n_keys, block.n_keys)
    mailbox.put(slot, mailbox.FIELDS.n_queries, block.n_queries)
    mailbox.put(slot, mailbox.FIELDS.first_acc, block.first_acc)
    mailbox.put(slot, mailbox.FIELDS.last_visit, block.last_visit)
    mailbox.put(slot, mailbox.FIELDS.n_visits, block.n_visits)
    mailbox.put(slot, mailbox.FIELDS.first_from, block.first_from)
    mailbox.put(slot, mailbox.FIELDS.waits, block.waits)
    thread_barrier()


@gluon.jit
def read_visits(mailbox, slot, WARPS: gl.constexpr):
    """The visits of the block in a slot."""
    return Visits(
        first_acc=mailbox.get(slot, mailbox.FIELDS.first_acc, WARPS),
        last=mailbox.get(slot, mailbox.FIELDS.last_visit, WARPS),
        count=mailbox.get(slot, mailbox.FIELDS.n_visits, WARPS),
        first_from=mailbox.get(slot, mailbox.FIELDS.first_from, WARPS),
    )


@gluon.jit
def read_block(mailbox, blocks, slot, WARPS: gl.constexpr):
    """Wait for the CTA's next block, which comes in a slot, and read it, in a partition of WARPS warps."""
    blocks.wait_full(slot)
    i_block = mailbox.get(slot.stage, mailbox.FIELDS.i_block, WARPS)
    i_b = mailbox.get(slot.stage, mailbox.FIELDS.i_b, WARPS)
    i_h = mailbox.get(slot.stage, mailbox.FIELDS.i_h, WARPS)
    start = mailbox.get(slot.stage, mailbox.FIELDS.start, WARPS)
    n_keys = mailbox.get(slot.stage, mailbox.FIELDS.n_keys, WARPS)
    # Posted as it is here, the difference takes 3 % more instructions a step: ptxas then keeps visits in uniform
    # registers.
    off = n_keys - mailbox.get(slot.stage, mailbox.FIELDS.n_queries, WARPS)
    visits = read_visits(mailbox, slot.stage, WARPS)
    waits = mailbox.get(slot.stage, mailbox.FIELDS.waits, WARPS) != 0
    # All threads have read the message before one of them releases the slot.
    thread_barrier()
    return Block(i_block, i_b, i_h, start, n_keys, off, visits, waits)


@gluon.jit
def wait_semaphore(p_semaphore, count):
    """Wait until this many blocks have added to an accumulator."""
    # An atomic add of 0 serves as an acquiring load.
    added = gl.atomic_add(p_semaphore, 0, sem="acquire", scope="gpu")
    while added < count:
        added = gl.atomic_add(p_semaphore, 0, sem="acquire", scope="gpu")


@gluon.jit
def zero_accumulator(p_acc, p_semaphore, is_first, waits, ELEMENTS: gl.constexpr):
    """For one warp: zero an accumulator if its block is the first to add there, and release it; else wait for that."""
    if is_first:
        o = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
        for i in range(0, ELEMENTS, 128):
            gl.store(p_acc + i + o, gl.zeros_like(o).to(gl.float32))
        # One thread releases for all: their stores must be done.
        thread_barrier()
        gl.atomic_max(p_semaphore, 1, sem="release", scope="gpu")
    elif waits:
        wait_semaphore(p_semaphore, 1)


@aggregate
class Order:
    """The mbarriers between the warpgroups and the warps that keep the order, of ORDER_STAGES steps: the warpgroups may
    add (`go`), both have (`added`), and `acquire` may go on with another step (`free`).
    """

    go: gl.shared_memory_descriptor
    added: gl.shared_memory_descriptor
    free: gl.shared_memory_descriptor

    @gluon.jit
    def wait_go(self, count):
        """For a warpgroup: wait until it may add to the accumulator of step `count`."""
        mbarrier.wait(self.go.index(count % ORDER_STAGES), (count // ORDER_STAGES) & 1)

    @gluon.jit
    def add(self, count):
        """For a warpgroup: signal that it has added."""
        mbarrier.arrive(self.added.index(count % ORDER_STAGES), count=1)

    @gluon.jit
    def acquire(self, count, p_semaphore, i_block, waits):
        """Let the warpgroups add to the accumulator of step `count` once the block before theirs has; at most
        ORDER_STAGES steps ahead of `release`.
        """
        mbarrier.wait(self.free.index(count % ORDER_STAGES), ((count // ORDER_STAGES) & 1) ^ 1)
        if waits:
            wait_semaphore(p_semaphore, i_block)
        mbarrier.arrive(self.go.index(count % ORDER_STAGES), count=1)

    @gluon.jit
    def release(self, count, p_semaphore, i_block):
        """Pass the accumulator of step `count` on to the next block after both warpgroups have added to it."""
        mbarrier.wait(self.added.index(count % ORDER_STAGES), (count // ORDER_STAGES) & 1)
        mbarrier.arrive(self.free.index(count % ORDER_STAGES), count=1)
        # The release orders the warpgroups' additions before it too, since the barrier puts it after them. The
        # largest number stays: offsets that are not in order may make two sequences share an accumulator, and then no
        # block must see a smaller number than before.
        gl.atomic_max(p_semaphore, i_block + 1, sem="release", scope="gpu")


@gluon.jit
def keep_order(given, ACQUIRES: gl.constexpr, TILE: gl.constexpr):
    """One of two warps that keep the order of additions, through the steps of block after block: `acquire` if ACQUIRES,
    else `release`.
    """
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 1)
    while block.i_block >= 0:
        visits = block.visits
        first_acc = visits.first_acc
        given.blocks.release(ring_at(i_item, TILE.SLOTS))
        for _ in range(0, given.group, heads_of_sweep(given.group, TILE.SWEEPS)):
            for i_step in range(visits.count):
                i_visit = visits.last - i_step
                p_semaphore = given.semaphores + (first_acc + i_visit)
                if ACQUIRES:
                    is_first = meets_first(i_visit, visits.first_from, block.i_block, given.limits)
                    given.order.acquire(done + i_step, p_semaphore, block.i_block, block.waits & (not is_first))
                else:
                    given.order.release(done + i_step, p_semaphore, block.i_block)
            done += visits.count
            first_acc += given.n_slots_q
        i_item += 1
        block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 1)
