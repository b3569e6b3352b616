"""One step of the backward for Hopper: a query tile against a warpgroup's half of a block of keys.

Sᵀ and dPᵀ are computed from shared memory; Pᵀ and dSᵀ stay in registers as operands of dV and dK. dSᵀ is exchanged
with the other warpgroup through shared memory for dQ, half of whose columns this one adds to the accumulator in global
memory.
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

from tilewise.ops._device.hopper.ring import as_matrix, ring_at, thread_barrier
from tilewise.ops._device.hopper.semaphore import meets_first
from tilewise.ops._device.scores import cap_scores


class Exchange(NamedTuple):
    """Shared memory and mbarriers between the warpgroups: dSᵀ of both, double-buffered, or WIDE, one Pᵀ and one dSᵀ;
    what a warpgroup puts there is there (`ready`, by warpgroup); both are done with K; both have put dK and dV into a
    slot.
    """

    p: Any
    ds: Any
    ready: Any
    finished: Any
    written: Any


class Consuming(NamedTuple):
    """A warpgroup's arguments."""

    tiles: Any
    mailbox: Any
    blocks: Any
    steps: Any
    exchange: Any
    order: Any
    limits: Any
    group: Any
    n_slots_q: Any
    acc_dq: Any
    scales: Any


class Half(NamedTuple):
    """A warpgroup's half of a block: its rows of K and V; of both warpgroups' K the columns that its half of dQ is made
    of; its first key; the sequence's keys, and how many more those are than queries; the visits that need no mask.
    """

    b_k: Any
    b_v: Any
    b_k0: Any
    b_k1: Any
    i_nw: Any
    n_keys: Any
    off: Any
    whole_low: Any
    whole_high: Any


class Target(NamedTuple):
    """Where a block's sweep adds to dQ: the accumulators from the columns on that are added, offsets in one of those,
    the accumulator of visit 0, the first visit of `Visits`, and the block.
    """

    p_acc: Any
    o_dq: Any
    first_acc: Any
    first_from: Any
    i_block: Any


class Step(NamedTuple):
    """The CTA's step number `count`, which is a visit of its block; that one's steps end before `end`."""

    count: Any
    i_visit: Any
    end: Any


class Queries(NamedTuple):
    """A step's Q and dO."""

    b_q: Any
    b_do: Any


class Zeros(NamedTuple):
    """Zero accumulators for products that start a new sum."""

    s: Any
    dq: Any


@gluon.jit
def mask_tile(b_pT, i_tile, half, limits, BLOCK_M: gl.constexpr, HALF_N: gl.constexpr):
    """Pᵀ with 0 where a query does not see a key: as in `scores.keep`, counted from the warpgroup's first key."""
    o_n = gl.expand_dims(gl.arange(0, HALF_N, gl.SliceLayout(1, b_pT.type.layout)), 1)
    o_q = gl.expand_dims(
        gl.arange(0, BLOCK_M, gl.SliceLayout(0, b_pT.type.layout)) + (i_tile * BLOCK_M + half.off - half.i_nw), 0
    )
    m_keep = o_n < half.n_keys - half.i_nw
    if limits.right is not None:
        m_keep = m_keep & (o_n <= o_q + limits.right)
    if limits.left is not None:
        m_keep = m_keep & (o_n >= o_q - limits.left)
    return gl.where(m_keep, b_pT, 0.0)


@gluon.jit
def start_scores(zeros, b_k, given, count, some, TILE: gl.constexpr):
    """Start Sᵀ of step `count` and a warpgroup's keys, as soon as the query tile is there: of anything where it is not
    one of `some`.
    """
    ring = ring_at(count, TILE.STAGES)
    b_q = as_matrix(given.tiles.q.index(ring.stage), TILE.BLOCK_M, TILE.BLOCK_D)
    if some:
        given.steps.wait_q(ring)
    # [N, D] @ [D, M] -> [N, M]
    return warpgroup_mma(b_k, b_q.permute((1, 0)), zeros.s, use_acc=False, is_async=True)


@gluon.jit
def add_values(acc_dv, b_pT, b_do):
    """dV with a step's product added, in flight."""
    # [N, M] @ [M, DV] -> [N, DV]
    return warpgroup_mma(
        gl.convert_layout(b_pT, gl.DotOperandLayout(0, acc_dv.type.layout, 2)), b_do, acc_dv, is_async=True
    )


@gluon.jit
def probabilities(b_sT, keys, ring, i_visit, given, ROWS: gl.constexpr, TILE: gl.constexpr):
    """Pᵀ of a query tile and ROWS keys, masked if the visit is not whole; and the scores under it, after softcap."""
    b_sT = cap_scores(b_sT, given.scales.score_scale)
    b_sT_log2 = b_sT * given.scales.scale_log2
    b_lse = given.tiles.lse.index(ring.stage).load(gl.SliceLayout(0, b_sT.type.layout))
    b_pT = gl.exp2(b_sT_log2 - gl.expand_dims(b_lse, 0))
    if (i_visit < keys.whole_low) | (i_visit >= keys.whole_high):
        # As in `tile_and_head`.
        i_tile = i_visit // given.group if TILE.GROUPED and not TILE.SWEEPS else i_visit
        b_pT = mask_tile(b_pT, i_tile, keys, given.limits, TILE.BLOCK_M, ROWS)
    return b_pT, b_sT


@gluon.jit
def score_gradients(zeros, b_sT, acc_dv, half, queries, ring, step, given, TILE: gl.constexpr):
    """dSᵀ of a query tile and a warpgroup's keys, and before it Pᵀ, both as products take them; AHEAD, dV with Pᵀ
    added, in flight, in place of Pᵀ.

    Sᵀ is already computed if AHEAD.
    """
    scales = given.scales
    ROW_LAYOUT: gl.constexpr = gl.SliceLayout(0, zeros.s.type.layout)
    if not TILE.AHEAD:
        s_running = start_scores(zeros, half.b_k, given, step.count, True, TILE)
    given.steps.wait_do(ring)
    # [N, DV] @ [DV, M] -> [N, M]
    dp_running = warpgroup_mma(half.b_v, queries.b_do.permute((1, 0)), zeros.s, use_acc=False, is_async=True)
    if not TILE.AHEAD:
        b_sT = warpgroup_mma_wait(1, deps=(s_running,))
    b_pT, b_sT = probabilities(b_sT, half, ring, step.i_visit, given, TILE.BLOCK_N // 2, TILE)
    b_pT_or_dv = b_pT.to(queries.b_do.dtype)
    if scales.score_scale is not None:
        b_pT = b_pT * (1.0 - b_sT * b_sT)
    if TILE.AHEAD:
        b_pT_or_dv = add_values(acc_dv, b_pT_or_dv, queries.b_do)
    b_dpT = warpgroup_mma_wait(1 if TILE.AHEAD else 0, deps=(dp_running,))
    b_delta = given.tiles.delta.index(ring.stage).load(ROW_LAYOUT)
    b_dsT = (b_pT * (b_dpT - gl.expand_dims(b_delta, 0))).to(queries.b_q.dtype)
    return b_pT_or_dv, b_dsT


@gluon.jit
def accumulator_offsets(BLOCK_M: gl.constexpr, COLUMNS: gl.constexpr, RUN: gl.constexpr, DQ_LAYOUT: gl.constexpr):
    """Where the elements of COLUMNS of dQ's columns lie in an accumulator, from the first of them on: RUN of a row are
    neighbours.
    """
    o_m = gl.arange(0, BLOCK_M, gl.SliceLayout(1, DQ_LAYOUT))
    o_d = gl.arange(0, COLUMNS, gl.SliceLayout(0, DQ_LAYOUT))
    # [D / RUN, M, RUN]
    return gl.expand_dims(o_m * RUN, 1) + gl.expand_dims((o_d // RUN) * (RUN * BLOCK_M) + o_d % RUN, 0)


@gluon.jit
def add_to_accumulator(b_dq, target, step, given, TILE: gl.constexpr):
    """Adds to a step's accumulator of dQ: ORDERED, after the blocks before, and the first block that meets the tile
    stores, for the accumulator was not zeroed.
    """
    i_acc = target.first_acc + step.i_visit
    p_dq = target.p_acc + i_acc.to(gl.int64) * (TILE.BLOCK_M * TILE.BLOCK_D) + target.o_dq
    if TILE.ORDERED:
        given.order.wait_go(step.count)
        if meets_first(step.i_visit, target.first_from, target.i_block, given.limits):
            gl.store(p_dq, b_dq)
        else:
            gl.atomic_add(p_dq, b_dq, sem="relaxed")
    else:
        gl.atomic_add(p_dq, b_dq, sem="relaxed")


@gluon.jit
def add_products(
    acc_dk, acc_dv, b_sT, zeros, b_pT_or_dv, b_dsT, half, queries, target, step, given, W: gl.constexpr,
    TILE: gl.constexpr,
):  # fmt: skip
    """dK and dV with a step's products added, and AHEAD the next step's Sᵀ; dQ, this warpgroup's columns from the dSᵀ
    of both, is added in global memory.
    """
    ds = given.exchange.ds
    ready = given.exchange.ready
    count = step.count
    turn = count % 2
    ds.index(turn * 2 + W).store(b_dsT)
    fence_async_shared()
    # Overlaps the wait for the other warpgroup.
    dv_running = b_pT_or_dv if TILE.AHEAD else add_values(acc_dv, b_pT_or_dv, queries.b_do)
    # One thread arrives for all: their stores must be done.
    thread_barrier()
    mbarrier.arrive(ready[W].index(turn), count=1)
    if TILE.AHEAD:
        b_sT = start_scores(zeros, half.b_k, given, count + 1, count + 1 < step.end, TILE)
    # Two buffers in turn: a warpgroup that has this tile's dS of the other one knows that it is done with the tile
    # before.
    mbarrier.wait(ready[1 - W].index(turn), (count // 2) & 1)
    # [M, N] @ [N, D / 2] -> [M, D / 2]
    dq_running = warpgroup_mma(ds.index(turn * 2).permute((1, 0)), half.b_k0, zeros.dq, use_acc=False, is_async=True)
    dq_running = warpgroup_mma(ds.index(turn * 2 + 1).permute((1, 0)), half.b_k1, dq_running, is_async=True)
    # [N, M] @ [M, D] -> [N, D], overlapping the additions to dQ
    dk_running = warpgroup_mma(
        gl.convert_layout(b_dsT, gl.DotOperandLayout(0, acc_dk.type.layout, 2)), queries.b_q, acc_dk, is_async=True
    )
    if TILE.AHEAD:
        b_dq, acc_dv, b_sT = warpgroup_mma_wait(1, deps=(dq_running, dv_running, b_sT))
    else:
        b_dq, acc_dv = warpgroup_mma_wait(1, deps=(dq_running, dv_running))
    add_to_accumulator(b_dq, target, step, given, TILE)
    acc_dk = warpgroup_mma_wait(0, deps=(dk_running,))
    return acc_dk, acc_dv, b_sT


@gluon.jit
def consume_step(acc_dk, acc_dv, b_sT, zeros, half, target, step, given, W: gl.constexpr, TILE: gl.constexpr):
    """One visit: dK, dV and dQ of a query tile and a warpgroup's keys."""
    ring = ring_at(step.count, TILE.STAGES)
    queries = Queries(
        as_matrix(given.tiles.q.index(ring.stage), TILE.BLOCK_M, TILE.BLOCK_D),
        as_matrix(given.tiles.do.index(ring.stage), TILE.BLOCK_M, TILE.BLOCK_DV),
    )
    b_pT_or_dv, b_dsT = score_gradients(zeros, b_sT, acc_dv, half, queries, ring, step, given, TILE)
    acc_dk, acc_dv, b_sT = add_products(
        acc_dk, acc_dv, b_sT, zeros, b_pT_or_dv, b_dsT, half, queries, target, step, given, W, TILE
    )
    thread_barrier()
    given.steps.release(ring)
    if TILE.ORDERED:
        given.order.add(step.count)
    return acc_dk, acc_dv, b_sT
