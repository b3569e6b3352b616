"""Blocks of keys that take turns in the backward for Hopper: what warps read of a block, who may add to which query tile's sum, and when."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._tile.hopper import read_note, thread_barrier
from tilewise.ops._tile.reach import first_block, step_tile

# Tiles of dQ that `grant` may be ahead of `release`.
TURNS = gl.constexpr(4)
# What the fetching warp notes of a block: its number (-1 where none is left), batch entry, key head, the sequence's first key, keys, queries, the
# first tile of the group's first query head, the last tile of the walk, its steps, and whether the block waits for those before it.
FIELDS = gl.constexpr(10)


@gluon.jit
def read_block(notes, full, i_item, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Wait for the program's block number `i_item` and read what is noted of it, in a partition of WARPS warps.

    Its number, where its rows of K are, keys, how many more they are than queries, the walk, and whether it waits.
    """
    mbarrier.wait(full.index(i_item % SLOTS), (i_item // SLOTS) & 1)
    note = i_item % SLOTS * FIELDS
    i_block = read_note(notes, note, WARPS)
    rows = (read_note(notes, note + 1, WARPS), read_note(notes, note + 2, WARPS), read_note(notes, note + 3, WARPS))
    n_keys = read_note(notes, note + 4, WARPS)
    off = n_keys - read_note(notes, note + 5, WARPS)
    walk = (read_note(notes, note + 6, WARPS), read_note(notes, note + 7, WARPS), read_note(notes, note + 8, WARPS))
    waits = read_note(notes, note + 9, WARPS) != 0
    # All threads have read before one of them gives the notes free.
    thread_barrier()
    return i_block, rows, n_keys, off, walk, waits


@gluon.jit
def wait_turn(p_turn, i_block):
    """Wait until a tile's counter has come to `i_block`."""
    # An addition of 0 is how an acquiring load is written.
    turn = gl.atomic_add(p_turn, 0, sem="acquire", scope="gpu")
    while turn < i_block:
        turn = gl.atomic_add(p_turn, 0, sem="acquire", scope="gpu")


@gluon.jit
def open_sum(p_sum, p_turn, is_first, waits, ELEMENTS: gl.constexpr):
    """For one warp: 0 to a tile of sums if its block is the first to add there, and its counter to 1; else wait for that."""
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
    """Lets the warpgroups add to the tile of step `count` once the block before theirs has; at most TURNS tiles ahead of `release`."""
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
    # The release orders the warpgroups' additions before it too, for it comes after theirs by the barrier. The largest number stays: offsets that are
    # not in order may make two sequences share a tile, and then nobody must see a smaller number than before.
    gl.atomic_max(p_turn, i_block + 1, sem="release", scope="gpu")


@gluon.jit
def take_turns(given, GRANTS: gl.constexpr, HAS_LEFT: gl.constexpr, SLOTS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """One of two warps that keep the order of additions, through the steps of block after block: `grant` if GRANTS, else `release`."""
    notes, of_blocks, order, turns, left, group, n_slots_q = given
    full, empty = of_blocks
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    i_block, _, _, off, walk, waits = read_block(notes, full, i_item, SLOTS, 1)
    while i_block >= 0:
        first_tile, last, n_steps = walk
        mbarrier.arrive(empty.index(i_item % SLOTS), count=1)
        for i_step in range(n_steps):
            i_tile, i_g = step_tile(i_step, last, group)
            p_turn = turns + (first_tile + i_g * n_slots_q + i_tile)
            if GRANTS:
                not_first = i_block > first_block(i_tile * BLOCK_M, off, left, HAS_LEFT, BLOCK_N)
                grant(order, done + i_step, p_turn, i_block, waits & not_first)
            else:
                release(order, done + i_step, p_turn, i_block)
        done += n_steps
        i_item += 1
        i_block, _, _, off, walk, waits = read_block(notes, full, i_item, SLOTS, 1)
