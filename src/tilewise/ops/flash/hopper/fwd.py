"""Flash attention forward for Hopper, in Gluon: TMA and the matrix units driven by warps with a job each, one program a
processor.

Tile plan, one item a query tile of 64 · GROUPS rows of one head: warpgroups of 64 rows each keep their Q in shared
memory, and O, with the scores of one key tile, in registers; one warp more fetches (`_device.hopper.work`): Q, into
SLOTS places in turn, and in a ring of STAGES buffers for each step BLOCK_N rows of K with the rows of V of the tile
before, for the next item too while this one ends. A step starts the scores of its tile and the product of the tile
before, and computes the softmax; the first scores of the next item are computed while O leaves. A step is a chain of
waits that the other warpgroups' steps fill only in part: so there is one barrier to wait for and one to arrive at in
it, and a row's sum is added up over threads once, at the end. Key tiles are walked from the last to the first: the tile
at a causal diagonal, or past the last key, comes first, and is masked if anything is; tiles that need no mask have a
loop of their own, and those that a warpgroup's own rows do not reach go by.
Operations: 2 · 64 · GROUPS · BLOCK_N · (D + Dv) a step. Bytes from memory: Q, O and LSE once; K and V once for each
query tile, from the L2 cache for all but the first. On chip: 64 · GROUPS · (SLOTS · D + Dv) + STAGES · BLOCK_N · (D +
Dv) elements of shared memory (one slot, and O in Q's place, where that is too much); (BLOCK_N · 3/2 + Dv) / 2 registers
a thread for scores, probabilities and O.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.ring import (
    allocate_barriers,
    allocate_notes,
    allocate_tiles,
    as_matrix,
    next_stage,
    read_note,
    store_tile,
    thread_barrier,
)
from tilewise.ops._device.hopper.work import FIELDS, ROWS, fetch_items, key_tiles, own_tiles
from tilewise.ops._device.mask import keep
from tilewise.ops._device.records import Window
from tilewise.ops._device.softmax import cap_scores, online_softmax_terms

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_batch", "n_tiles", "n_heads", "n_all_heads", "together", "group", "n_queries", "n_keys", "left", "right")


@gluon.jit
def thread_sums(b_p):
    """Sums of a row's elements that one thread holds, `[M, 4]`: four threads share a row, two columns in eight each."""
    pairs = b_p.reshape([b_p.shape[0], b_p.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(pairs, 3), 1)


@gluon.jit
def probabilities(
    b_s, m, l, o_m, row, off, n_keys, window, scales, SIGN: gl.constexpr, CAPPED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the scores of the key tile from `row` on; the sums `l` are those of
    `thread_sums`, until the end.
    """
    scale_log2, score_scale = scales
    left, right = window
    if SIGN != 1:
        # The row maximum is taken before scaling, which wants a positive scale: its sign (or 0) goes into the scores.
        b_s = b_s * SIGN
    b_s = cap_scores(b_s, score_scale if CAPPED else None)
    if MASKED:
        o_n = row + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        m_keep = keep(
            gl.expand_dims(o_m, 1),
            gl.expand_dims(o_n, 0),
            n_keys,
            Window(left if LEFT else None, right if RIGHT else None, off),
        )
        b_s = gl.where(m_keep, b_s, float("-inf"))
    b_p, m, rescale = online_softmax_terms(b_s, m, scale_log2, MASKED)
    l = l * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, l.type.layout)), 1) + thread_sums(b_p)
    return b_p, m, l, rescale


@gluon.jit
def write_rows(
    o_desc,
    o_tile,
    lse,
    acc,
    m,
    l,
    item,
    row,
    n_heads,
    n_all_queries,
    DV: gl.constexpr,
    O_IN_Q: gl.constexpr,
    PACKED: gl.constexpr,
):
    """A warpgroup's rows of O and LSE from its final sums: 0 and -inf for a row that saw nothing.

    O is on its way when this returns.
    """
    i_h, i_b, start, n_queries = item
    l = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    # Not `> 0`, which NaN fails too: a row with NaN in it has seen something.
    seen = l != 0.0
    l = gl.where(seen, l, 1.0)
    b_lse = gl.where(seen, (m + gl.log2(l)) * 0.6931471805599453, float("-inf"))
    o_m = row + gl.arange(0, ROWS, l.type.layout)
    p_lse = lse + (gl.cast(i_b, gl.int64) * n_heads + i_h) * n_all_queries + start
    gl.store(p_lse + o_m, b_lse, mask=o_m < n_queries)
    inverse = gl.convert_layout(1.0 / l, gl.SliceLayout(1, acc.type.layout))
    b_o = acc * gl.expand_dims(inverse, 1)
    if not O_IN_Q:
        # The copy of the last item's rows may still read the buffer.
        tma.store_wait(0)
    # Whoever waited for that, or for the last product with Q, is one warp of four.
    thread_barrier()
    as_matrix(o_tile, ROWS, DV).store(b_o.to(o_desc.dtype))
    fence_async_shared()
    thread_barrier()
    store_tile(o_desc, o_tile, i_b, i_h, start, n_queries, row, PACKED)


@gluon.jit
def attend_tile(
    acc, b_p, m, l, b_q, tiles, barriers, ring, o_m, row, off, n_keys, window, scales,
    SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One key tile: its scores and their softmax, and the product with the values of the tile before it."""
    k_tiles, v_tiles = tiles
    full, empty = barriers
    stage, phase = ring
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(full.index(stage), phase)
    # [M, D] @ [D, N] -> [M, N]
    s_running = warpgroup_mma(
        b_q, as_matrix(k_tiles.index(stage), BLOCK_N, BLOCK_D).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    # [M, N] @ [N, DV] -> [M, DV]
    acc_running = warpgroup_mma(b_p, as_matrix(v_tiles.index(stage), BLOCK_N, BLOCK_DV), acc, is_async=True)
    b_s = warpgroup_mma_wait(1, deps=(s_running,))
    p32, m, l, rescale = probabilities(
        b_s, m, l, o_m, row, off, n_keys, window, scales, SIGN, CAPPED, LEFT, RIGHT, MASKED, BLOCK_N, S_LAYOUT,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc_running,))
    # Here and below Triton has all threads of the warpgroup meet before the one that arrives does.
    mbarrier.arrive(empty.index(stage), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
    b_p = gl.convert_layout(p32.to(b_q.dtype), b_p.type.layout)
    return acc, b_p, m, l


@gluon.jit
def pass_steps(barriers, stage, phase, count, STAGES: gl.constexpr):
    """Let `count` steps go by that other warpgroups need and this one does not: their tiles are given back as soon as
    they are there.
    """
    full, empty = barriers
    for _ in range(count):
        mbarrier.wait(full.index(stage), phase)
        mbarrier.arrive(empty.index(stage), count=1)
        stage, phase = next_stage(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def attend_item(
    b_s, acc, m, l, b_q, tiles, barriers, stage, phase, o_m, ends, off, n_keys, window, scales,
    STAGES: gl.constexpr, SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    MASK_LAST: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
    S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """All key tiles that a warpgroup's rows of an item reach, at least one, from its scores on: from the last to the
    first, masked, whole, masked.
    """
    _, v_tiles = tiles
    full, empty = barriers
    first, whole_first, whole_end, end = ends
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    p32, m, l, _ = probabilities(
        b_s, m, l, o_m, (end - 1) * BLOCK_N, off, n_keys, window, scales, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST,
        BLOCK_N, S_LAYOUT,
    )  # fmt: skip
    b_p = gl.convert_layout(p32.to(b_q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    masked = gl.maximum(end - whole_end, 1)
    whole = gl.maximum(end - whole_first, masked)
    steps = (1, masked, whole, end - first)
    for PART in gl.static_range(3):
        # Without a limit to the right only the last tile needs a mask there.
        if PART == 1 or (RIGHT if PART == 0 else LEFT):
            for i in range(steps[PART], steps[PART + 1]):
                acc, b_p, m, l = attend_tile(
                    acc, b_p, m, l, b_q, tiles, barriers, (stage, phase), o_m, (end - 1 - i) * BLOCK_N, off, n_keys,
                    window, scales, SIGN, CAPPED, LEFT, RIGHT, PART != 1, BLOCK_D, BLOCK_DV, BLOCK_N, S_LAYOUT,
                )  # fmt: skip
                stage, phase = next_stage(stage, phase, STAGES)
    mbarrier.wait(full.index(stage), phase)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = warpgroup_mma(b_p, as_matrix(v_tiles.index(stage), BLOCK_N, BLOCK_DV), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, m, l, stage, phase


@gluon.jit
def begin_item(
    q_tiles, k_tiles, notes, q_full, ring, slot, turn, stage, phase, window,
    W: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """Wait for the next item, let the key tiles before the warpgroup's own go by, and start the scores of its first: of
    anything if it has none.
    """
    full, _ = ring
    mbarrier.wait(q_full.index(slot), turn)
    note = slot * FIELDS
    i_m = read_note(notes, note, 4)
    item = (
        read_note(notes, note + 1, 4),
        read_note(notes, note + 2, 4),
        read_note(notes, note + 3, 4),
        read_note(notes, note + 4, 4),
    )
    n_keys = read_note(notes, note + 5, 4)
    # All threads have read the notes before one of them gives them free.
    thread_barrier()
    n_queries = gl.where(i_m >= 0, item[3], -1)
    first, _, _, end = key_tiles(i_m, n_queries, n_keys, window, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
    end = gl.where(i_m >= 0, end, first)
    own_first, whole_first, whole_end, own_end = own_tiles(
        i_m + W * ROWS, first, end, n_queries, n_keys, window, LEFT, RIGHT, BLOCK_N
    )
    stage, phase = pass_steps(ring, stage, phase, end - own_end, STAGES)
    some = own_first < own_end
    if some:
        mbarrier.wait(full.index(stage), phase)
    b_q = as_matrix(q_tiles.index(slot * GROUPS + W), ROWS, BLOCK_D)
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    # [M, D] @ [D, N] -> [M, N]
    s_running = warpgroup_mma(
        b_q, as_matrix(k_tiles.index(stage), BLOCK_N, BLOCK_D).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    return (
        s_running,
        i_m,
        item[0],
        item[1],
        item[2],
        n_queries,
        n_keys,
        first,
        end,
        own_first,
        whole_first,
        whole_end,
        own_end,
        stage,
        phase,
    )


@gluon.jit
def attend_items(
    given, W: gl.constexpr, GROUPS: gl.constexpr, SLOTS: gl.constexpr, STAGES: gl.constexpr, O_IN_Q: gl.constexpr,
    SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, MASK_LAST: gl.constexpr,
    PACKED: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: rows 64 · W to 64 · W + 63 of item after item, as the fetching warp notes them; O leaves under the
    next one's first scores.
    """
    o_desc, tiles, notes, barriers, lse, sizes, window, scales = given
    q_tiles, k_tiles, v_tiles, o_tiles = tiles
    q_full, q_empty, full, empty = barriers
    _, _, n_heads, _, _, _, n_all_queries, _ = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    ring = (full, empty)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    (
        s_running,
        i_m,
        i_h,
        i_b,
        start,
        n_queries,
        n_keys,
        first,
        end,
        own_first,
        whole_first,
        whole_end,
        own_end,
        stage,
        phase,
    ) = begin_item(
        q_tiles, k_tiles, notes, q_full, ring, slot, turn, stage, phase, window,
        W, GROUPS, STAGES, LEFT, RIGHT, BLOCK_D, BLOCK_N, s_layout,
    )  # fmt: skip
    while i_m >= 0:
        item = (i_h, i_b, start, n_queries)
        row = i_m + W * ROWS
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        l = thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, s_layout))
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
        b_s = warpgroup_mma_wait(0, deps=(s_running,))
        if own_first < own_end:
            o_m = row + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
            b_q = as_matrix(q_tiles.index(slot * GROUPS + W), ROWS, BLOCK_D)
            acc, m, l, stage, phase = attend_item(
                b_s, acc, m, l, b_q, (k_tiles, v_tiles), ring, stage, phase, o_m, (own_first, whole_first, whole_end,
                own_end), n_keys - n_queries, n_keys, window, scales, STAGES, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST,
                BLOCK_D, BLOCK_DV, BLOCK_N, s_layout,
            )  # fmt: skip
        elif first < end:
            # The step after the last tile, with its V.
            stage, phase = pass_steps(ring, stage, phase, 1, STAGES)
        stage, phase = pass_steps(ring, stage, phase, own_first - first, STAGES)
        if O_IN_Q:
            write_rows(
                o_desc, o_tiles.index(W), lse, acc, m, l, item, row, n_heads, n_all_queries, BLOCK_DV, O_IN_Q, PACKED
            )
            tma.store_wait(0)
            thread_barrier()
        mbarrier.arrive(q_empty.index(slot), count=1)
        slot, turn = next_stage(slot, turn, SLOTS)
        (
            s_running,
            i_m,
            i_h,
            i_b,
            start,
            n_queries,
            n_keys,
            first,
            end,
            own_first,
            whole_first,
            whole_end,
            own_end,
            stage,
            phase,
        ) = begin_item(
            q_tiles, k_tiles, notes, q_full, ring, slot, turn, stage, phase, window,
            W, GROUPS, STAGES, LEFT, RIGHT, BLOCK_D, BLOCK_N, s_layout,
        )  # fmt: skip
        if not O_IN_Q:
            write_rows(
                o_desc, o_tiles.index(W), lse, acc, m, l, item, row, n_heads, n_all_queries, BLOCK_DV, O_IN_Q, PACKED
            )
    warpgroup_mma_wait(0, deps=(s_running,))
    # The last copies still read shared memory.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def flash_fwd_hopper_kernel(
    q, k, v, o, lse, counter, cu_q, cu_k, n_batch, n_tiles, n_heads, n_all_heads, together, group, n_queries, n_keys,
    scale_log2, score_scale, left, right,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr,
    O_IN_Q: gl.constexpr, SLOTS: gl.constexpr, MASK_LAST: gl.constexpr, SIGN: gl.constexpr, REGISTERS: gl.constexpr,
    REGISTERS_FETCH: gl.constexpr,
):  # fmt: skip
    # Grid: as many programs as processors, or as items where those are fewer.
    # Owns: one item after the other, a query tile of 64 · GROUPS rows of one head: every n-th, or, with a counter, the
    # next that nobody has taken.
    # Loops over: the key tiles that the item's window reaches, from the last to the first.
    # Writes: the items' rows of o and lse.
    # O is put where the first slot's Q was.
    gl.static_assert(SLOTS == 1 or not O_IN_Q)
    LEFT: gl.constexpr = left is not None
    RIGHT: gl.constexpr = right is not None
    PACKED: gl.constexpr = cu_q is not None
    CAPPED: gl.constexpr = score_scale is not None
    TICKETS: gl.constexpr = counter is not None
    q_tiles = allocate_tiles(q, SLOTS * GROUPS)
    k_tiles = allocate_tiles(k, STAGES)
    v_tiles = allocate_tiles(v, STAGES)
    o_tiles = q_tiles if O_IN_Q else allocate_tiles(o, GROUPS)
    notes = allocate_notes(SLOTS * FIELDS)
    # One warp fills a buffer, all warpgroups empty it.
    barriers = (
        allocate_barriers(SLOTS, 1), allocate_barriers(SLOTS, GROUPS), allocate_barriers(STAGES, 1),
        allocate_barriers(STAGES, GROUPS),
    )  # fmt: skip
    sizes = (n_batch, n_tiles, n_heads, n_all_heads, together, group, n_queries, n_keys)
    # Partitions take no None: what is missing is a number or pointer that nobody reads.
    window = (left if LEFT else n_keys, right if RIGHT else n_keys)
    scales = (scale_log2, score_scale if CAPPED else scale_log2)
    tiles = (q_tiles, k_tiles, v_tiles, o_tiles)
    offsets_q, offsets_k, tickets = cu_q if PACKED else lse, cu_k if PACKED else lse, counter if TICKETS else lse
    fetch = ((q, k, v), (q_tiles, k_tiles, v_tiles), notes, barriers, sizes, window, offsets_q, offsets_k, tickets)
    attend = (o, tiles, notes, barriers, lse, sizes, window, scales)
    # fmt: off
    if GROUPS == 2:
        gl.warp_specialize([
            (attend_items, (
                attend, 0, 2, SLOTS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST, PACKED, BLOCK_D, BLOCK_DV,
                BLOCK_N,
            )),
            (attend_items, (
                attend, 1, 2, SLOTS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST, PACKED, BLOCK_D, BLOCK_DV,
                BLOCK_N,
            )),
            (fetch_items, (fetch, 2, SLOTS, BLOCK_N, STAGES, LEFT, RIGHT, PACKED, TICKETS)),
        ], [4, 1], [REGISTERS, REGISTERS_FETCH])
    else:
        gl.warp_specialize([
            (attend_items, (
                attend, 0, 3, SLOTS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST, PACKED, BLOCK_D, BLOCK_DV,
                BLOCK_N,
            )),
            (attend_items, (
                attend, 1, 3, SLOTS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST, PACKED, BLOCK_D, BLOCK_DV,
                BLOCK_N,
            )),
            (attend_items, (
                attend, 2, 3, SLOTS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, MASK_LAST, PACKED, BLOCK_D, BLOCK_DV,
                BLOCK_N,
            )),
            (fetch_items, (fetch, 3, SLOTS, BLOCK_N, STAGES, LEFT, RIGHT, PACKED, TICKETS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_FETCH])
    # fmt: on
