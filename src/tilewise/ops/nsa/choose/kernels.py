"""Which blocks each token attends to: scores of the blocks, then the best of them, exactly.

*Scores*: a program owns BLOCK_M tokens of one KV head and loops over the windows, BLOCK_N at a time: it keeps the tile
of windows and loops over the query heads of the group, adding up probabilities (their LSE is known) in registers, so
that nothing is summed across threads. Windows are laid out block by block, COUNT_P (a power of two) columns a block of
COUNT windows. A window that begins in block j reaches into the blocks j to j + PLANES - 1: each plane holds one
such share, and the second kernel adds them.
Operations: 2 · D a pair of query and window, as half of the compressed branch; bytes: Q once for each BLOCK_N windows,
out of the L2 cache; planes once, so tokens come in chunks.
*Best*: a program owns BLOCK_R tokens and all their blocks, and takes the best of them (`_device.choice`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.choice import ScoredRows, write_best
from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import first_position, load_rows, locate_slot, sequence_bounds

SIZES = ("n_batch", "n_tokens", "n_heads_k", "group", "n_windows", "first_tile", "n_tiles", "n_blocks", "n_rows")


class ScoresTile(NamedTuple):
    """Constants of the tiles of scores."""

    D: Any
    BLOCK_D: Any
    BLOCK_M: Any
    BLOCK_N: Any
    TMA: Any
    PRECISION: Any


class Windows(NamedTuple):
    """Constants of windows: tokens in one, from one to the next; how many begin in a block, also padded to tiles;
    planes of shares.
    """

    SIZE: Any
    STRIDE: Any
    COUNT: Any
    COUNT_P: Any
    PLANES: Any


@triton.jit(do_not_specialize=SIZES)
def nsa_choose_scores_kernel(
    q, k_cmp, lse, planes, q_strides, k_strides, cu, first, windows, n_batch, n_tokens, n_heads_k, group, n_windows,
    first_tile, n_tiles, n_blocks, scale_log2,
    TILE: tl.constexpr, WINDOWS: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M tokens of the chunk x KV heads.
    # Owns: BLOCK_M tokens of one KV head.
    # Loops over: tiles of windows that they see, and the query heads of the group.
    # Writes: each token's planes of block scores, up to its own block.
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    COUNT: tl.constexpr = WINDOWS.COUNT
    COUNT_P: tl.constexpr = WINDOWS.COUNT_P
    PLANES: tl.constexpr = WINDOWS.PLANES
    i_tile = tl.program_id(0) % n_tiles
    i_hk = tl.program_id(0) // n_tiles
    i_b, i_local, start, Tq = locate_slot(first_tile + i_tile, cu, n_batch, n_tokens, BLOCK_M)
    i_m = i_local * BLOCK_M
    i_first = first_position(first, i_b)
    i_bq, start_q, start_w, n_seen = i_b, 0, 0, n_windows
    if cu is not None:
        start_w, n_seen = sequence_bounds(windows, i_b, n_windows)
        i_bq, start_q = 0, start
    o_m = i_m + tl.arange(0, BLOCK_M)
    BLOCKS: tl.constexpr = BLOCK_N // COUNT_P
    o_n = tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, TILE.BLOCK_D)
    # Blocks of tokens up to the last one's own; those behind the last window that any of them sees score 0.
    n_mine = tl.where(i_m < Tq, i_first + tl.minimum(i_m + BLOCK_M, Tq) - 1, -1) // (COUNT * WINDOWS.STRIDE) + 1
    if first is not None:
        n_mine = tl.minimum(n_mine, n_blocks)
    for i_block in range(0, n_mine, BLOCKS):
        o_c = (i_block + o_n // COUNT_P) * COUNT + o_n % COUNT_P
        m_c = (o_n % COUNT_P < COUNT) & (o_c < n_seen)
        p_k = (
            k_cmp
            + tl.cast(i_bq, tl.int64) * k_strides.batch
            + (start_w + o_c).to(tl.int64) * k_strides.token
            + tl.cast(i_hk, tl.int64) * k_strides.head
        )
        # [N, D]
        b_k = tl.load(p_k[:, None] + o_d[None, :], mask=m_c[:, None] & (o_d < TILE.D)[None, :], other=0.0)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for i_h in range(i_hk * group, i_hk * group + group):
            # [M, D]
            b_q = load_rows(Rows(q, q_strides, i_bq, i_h, start_q, Tq), i_m, TILE.D, BLOCK_M, TILE.BLOCK_D, TILE.TMA)
            p_lse = lse + (tl.cast(i_bq, tl.int64) * (n_heads_k * group) + i_h) * n_tokens + start_q
            b_lse = tl.load(p_lse + o_m, mask=o_m < Tq, other=float("-inf")) * 1.4426950408889634
            b_lse = tl.where(b_lse == float("-inf"), float("inf"), b_lse)
            # [M, D] @ [D, N] -> [M, N]
            acc += tl.exp2(tl.dot(b_q, tl.trans(b_k), input_precision=TILE.PRECISION) * scale_log2 - b_lse[:, None])
        m_seen = m_c[None, :] & ((o_c * WINDOWS.STRIDE + (WINDOWS.SIZE - 1))[None, :] <= (i_first + o_m)[:, None])
        acc = tl.reshape(tl.where(m_seen, acc, 0.0), [BLOCK_M, BLOCKS, COUNT_P])
        o_w = tl.arange(0, COUNT_P)
        o_j = i_block + tl.arange(0, BLOCKS)
        m_j = (o_m < Tq)[:, None] & (o_j < n_blocks)[None, :]
        o_row = ((i_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64) * n_heads_k + i_hk) * PLANES
        for PLANE in tl.static_range(PLANES):
            # Strides that window w of a block shares with the block that lies PLANE behind its own.
            last = o_w + WINDOWS.SIZE // WINDOWS.STRIDE
            shared = tl.minimum(last, COUNT * (PLANE + 1)) - tl.maximum(o_w, COUNT * PLANE)
            shared = tl.where(o_w < COUNT, tl.maximum(shared, 0), 0).to(tl.float32)
            b_score = tl.sum(acc * shared[None, None, :], 2)
            tl.store(planes + (o_row + PLANE)[:, None] * n_blocks + o_j[None, :], b_score, mask=m_j)


@triton.jit(do_not_specialize=SIZES)
def nsa_choose_best_kernel(
    planes, indices, cu, first, n_batch, n_tokens, n_heads_k, first_tile, n_blocks, n_rows,
    CHOICE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R rows of the chunk: KV heads x tokens.
    # Owns: BLOCK_R tokens of one KV head.
    # Loops over: the bits of a score; and over tiles of blocks, where not all fit one.
    # Writes: the blocks of each token, ascending, -1 behind the last.
    i_hk = tl.program_id(0) * BLOCK_R // n_rows
    i_r = tl.program_id(0) * BLOCK_R % n_rows
    i_b, i_local, start, Tq = locate_slot(first_tile + i_r // BLOCK_M, cu, n_batch, n_tokens, BLOCK_M)
    o_r = tl.arange(0, BLOCK_R)
    o_t = i_local * BLOCK_M + i_r % BLOCK_M + o_r
    m_r = o_t < Tq
    i_own = (first_position(first, i_b) + o_t) // CHOICE.BLOCK_SIZE
    if first is not None:
        # Values that were not checked must not lead out of bounds.
        i_own = tl.minimum(i_own, n_blocks - 1)
    o_row = (i_r + o_r).to(tl.int64) * n_heads_k + i_hk
    rows = ScoredRows(planes, o_row, m_r, i_own, n_blocks)
    write_best(rows, indices + ((start + o_t).to(tl.int64) * n_heads_k + i_hk) * CHOICE.COUNT, CHOICE)
