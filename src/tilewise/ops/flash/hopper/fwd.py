"""Flash attention forward for Hopper, in Gluon: warp-specialised, TMA and wgmma, one persistent CTA per SM.

Tile plan. A work item is a query tile of 64 · GROUPS rows of one head. Each of GROUPS warpgroups owns 64 of its rows:
their Q in shared memory, O and the scores of one key tile in registers. One more warp fetches (`_device.hopper.work`):
Q into one of SLOTS slots, and for each step BLOCK_N rows of K, with the rows of V of the tile before, into a ring of
STAGES buffers; it runs ahead into the next item while this one ends.

A step. It starts S = Q Kᵀ of its key tile and O += P V of the tile before, then computes the softmax of S while the
second product runs. The first S of the next item is computed while O is stored. A step is a chain of waits, which the
steps of the other warpgroups fill only in part: so it has one barrier to wait for and one to arrive at, and a row's sum
is reduced over threads once, at the end.

Masks. Key tiles are walked from the last to the first. The tile at a causal diagonal, or past the last key, comes first
and is masked if any is. Tiles that need no mask have a separate loop. Tiles that a warpgroup's rows do not reach,
but those of another do, are skipped.

Costs. FLOPs: 2 · 64 · GROUPS · BLOCK_N · (D + Dv) a step. Bytes from memory: Q, O and LSE once; K and V once for each
query tile, all but the first from the L2 cache. Shared memory: 64 · GROUPS · (SLOTS · D + Dv) + STAGES · BLOCK_N · (D +
Dv) elements (one slot, and O in Q's place, where that is too much). Registers a thread: (BLOCK_N · 3/2 + Dv) / 2 for
scores, probabilities and O.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.pieces import (
    add_product,
    matrices,
    multiply_rows,
    piece,
    scale_rows,
    sums_layout,
    wait_pieces,
    zero_pieces,
)
from tilewise.ops._device.hopper.ring import (
    HeadRows,
    allocate_mailbox,
    allocate_ring,
    allocate_tiles,
    first_of_ring,
    store_tile,
    thread_barrier,
)
from tilewise.ops._device.hopper.work import (
    ITEM_FIELDS,
    ITEM_SIZE,
    ROWS,
    ItemFetch,
    ItemSizes,
    fetch_items,
    key_tiles,
    own_tiles,
    read_item,
)
from tilewise.ops._device.records import Limits, Window
from tilewise.ops._device.scores import add_sink, cap_scores, keep, online_softmax_terms

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_batch", "n_tiles", "n_heads", "n_all_heads", "together", "group", "n_queries", "n_keys", "left", "right")


class ForwardTile(NamedTuple):
    """What the forward kernel is compiled for."""

    BLOCK_D: int
    BLOCK_DV: int
    BLOCK_N: int
    STAGES: int
    """Buffers of the ring of K and V."""
    GROUPS: int
    """Warpgroups, of 64 query rows each."""
    SLOTS: int
    """Items whose Q is in shared memory at a time."""
    O_IN_Q: bool
    """Whether O is stored from Q's buffer: with one slot only."""
    PACKED: bool
    MASK_LAST: bool
    """Whether the last key tile needs a mask."""
    SIGN: int
    """Of the scale: the row maximum is taken before scaling, which needs a positive one."""
    REGISTERS: int
    """Per thread of a warpgroup."""
    REGISTERS_FETCH: int


class Shared(NamedTuple):
    """A CTA's shared memory: tiles, the mailbox, and the barriers of the slots of Q and of the ring of K and V."""

    q: Any
    k: Any
    v: Any
    o: Any
    mailbox: Any
    items: Any
    steps: Any


class Attending(NamedTuple):
    """A warpgroup's arguments."""

    o: Any
    lse: Any
    sinks: Any
    shared: Any
    n_heads: Any
    n_queries: Any
    """Of all packed sequences together."""
    limits: Any
    scales: Any


class Begun(NamedTuple):
    """An item whose first scores are in flight: the product, the item, key tiles `first .. end` of all its rows, and
    those of this warpgroup's.
    """

    s_running: Any
    item: Any
    first: Any
    end: Any
    own: Any


class Softmax(NamedTuple):
    """A warpgroup's running row maximum, row sums (those of `thread_sums`, until the end) and O.

    O comes last: before the others, ptxas copies its registers on the way around an item without key tiles.
    """

    m: Any
    l: Any
    acc: Any


@gluon.jit
def thread_sums(b_p):
    """Sums of a row's elements that one thread holds, `[M, 4]`: four threads share a row, two columns in eight each."""
    pairs = b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def probabilities(b_s, m, l, item, o_m, o_key, given, MASKED: gl.constexpr, TILE: gl.constexpr):
    """One step of the online softmax over the scores of the key tile from key `o_key` on."""
    limits = given.limits
    if TILE.SIGN != 1:
        # The row maximum is taken before scaling, which needs a positive scale: its sign (or 0) goes into the scores.
        b_s = b_s * TILE.SIGN
    b_s = cap_scores(b_s, given.scales.score_scale)
    if MASKED:
        o_n = o_key + gl.arange(0, TILE.BLOCK_N, gl.SliceLayout(0, b_s.type.layout))
        m_keep = keep(
            gl.expand_dims(o_m, 1),
            gl.expand_dims(o_n, 0),
            item.n_keys,
            Window(limits.left, limits.right, item.n_keys - item.n_queries),
        )
        b_s = gl.where(m_keep, b_s, float("-inf"))
    b_p, m, rescale = online_softmax_terms(b_s, m, given.scales.scale_log2, MASKED)
    l = l * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout)), 1) + thread_sums(b_p)
    return b_p, m, l, rescale


@gluon.jit
def write_rows(given, state, item, row, W: gl.constexpr, TILE: gl.constexpr):
    """A warpgroup's rows of O and LSE from its final sums: 0 and -inf for a row that saw nothing.

    The store of O is in flight when this returns.
    """
    m = state.m
    l = gl.convert_layout(gl.sum(state.l, 1), m.type.layout)
    if given.sinks is not None:
        m, l, rescale = add_sink(m, l, gl.load(given.sinks + item.i_h))
    # Not `> 0`, which NaN fails too: a row with NaN in it has seen something.
    seen = l != 0.0
    l = gl.where(seen, l, 1.0)
    if given.sinks is None:
        b_lse = gl.where(seen, (m + gl.log2(l)) * 0.6931471805599453, float("-inf"))
    else:
        b_lse = gl.where(seen, m + gl.log2(l) * 0.6931471805599453, float("-inf"))
    o_m = row + gl.arange(0, ROWS, l.type.layout)
    p_lse = given.lse + (gl.cast(item.i_b, gl.int64) * given.n_heads + item.i_h) * given.n_queries + item.start
    gl.store(p_lse + o_m, b_lse, mask=o_m < item.n_queries)
    inverse = 1.0 / l
    if given.sinks is not None:
        inverse = inverse * rescale
    b_o = scale_rows(state.acc, inverse)
    if not TILE.O_IN_Q:
        # The copy of the last item's rows may still read the buffer.
        tma.store_wait(0)
    # One warp of four has waited for that, or for the last product with Q.
    thread_barrier()
    for i in gl.static_range(len(b_o)):
        piece(given.shared.o, W * len(b_o) + i).store(b_o[i].to(given.o.dtype))
    fence_async_shared()
    thread_barrier()
    rows = HeadRows(item.i_b, item.i_h, item.start, item.n_queries)
    store_tile(given.o, given.shared.o, W, rows, row, TILE.BLOCK_DV, TILE.PACKED)


@gluon.jit
def start_scores(b_q, shared, i_k, TILE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """S of a warpgroup's rows and a key tile, in flight."""
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    # [M, D] @ [D, N] -> [M, N]
    return multiply_rows(b_q, shared.k, i_k, zero)


@gluon.jit
def attend_tile(
    state, b_p, b_q, item, o_m, o_key, ring, given, MASKED: gl.constexpr, TILE: gl.constexpr, S_LAYOUT: gl.constexpr
):
    """One key tile: its scores and their softmax, and the product with the values of the tile before it."""
    shared = given.shared
    shared.steps.wait_full(ring)
    s_running = start_scores(b_q, shared, ring.stage, TILE, S_LAYOUT)
    # [M, N] @ [N, DV] -> [M, DV]
    acc_running = add_product(state.acc, b_p, shared.v, ring.stage)
    b_s = warpgroup_mma_wait(len(acc_running), deps=(s_running,))
    p32, m, l, rescale = probabilities(b_s, state.m, state.l, item, o_m, o_key, given, MASKED, TILE)
    acc = wait_pieces(0, acc_running)
    shared.steps.release(ring)
    acc = scale_rows(acc, rescale)
    b_p = gl.convert_layout(p32.to(shared.v.dtype), b_p.type.layout)
    return Softmax(m, l, acc), b_p


@gluon.jit
def skip_steps(steps, ring, count):
    """Skip `count` steps that other warpgroups need and this one does not: release their buffers as soon as they are
    full.
    """
    for _ in range(count):
        steps.wait_full(ring)
        steps.release(ring)
        ring = ring.advance()
    return ring


@gluon.jit
def attend_item(b_s, state, b_q, item, tiles, o_m, ring, given, TILE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """All key tiles that a warpgroup's rows of an item reach, at least one, from its scores on: from the last to the
    first, masked, whole, masked.
    """
    shared = given.shared
    limits = given.limits
    end = tiles.end
    shared.steps.release(ring)
    ring = ring.advance()
    p32, m, l, _ = probabilities(
        b_s, state.m, state.l, item, o_m, (end - 1) * TILE.BLOCK_N, given, TILE.MASK_LAST, TILE
    )
    state = Softmax(m, l, state.acc)
    b_p = gl.convert_layout(p32.to(shared.v.dtype), gl.DotOperandLayout(0, sums_layout(shared.v), 2))
    masked = gl.maximum(end - tiles.whole_end, 1)
    whole = gl.maximum(end - tiles.whole_first, masked)
    # Without a limit to the right only the last tile needs a mask there.
    if limits.right is not None:
        for i in range(1, masked):
            o_key = (end - 1 - i) * TILE.BLOCK_N
            state, b_p = attend_tile(state, b_p, b_q, item, o_m, o_key, ring, given, True, TILE, S_LAYOUT)
            ring = ring.advance()
    for i in range(masked, whole):
        o_key = (end - 1 - i) * TILE.BLOCK_N
        state, b_p = attend_tile(state, b_p, b_q, item, o_m, o_key, ring, given, False, TILE, S_LAYOUT)
        ring = ring.advance()
    if limits.left is not None:
        for i in range(whole, end - tiles.first):
            o_key = (end - 1 - i) * TILE.BLOCK_N
            state, b_p = attend_tile(state, b_p, b_q, item, o_m, o_key, ring, given, True, TILE, S_LAYOUT)
            ring = ring.advance()
    shared.steps.wait_full(ring)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = wait_pieces(0, add_product(state.acc, b_p, shared.v, ring.stage))
    shared.steps.release(ring)
    return Softmax(state.m, state.l, acc), ring.advance()


@gluon.jit
def begin_item(given, slot, ring, W: gl.constexpr, TILE: gl.constexpr, S_LAYOUT: gl.constexpr):
    """Wait for the next item, skip the key tiles before the warpgroup's own, and start the scores of its first: of
    anything if it has none.
    """
    shared = given.shared
    shared.items.wait_full(slot)
    item = read_item(shared.mailbox, slot.stage, 4)
    tiles = key_tiles(item.row, item.n_queries, item.n_keys, given.limits, TILE.GROUPS * ROWS, TILE.BLOCK_N)
    first = tiles.first
    end = gl.where(item.row >= 0, tiles.end, first)
    own = own_tiles(item.row + W * ROWS, first, end, item, given.limits, TILE.BLOCK_N)
    ring = skip_steps(shared.steps, ring, end - own.end)
    if own.first < own.end:
        shared.steps.wait_full(ring)
    b_q = matrices(shared.q, slot.stage * TILE.GROUPS + W, TILE.BLOCK_D)
    s_running = start_scores(b_q, shared, ring.stage, TILE, S_LAYOUT)
    return Begun(s_running, item, first, end, own), ring


@gluon.jit
def attend_items(given, W: gl.constexpr, TILE: gl.constexpr):
    """Warpgroup W: rows 64 · W to 64 · W + 63 of item after item, as the fetching warp posts them; O's store overlaps
    the next one's first scores.
    """
    shared = given.shared
    BLOCK_N: gl.constexpr = TILE.BLOCK_N
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ring = first_of_ring(TILE.STAGES)
    slot = first_of_ring(TILE.SLOTS)
    begun, ring = begin_item(given, slot, ring, W, TILE, S_LAYOUT)
    while begun.item.row >= 0:
        item = begun.item
        own = begun.own
        row = item.row + W * ROWS
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S_LAYOUT))
        l = thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT))
        state = Softmax(m, l, zero_pieces(ROWS, shared.v, TILE.BLOCK_DV))
        b_s = warpgroup_mma_wait(0, deps=(begun.s_running,))
        if own.first < own.end:
            o_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, S_LAYOUT))
            b_q = matrices(shared.q, slot.stage * TILE.GROUPS + W, TILE.BLOCK_D)
            state, ring = attend_item(b_s, state, b_q, item, own, o_m, ring, given, TILE, S_LAYOUT)
        elif begun.first < begun.end:
            # The step after the last tile, with its V.
            ring = skip_steps(shared.steps, ring, 1)
        ring = skip_steps(shared.steps, ring, own.first - begun.first)
        if TILE.O_IN_Q:
            write_rows(given, state, item, row, W, TILE)
            tma.store_wait(0)
            thread_barrier()
        shared.items.release(slot)
        slot = slot.advance()
        begun, ring = begin_item(given, slot, ring, W, TILE, S_LAYOUT)
        if not TILE.O_IN_Q:
            write_rows(given, state, item, row, W, TILE)
    warpgroup_mma_wait(0, deps=(begun.s_running,))
    # The last copies still read shared memory.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def flash_fwd_hopper_kernel(
    q, k, v, sinks, o, lse, counter, offsets, n_batch, n_tiles, n_heads, n_all_heads, together, group, n_queries,
    n_keys, left, right, scales, TILE: gl.constexpr,
):  # fmt: skip
    # Grid: one CTA per SM, or one per item where those are fewer.
    # Owns: item after item, a query tile of 64 · GROUPS rows of one head: every n-th, or, with a work counter,
    # the next that no CTA has taken.
    # Loops over: the key tiles that the item's window reaches, from the last to the first.
    # Writes: the items' rows of o and lse.
    # O is put where the first slot's Q was.
    gl.static_assert(TILE.SLOTS == 1 or not TILE.O_IN_Q)
    q_tiles = allocate_tiles(q, TILE.SLOTS * TILE.GROUPS, TILE.BLOCK_D)
    k_tiles = allocate_tiles(k, TILE.STAGES, TILE.BLOCK_D)
    v_tiles = allocate_tiles(v, TILE.STAGES, TILE.BLOCK_DV)
    o_tiles = q_tiles if TILE.O_IN_Q else allocate_tiles(o, TILE.GROUPS, TILE.BLOCK_DV)
    shared = Shared(
        q=q_tiles,
        k=k_tiles,
        v=v_tiles,
        o=o_tiles,
        mailbox=allocate_mailbox(TILE.SLOTS, ITEM_FIELDS, ITEM_SIZE),
        # One warp fills a buffer, all warpgroups empty it.
        items=allocate_ring(TILE.SLOTS, TILE.GROUPS),
        steps=allocate_ring(TILE.STAGES, TILE.GROUPS),
    )
    sizes = ItemSizes(n_batch, n_tiles, n_heads, n_all_heads, together, group, n_queries, n_keys)
    limits = Limits(left, right)
    fetch = ItemFetch(q, k, v, shared, sizes, limits, offsets, counter)
    attend = Attending(o, lse, sinks, shared, n_heads, n_queries, limits, scales)
    if TILE.GROUPS == 2:
        gl.warp_specialize(
            [(attend_items, (attend, 0, TILE)), (attend_items, (attend, 1, TILE)), (fetch_items, (fetch, TILE))],
            [4, 1],
            [TILE.REGISTERS, TILE.REGISTERS_FETCH],
        )
    else:
        gl.warp_specialize(
            [
                (attend_items, (attend, 0, TILE)),
                (attend_items, (attend, 1, TILE)),
                (attend_items, (attend, 2, TILE)),
                (fetch_items, (fetch, TILE)),
            ],
            [4, 4, 1],
            [TILE.REGISTERS, TILE.REGISTERS, TILE.REGISTERS_FETCH],
        )
