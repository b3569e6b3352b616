"""Blocks of keys of the backward for Hopper: which there are and in which order, the query tiles that each meets, and
the warps that fetch and store.

A program takes one block after the other. K and V of a block have a slot in shared memory, where dK and dV are put in
the end. With two SLOTS the next block's K and V, and its first query tiles, are fetched while this one's last steps
run, and dK and dV leave while the next one's first steps do; with one, all of it begins when dK and dV have left.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewise.ops._device.hopper.ring import load_tile, store_tile, thread_barrier, tma_load, write_note
from tilewise.ops._device.hopper.semaphore import FIELDS, open_sum, read_block
from tilewise.ops._device.reach import first_from, head_and_slot, heads_of_sweep, query_tiles, tile_and_head
from tilewise.ops._device.varlen import find_tile, first_slot, sequence_bounds


@gluon.jit
def locate_block(
    place, sizes, together, group, left, right, cu_q, cu_k,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, OPENS: gl.constexpr, SWEEPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """What is to be noted of the block at a place in the order of work, and the first query of its sequence."""
    n_batch, n_slots_k, n_slots_q, n_heads_k, n_queries, n_keys = sizes
    n_heads = n_heads_k
    if not PACKED:
        n_heads = n_heads_k * n_batch
    i_head, i_slot = head_and_slot(place, n_slots_k, n_heads, together)
    i_b = i_head // n_heads_k
    i_hk = i_head % n_heads_k
    i_block = i_slot
    start_q = 0
    start_k = 0
    slot_q = 0
    n_all_keys = n_keys
    if PACKED:
        i_b, i_block = find_tile(cu_k, i_slot, n_batch, n_keys, BLOCK_N)
        slot_q = first_slot(i_b, cu_q, n_queries, BLOCK_M)
        start_q, n_queries = sequence_bounds(cu_q, i_b, n_queries)
        start_k, n_keys = sequence_bounds(cu_k, i_b, n_keys)
    low, high = query_tiles(i_block * BLOCK_N, n_queries, n_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    waits = i_slot > 0
    if PACKED:
        # Offsets that are not in order may leave out blocks before: then nobody would end the wait for them. Slots of
        # one sequence are neighbours.
        n_before = gl.minimum(i_block, 1)
        if OPENS:
            n_before = i_block
        b_before, block_before = find_tile(cu_k, gl.maximum(i_slot - n_before, 0), n_batch, n_all_keys, BLOCK_N)
        waits = (b_before == i_b) & (block_before + n_before == i_block)
    inside = heads_of_sweep(group, SWEEPS)
    first_visit = first_from(i_block * BLOCK_N, n_keys - n_queries, left, HAS_LEFT, BLOCK_M) * inside
    # Visits number tiles as the sums lie in memory: a sweep's heads inside a slot, and n_slots_q slots to the next
    # sweep's.
    first_sum = (i_head * (group // inside) * n_slots_q + slot_q) * inside
    block = (
        i_block, i_b, i_hk, start_k, n_keys, n_queries, first_sum, high * inside - 1, (high - low) * inside,
        first_visit, waits.to(gl.int32),
    )  # fmt: skip
    return block, start_q


@gluon.jit
def fetch_keys(
    descriptors,
    buffers,
    notes,
    barriers,
    i_item,
    block,
    PACKED: gl.constexpr,
    SLOTS: gl.constexpr,
    HALF_N: gl.constexpr,
):
    """Note what the program's next block is, and start to read its K and V, once their slot is free."""
    _, k, v, _, _, _ = descriptors
    _, ks, vs, _, _, _ = buffers
    full, empty = barriers
    i_block, i_b, i_hk, start_k, n_keys, _, _, _, _, _, _ = block
    slot = i_item % SLOTS
    mbarrier.wait(empty.index(slot), ((i_item // SLOTS) & 1) ^ 1)
    for FIELD in gl.static_range(FIELDS):
        write_note(notes, slot * FIELDS + FIELD, block[FIELD])
    thread_barrier()
    mbarrier.expect(full.index(slot), 2 * (k.block_type.nbytes + v.block_type.nbytes))
    for W in gl.static_range(2):
        row = (i_block * 2 + W) * HALF_N
        load_tile(k, ks.index(slot * 2 + W), full.index(slot), i_b, i_hk, start_k, n_keys, row, PACKED)
        load_tile(v, vs.index(slot * 2 + W), full.index(slot), i_b, i_hk, start_k, n_keys, row, PACKED)


@gluon.jit
def fetch_queries(descriptors, buffers, barriers, count, place, row, o_row, PACKED: gl.constexpr, STAGES: gl.constexpr):
    """Start to read a step's Q, dO and their rows' LSE and delta, once the buffers of this step, the `count`-th of the
    program, are free.
    """
    q, _, _, do, lse_log2, delta = descriptors
    qs, _, _, dos, lses, deltas = buffers
    q_full, do_full, empty = barriers
    i_b, i_hq, start_q, n_queries = place
    stage = count % STAGES
    mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
    mbarrier.expect(q_full.index(stage), q.block_type.nbytes + lse_log2.block_type.nbytes)
    load_tile(q, qs.index(stage), q_full.index(stage), i_b, i_hq, start_q, n_queries, row, PACKED)
    tma_load(lse_log2, [o_row], q_full.index(stage), lses.index(stage))
    mbarrier.expect(do_full.index(stage), do.block_type.nbytes + delta.block_type.nbytes)
    load_tile(do, dos.index(stage), do_full.index(stage), i_b, i_hq, start_q, n_queries, row, PACKED)
    tma_load(delta, [o_row], do_full.index(stage), deltas.index(stage))


@gluon.jit
def fetch_blocks(
    given, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, OPENS: gl.constexpr, PACKED: gl.constexpr, SLOTS: gl.constexpr,
    SWEEPS: gl.constexpr,
):  # fmt: skip
    """The fetching warp: block after block, K and V, and each step's query tile; if it OPENS sums, the step's one
    before.
    """
    (
        descriptors,
        buffers,
        notes,
        of_blocks,
        of_steps,
        tickets,
        n_places,
        sizes,
        together,
        group,
        limits,
        offsets,
        sums,
        turns,
    ) = given
    left, right = limits
    cu_q, cu_k = offsets
    _, _, n_slots_q, _, _, _ = sizes
    inside = heads_of_sweep(group, SWEEPS)
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    place = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    while place < n_places:
        block, start_q = locate_block(
            place, sizes, together, group, left, right, cu_q, cu_k, HAS_LEFT, HAS_RIGHT, PACKED, OPENS, SWEEPS,
            BLOCK_M, 2 * HALF_N
        )  # fmt: skip
        i_block, i_b, i_hk, _, n_keys, n_queries, first_sum, last, n_visits, _, waits = block
        # A packed block may be a slot past its sequence's last.
        if i_block * (2 * HALF_N) < n_keys:
            fetch_keys(descriptors, buffers, notes, of_blocks, i_item, block, PACKED, SLOTS, HALF_N)
            i_item += 1
            for i_head in range(i_hk * group, (i_hk + 1) * group, inside):
                for i_step in range(n_visits):
                    i_visit = last - i_step
                    i_tile, i_g = tile_and_head(i_visit, inside)
                    i_sum = first_sum + i_visit
                    if OPENS:
                        p_sum = sums + i_sum.to(gl.int64) * (BLOCK_M * BLOCK_D)
                        open_sum(p_sum, turns + i_sum, i_block == 0, waits != 0, BLOCK_M * BLOCK_D)
                    rows_q = (i_b, i_head + i_g, start_q, n_queries)
                    fetch_queries(
                        descriptors,
                        buffers,
                        of_steps,
                        done + i_step,
                        rows_q,
                        i_tile * BLOCK_M,
                        i_sum * BLOCK_M,
                        PACKED,
                        STAGES,
                    )
                done += n_visits
                first_sum += n_slots_q
        # Taken as late as can be: who has done its blocks takes the next, whatever they took.
        place = gl.atomic_add(tickets, 1, sem="relaxed", scope="gpu")
    full, empty = of_blocks
    mbarrier.wait(empty.index(i_item % SLOTS), ((i_item // SLOTS) & 1) ^ 1)
    write_note(notes, i_item % SLOTS * FIELDS, -1)
    thread_barrier()
    mbarrier.arrive(full.index(i_item % SLOTS), count=1)


@gluon.jit
def store_blocks(given, HALF_N: gl.constexpr, PACKED: gl.constexpr, SLOTS: gl.constexpr):
    """The storing warp: dK and dV of block after block, from where K and V were, once both warpgroups have put them
    there.
    """
    outputs, buffers, notes, of_blocks, written = given
    dk, dv = outputs
    _, ks, vs, _, _, _ = buffers
    full, empty = of_blocks
    i_item = gl.to_tensor(0)
    i_block, rows, n_keys, _, _, _ = read_block(notes, full, i_item, SLOTS, 1)
    while i_block >= 0:
        i_b, i_hk, start_k = rows
        slot = i_item % SLOTS
        mbarrier.wait(written.index(slot), (i_item // SLOTS) & 1)
        for W in gl.static_range(2):
            row = (i_block * 2 + W) * HALF_N
            store_tile(dv, vs.index(slot * 2 + W), i_b, i_hk, start_k, n_keys, row, PACKED)
            store_tile(dk, ks.index(slot * 2 + W), i_b, i_hk, start_k, n_keys, row, PACKED)
        # The copies read shared memory until then.
        tma.store_wait(0)
        mbarrier.arrive(empty.index(slot), count=1)
        i_item += 1
        i_block, rows, n_keys, _, _, _ = read_block(notes, full, i_item, SLOTS, 1)
