"""Items of the forward for Hopper: which there are and in which order, the key tiles that each reaches, and the warp
that fetches them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._device.hopper.ring import load_tile, next_stage, thread_barrier, write_note
from tilewise.ops._device.mask import key_range
from tilewise.ops._device.records import Window
from tilewise.ops._device.varlen import find_tile, sequence_bounds

# Rows of one warpgroup.
ROWS = gl.constexpr(64)
# What the fetching warp notes of an item: first row (-1 where none is left), head, batch entry, the sequence's first
# token, queries, keys.
FIELDS = gl.constexpr(6)


@gluon.jit
def locate_item(item, sizes, cu_q, cu_k, LAST_FIRST: gl.constexpr, PACKED: gl.constexpr, BLOCK_M: gl.constexpr):
    """First row, head, batch entry, first query token, queries, first key token and keys for an item.

    Heads (of all batch entries) come `together` at a time; of those, all tiles with the same number are neighbours,
    LAST_FIRST from the last tile
    down: under a causal mask the longest come first. A packed item may be a slot past its sequence's last tile: its
    first row is then not below the number of queries.
    """
    n_batch, n_tiles, n_heads, n_all_heads, together, _, n_queries, n_keys = sizes
    i_part = item // (n_tiles * together)
    first = i_part * together
    here = gl.minimum(together, n_all_heads - first)
    rest = item - i_part * (n_tiles * together)
    i_tile = rest // here
    i_bh = first + rest % here
    if LAST_FIRST:
        i_tile = n_tiles - 1 - i_tile
    i_b = i_bh // n_heads
    i_h = i_bh % n_heads
    start_q = 0
    start_k = 0
    if PACKED:
        i_b, i_tile = find_tile(cu_q, i_tile, n_batch, n_queries, BLOCK_M)
        start_q, n_queries = sequence_bounds(cu_q, i_b, n_queries)
        start_k, n_keys = sequence_bounds(cu_k, i_b, n_keys)
        i_b = 0
    return i_tile * BLOCK_M, i_h, i_b, start_q, n_queries, start_k, n_keys


@gluon.jit
def key_tiles(
    i_m,
    n_queries,
    n_keys,
    window,
    LEFT: gl.constexpr,
    RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Numbers of key tiles that the item reaches: the first, the first and the one past the last that need no mask, the
    one past the last of all.
    """
    left, right = window
    limits = Window(left if LEFT else None, right if RIGHT else None, n_keys - n_queries)
    low, full_low, full_high, high = key_range(i_m, n_keys, limits, BLOCK_M, BLOCK_N)
    return low // BLOCK_N, full_low // BLOCK_N, full_high // BLOCK_N, gl.cdiv(high, BLOCK_N)


@gluon.jit
def own_tiles(
    row, first, end, n_queries, n_keys, window, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The same for one warpgroup's rows from `row` on, of the item's tiles `first .. end`; none where there is no such
    row.
    """
    own_first, whole_first, whole_end, own_end = key_tiles(row, n_queries, n_keys, window, LEFT, RIGHT, ROWS, BLOCK_N)
    own_end = gl.where(row < n_queries, gl.minimum(gl.maximum(own_end, first), end), first)
    return gl.minimum(gl.maximum(own_first, first), own_end), whole_first, whole_end, own_end


@gluon.jit
def fetch_step(
    given,
    stage,
    phase,
    place,
    row,
    HAS_K: gl.constexpr,
    HAS_V: gl.constexpr,
    PACKED: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Start to read what a step multiplies with, once its buffers are free: K from `row` on, and of V the tile before,
    which lies after it.
    """
    k_desc, v_desc, k_tiles, v_tiles, full, empty = given
    i_b, i_h, start, n_keys = place
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(
        full.index(stage), (k_desc.block_type.nbytes if HAS_K else 0) + (v_desc.block_type.nbytes if HAS_V else 0)
    )
    if HAS_K:
        load_tile(k_desc, k_tiles.index(stage), full.index(stage), i_b, i_h, start, n_keys, row, PACKED)
    if HAS_V:
        load_tile(v_desc, v_tiles.index(stage), full.index(stage), i_b, i_h, start, n_keys, row + BLOCK_N, PACKED)


@gluon.jit
def fetch_queries(desc, tiles, notes, q_full, q_empty, slot, turn, item, GROUPS: gl.constexpr, PACKED: gl.constexpr):
    """Start to read an item's Q into its slot, once that is free, and note what the item is."""
    i_m, i_h, i_b, start, n_queries, _ = item
    mbarrier.wait(q_empty.index(slot), turn ^ 1)
    for FIELD in gl.static_range(FIELDS):
        write_note(notes, slot * FIELDS + FIELD, item[FIELD])
    thread_barrier()
    mbarrier.expect(q_full.index(slot), GROUPS * desc.block_type.nbytes)
    for w in gl.static_range(GROUPS):
        load_tile(
            desc, tiles.index(slot * GROUPS + w), q_full.index(slot), i_b, i_h, start, n_queries, i_m + w * ROWS, PACKED
        )


@gluon.jit
def fetch_items(
    given, GROUPS: gl.constexpr, SLOTS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, PACKED: gl.constexpr, TICKETS: gl.constexpr,
):  # fmt: skip
    """The fetching warp: item after item, Q, and for each step a tile of K with the tile of V before it, for they are
    multiplied side by side.
    """
    descs, tiles, notes, barriers, sizes, window, cu_q, cu_k, counter = given
    q_desc, k_desc, v_desc = descs
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, full, empty = barriers
    ring = (k_desc, v_desc, k_tiles, v_tiles, full, empty)
    _, n_tiles, _, n_all_heads, _, group, _, _ = sizes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < n_tiles * n_all_heads:
        i_m, i_h, i_b, start_q, n_queries, start_k, n_keys = locate_item(
            item, sizes, cu_q, cu_k, RIGHT, PACKED, GROUPS * ROWS
        )
        if i_m < n_queries:
            first, _, _, end = key_tiles(i_m, n_queries, n_keys, window, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
            place = (i_b, i_h // group, start_k, n_keys)
            if first < end:
                fetch_step(ring, stage, phase, place, (end - 1) * BLOCK_N, True, False, PACKED, BLOCK_N)
                stage, phase = next_stage(stage, phase, STAGES)
            noted = (i_m, i_h, i_b, start_q, n_queries, n_keys)
            fetch_queries(q_desc, q_tiles, notes, q_full, q_empty, slot, turn, noted, GROUPS, PACKED)
            slot, turn = next_stage(slot, turn, SLOTS)
            for i in range(first + 1, end):
                fetch_step(ring, stage, phase, place, (end - 1 - i + first) * BLOCK_N, True, True, PACKED, BLOCK_N)
                stage, phase = next_stage(stage, phase, STAGES)
            if first < end:
                fetch_step(ring, stage, phase, place, (first - 1) * BLOCK_N, False, True, PACKED, BLOCK_N)
                stage, phase = next_stage(stage, phase, STAGES)
        if TICKETS:
            # Taken as late as can be: who has done its items takes the next, whatever they took.
            item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            item += gl.num_programs(0)
    mbarrier.wait(q_empty.index(slot), turn ^ 1)
    write_note(notes, slot * FIELDS, -1)
    thread_barrier()
    mbarrier.arrive(q_full.index(slot), count=1)
