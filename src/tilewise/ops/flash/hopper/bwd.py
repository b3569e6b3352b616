"""Flash attention backward for Hopper, in Gluon: one kernel and five products, dQ accumulated in global memory.

Tile plan. A CTA takes block after block of BLOCK_N keys of one KV head. Two warpgroups own half of the keys each and
share every query tile that one warp fetches (`_device.hopper.blocks`). A warpgroup computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ,
so that Pᵀ and dSᵀ come out of wgmma in the registers where dV += Pᵀ dO and dK += dSᵀ Q need them. dSᵀ also goes through
shared memory, and each warpgroup computes one half of the columns of dQ = dS K from the keys of both. It adds that half
to an fp32 accumulator in global memory, whose private layout [D / 8, BLOCK_M, 8] lets a warp write 256 contiguous bytes
straight from wgmma's registers. WIDE, the warpgroups share the keys instead (`_device.hopper.wide`).

Costs. FLOPs: 10 · BLOCK_M · BLOCK_N · D a step, with D = Dv. Bytes: a step reads BLOCK_M · (D + Dv) elements and adds
4 · BLOCK_M · D bytes; K, V, dK and dV pass once. Shared memory: (SLOTS · BLOCK_N + STAGES · BLOCK_M) · (D + Dv)
elements, with two SLOTS K and V of the next block among them, and dSᵀ twice. Registers: BLOCK_N · (D + Dv) fp32 sums a
CTA.

A step is a chain: S, P, dS, the exchange of dS, dQ and its addition, dK. AHEAD, the next step's Sᵀ is started before
the exchange, and dV before dS is computed, so that products run meanwhile; both hold registers longer.

Order of additions to dQ. ORDERED, it is fixed: block n of keys adds to a query tile after block n - 1 did. Each
accumulator has a semaphore that counts the blocks which have added; one warp acquires it, another releases it
(`_device.hopper.semaphore`), so that the warpgroups do neither. The first block that meets a tile stores, so that no
accumulator needs to be zeroed. Where the order is free, accumulators are zeroed up front by another kernel, or lazily
(ZEROES_LAZILY): the warp that fetches query tiles prepares each in time; that of the first block zeroes it, those of
others wait until it has. That saves a pass over memory, but no block may overtake the first.

No deadlock, for any start order of CTAs: a CTA takes its blocks from a work counter, in ascending order, and waits
only for blocks before its own. The smallest block that is not done is being worked on, and waits for none. Waits are
short, as every CTA walks the query tiles from the last to the first. Under a causal mask the blocks of the first keys
are the longest; they are taken first, which evens out the end, and all begin with the same tile: each has to stay one
step behind the one before it, and nothing more, for the shorter ones drop out at the diagonal. With the first tile
first, a block would begin two tiles ahead of the one before it and wait at once. Under a left limit the one before is
two tiles ahead from the start.

Query heads of a GQA group. One visit is a query tile of one head. If the block SWEEPS, it walks all its tiles for one
head, then for the next: neighbouring blocks come to a tile within a few steps, and find it in the L2 cache. Under a
causal mask a block would then overtake the longer one before it at each head, and wait: there it visits all heads of
a tile, then the next tile. Visits are walked from the last down, in the order in which their accumulators lie in
memory, so that a step needs no division.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.blocks import (
    BlockFetch,
    BlockSizes,
    BlockStore,
    StepBarriers,
    Tiles,
    fetch_blocks,
    store_blocks,
)
from tilewise.ops._device.hopper.gradients import (
    Consuming,
    Exchange,
    Half,
    Step,
    Target,
    Zeros,
    accumulator_offsets,
    consume_step,
    start_scores,
)
from tilewise.ops._device.hopper.ring import (
    allocate_barriers,
    allocate_mailbox,
    allocate_ring,
    allocate_tiles,
    as_matrix,
    ring_at,
    thread_barrier,
)
from tilewise.ops._device.hopper.semaphore import (
    MESSAGE_FIELDS,
    MESSAGE_SIZE,
    ORDER_STAGES,
    Order,
    Ordering,
    heads_of_sweep,
    keep_order,
    read_block,
    read_visits,
    whole_tiles,
)
from tilewise.ops._device.hopper.wide import PART, consume_wide_block, fours_layout
from tilewise.ops._device.records import Limits

# Sizes that change from call to call. Not group: of 1 it needs no division.
SIZES = ("n_batch", "n_slots_q", "n_queries", "n_keys", "together", "left", "right")


class BackwardTile(NamedTuple):
    """What the backward kernel is compiled for."""

    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_M: int
    BLOCK_N: int
    """Keys of a block, half of them for each warpgroup unless WIDE."""
    STAGES: int
    """Query tiles in shared memory at a time."""
    SLOTS: int
    """Blocks whose K and V are in shared memory at a time."""
    ORDERED: bool
    """Whether blocks add to dQ in a fixed order."""
    ZEROES_LAZILY: bool
    """Whether the first block that meets an accumulator of dQ zeroes it."""
    PACKED: bool
    AHEAD: bool
    """Whether the next step's scores are started early."""
    GROUPED: bool
    """Whether several query heads share a KV head."""
    SWEEPS: bool
    """Whether a block walks its query tiles once for each head of a group."""
    WIDE: bool
    """Whether the warpgroups share the keys: one sums dK, the other dV."""


@gluon.jit
def leave_gradients(half, acc_dk, acc_dv, i_item, given, TILE: gl.constexpr):
    """Writes a warpgroup's rows of dK and dV into the shared memory that held K and V, for `store_blocks`."""
    exchange = given.exchange
    # V's rows of this warpgroup are read by it alone; K's are read by both, for dQ.
    half.b_v.store(acc_dv.to(half.b_v.dtype))
    mbarrier.arrive(exchange.finished.index(0), count=1)
    mbarrier.wait(exchange.finished.index(0), i_item & 1)
    half.b_k.store((acc_dk * given.scales.scale).to(half.b_k.dtype))
    fence_async_shared()
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(exchange.written.index(i_item % TILE.SLOTS), count=1)


@gluon.jit
def half_of_block(block, slot, given, W: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup W's half of the block in a slot."""
    HALF_N: gl.constexpr = TILE.BLOCK_N // 2
    HALF_D: gl.constexpr = TILE.BLOCK_D // 2
    k_tiles = given.tiles.k
    i_nw = block.i_block * TILE.BLOCK_N + W * HALF_N
    low, high = whole_tiles(i_nw, block.n_keys - block.off, block.n_keys, given.limits, TILE.BLOCK_M, HALF_N)
    inside = heads_of_sweep(given.group, TILE.SWEEPS)
    return Half(
        b_k=as_matrix(k_tiles.index(slot * 2 + W), HALF_N, TILE.BLOCK_D),
        b_v=as_matrix(given.tiles.v.index(slot * 2 + W), HALF_N, TILE.BLOCK_DV),
        b_k0=as_matrix(k_tiles.index(slot * 2), HALF_N, TILE.BLOCK_D).slice(W * HALF_D, HALF_D, 1),
        b_k1=as_matrix(k_tiles.index(slot * 2 + 1), HALF_N, TILE.BLOCK_D).slice(W * HALF_D, HALF_D, 1),
        i_nw=i_nw,
        n_keys=block.n_keys,
        off=block.off,
        whole_low=low * inside,
        whole_high=high * inside,
    )


@gluon.jit
def consume_block(block, i_item, done, zeros, o_dq, given, W: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup W's half of a block of keys: of every step, which are the CTA's steps from `done` on, and its rows of
    dK and dV.
    """
    HALF_N: gl.constexpr = TILE.BLOCK_N // 2
    BLOCK_D: gl.constexpr = TILE.BLOCK_D
    BLOCK_DV: gl.constexpr = TILE.BLOCK_DV
    DK_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    DV_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    slot = i_item % TILE.SLOTS
    half = half_of_block(block, slot, given, W, TILE)
    acc_dk = gl.zeros([HALF_N, BLOCK_D], gl.float32, DK_LAYOUT)
    acc_dv = gl.zeros([HALF_N, BLOCK_DV], gl.float32, DV_LAYOUT)
    p_acc = given.acc_dq + W * (BLOCK_D // 2 * TILE.BLOCK_M)
    visits = block.visits
    end = done + visits.count * (given.group if TILE.SWEEPS else 1)
    b_sT = zeros.s
    if TILE.AHEAD:
        b_sT = start_scores(zeros, half.b_k, given, done, visits.count > 0, TILE)
        b_sT = warpgroup_mma_wait(0, deps=(b_sT,))
    for i_sweep in range(given.group if TILE.SWEEPS else 1):
        if TILE.SWEEPS:
            # Reloaded, so that no registers hold them across sweeps.
            visits = read_visits(given.mailbox, slot, 4)
        first_acc = visits.first_acc + i_sweep * given.n_slots_q
        target = Target(p_acc, o_dq, first_acc, visits.first_from, block.i_block)
        for count in range(done, done + visits.count):
            step = Step(count, visits.last - (count - done), end)
            acc_dk, acc_dv, b_sT = consume_step(acc_dk, acc_dv, b_sT, zeros, half, target, step, given, W, TILE)
        done += visits.count
    leave_gradients(half, acc_dk, acc_dv, i_item, given, TILE)
    return end


@gluon.jit
def consume(given, W: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup W: half of the keys of block after block, as the fetching warp posts them, and one half of dQ's
    columns; WIDE, what `consume_wide_block` says.
    """
    BLOCK_M: gl.constexpr = TILE.BLOCK_M
    # Of the scores, and of what one product adds to dQ.
    KEYS: gl.constexpr = TILE.BLOCK_N if TILE.WIDE else TILE.BLOCK_N // 2
    COLUMNS: gl.constexpr = PART if TILE.WIDE else TILE.BLOCK_D // 2
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    DQ_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zeros = Zeros(
        gl.zeros([KEYS, BLOCK_M], gl.float32, S_LAYOUT),
        gl.zeros([BLOCK_M, COLUMNS], gl.float32, DQ_LAYOUT),
    )
    if TILE.WIDE:
        o_dq = accumulator_offsets(BLOCK_M, COLUMNS, 16, fours_layout(BLOCK_M, COLUMNS))
    else:
        o_dq = accumulator_offsets(BLOCK_M, COLUMNS, 8, DQ_LAYOUT)
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    # Redundant: read_block's thread barrier, here. Others follow before the slot is released, in leave_gradients or
    # leave_sums.
    block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 4)
    while block.i_block >= 0:
        if TILE.WIDE:
            done = consume_wide_block(block, i_item, done, zeros, o_dq, given, W, TILE)
        else:
            done = consume_block(block, i_item, done, zeros, o_dq, given, W, TILE)
        i_item += 1
        # Redundant: as above.
        block = read_block(given.mailbox, given.blocks, ring_at(i_item, TILE.SLOTS), 4)


@gluon.jit
def tile_slots(n_tokens, n_batch, BLOCK: gl.constexpr, PACKED: gl.constexpr):
    """Tiles of BLOCK rows that a head has; of packed sequences as many as `find_tile` numbers."""
    slots = gl.cdiv(n_tokens, BLOCK)
    if PACKED:
        slots = n_tokens // BLOCK + n_batch
    return slots


@gluon.jit
def allocate_scores(DTYPE: gl.constexpr, COUNT: gl.constexpr, KEYS: gl.constexpr, QUERIES: gl.constexpr):
    """Shared memory for COUNT tiles of Pᵀ or dSᵀ."""
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, QUERIES], DTYPE)
    return gl.allocate_shared_memory(DTYPE, [COUNT, KEYS, QUERIES], LAYOUT)


@gluon.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_kernel(
    q, k, v, do, dk, dv, lse_log2, delta, workspace, offsets, n_batch, n_slots_q, group, n_queries, n_keys, together,
    left, right, scales, TILE: gl.constexpr,
):  # fmt: skip
    # Grid: one CTA per SM, or one per block where those are fewer.
    # Owns: block after block, BLOCK_N keys of one KV head, each the next that no CTA has taken.
    # Loops over: the query tiles that meet them, one query head of the group at a time, or in each tile over
    # those heads.
    # Writes: the blocks' rows of dk and dv; adds to those tiles' accumulators of dq, which `hopper.sum` finishes.
    # AHEAD waits for the next query tile before it releases this one.
    gl.static_assert(TILE.STAGES > 1 or not TILE.AHEAD)
    # Block 0 zeroes every accumulator, of one query head.
    gl.static_assert(not TILE.ZEROES_LAZILY or not (TILE.ORDERED or left is not None or TILE.GROUPED))
    gl.static_assert(not TILE.WIDE or (TILE.SLOTS == 1 and not TILE.AHEAD and scales.score_scale is None))
    # Each warpgroup adds some columns of dQ.
    gl.static_assert(not TILE.WIDE or TILE.BLOCK_D >= 2 * PART)
    # n_slots_q comes from the host: computed here, half of it would be hoisted out of all partitions, and held in a
    # register of the warpgroups, which have none to spare.
    n_slots_k = tile_slots(n_keys, n_batch, TILE.BLOCK_N, TILE.PACKED)
    n_heads_k = k.shape[-3]
    sizes = BlockSizes(n_batch, n_slots_k, n_slots_q, n_heads_k, group, n_queries, n_keys, together)
    limits = Limits(left, right)
    KEY_TILES: gl.constexpr = 1 if TILE.WIDE else 2
    KEYS: gl.constexpr = TILE.BLOCK_N // KEY_TILES
    q_tiles = allocate_tiles(q, TILE.STAGES, TILE.BLOCK_D)
    do_tiles = allocate_tiles(do, TILE.STAGES, TILE.BLOCK_DV)
    k_tiles = allocate_tiles(k, KEY_TILES * TILE.SLOTS, TILE.BLOCK_D)
    v_tiles = allocate_tiles(v, KEY_TILES * TILE.SLOTS, TILE.BLOCK_DV)
    lse_tiles = allocate_tiles(lse_log2, TILE.STAGES, TILE.BLOCK_M)
    delta_tiles = allocate_tiles(delta, TILE.STAGES, TILE.BLOCK_M)
    tiles = Tiles(q_tiles, k_tiles, v_tiles, do_tiles, lse_tiles, delta_tiles)
    # Allocations of their own: in one, stores to either would wait for readers of the other.
    p = allocate_scores(q.dtype, 1, KEYS, TILE.BLOCK_M) if TILE.WIDE else None
    ds = allocate_scores(q.dtype, 1 if TILE.WIDE else 4, KEYS, TILE.BLOCK_M)
    mailbox = allocate_mailbox(TILE.SLOTS, MESSAGE_FIELDS, MESSAGE_SIZE)
    # A slot is full of K, V and a message; all single warps but the one that fetches release it.
    blocks = allocate_ring(TILE.SLOTS, 3 if TILE.ORDERED else 1)
    steps = StepBarriers(
        allocate_barriers(TILE.STAGES, 1), allocate_barriers(TILE.STAGES, 1), allocate_barriers(TILE.STAGES, 2)
    )
    ready = (allocate_barriers(KEY_TILES, 1), allocate_barriers(KEY_TILES, 1))
    exchange = Exchange(p, ds, ready, allocate_barriers(1, 2), allocate_barriers(TILE.SLOTS, 2))
    order = Order(
        allocate_barriers(ORDER_STAGES, 1), allocate_barriers(ORDER_STAGES, 2), allocate_barriers(ORDER_STAGES, 1)
    )
    fetching = BlockFetch(
        q=q,
        k=k,
        v=v,
        do=do,
        lse_log2=lse_log2,
        delta=delta,
        tiles=tiles,
        mailbox=mailbox,
        blocks=blocks,
        steps=steps,
        workspace=workspace,
        n_places=n_slots_k * n_heads_k * (1 if TILE.PACKED else n_batch),
        sizes=sizes,
        limits=limits,
        offsets=offsets,
    )
    consuming = Consuming(
        tiles=tiles,
        mailbox=mailbox,
        blocks=blocks,
        steps=steps,
        exchange=exchange,
        order=order,
        limits=limits,
        group=group,
        n_slots_q=n_slots_q,
        acc_dq=workspace.acc_dq,
        scales=scales,
    )
    storing = BlockStore(dk, dv, tiles, mailbox, blocks, exchange.written)
    ordering = Ordering(mailbox, blocks, order, workspace.semaphores, limits, group, n_slots_q)
    if TILE.ORDERED:
        gl.warp_specialize(
            [
                (consume, (consuming, 0, TILE)),
                (consume, (consuming, 1, TILE)),
                (fetch_blocks, (fetching, TILE)),
                (store_blocks, (storing, TILE)),
                (keep_order, (ordering, True, TILE)),
                (keep_order, (ordering, False, TILE)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (consuming, 0, TILE)),
                (consume, (consuming, 1, TILE)),
                (fetch_blocks, (fetching, TILE)),
                (store_blocks, (storing, TILE)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
