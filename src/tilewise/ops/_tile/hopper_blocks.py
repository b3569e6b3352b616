"""Blocks of keys of the backward for Hopper: which there are and in which order, the query tiles that each meets, and the warp that fetches them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.ops._tile.hopper import load_tile, tma_load
from tilewise.ops._tile.reach import head_and_slot, query_tiles, step_tile
from tilewise.ops._tile.varlen import find_tile, first_slot, sequence_bounds


@gluon.jit
def locate_block(
    place, sizes, together, group, left, right, cu_q, cu_k,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, PACKED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The block of keys at a place in the order of work: its number, its rows of K, and whether it waits for the block before it.

    Then what it meets: the rows of the group's first query head, that head's first tile, and the walk through the tiles.
    """
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
    waits = i_slot > 0
    if PACKED:
        i_b, i_block = find_tile(cu_k, i_slot, n_batch, n_keys, BLOCK_N)
        # Offsets that are not in order may leave out the block before: then nobody would end the wait for it.
        b_before, block_before = find_tile(cu_k, gl.maximum(i_slot - 1, 0), n_batch, n_keys, BLOCK_N)
        waits = (b_before == i_b) & (block_before + 1 == i_block)
        slot_q = first_slot(i_b, cu_q, n_queries, BLOCK_M)
        start_q, n_queries = sequence_bounds(cu_q, i_b, n_queries)
        start_k, n_keys = sequence_bounds(cu_k, i_b, n_keys)
    low, high = query_tiles(i_block * BLOCK_N, n_queries, n_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, BLOCK_N)
    # Tiles of one query head lie n_slots_q apart from those of the next.
    first_tile = i_head * group * n_slots_q + slot_q
    walk = (high - 1, (high - low) * group, group, n_slots_q)
    rows_q = (i_b, i_hk * group, start_q, n_queries)
    rows_k = (i_b, i_hk, start_k, n_keys)
    return i_block, rows_k, waits, rows_q, first_tile, walk


@gluon.jit
def produce_tiles(arguments, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr, STAGES: gl.constexpr, PACKED: gl.constexpr):
    """Brings K and V once, and each step's Q, dO and their rows' LSE and delta."""
    descriptors, buffers, barriers, rows_k, rows_q, i_n, walk, first_tile = arguments
    q, k, v, do, lse_log2, delta = descriptors
    qs, ks, vs, dos, lses, deltas = buffers
    kv_full, q_full, do_full, empty = barriers
    i_b, i_hk, start_k, n_keys = rows_k
    i_b, i_hq, start_q, n_queries = rows_q
    last, n_steps, group, n_slots_q = walk
    for W in gl.static_range(2):
        mbarrier.expect(kv_full.index(W), k.block_type.nbytes + v.block_type.nbytes)
        load_tile(k, ks.index(W), kv_full.index(W), i_b, i_hk, start_k, n_keys, i_n + W * HALF_N, PACKED)
        load_tile(v, vs.index(W), kv_full.index(W), i_b, i_hk, start_k, n_keys, i_n + W * HALF_N, PACKED)
    for i_step in range(n_steps):
        i_tile, i_g = step_tile(i_step, last, group)
        stage = i_step % STAGES
        mbarrier.wait(empty.index(stage), ((i_step // STAGES) & 1) ^ 1)
        o_row = (first_tile + i_g * n_slots_q + i_tile) * BLOCK_M
        mbarrier.expect(q_full.index(stage), q.block_type.nbytes + lse_log2.block_type.nbytes)
        load_tile(q, qs.index(stage), q_full.index(stage), i_b, i_hq + i_g, start_q, n_queries, i_tile * BLOCK_M, PACKED)
        tma_load(lse_log2, [o_row], q_full.index(stage), lses.index(stage))
        mbarrier.expect(do_full.index(stage), do.block_type.nbytes + delta.block_type.nbytes)
        load_tile(do, dos.index(stage), do_full.index(stage), i_b, i_hq + i_g, start_q, n_queries, i_tile * BLOCK_M, PACKED)
        tma_load(delta, [o_row], do_full.index(stage), deltas.index(stage))
