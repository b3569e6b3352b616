"""Blocks of keys that take turns in the backward for Hopper: what warps read of a block, who may add to which query
tile's sum, and when.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._device.hopper.ring import read_note, thread_barrier
from tilewise.ops._device.reach import heads_of_sweep, meets_first

# Tiles of dQ that `grant` may be ahead of `release`.
TURNS = gl.constexpr(4)
# What the fetching warp notes of a block: its number (-1 where none is left), batch entry, key head, the sequence's
# first key, keys, queries, the number of its first sweep's visit 0 among all tiles of sums, the last visit, how many a
# sweep has, the one from which on no block before makes them, and whether the block waits for those before it.
FIELDS = gl.constexpr(11)


@gluon.jit
def read_visits(notes, slot, WARPS: gl.constexpr):
    """What is noted of the visits of the block in a slot: visit 0's number, the last, how many there are, and from
    which on the block is first.
    """
    note = slot * FIELDS + 6
    return (
        read_note(notes, note, WARPS),
        read_note(notes, note + 1, WARPS),
        read_note(notes, note + 2, WARPS),
        read_note(notes, note + 3, WARPS),
    )


@gluon.jit
def read_block(notes, full, i_item, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Wait for the program's block number `i_item` and read what is noted of it, in a partition of WARPS warps.

    Its number, where its rows of K are, keys, how many more they are than queries, its visits, and whether it waits.
    """
    mbarrier.wait(full.index(i_item % SLOTS), (i_item // SLOTS) & 1)
    note = i_item % SLOTS * FIELDS
    i_block = read_note(notes, note, WARPS)
    rows = (read_note(notes, note + 1, WARPS), read_note(notes, note + 2, WARPS), read_note(notes, note + 3, WARPS))
    n_keys = read_note(notes, note + 4, WARPS)
    off = n_keys - read_note(notes, note + 5, WARPS)
    visits = read_visits(notes, i_item % SLOTS, WARPS)
    waits = read_note(notes, note + 10, WARPS) != 0
    # All threads have read before one of them gives the notes free.
    thread_barrier()
    return i_block, rows, n_keys, off, visits, waits


@gluon.jit
def wait_turn(p_turn, i_block):
    """Wait until a tile's counter has come to `i_block`."""
    # An addition of 0 is how an acquiring load is written.
    turn = gl.atomic_add(p_turn, 0, sem="acquire", scope="gpu")
    while turn < i_block:
        turn = gl.atomic_add(p_turn, 0, sem="acquire", scope="gpu")


@gluon.jit
def open_sum(p_sum, p_turn, is_first, waits, ELEMENTS: gl.constexpr):
    """For one warp: 0 to a tile of sums if its block is the first to add there, and its counter to 1; else wait for
    that.
    """
    if is_first:
        o = gl.arange(0, 128, gl.BlockedLayout([4], [32], [1], [0]))
        for i in range(0, ELEMENTS, 128):
            gl.store(p_sum + i + o, gl.zeros_like(o).to(gl.float32))
        # One thread releases for all: their stores must be done.
        thread_barrier()
        gl.atomic_max(p_turn, 1, sem="release", scope="gpu")
    elif waits:
        wait_turn(p_turn, 1)


@gluon.jit
def grant(order, count, p_turn, i_block, waits):
    """Lets the warpgroups add to the tile of step `count` once the block before theirs has; at most TURNS tiles ahead
    of `release`.
    """
    go, _, free = order
    mbarrier.wait(free.index(count % TURNS), ((count // TURNS) & 1) ^ 1)
    if waits:
        wait_turn(p_turn, i_block)
    mbarrier.arrive(go.index(count % TURNS), count=1)


@gluon.jit
def release(order, count, p_turn, i_block):
    """Passes the tile of step `count` on to the next block after both warpgroups have added to it."""
    _, added, free = order
    mbarrier.wait(added.index(count % TURNS), (count // TURNS) & 1)
    mbarrier.arrive(free.index(count % TURNS), count=1)
    # The release orders the warpgroups' additions before it too, for it comes after theirs by the barrier. The largest
    # number stays: offsets that are not in order may make two sequences share a tile, and then nobody must see a
    # smaller number than before.
    gl.atomic_max(p_turn, i_block + 1, sem="release", scope="gpu")


@gluon.jit
def take_turns(given, GRANTS: gl.constexpr, HAS_LEFT: gl.constexpr, SLOTS: gl.constexpr, SWEEPS: gl.constexpr):
    """One of two warps that keep the order of additions, through the steps of block after block: `grant` if GRANTS,
    else `release`.
    """
    notes, of_blocks, order, turns, group, n_slots_q = given
    full, empty = of_blocks
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    i_block, _, _, _, visits, waits = read_block(notes, full, i_item, SLOTS, 1)
    while i_block >= 0:
        first_sum, last, n_visits, first_visit = visits
        mbarrier.arrive(empty.index(i_item % SLOTS), count=1)
        for _ in range(0, group, heads_of_sweep(group, SWEEPS)):
            for i_step in range(n_visits):
                i_visit = last - i_step
                p_turn = turns + (first_sum + i_visit)
                if GRANTS:
                    is_first = meets_first(i_visit, first_visit, i_block, HAS_LEFT)
                    grant(order, done + i_step, p_turn, i_block, waits & (not is_first))
                else:
                    release(order, done + i_step, p_turn, i_block)
            done += n_visits
            first_sum += n_slots_q
        i_item += 1
        i_block, _, _, _, visits, waits = read_block(notes, full, i_item, SLOTS, 1)
