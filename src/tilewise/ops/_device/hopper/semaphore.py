"""Blocks of keys that add to dQ in a fixed order, in the backward for Hopper: a block's message in the mailbox, and the
semaphores by which one block waits for another.

Every fp32 accumulator of dQ, a query tile of one query head, has a semaphore in global memory: how many blocks have
added to it. Block n waits for n, adds, and releases n + 1. Two warps do that for the warpgroups, one acquires and one
releases, and talk to them through mbarriers (`Order`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._device.hopper.ring import aggregate, ring_at, thread_barrier
from tilewise.ops._device.mask import heads_of_sweep, meets_first

# Accumulators of dQ that `acquire` may be ahead of `release`.
ORDER_STAGES = gl.constexpr(4)


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
