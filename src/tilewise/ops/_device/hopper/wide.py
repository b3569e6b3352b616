"""The backward for Hopper of more than 128 channels: what two warpgroups do with a block of keys that they share. All
else is as in `flash.hopper.bwd`.

Tile plan. The sums of dK and dV of 64 keys fill the registers of two warpgroups: one sums dK, the other dV. For each
query tile the first computes Sᵀ = K Qᵀ and from it Pᵀ, which goes to the other through shared memory; that one computes
dPᵀ = V dOᵀ and from both dSᵀ, which comes back the same way. Then dV += Pᵀ dO, dK += dSᵀ Q, and each adds some columns
of dQ = dS K to the accumulator in global memory, PART at a time.

Costs. FLOPs: 2 · BLOCK_M · BLOCK_N · (3 · D + 2 · Dv) a step. Bytes: a step reads BLOCK_M · (D + Dv) elements and adds
4 · BLOCK_M · D bytes. Shared memory: (BLOCK_N + STAGES · BLOCK_M) · (D + Dv) elements, Pᵀ and dSᵀ. Registers: BLOCK_N ·
(D + Dv) fp32 sums a CTA.

A step is a chain from one warpgroup to the other and back: S, P; dS; dQ and dK. One buffer each for Pᵀ and dSᵀ
suffices, for neither warpgroup begins a step before it has what the other made in the last one: Pᵀ has been read when
dSᵀ comes, and dSᵀ when the next Pᵀ does.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.gradients import Step, Target, add_to_accumulator, probabilities
from tilewise.ops._device.hopper.pieces import (
    add_product,
    matrices,
    multiply_rows,
    piece,
    sums_layout,
    wait_pieces,
    zero_pieces,
)
from tilewise.ops._device.hopper.ring import ring_at, thread_barrier
from tilewise.ops._device.hopper.semaphore import heads_of_sweep, read_visits, whole_tiles

# The warpgroups, by what they do with the scores; the first sums dK, the other dV.
WEIGHS, DIFFERENTIATES = gl.constexpr(0), gl.constexpr(1)
# Columns of dQ that one product makes.
PART = gl.constexpr(64)


class Keys(NamedTuple):
    """A block's first key; the sequence's keys, and how many more than queries; the visits that need no mask."""

    i_nw: Any
    n_keys: Any
    off: Any
    whole_low: Any
    whole_high: Any


@gluon.jit
def unhoisted_zero(step):
    """0, as no compiler knows: an index with which the addresses of operands are computed in each step. They would be
    computed before the loop otherwise, and held in registers, of which there are none to spare.
    """
    return gl.minimum(step.i_visit, 0)


@gluon.constexpr_function
def first_parts(D):
    """How many PARTs of dQ's columns the first warpgroup adds."""
    return D // PART.value // 2


@gluon.constexpr_function
def fours_layout(M, D):
    """Layout of `in_fours`: of a thread's elements, four columns come first."""
    rows = [[row, 0] for row in (8, *(2**i for i in range(6, M.bit_length() - 1)))]
    columns = [[0, 2**i] for i in range(4, D.bit_length() - 1)]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 1], [0, 2], *rows, *columns], lanes, [[16, 0], [32, 0]], [], [M, D])


@gluon.jit
def in_fours(b_dq):
    """Columns of dQ in the order [D / 16, 4, 2, 2] in place of [D / 16, 2, 4, 2]: then the four of each 16 that a
    thread holds are neighbours, and it adds 16 bytes at a time. No data moves.
    """
    M: gl.constexpr = b_dq.shape[0]
    D: gl.constexpr = b_dq.shape[1]
    LAYOUT: gl.constexpr = fours_layout(M, D)
    b_dq = b_dq.reshape([M, D // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([M, D])
    return gl.convert_layout(b_dq, LAYOUT)


@gluon.jit
def start_dq(PIECE: gl.constexpr, here, zeros, given):
    """PART columns of a step's dQ, in flight."""
    WIDTH: gl.constexpr = given.tiles.k.shape[-1]
    COLUMN: gl.constexpr = PIECE * PART
    b_k = piece(given.tiles.k, here + COLUMN // WIDTH).slice(COLUMN % WIDTH, PART, 1)
    b_ds = given.exchange.ds.index(here).permute((1, 0))
    # [M, N] @ [N, PART] -> [M, PART]
    return warpgroup_mma(b_ds, b_k, zeros.dq, use_acc=False, is_async=True)


@gluon.jit
def add_columns(
    dq_running, AFTER: gl.constexpr, FIRST: gl.constexpr, END: gl.constexpr, here, zeros, target, step, given,
    TILE: gl.constexpr,
):  # fmt: skip
    """Adds columns of dQ from FIRST · PART to END · PART to the step's accumulator; the first of them are in flight,
    and AFTER products behind them.
    """
    for i in gl.static_range(FIRST, END):
        b_dq = warpgroup_mma_wait(AFTER if i == FIRST else 0, deps=(dq_running,))
        p_acc = target.p_acc + i * (PART * TILE.BLOCK_M)
        columns = Target(p_acc, target.o_dq, target.first_acc, target.first_from, target.i_block)
        add_to_accumulator(in_fours(b_dq), columns, step, given, TILE)
        if i + 1 < END:
            dq_running = start_dq(i + 1, here, zeros, given)


@gluon.jit
def weigh_step(acc_dk, zeros, keys, target, step, given, TILE: gl.constexpr):
    """The first warpgroup's part of a visit: Pᵀ for the other one, dK, and the first columns of dQ."""
    exchange = given.exchange
    ring = ring_at(step.count, TILE.STAGES)
    here = unhoisted_zero(step)
    given.steps.wait_q(ring)
    b_k = matrices(given.tiles.k, here, TILE.BLOCK_D)
    # [N, D] @ [D, M] -> [N, M]
    s_running = multiply_rows(b_k, given.tiles.q, ring.stage, zeros.s)
    b_sT = warpgroup_mma_wait(0, deps=(s_running,))
    b_pT, b_sT = probabilities(b_sT, keys, ring, step.i_visit, given, TILE.BLOCK_N, TILE)
    exchange.p.index(here).store(b_pT.to(given.tiles.q.dtype))
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(exchange.ready[WEIGHS].index(0), count=1)
    mbarrier.wait(exchange.ready[DIFFERENTIATES].index(0), step.count & 1)
    dq_running = start_dq(0, here, zeros, given)
    # [N, M] @ [M, D] -> [N, D]
    acc_dk = add_product(acc_dk, exchange.ds.index(here), given.tiles.q, ring.stage)
    add_columns(dq_running, len(acc_dk), 0, first_parts(TILE.BLOCK_D), here, zeros, target, step, given, TILE)
    return wait_pieces(0, acc_dk)


@gluon.jit
def differentiate_step(acc_dv, zeros, target, step, given, TILE: gl.constexpr):
    """The second warpgroup's part of a visit: dSᵀ for both, dV, and the other columns of dQ."""
    exchange = given.exchange
    FIRST: gl.constexpr = first_parts(TILE.BLOCK_D)
    ring = ring_at(step.count, TILE.STAGES)
    here = unhoisted_zero(step)
    given.steps.wait_do(ring)
    b_v = matrices(given.tiles.v, here, TILE.BLOCK_DV)
    # [N, DV] @ [DV, M] -> [N, M]
    dp_running = multiply_rows(b_v, given.tiles.do, ring.stage, zeros.s)
    mbarrier.wait(exchange.ready[WEIGHS].index(0), step.count & 1)
    b_pT = exchange.p.index(here).load(zeros.s.type.layout)
    b_weights = gl.convert_layout(b_pT, gl.DotOperandLayout(0, sums_layout(given.tiles.do), 2))
    # [N, M] @ [M, DV] -> [N, DV]
    acc_dv = add_product(acc_dv, b_weights, given.tiles.do, ring.stage)
    b_dpT = warpgroup_mma_wait(len(acc_dv), deps=(dp_running,))
    b_delta = given.tiles.delta.index(ring.stage).load(gl.SliceLayout(0, zeros.s.type.layout))
    b_dsT = b_pT.to(gl.float32) * (b_dpT - gl.expand_dims(b_delta, 0))
    exchange.ds.index(here).store(b_dsT.to(given.tiles.q.dtype))
    fence_async_shared()
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(exchange.ready[DIFFERENTIATES].index(0), count=1)
    dq_running = start_dq(FIRST, here, zeros, given)
    acc_dv = wait_pieces(1, acc_dv)
    given.steps.release(ring)
    add_columns(dq_running, 0, FIRST, TILE.BLOCK_D // PART, here, zeros, target, step, given, TILE)
    return acc_dv


@gluon.jit
def leave_sums(acc, tiles, scale, given):
    """Writes a warpgroup's sums into the shared memory that held K or V, for `store_blocks`."""
    for i in gl.static_range(len(acc)):
        piece(tiles, i).store((acc[i] * scale).to(tiles.dtype))
    fence_async_shared()
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(given.exchange.written.index(0), count=1)


@gluon.jit
def keys_of_block(block, given, TILE: gl.constexpr):
    """The keys of a block, and the visits that need no mask."""
    i_n = block.i_block * TILE.BLOCK_N
    low, high = whole_tiles(i_n, block.n_keys - block.off, block.n_keys, given.limits, TILE.BLOCK_M, TILE.BLOCK_N)
    inside = heads_of_sweep(given.group, TILE.SWEEPS)
    return Keys(i_n, block.n_keys, block.off, low * inside, high * inside)


@gluon.jit
def consume_wide_block(block, i_item, done, zeros, o_dq, given, W: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup W's part of a block of keys: of every step, which are the CTA's steps from `done` on, and dK or dV."""
    visits = block.visits
    end = done + visits.count * (given.group if TILE.SWEEPS else 1)
    keys = keys_of_block(block, given, TILE)
    if W == WEIGHS:
        acc = zero_pieces(TILE.BLOCK_N, given.tiles.k, TILE.BLOCK_D)
    else:
        acc = zero_pieces(TILE.BLOCK_N, given.tiles.v, TILE.BLOCK_DV)
    for i_sweep in range(given.group if TILE.SWEEPS else 1):
        if TILE.SWEEPS:
            # Reloaded, so that no registers hold them across sweeps.
            visits = read_visits(given.mailbox, 0, 4)
        first_acc = visits.first_acc + i_sweep * given.n_slots_q
        target = Target(given.acc_dq, o_dq, first_acc, visits.first_from, block.i_block)
        for count in range(done, done + visits.count):
            step = Step(count, visits.last - (count - done), end)
            if W == WEIGHS:
                acc = weigh_step(acc, zeros, keys, target, step, given, TILE)
            else:
                acc = differentiate_step(acc, zeros, target, step, given, TILE)
            # All have added to dQ before one says so, and have read dSᵀ before one of them stores the next.
            thread_barrier()
            if W == WEIGHS:
                given.steps.release(ring_at(count, TILE.STAGES))
            if TILE.ORDERED:
                given.order.add(count)
        done += visits.count
    mbarrier.arrive(given.exchange.finished.index(0), count=1)
    if W == WEIGHS:
        # The other one reads K too, for dQ.
        mbarrier.wait(given.exchange.finished.index(0), i_item & 1)
        leave_sums(acc, given.tiles.k, given.scales.scale, given)
    else:
        leave_sums(acc, given.tiles.v, 1.0, given)
    return end
