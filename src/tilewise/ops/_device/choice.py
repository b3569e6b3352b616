"""The best blocks of tokens whose blocks have scores: exactly, ties to the lower index.

Scores are not negative, so their bits order as they do: 31 steps of bisection over the bits find the last score that is
taken, a prefix sum over the blocks which of its equals are (the first), and another one their places.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

FORCED = tl.constexpr(0x7FFFFFFF)


class Choice(NamedTuple):
    """Constants of the choice: tokens in a block; blocks to take, and as tiles hold them; of them the first and the
    last that are always in; planes of shares; blocks of a tile, and whether those are all.
    """

    BLOCK_SIZE: Any
    COUNT: Any
    COUNT_P: Any
    INIT: Any
    LOCAL: Any
    PLANES: Any
    BLOCK: Any
    WHOLE: Any


class ScoredRows(NamedTuple):
    """Tokens of one KV head whose blocks are scored: their planes, rows there, which exist, and their own blocks."""

    planes: Any
    o_row: Any
    m_row: Any
    i_own: Any
    n_blocks: Any
    """Room for blocks in a plane."""


@triton.jit
def block_bits(rows, i_block, CHOICE: tl.constexpr):
    """Scores of blocks `i_block .. i_block + BLOCK` as integers of the same order, [R, BLOCK]: FORCED where always in,
    -1 where never.
    """
    BLOCK: tl.constexpr = CHOICE.BLOCK
    PLANES: tl.constexpr = CHOICE.PLANES
    o_j = i_block + tl.arange(0, BLOCK)
    score = tl.zeros([rows.o_row.shape[0], BLOCK], tl.float32)
    m_j = rows.m_row[:, None] & (o_j[None, :] <= rows.i_own[:, None])
    for PLANE in tl.static_range(PLANES):
        p_score = rows.planes + (rows.o_row * PLANES + PLANE)[:, None] * rows.n_blocks + (o_j - PLANE)[None, :]
        score += tl.load(p_score, mask=m_j & (o_j >= PLANE)[None, :], other=0.0)
    # NaN has the bits of FORCED.
    score = tl.where(score == score, score, 0.0)
    forced = (o_j < CHOICE.INIT)[None, :] | (o_j[None, :] > (rows.i_own - CHOICE.LOCAL)[:, None])
    return tl.where(m_j, tl.where(forced, FORCED, score.to(tl.int32, bitcast=True)), -1)


@triton.jit
def count_from(rows, b_bits, limit, n_mine, CHOICE: tl.constexpr):
    """How many blocks of each row score `limit` or more; where tiles are WHOLE, `b_bits` holds them all."""
    if CHOICE.WHOLE:
        count = tl.sum((b_bits >= limit[:, None]).to(tl.int32), 1)
    else:
        count = tl.zeros_like(limit)
        for i_block in range(0, n_mine, CHOICE.BLOCK):
            b_bits = block_bits(rows, i_block, CHOICE)
            count += tl.sum((b_bits >= limit[:, None]).to(tl.int32), 1)
    return count


@triton.jit
def write_best(rows, p_out, CHOICE: tl.constexpr):
    """Write the blocks of each row from `p_out` on: ascending, -1 behind the last."""
    COUNT: tl.constexpr = CHOICE.COUNT
    COUNT_P: tl.constexpr = CHOICE.COUNT_P
    ROWS: tl.constexpr = rows.o_row.shape[0]
    n_mine = tl.max(tl.where(rows.m_row, rows.i_own, -1), 0) + 1
    b_bits = block_bits(rows, 0, CHOICE)
    # The greatest limit that COUNT blocks or more reach: the score of the last one taken; 0 where fewer may be taken at
    # all.
    last = tl.zeros([ROWS], tl.int32)
    for i in range(31):
        higher = last | (1 << (30 - i))
        count = count_from(rows, b_bits, higher, n_mine, CHOICE)
        last = tl.where(count >= COUNT, higher, last)
    # No score lies above FORCED, and no number either.
    above = tl.where(last == FORCED, last, last + 1)
    n_above = count_from(rows, b_bits, above, n_mine, CHOICE)
    n_equal = COUNT - tl.where(last == FORCED, 0, n_above)
    n_taken = tl.zeros([ROWS], tl.int32)
    n_met = tl.zeros([ROWS], tl.int32)
    for i_block in range(0, n_mine, CHOICE.BLOCK):
        if not CHOICE.WHOLE:
            b_bits = block_bits(rows, i_block, CHOICE)
        equal = (b_bits == last[:, None]).to(tl.int32)
        rank = n_met[:, None] + tl.cumsum(equal, 1)
        taken = (b_bits > last[:, None]) | ((equal > 0) & (rank <= n_equal[:, None]))
        place = n_taken[:, None] + tl.cumsum(taken.to(tl.int32), 1) - 1
        p_place = p_out[:, None] + place
        o_j = i_block + tl.arange(0, CHOICE.BLOCK)
        tl.store(p_place, o_j[None, :] + tl.zeros_like(place), mask=taken)
        n_met += tl.sum(equal, 1)
        n_taken += tl.sum(taken.to(tl.int32), 1)
    o_s = tl.arange(0, COUNT_P)
    m_s = rows.m_row[:, None] & (o_s < COUNT)[None, :] & (o_s[None, :] >= n_taken[:, None])
    tl.store(p_out[:, None] + o_s[None, :], tl.full([ROWS, COUNT_P], -1, tl.int32), mask=m_s)
