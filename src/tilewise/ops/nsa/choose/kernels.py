"""Which blocks each token attends to: scores of the blocks, then the best of them, exactly.

*Scores*: a program owns BLOCK_M tokens of one key head and walks the windows, BLOCK_N at a time: it keeps the tile of
windows and goes through the query heads of the group, adding up probabilities (their LSE is known) in registers, so
that nothing is summed across threads. Windows are laid out block by block, WINDOWS_P (a power of two) columns a block
of WINDOWS windows. A window that begins in block j reaches into the blocks j to j + PLANES - 1: each plane holds one
such share, and the second kernel adds them.
Operations: 2 · D a pair of query and window, as half of the compressed branch; bytes: Q once for each BLOCK_N windows,
out of the L2 cache; planes once, so tokens come in chunks.
*Best*: a program owns BLOCK_R tokens and all their blocks. Scores are not negative, so their bits order as they do: 31
steps of bisection over the bits find the last score that is taken, a prefix sum over the blocks which of its equals are
(the first), and another one their places.
"""

import triton
import triton.language as tl

from tilewise.ops._device.load import load_rows
from tilewise.ops._device.records import Rows
from tilewise.ops._device.varlen import locate_slot, sequence_bounds

SIZES = ("n_batch", "n_tokens", "n_heads_k", "group", "n_windows", "first_tile", "n_tiles", "n_blocks", "n_rows")
FORCED = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=SIZES)
def nsa_choose_scores_kernel(
    q, k_cmp, lse, planes, q_strides, k_strides, cu, windows, n_batch, n_tokens, n_heads_k, group, n_windows,
    first_tile, n_tiles, n_blocks, scale_log2,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr,
    STRIDE: tl.constexpr, WINDOWS: tl.constexpr, WINDOWS_P: tl.constexpr, PLANES: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M tokens of the chunk x key heads.
    # Owns: BLOCK_M tokens of one key head.
    # Loops over: tiles of windows that they see, and the query heads of the group.
    # Writes: each token's planes of block scores, up to its own block.
    i_tile = tl.program_id(0) % n_tiles
    i_hk = tl.program_id(0) // n_tiles
    i_b, i_local, start, Tq = locate_slot(first_tile + i_tile, cu, n_batch, n_tokens, BLOCK_M)
    i_m = i_local * BLOCK_M
    i_bq, start_q, start_w, n_seen = i_b, 0, 0, n_windows
    if cu is not None:
        start_w, n_seen = sequence_bounds(windows, i_b, n_windows)
        i_bq, start_q = 0, start
    o_m = i_m + tl.arange(0, BLOCK_M)
    BLOCKS: tl.constexpr = BLOCK_N // WINDOWS_P
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    # Blocks of tokens up to the last one's own; those behind the last window that anyone sees score 0.
    n_mine = tl.where(i_m < Tq, tl.minimum(i_m + BLOCK_M, Tq) - 1, -1) // (WINDOWS * STRIDE) + 1
    for i_block in range(0, n_mine, BLOCKS):
        o_c = (i_block + o_n // WINDOWS_P) * WINDOWS + o_n % WINDOWS_P
        m_c = (o_n % WINDOWS_P < WINDOWS) & (o_c < n_seen)
        p_k = (
            k_cmp
            + tl.cast(i_bq, tl.int64) * k_strides.batch
            + (start_w + o_c).to(tl.int64) * k_strides.token
            + tl.cast(i_hk, tl.int64) * k_strides.head
        )
        # [N, D]
        b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_c[:, None] & (o_d < D)[None, :], other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_h in range(i_hk * group, i_hk * group + group):
            # [M, D]
            b_q = load_rows(Rows(q, q_strides, i_bq, i_h, start_q, Tq), i_m, D, BLOCK_M, BLOCK_D, TMA)
            p_lse = lse + (tl.cast(i_bq, tl.int64) * (n_heads_k * group) + i_h) * n_tokens + start_q
            b_lse = tl.load(p_lse + o_m, mask=o_m < Tq, other=float("-inf")) * 1.4426950408889634
            b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
            # [M, D] @ [D, N] -> [M, N]
            acc += tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale_log2 - b_lse[:, None])
        m_seen = m_c[None, :] & ((o_c * STRIDE + (SIZE - 1))[None, :] <= o_m[:, None])
        acc = tl.reshape(tl.where(m_seen, acc, 0.0), [BLOCK_M, BLOCKS, WINDOWS_P])
        o_w = tl.arange(0, WINDOWS_P)
        o_j = i_block + tl.arange(0, BLOCKS)
        m_j = (o_m < Tq)[:, None] & (o_j < n_blocks)[None, :]
        o_row = ((i_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64) * n_heads_k + i_hk) * PLANES
        for PLANE in tl.static_range(PLANES):
            # Strides that window w of a block shares with the block that lies PLANE behind its own.
            shared = tl.minimum(o_w + SIZE // STRIDE, WINDOWS * (PLANE + 1)) - tl.maximum(o_w, WINDOWS * PLANE)
            shared = tl.where(o_w < WINDOWS, tl.maximum(shared, 0), 0).to(tl.float32)
            b_score = tl.sum(acc * shared[None, None, :], 2)
            tl.store(planes + (o_row + PLANE)[:, None] * n_blocks + o_j[None, :], b_score, mask=m_j)


@triton.jit
def block_bits(
    planes,
    o_row,
    m_row,
    i_own,
    i_block,
    n_blocks,
    INIT: tl.constexpr,
    LOCAL: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scores of blocks `i_block .. i_block + BLOCK` as integers of the same order, [R, BLOCK]: FORCED where always in,
    -1 where never.
    """
    o_j = i_block + tl.arange(0, BLOCK)
    score = tl.zeros([o_row.shape[0], BLOCK], tl.float32)
    m_j = m_row[:, None] & (o_j[None, :] <= i_own[:, None])
    for PLANE in tl.static_range(PLANES):
        p_score = planes + (o_row * PLANES + PLANE)[:, None] * n_blocks + (o_j - PLANE)[None, :]
        score += tl.load(p_score, mask=m_j & (o_j >= PLANE)[None, :], other=0.0)
    # NaN has the bits of FORCED.
    score = tl.where(score == score, score, 0.0)
    forced = (o_j < INIT)[None, :] | (o_j[None, :] > (i_own - LOCAL)[:, None])
    return tl.where(m_j, tl.where(forced, FORCED, score.to(tl.int32, bitcast=True)), -1)


@triton.jit
def count_from(planes, o_row, m_row, i_own, b_bits, limit, n_mine, n_blocks, INIT: tl.constexpr, LOCAL: tl.constexpr,
PLANES: tl.constexpr,
               BLOCK: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """How many blocks of each row score `limit` or more; with WHOLE, `b_bits` holds them all."""
    if WHOLE:
        count = tl.sum((b_bits >= limit[:, None]).to(tl.int32), 1)
    else:
        count = tl.zeros_like(limit)
        for i_block in range(0, n_mine, BLOCK):
            b_bits = block_bits(planes, o_row, m_row, i_own, i_block, n_blocks, INIT, LOCAL, PLANES, BLOCK)
            count += tl.sum((b_bits >= limit[:, None]).to(tl.int32), 1)
    return count


@triton.jit(do_not_specialize=SIZES)
def nsa_choose_best_kernel(
    planes, indices, cu, n_batch, n_tokens, n_heads_k, first_tile, n_blocks, n_rows,
    BLOCK_SIZE: tl.constexpr, COUNT: tl.constexpr, COUNT_P: tl.constexpr, INIT: tl.constexpr, LOCAL: tl.constexpr,
    PLANES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R rows of the chunk: key heads x tokens.
    # Owns: BLOCK_R tokens of one key head.
    # Loops over: the bits of a score; and over tiles of blocks, where not all fit one.
    # Writes: the blocks of each token, ascending, -1 behind the last.
    i_hk = tl.program_id(0) * BLOCK_R // n_rows
    i_r = tl.program_id(0) * BLOCK_R % n_rows
    _, i_local, start, Tq = locate_slot(first_tile + i_r // BLOCK_M, cu, n_batch, n_tokens, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    o_t = i_local * BLOCK_M + i_r % BLOCK_M + o_r
    m_r = o_t < Tq
    i_own = o_t // BLOCK_SIZE
    o_row = (i_r + o_r).to(tl.int64) * n_heads_k + i_hk
    n_mine = tl.max(tl.where(m_r, i_own, -1), 0) + 1
    b_bits = block_bits(planes, o_row, m_r, i_own, 0, n_blocks, INIT, LOCAL, PLANES, BLOCK)
    # The greatest limit that COUNT blocks or more reach: the score of the last one taken; 0 where fewer may be taken at
    # all.
    last = tl.zeros([BLOCK_R], tl.int32)
    for i in range(31):
        higher = last | (1 << (30 - i))
        count = count_from(
            planes, o_row, m_r, i_own, b_bits, higher, n_mine, n_blocks, INIT, LOCAL, PLANES, BLOCK, WHOLE
        )
        last = tl.where(count >= COUNT, higher, last)
    # No score lies above FORCED, and no number either.
    above = tl.where(last == FORCED, last, last + 1)
    n_above = count_from(planes, o_row, m_r, i_own, b_bits, above, n_mine, n_blocks, INIT, LOCAL, PLANES, BLOCK, WHOLE)
    n_equal = COUNT - tl.where(last == FORCED, 0, n_above)
    p_out = indices + ((start + o_t).to(tl.int64) * n_heads_k + i_hk) * COUNT
    n_taken = tl.zeros([BLOCK_R], tl.int32)
    n_met = tl.zeros([BLOCK_R], tl.int32)
    for i_block in range(0, n_mine, BLOCK):
        if not WHOLE:
            b_bits = block_bits(planes, o_row, m_r, i_own, i_block, n_blocks, INIT, LOCAL, PLANES, BLOCK)
        equal = (b_bits == last[:, None]).to(tl.int32)
        rank = n_met[:, None] + tl.cumsum(equal, 1)
        taken = (b_bits > last[:, None]) | ((equal > 0) & (rank <= n_equal[:, None]))
        place = n_taken[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
        tl.store(p_out[:, None] + place, (i_block + tl.arange(0, BLOCK))[None, :] + tl.zeros_like(place), mask=taken)
        n_met += tl.sum(equal, 1)
        n_taken += tl.sum(taken.to(tl.int32), 1)
    o_s = tl.arange(0, COUNT_P)
    m_s = m_r[:, None] & (o_s < COUNT)[None, :] & (o_s[None, :] >= n_taken[:, None])
    tl.store(p_out[:, None] + o_s[None, :], tl.full([BLOCK_R, COUNT_P], -1, tl.int32), mask=m_s)
