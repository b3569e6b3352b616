"""Flash attention forward for Hopper, in Gluon: TMA and the matrix units driven by warps with a job each, one program a processor.

Tile plan, one item a query tile of 64 · GROUPS rows of one head: warpgroups of 64 rows each keep their Q in shared memory, and O, with the scores of
one key tile, in registers; one warp more fetches: Q, and K and V tiles of BLOCK_N rows through rings of STAGES buffers, for the next item too while
the last products of this one run. A warpgroup computes the scores of a tile, then runs the product with the values of the tile before it under the
softmax of this one. Key tiles are walked from the last to the first: the tile at a causal diagonal, or past the last key, comes first, and is masked;
tiles that need no mask have a loop of their own.
Operations: 2 · 64 · GROUPS · BLOCK_N · (D + Dv) a step. Bytes from memory: Q, O and LSE once; K and V once for each query tile, from the L2 cache for
all but the first. On chip: (64 · GROUPS + STAGES · BLOCK_N) · (D + Dv) elements of shared memory (O takes Q's place where that is too much);
(BLOCK_N · 3/2 + Dv) / 2 registers a thread for scores, probabilities and O.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilewise.ops._tile.hopper import allocate_barriers, allocate_tiles, as_matrix, load_tile, next_stage, store_tile, thread_barrier
from tilewise.ops._tile.mask import keep, key_range
from tilewise.ops._tile.softmax import cap_scores, online_softmax_step
from tilewise.ops._tile.varlen import find_tile, sequence_bounds

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_batch", "n_tiles", "n_heads", "n_all_heads", "together", "group", "n_queries", "n_keys", "left", "right")

# Rows of one warpgroup.
ROWS = gl.constexpr(64)
# What the fetching warp notes of an item: first row (-1 where none is left), head, batch entry, the sequence's first token, queries, keys.
FIELDS = gl.constexpr(6)


@gluon.jit
def locate_item(item, sizes, cu_q, cu_k, LAST_FIRST: gl.constexpr, PACKED: gl.constexpr, BLOCK_M: gl.constexpr):
    """First row, head, batch entry, first query token, queries, first key token and keys for an item.

    Heads (of all batch entries) come `together` at a time; of those, all tiles with the same number are neighbours, LAST_FIRST from the last tile
    down: under a causal mask the longest come first. A packed item may be a slot past its sequence's last tile: its first row is then not below the
    number of queries.
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
def key_tiles(i_m, n_queries, n_keys, window, LEFT: gl.constexpr, RIGHT: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Numbers of key tiles that the item reaches: the first, the first and the one past the last that need no mask, the one past the last of all."""
    left, right = window
    low, full_low, full_high, high = key_range(i_m, n_queries, n_keys, left if LEFT else None, right if RIGHT else None, BLOCK_M, BLOCK_N)
    return low // BLOCK_N, full_low // BLOCK_N, full_high // BLOCK_N, gl.cdiv(high, BLOCK_N)


@gluon.jit
def write_field(notes, FIELD: gl.constexpr, value):
    """One number of an item into shared memory, by the fetching warp."""
    notes.index(FIELD).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_field(notes, FIELD: gl.constexpr):
    """The same number, in a warpgroup."""
    return gl.max(notes.index(FIELD).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def fetch_key_tile(desc, tiles, full, empty, stage, phase, place, row, PACKED: gl.constexpr):
    """Start to read rows `row ..` of K or V into a buffer of its ring, once that is free."""
    i_b, i_h, start, n_keys = place
    mbarrier.wait(empty.index(stage), phase ^ 1)
    mbarrier.expect(full.index(stage), desc.block_type.nbytes)
    load_tile(desc, tiles.index(stage), full.index(stage), i_b, i_h, start, n_keys, row, PACKED)


@gluon.jit
def fetch_queries(desc, tiles, notes, q_full, q_empty, turn, i_m, i_h, i_b, start, n_queries, n_keys, GROUPS: gl.constexpr, PACKED: gl.constexpr):
    """Start to read an item's Q, once the one before it is no longer needed, and note what the item is."""
    mbarrier.wait(q_empty.index(0), turn ^ 1)
    write_field(notes, 0, i_m)
    write_field(notes, 1, i_h)
    write_field(notes, 2, i_b)
    write_field(notes, 3, start)
    write_field(notes, 4, n_queries)
    write_field(notes, 5, n_keys)
    thread_barrier()
    mbarrier.expect(q_full.index(0), GROUPS * desc.block_type.nbytes)
    for w in gl.static_range(GROUPS):
        load_tile(desc, tiles.index(w), q_full.index(0), i_b, i_h, start, n_queries, i_m + w * ROWS, PACKED)


@gluon.jit
def fetch_items(
    given, GROUPS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    TICKETS: gl.constexpr,
):  # fmt: skip
    """The fetching warp: item after item, in the order K, Q, then K of the next tile before V of this one, as products want them."""
    descs, tiles, notes, barriers, sizes, window, cu_q, cu_k, counter = given
    q_desc, k_desc, v_desc = descs
    q_tiles, k_tiles, v_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, _ = barriers
    _, n_tiles, _, n_all_heads, _, group, _, _ = sizes
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    item = gl.program_id(0)
    while item < n_tiles * n_all_heads:
        i_m, i_h, i_b, start_q, n_queries, start_k, n_keys = locate_item(item, sizes, cu_q, cu_k, RIGHT, PACKED, GROUPS * ROWS)
        if i_m < n_queries:
            first, _, _, end = key_tiles(i_m, n_queries, n_keys, window, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
            place = (i_b, i_h // group, start_k, n_keys)
            if first < end:
                fetch_key_tile(k_desc, k_tiles, k_full, k_empty, stage, phase, place, (end - 1) * BLOCK_N, PACKED)
            fetch_queries(q_desc, q_tiles, notes, q_full, q_empty, turn, i_m, i_h, i_b, start_q, n_queries, n_keys, GROUPS, PACKED)
            turn ^= 1
            for i in range(first, end):
                row = (end - 1 - i + first) * BLOCK_N
                after, phase_after = next_stage(stage, phase, STAGES)
                if i + 1 < end:
                    fetch_key_tile(k_desc, k_tiles, k_full, k_empty, after, phase_after, place, row - BLOCK_N, PACKED)
                fetch_key_tile(v_desc, v_tiles, v_full, v_empty, stage, phase, place, row, PACKED)
                stage = after
                phase = phase_after
        if TICKETS:
            # Taken as late as can be: who has done its items takes the next, whatever they took.
            item = gl.num_programs(0) + gl.atomic_add(counter, 1, sem="relaxed")
        else:
            item += gl.num_programs(0)
    mbarrier.wait(q_empty.index(0), turn ^ 1)
    write_field(notes, 0, -1)
    thread_barrier()
    mbarrier.arrive(q_full.index(0), count=1)


@gluon.jit
def probabilities(
    b_s, m, l, o_m, row, off, n_keys, window, scales, SIGN: gl.constexpr, CAPPED: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax over the scores of the key tile from `row` on."""
    scale_log2, score_scale = scales
    left, right = window
    if SIGN != 1:
        # The row maximum is taken before scaling, which wants a positive scale: its sign (or 0) goes into the scores.
        b_s = b_s * SIGN
    b_s = cap_scores(b_s, score_scale if CAPPED else None)
    if MASKED:
        o_n = row + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S_LAYOUT))
        m_keep = keep(gl.expand_dims(o_m, 1), gl.expand_dims(o_n, 0), n_keys, off, left if LEFT else None, right if RIGHT else None)
        b_s = gl.where(m_keep, b_s, float("-inf"))
    return online_softmax_step(b_s, m, l, scale_log2, MASKED)


@gluon.jit
def write_rows(o_desc, o_tile, lse, acc, m, l, item, row, n_heads, n_all_queries, DV: gl.constexpr, O_IN_Q: gl.constexpr, PACKED: gl.constexpr):
    """A warpgroup's rows of O and LSE from its final sums: 0 and -inf for a row that saw nothing. O is on its way when this returns."""
    i_h, i_b, start, n_queries = item
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
    acc, b_p, m, l, b_q, tiles, barriers, ring, go, o_m, row, off, n_keys, window, scales, W: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, MASKED: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """One key tile: its scores, and under their softmax the product with the values of the tile before it."""
    k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty, turns = barriers
    before, phase_before, stage, phase = ring
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), phase)
    if TURNS:
        # Warpgroups start their products in turn, so that one's run under the softmax of another; the first goes first, unasked.
        mbarrier.wait(turns.index(W), go ^ (1 if W == 0 else 0))
    # [M, D] @ [D, N] -> [M, N]
    s_running = warpgroup_mma(b_q, as_matrix(k_tiles.index(stage), BLOCK_N, BLOCK_D).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), phase_before)
    # [M, N] @ [N, DV] -> [M, DV]
    acc_running = warpgroup_mma(b_p, as_matrix(v_tiles.index(before), BLOCK_N, BLOCK_DV), acc, is_async=True)
    if TURNS:
        mbarrier.arrive(turns.index((W + 1) % GROUPS), count=1)
    b_s = warpgroup_mma_wait(1, deps=(s_running,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p32, m, l, rescale = probabilities(
        b_s, m, l, o_m, row, off, n_keys, window, scales, SIGN, CAPPED, LEFT, RIGHT, MASKED, BLOCK_N, S_LAYOUT,
    )  # fmt: skip
    acc = warpgroup_mma_wait(0, deps=(acc_running,))
    mbarrier.arrive(v_empty.index(before), count=1)
    acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, acc.type.layout)), 1)
    b_p = gl.convert_layout(p32.to(b_q.dtype), b_p.type.layout)
    return acc, b_p, m, l


@gluon.jit
def attend_item(
    acc, m, l, b_q, tiles, barriers, q_empty, stage, phase, go, o_m, ends, off, n_keys, window, scales, W: gl.constexpr, GROUPS: gl.constexpr,
    TURNS: gl.constexpr, STAGES: gl.constexpr, O_IN_Q: gl.constexpr, SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, S_LAYOUT: gl.constexpr,
):  # fmt: skip
    """All key tiles of an item, at least one: from the last to the first, masked, whole, masked."""
    k_tiles, v_tiles = tiles
    k_full, k_empty, v_full, v_empty, _ = barriers
    first, whole_first, whole_end, end = ends
    zero = gl.zeros([ROWS, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(k_full.index(stage), phase)
    # [M, D] @ [D, N] -> [M, N]
    b_s = warpgroup_mma(b_q, as_matrix(k_tiles.index(stage), BLOCK_N, BLOCK_D).permute((1, 0)), zero, use_acc=False, is_async=True)
    b_s = warpgroup_mma_wait(0, deps=(b_s,))
    mbarrier.arrive(k_empty.index(stage), count=1)
    p32, m, l, _ = probabilities(
        b_s, m, l, o_m, (end - 1) * BLOCK_N, off, n_keys, window, scales, SIGN, CAPPED, LEFT, RIGHT, True, BLOCK_N, S_LAYOUT,
    )  # fmt: skip
    b_p = gl.convert_layout(p32.to(b_q.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))
    masked = gl.maximum(end - whole_end, 1)
    whole = gl.maximum(end - whole_first, masked)
    steps = (1, masked, whole, end - first)
    for PART in gl.static_range(3):
        # Without a limit to the right only the last tile needs a mask there.
        if PART == 1 or (RIGHT if PART == 0 else LEFT):
            for i in range(steps[PART], steps[PART + 1]):
                after, phase_after = next_stage(stage, phase, STAGES)
                ring = (stage, phase, after, phase_after)
                acc, b_p, m, l = attend_tile(
                    acc, b_p, m, l, b_q, tiles, barriers, ring, go, o_m, (end - 1 - i) * BLOCK_N, off, n_keys, window, scales, W, GROUPS, TURNS,
                    SIGN, CAPPED, LEFT, RIGHT, PART != 1, BLOCK_D, BLOCK_DV, BLOCK_N, S_LAYOUT,
                )  # fmt: skip
                stage = after
                phase = phase_after
                go ^= 1
    if not O_IN_Q:
        mbarrier.arrive(q_empty.index(0), count=1)
    mbarrier.wait(v_full.index(stage), phase)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = warpgroup_mma(b_p, as_matrix(v_tiles.index(stage), BLOCK_N, BLOCK_DV), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    stage, phase = next_stage(stage, phase, STAGES)
    return acc, m, l, stage, phase, go


@gluon.jit
def attend_items(
    given, W: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr, STAGES: gl.constexpr, O_IN_Q: gl.constexpr,
    SIGN: gl.constexpr, CAPPED: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, PACKED: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Warpgroup W: rows 64 · W to 64 · W + 63 of item after item, as the fetching warp notes them."""
    o_desc, tiles, notes, barriers, lse, sizes, window, scales = given
    q_tiles, k_tiles, v_tiles, o_tiles = tiles
    q_full, q_empty, k_full, k_empty, v_full, v_empty, turns = barriers
    _, _, n_heads, _, _, _, n_all_queries, _ = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    b_q = as_matrix(q_tiles.index(W), ROWS, BLOCK_D)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    go = gl.to_tensor(0)
    mbarrier.wait(q_full.index(0), turn)
    i_m = read_field(notes, 0)
    while i_m >= 0:
        item = (read_field(notes, 1), read_field(notes, 2), read_field(notes, 3), read_field(notes, 4))
        n_keys = read_field(notes, 5)
        # All threads have read the notes before one of them gives them free.
        thread_barrier()
        n_queries = item[3]
        o_m = i_m + W * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
        m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, s_layout))
        acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)
        ends = key_tiles(i_m, n_queries, n_keys, window, LEFT, RIGHT, GROUPS * ROWS, BLOCK_N)
        if ends[0] < ends[3]:
            acc, m, l, stage, phase, go = attend_item(
                acc, m, l, b_q, (k_tiles, v_tiles), (k_full, k_empty, v_full, v_empty, turns), q_empty, stage, phase, go, o_m, ends,
                n_keys - n_queries, n_keys, window, scales, W, GROUPS, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, BLOCK_D, BLOCK_DV, BLOCK_N,
                s_layout,
            )  # fmt: skip
        elif not O_IN_Q:
            mbarrier.arrive(q_empty.index(0), count=1)
        write_rows(o_desc, o_tiles.index(W), lse, acc, m, l, item, i_m + W * ROWS, n_heads, n_all_queries, BLOCK_DV, O_IN_Q, PACKED)
        if O_IN_Q:
            tma.store_wait(0)
            thread_barrier()
            mbarrier.arrive(q_empty.index(0), count=1)
        turn ^= 1
        mbarrier.wait(q_full.index(0), turn)
        i_m = read_field(notes, 0)
    # The last copies still read shared memory.
    tma.store_wait(0)


@gluon.jit(do_not_specialize=SIZES)
def flash_fwd_hopper_kernel(
    q, k, v, o, lse, counter, cu_q, cu_k, n_batch, n_tiles, n_heads, n_all_heads, together, group, n_queries, n_keys,
    scale_log2, score_scale, left, right,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, TURNS: gl.constexpr,
    O_IN_Q: gl.constexpr, SIGN: gl.constexpr, REGISTERS: gl.constexpr, REGISTERS_FETCH: gl.constexpr,
):  # fmt: skip
    # Grid: as many programs as processors, or as items where those are fewer.
    # Owns: one item after the other, a query tile of 64 · GROUPS rows of one head: every n-th, or, with a counter, the next that nobody has taken.
    # Loops over: the key tiles that the item's window reaches, from the last to the first.
    # Writes: the items' rows of o and lse.
    LEFT: gl.constexpr = left is not None
    RIGHT: gl.constexpr = right is not None
    PACKED: gl.constexpr = cu_q is not None
    CAPPED: gl.constexpr = score_scale is not None
    TICKETS: gl.constexpr = counter is not None
    q_tiles = allocate_tiles(q, GROUPS)
    k_tiles = allocate_tiles(k, STAGES)
    v_tiles = allocate_tiles(v, STAGES)
    o_tiles = q_tiles if O_IN_Q else allocate_tiles(o, GROUPS)
    notes = gl.allocate_shared_memory(gl.int32, [FIELDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # One warp fills a buffer, all warpgroups empty it.
    barriers = (
        allocate_barriers(1, 1), allocate_barriers(1, GROUPS), allocate_barriers(STAGES, 1), allocate_barriers(STAGES, GROUPS),
        allocate_barriers(STAGES, 1), allocate_barriers(STAGES, GROUPS), allocate_barriers(GROUPS, 1),
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
            (attend_items, (attend, 0, 2, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, PACKED, BLOCK_D, BLOCK_DV, BLOCK_N)),
            (attend_items, (attend, 1, 2, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, PACKED, BLOCK_D, BLOCK_DV, BLOCK_N)),
            (fetch_items, (fetch, 2, BLOCK_N, STAGES, LEFT, RIGHT, PACKED, TICKETS)),
        ], [4, 1], [REGISTERS, REGISTERS_FETCH])
    else:
        gl.warp_specialize([
            (attend_items, (attend, 0, 3, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, PACKED, BLOCK_D, BLOCK_DV, BLOCK_N)),
            (attend_items, (attend, 1, 3, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, PACKED, BLOCK_D, BLOCK_DV, BLOCK_N)),
            (attend_items, (attend, 2, 3, TURNS, STAGES, O_IN_Q, SIGN, CAPPED, LEFT, RIGHT, PACKED, BLOCK_D, BLOCK_DV, BLOCK_N)),
            (fetch_items, (fetch, 3, BLOCK_N, STAGES, LEFT, RIGHT, PACKED, TICKETS)),
        ], [4, 4, 1], [REGISTERS, REGISTERS, REGISTERS_FETCH])
    # fmt: on
