"""Flash attention backward for Hopper: one kernel and five products, dQ summed in memory.

A program takes block after block of BLOCK_N keys of one key head: two warpgroups with half of them each, which share
every query tile that one warp brings (`_device.hopper.blocks`). A warpgroup computes Sᵀ = K Qᵀ and dPᵀ = V dOᵀ, so that
Pᵀ and dSᵀ come out of the matrix unit in the registers where dV += Pᵀ dO and dK += dSᵀ Q want them. dSᵀ also goes
through shared memory, and each warpgroup makes one half of the columns of dQ = dS K from the keys of both. That half is
added to an fp32 sum in global memory, whose private order [D / 8, BLOCK_M, 8] lets a warp write 256 bytes in a row
straight from the matrix unit's registers.
Operations: 10 · BLOCK_M · BLOCK_N · D a step, with D = Dv. Bytes: a step reads BLOCK_M · (D + Dv) elements and adds 4 ·
BLOCK_M · D bytes; K, V, dK and dV pass once. On chip: (SLOTS · BLOCK_N + STAGES · BLOCK_M) · (D + Dv) elements, with
two SLOTS K and V of the next block among them, and twice dSᵀ in shared memory, BLOCK_N · (D + Dv) fp32 sums in
registers.

A step is a chain: S, P, dS, the exchange of dS, dQ and its addition, dK. AHEAD, the next step's Sᵀ is started before
the exchange, and dV before dS is computed, so that products run meanwhile; both hold registers longer.

The order of those sums is fixed where ORDERED: block n of keys adds to a query tile after block n - 1 did. A counter
for each tile of each query head holds the number of the block whose turn it is; one warp waits for it (`grant`),
another passes it on (`release`), so that the warpgroups do neither. The first block that meets a tile writes, so that
nobody has to clear it. Where the order is free, the sums have been cleared before; or, if it OPENS them, the warp that
fetches query tiles sees to each tile's sum in time (`open_sum`): that of the first block clears it, those of others
wait until it has. That saves a pass over memory, but nobody passes the first block.

Nobody waits forever, in whatever order programs start: a program takes its blocks from a counter of tickets, in
ascending order, and waits only for blocks before its own, which have smaller tickets: the smallest that is not done is
being worked on, and waits for nobody. Hardly anybody waits long: every program walks the query tiles from the last to
the first. Under a causal mask the blocks of the first keys are the longest; they have the first tickets, which evens
out the end, and all begin with the same tile: each has to stay one step behind the one before it, and nothing more, for
the shorter ones drop out at the diagonal. With the first tile first, a block would begin two tiles ahead of the one
before it and wait at once. Under a left limit the one before is two tiles ahead from the start.

A group's query heads: one visit is a query tile of one of them. If the block SWEEPS, it walks all its tiles for one
head, then for the next: neighbouring blocks come to a tile within a few steps, and find it in the L2 cache. Under a
causal mask a block would so overtake the longer one before it anew at each head, and wait: there it visits all heads of
a tile, then the next tile. Visits are walked from the last down, in the order in which their sums lie in memory, so
that a step needs no division.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.blocks import fetch_blocks, store_blocks
from tilewise.ops._device.hopper.ring import (
    allocate_barriers,
    allocate_notes,
    allocate_tiles,
    as_matrix,
    thread_barrier,
)
from tilewise.ops._device.hopper.semaphore import FIELDS, TURNS, read_block, read_visits, take_turns
from tilewise.ops._device.reach import heads_of_sweep, meets_first, whole_tiles
from tilewise.ops._device.softmax import cap_scores

# Sizes that change from call to call. Not group: of 1 it needs no division.
SIZES = ("n_batch", "n_slots_k", "n_slots_q", "n_heads_k", "n_queries", "n_keys", "together", "left", "right")


@gluon.jit
def mask_tile(
    b_pT,
    i_tile,
    i_nw,
    n_keys,
    limits,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    BLOCK_M: gl.constexpr,
    HALF_N: gl.constexpr,
):
    """Pᵀ with 0 where a query does not see a key: as `mask.keep` has it, counted from the warpgroup's first key,
    `i_nw`.
    """
    off, left, right = limits
    o_n = gl.expand_dims(gl.arange(0, HALF_N, gl.SliceLayout(1, b_pT.type.layout)), 1)
    o_q = gl.expand_dims(
        gl.arange(0, BLOCK_M, gl.SliceLayout(0, b_pT.type.layout)) + (i_tile * BLOCK_M + off - i_nw), 0
    )
    m_keep = o_n < n_keys - i_nw
    if HAS_RIGHT:
        m_keep = m_keep & (o_n <= o_q + right)
    if HAS_LEFT:
        m_keep = m_keep & (o_n >= o_q - left)
    return gl.where(m_keep, b_pT, 0.0)


@gluon.jit
def start_scores(none_s, b_k, b_q, q_full, stage, phase, some):
    """Start Sᵀ of a query tile and a warpgroup's keys, as soon as the tile is there: of anything where it is not one of
    `some`.
    """
    if some:
        mbarrier.wait(q_full.index(stage), phase)
    # [N, D] @ [D, M] -> [N, M]
    return warpgroup_mma(b_k, b_q.permute((1, 0)), none_s, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc_dv, b_pT, b_do):
    """dV with a step's product added, on its way."""
    # [N, M] @ [M, DV] -> [N, DV]
    return warpgroup_mma(
        gl.convert_layout(b_pT, gl.DotOperandLayout(0, acc_dv.type.layout, 2)), b_do, acc_dv, is_async=True
    )


@gluon.jit
def score_gradients(
    none_s, b_sT, acc_dv, keys, queries, rows, full, stage, phase, i_visit, group, whole, i_nw, n_keys, limits, scales,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, AHEAD: gl.constexpr, GROUPED: gl.constexpr,
    SWEEPS: gl.constexpr, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr,
):  # fmt: skip
    """dSᵀ of a query tile and a warpgroup's keys, and before it Pᵀ, both as products take them; AHEAD, dV with Pᵀ
    added, on its way, in place of Pᵀ.

    Sᵀ is there if AHEAD. A visit outside of `whole` is masked.
    """
    b_k, b_v = keys
    b_q, b_do = queries
    lses, deltas = rows
    q_full, do_full = full
    whole_low, whole_high = whole
    _, scale_log2, score_scale = scales
    row_layout: gl.constexpr = gl.SliceLayout(0, none_s.type.layout)
    if not AHEAD:
        s_flying = start_scores(none_s, b_k, b_q, q_full, stage, phase, True)
    mbarrier.wait(do_full.index(stage), phase)
    # [N, DV] @ [DV, M] -> [N, M]
    dp_flying = warpgroup_mma(b_v, b_do.permute((1, 0)), none_s, use_acc=False, is_async=True)
    if not AHEAD:
        b_sT = warpgroup_mma_wait(1, deps=(s_flying,))
    if SOFTCAP:
        b_sT = cap_scores(b_sT, score_scale)
    b_pT = gl.exp2(b_sT * scale_log2 - gl.expand_dims(lses.index(stage).load(row_layout), 0))
    if (i_visit < whole_low) | (i_visit >= whole_high):
        # As `tile_and_head` has it.
        i_tile = i_visit // group if GROUPED and not SWEEPS else i_visit
        b_pT = mask_tile(b_pT, i_tile, i_nw, n_keys, limits, HAS_LEFT, HAS_RIGHT, BLOCK_M, HALF_N)
    b_pT_or_dv = b_pT.to(b_do.dtype)
    if SOFTCAP:
        b_pT = b_pT * (1.0 - b_sT * b_sT)
    if AHEAD:
        b_pT_or_dv = add_values(acc_dv, b_pT_or_dv, b_do)
    b_dpT = warpgroup_mma_wait(1 if AHEAD else 0, deps=(dp_flying,))
    b_dsT = (b_pT * (b_dpT - gl.expand_dims(deltas.index(stage).load(row_layout), 0))).to(b_q.dtype)
    return b_pT_or_dv, b_dsT


@gluon.jit
def sum_offsets(BLOCK_M: gl.constexpr, HALF_D: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    """Where the elements of a half of dQ's columns lie, from its first on, in a tile of the sums."""
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, DQ_LAYOUT))
    o_d = gl.arange(0, HALF_D, gl.SliceLayout(0, DQ_LAYOUT))
    # [D / 8, M, 8]
    return gl.expand_dims(o_m * 8, 1) + gl.expand_dims((o_d // 8) * (8 * BLOCK_M) + o_d % 8, 0)


@gluon.jit
def add_to_sums(
    b_dq, target, step, HAS_LEFT: gl.constexpr, ORDERED: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_D: gl.constexpr
):
    """Adds to a step's tile of dQ: ORDERED, in the block's turn, and the first block that meets the tile writes, for
    nobody has cleared it.
    """
    p_sums, o_dq, first_sum, first_visit, i_block, go = target
    count, i_visit = step
    p_dq = p_sums + (first_sum + i_visit).to(gl.int64) * (BLOCK_M * BLOCK_D) + o_dq
    if ORDERED:
        mbarrier.wait(go.index(count % TURNS), (count // TURNS) & 1)
        if meets_first(i_visit, first_visit, i_block, HAS_LEFT):
            gl.store(p_dq, b_dq)
        else:
            gl.atomic_add(p_dq, b_dq, sem="relaxed")
    else:
        gl.atomic_add(p_dq, b_dq, sem="relaxed")


@gluon.jit
def add_products(
    acc_dk, acc_dv, b_sT, none_s, none_dq, b_pT_or_dv, b_dsT, keys, queries, columns, staged, ready, target, step,
    coming, W: gl.constexpr, HAS_LEFT: gl.constexpr, ORDERED: gl.constexpr, AHEAD: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_D: gl.constexpr,
):  # fmt: skip
    """dK and dV with a step's products added, and AHEAD the next step's Sᵀ; dQ, this warpgroup's columns from the dSᵀ
    of both, is added in memory.
    """
    b_q, b_do = queries
    b_k0, b_k1 = columns
    count, _ = step
    half = count % 2
    q_after, q_full, after, phase_after, some = coming
    staged.index(half * 2 + W).store(b_dsT)
    fence_async_shared()
    # Under the wait for the other warpgroup.
    dv_flying = b_pT_or_dv if AHEAD else add_values(acc_dv, b_pT_or_dv, b_do)
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(ready[W].index(half), count=1)
    if AHEAD:
        b_sT = start_scores(none_s, keys[0], q_after, q_full, after, phase_after, some)
    # Two buffers take turns: whoever has this tile's dS of the other warpgroup knows that it is done with the tile
    # before.
    mbarrier.wait(ready[1 - W].index(half), (count // 2) & 1)
    # [M, N] @ [N, D / 2] -> [M, D / 2]
    dq_flying = warpgroup_mma(staged.index(half * 2).permute((1, 0)), b_k0, none_dq, use_acc=False, is_async=True)
    dq_flying = warpgroup_mma(staged.index(half * 2 + 1).permute((1, 0)), b_k1, dq_flying, is_async=True)
    # [N, M] @ [M, D] -> [N, D], under the additions to dQ
    dk_flying = warpgroup_mma(
        gl.convert_layout(b_dsT, gl.DotOperandLayout(0, acc_dk.type.layout, 2)), b_q, acc_dk, is_async=True
    )
    if AHEAD:
        b_dq, acc_dv, b_sT = warpgroup_mma_wait(1, deps=(dq_flying, dv_flying, b_sT))
    else:
        b_dq, acc_dv = warpgroup_mma_wait(1, deps=(dq_flying, dv_flying))
    add_to_sums(b_dq, target, step, HAS_LEFT, ORDERED, BLOCK_M, BLOCK_D)
    acc_dk = warpgroup_mma_wait(0, deps=(dk_flying,))
    return acc_dk, acc_dv, b_sT


@gluon.jit
def leave_gradients(keys, acc_dk, acc_dv, finished, written, i_item, scale, SLOTS: gl.constexpr):
    """A warpgroup's rows of dK and dV into the shared memory that held K and V, for `store_blocks`."""
    b_k, b_v = keys
    # V's rows of this warpgroup are read by nobody else; K's are, for dQ.
    b_v.store(acc_dv.to(b_v.dtype))
    mbarrier.arrive(finished.index(0), count=1)
    mbarrier.wait(finished.index(0), i_item & 1)
    b_k.store((acc_dk * scale).to(b_k.dtype))
    fence_async_shared()
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(written.index(i_item % SLOTS), count=1)


@gluon.jit
def consume_step(
    acc_dk, acc_dv, b_sT, given, none_s, none_dq, keys, columns, target, whole, i_nw, n_keys, off, count, end, i_visit,
    W: gl.constexpr, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    ORDERED: gl.constexpr, AHEAD: gl.constexpr, GROUPED: gl.constexpr, SWEEPS: gl.constexpr,
):  # fmt: skip
    """The program's step number `count`, which is visit `i_visit` of its block; that one's steps end before `end`."""
    buffers, staged, _, _, of_steps, exchange, order, left, right, group, _, _, scales = given
    qs, _, _, dos, lses, deltas = buffers
    q_full, do_full, empty = of_steps
    stage, phase = count % STAGES, (count // STAGES) & 1
    queries = (as_matrix(qs.index(stage), BLOCK_M, BLOCK_D), as_matrix(dos.index(stage), BLOCK_M, BLOCK_DV))
    after = (count + 1) % STAGES
    coming = (as_matrix(qs.index(after), BLOCK_M, BLOCK_D), q_full, after, ((count + 1) // STAGES) & 1, count + 1 < end)
    b_pT_or_dv, b_dsT = score_gradients(
        none_s, b_sT, acc_dv, keys, queries, (lses, deltas), (q_full, do_full), stage, phase, i_visit, group, whole,
        i_nw, n_keys, (off, left, right), scales, HAS_LEFT, HAS_RIGHT, SOFTCAP, AHEAD, GROUPED, SWEEPS, BLOCK_M, HALF_N,
    )  # fmt: skip
    acc_dk, acc_dv, b_sT = add_products(
        acc_dk, acc_dv, b_sT, none_s, none_dq, b_pT_or_dv, b_dsT, keys, queries, columns, staged, exchange[0], target,
        (count, i_visit), coming, W, HAS_LEFT, ORDERED, AHEAD, BLOCK_M, BLOCK_D,
    )  # fmt: skip
    thread_barrier()
    mbarrier.arrive(empty.index(stage), count=1)
    if ORDERED:
        mbarrier.arrive(order[1].index(count % TURNS), count=1)
    return acc_dk, acc_dv, b_sT


@gluon.jit
def consume_block(
    given, block, i_item, done, none_s, none_dq, o_dq,
    W: gl.constexpr, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    ORDERED: gl.constexpr, AHEAD: gl.constexpr, SLOTS: gl.constexpr, GROUPED: gl.constexpr, SWEEPS: gl.constexpr,
):  # fmt: skip
    """Warpgroup W's part of a block of keys: of every step, which are the program's steps from `done` on, and its rows
    of dK and dV.
    """
    buffers, _, notes, _, of_steps, exchange, order, left, right, group, n_slots_q, sums, scales = given
    qs, ks, vs, _, _, _ = buffers
    q_full, _, _ = of_steps
    _, finished, written = exchange
    i_block, _, n_keys, off, visits, _ = block
    first_sum, last, n_visits, first_visit = visits
    HALF_D: gl.constexpr = BLOCK_D // 2
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])

    slot = i_item % SLOTS
    keys = (as_matrix(ks.index(slot * 2 + W), HALF_N, BLOCK_D), as_matrix(vs.index(slot * 2 + W), HALF_N, BLOCK_DV))
    # The columns of all keys that this warpgroup's half of dQ is made of.
    b_k0 = as_matrix(ks.index(slot * 2), HALF_N, BLOCK_D).slice(W * HALF_D, HALF_D, 1)
    columns = (b_k0, as_matrix(ks.index(slot * 2 + 1), HALF_N, BLOCK_D).slice(W * HALF_D, HALF_D, 1))
    acc_dk = gl.zeros([HALF_N, BLOCK_D], gl.float32, dk_layout)
    acc_dv = gl.zeros([HALF_N, BLOCK_DV], gl.float32, dv_layout)
    i_nw = i_block * (2 * HALF_N) + W * HALF_N
    whole_low, whole_high = whole_tiles(i_nw, n_keys - off, n_keys, left, right, HAS_LEFT, HAS_RIGHT, BLOCK_M, HALF_N)
    inside = heads_of_sweep(group, SWEEPS)
    whole = (whole_low * inside, whole_high * inside)

    end = done + n_visits * (group if SWEEPS else 1)
    b_sT = none_s
    if AHEAD:
        b_q = as_matrix(qs.index(done % STAGES), BLOCK_M, BLOCK_D)
        b_sT = start_scores(none_s, keys[0], b_q, q_full, done % STAGES, (done // STAGES) & 1, n_visits > 0)
        b_sT = warpgroup_mma_wait(0, deps=(b_sT,))
    for i_sweep in range(group if SWEEPS else 1):
        if SWEEPS:
            # Read anew, so that no registers hold them from sweep to sweep.
            first_sum, last, n_visits, first_visit = read_visits(notes, slot, 4)
        target = (sums + W * (HALF_D * BLOCK_M), o_dq, first_sum + i_sweep * n_slots_q, first_visit, i_block, order[0])
        for count in range(done, done + n_visits):
            acc_dk, acc_dv, b_sT = consume_step(
                acc_dk, acc_dv, b_sT, given, none_s, none_dq, keys, columns, target, whole, i_nw, n_keys, off, count,
                end, last - (count - done), W, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT,
                SOFTCAP, ORDERED, AHEAD, GROUPED, SWEEPS,
            )  # fmt: skip
        done += n_visits
    leave_gradients(keys, acc_dk, acc_dv, finished, written, i_item, scales[0], SLOTS)
    return end


@gluon.jit
def consume(
    given,
    W: gl.constexpr, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr,
    ORDERED: gl.constexpr, AHEAD: gl.constexpr, SLOTS: gl.constexpr, GROUPED: gl.constexpr, SWEEPS: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: HALF_N keys of block after block, as the fetching warp notes them, and one half of dQ's columns."""
    _, _, notes, of_blocks, _, _, _, _, _, _, _, _, _ = given
    full, _ = of_blocks
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D // 2, 16])
    none_s = gl.zeros([HALF_N, BLOCK_M], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16]))
    none_dq = gl.zeros([BLOCK_M, BLOCK_D // 2], gl.float32, dq_layout)
    o_dq = sum_offsets(BLOCK_M, BLOCK_D // 2, dq_layout)
    i_item = gl.to_tensor(0)
    done = gl.to_tensor(0)
    i_block, rows, n_keys, off, visits, waits = read_block(notes, full, i_item, SLOTS, 4)
    while i_block >= 0:
        done = consume_block(
            given, (i_block, rows, n_keys, off, visits, waits), i_item, done, none_s, none_dq, o_dq,
            W, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, ORDERED, AHEAD, SLOTS,
            GROUPED, SWEEPS,
        )  # fmt: skip
        i_item += 1
        i_block, rows, n_keys, off, visits, waits = read_block(notes, full, i_item, SLOTS, 4)


@gluon.jit
def allocate_buffers(descriptors, STAGES: gl.constexpr, SLOTS: gl.constexpr):
    """Shared memory for STAGES tiles of Q and dO with their rows' LSE and delta, and for both warpgroups' K and V of
    SLOTS blocks.
    """
    q, k, v, do, lse_log2, delta = descriptors
    qs = allocate_tiles(q, STAGES)
    dos = allocate_tiles(do, STAGES)
    ks = allocate_tiles(k, 2 * SLOTS)
    vs = allocate_tiles(v, 2 * SLOTS)
    lses = allocate_tiles(lse_log2, STAGES)
    deltas = allocate_tiles(delta, STAGES)
    return qs, ks, vs, dos, lses, deltas


@gluon.jit(do_not_specialize=SIZES)
def flash_bwd_hopper_kernel(
    q, k, v, do, dk, dv, lse_log2, delta, sums, turns, tickets, cu_q, cu_k, n_batch, n_slots_k, n_slots_q, n_heads_k,
    group, n_queries, n_keys, together, left, right, scale, scale_log2, score_scale,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    HAS_LEFT: gl.constexpr, HAS_RIGHT: gl.constexpr, SOFTCAP: gl.constexpr, ORDERED: gl.constexpr,
    PACKED: gl.constexpr, AHEAD: gl.constexpr, SLOTS: gl.constexpr, GROUPED: gl.constexpr, SWEEPS: gl.constexpr,
    OPENS: gl.constexpr,
):  # fmt: skip
    # Grid: as many programs as processors, or as blocks where those are fewer.
    # Owns: one block after the other, BLOCK_N keys of one key head, the next that nobody has taken.
    # Loops over: the query tiles that meet them, of one query head of the group after the other, or in each tile over
    # those heads.
    # Writes: the blocks' rows of dk and dv; adds to those tiles of sums, which `hopper.sum` makes dq of.
    # AHEAD waits for the next query tile before it lets go of this one.
    gl.static_assert(STAGES > 1 or not AHEAD)
    # Block 0 clears every tile, of one query head.
    gl.static_assert(not OPENS or not (ORDERED or HAS_LEFT or GROUPED))
    HALF_N: gl.constexpr = BLOCK_N // 2
    sizes = (n_batch, n_slots_k, n_slots_q, n_heads_k, n_queries, n_keys)
    n_places = n_slots_k * n_heads_k * (1 if PACKED else n_batch)
    descriptors = (q, k, v, do, lse_log2, delta)
    buffers = allocate_buffers(descriptors, STAGES, SLOTS)
    # dSᵀ of both warpgroups, twice.
    staged = gl.allocate_shared_memory(
        q.dtype, [4, HALF_N, BLOCK_M], gl.NVMMASharedLayout.get_default_for([HALF_N, BLOCK_M], q.dtype)
    )
    notes = allocate_notes(SLOTS * FIELDS)
    # K, V and notes are there; all single warps but the one that fetches let go of them.
    of_blocks = (allocate_barriers(SLOTS, 1), allocate_barriers(SLOTS, 3 if ORDERED else 1))
    # Q is there, and dO; both warpgroups let go of a query tile.
    of_steps = (allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 1), allocate_barriers(STAGES, 2))
    # A warpgroup's dSᵀ is there; both are done with K; both have left dK and dV.
    ready = (allocate_barriers(2, 1), allocate_barriers(2, 1))
    exchange = (ready, allocate_barriers(1, 2), allocate_barriers(SLOTS, 2))
    # The warpgroups may add to dQ; both have; there is room for a turn more.
    order = (allocate_barriers(TURNS, 1), allocate_barriers(TURNS, 2), allocate_barriers(TURNS, 1))
    # Partitions take no None: what is missing is a pointer that nobody reads.
    offsets = (cu_q if PACKED else turns, cu_k if PACKED else turns)
    fetch = (
        descriptors, buffers, notes, of_blocks, of_steps, tickets, n_places, sizes, together, group, (left, right),
        offsets, sums, turns,
    )  # fmt: skip
    attend = (
        buffers, staged, notes, of_blocks, of_steps, exchange, order, left, right, group, n_slots_q, sums, (scale,
        scale_log2, score_scale),
    )  # fmt: skip
    store = ((dk, dv), buffers, notes, of_blocks, exchange[2])
    turning = (notes, of_blocks, order, turns, group, n_slots_q)
    # fmt: off
    if ORDERED:
        gl.warp_specialize([
            (consume, (
                attend, 0, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, ORDERED, AHEAD,
                SLOTS, GROUPED, SWEEPS,
            )),
            (consume, (
                attend, 1, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, ORDERED, AHEAD,
                SLOTS, GROUPED, SWEEPS,
            )),
            (fetch_blocks, (
                fetch, BLOCK_M, HALF_N, BLOCK_D, STAGES, HAS_LEFT, HAS_RIGHT, OPENS, PACKED, SLOTS, SWEEPS,
            )),
            (store_blocks, (store, HALF_N, PACKED, SLOTS)),
            (take_turns, (turning, True, HAS_LEFT, SLOTS, SWEEPS)),
            (take_turns, (turning, False, HAS_LEFT, SLOTS, SWEEPS)),
        ], [4, 1, 1, 1, 1], [240, 24, 24, 24, 24])
    else:
        gl.warp_specialize([
            (consume, (
                attend, 0, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, ORDERED, AHEAD,
                SLOTS, GROUPED, SWEEPS,
            )),
            (consume, (
                attend, 1, BLOCK_M, HALF_N, BLOCK_D, BLOCK_DV, STAGES, HAS_LEFT, HAS_RIGHT, SOFTCAP, ORDERED, AHEAD,
                SLOTS, GROUPED, SWEEPS,
            )),
            (fetch_blocks, (
                fetch, BLOCK_M, HALF_N, BLOCK_D, STAGES, HAS_LEFT, HAS_RIGHT, OPENS, PACKED, SLOTS, SWEEPS,
            )),
            (store_blocks, (store, HALF_N, PACKED, SLOTS)),
        ], [4, 1, 1], [240, 24, 24])
    # fmt: on
