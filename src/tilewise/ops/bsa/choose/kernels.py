"""Which blocks each token attends to: its own, and of those before it the best by score, exactly.

A program owns BLOCK_M tokens of one head and loops over the whole blocks before them, BLOCK_N at a time. A block's key
holds its score's bits above, in an order that integers share, and its number, inverted, below: keys are all different,
and the larger of two is the one to take. The best are kept on chip: as long as a tile's best key beats the worst of
those kept, it takes its place. Nothing is written but the choice. Operations: 2 · D a pair of query and block, as half
of the compressed branch, and a few rounds of maxima. Bytes: q once, the blocks' means from the L2 cache.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import load_rows, locate_slot, sequence_bounds
from tilewise.ops._device.scores import silu_weights

SIZES = ("n_batch", "n_tokens", "n_choosing", "n_windows", "n_tiles")
NONE = tl.constexpr(-(1 << 63))
LAST_BLOCK = tl.constexpr((1 << 31) - 1)


class ChoiceShape(NamedTuple):
    """Constants: heads that share a choice, channels, tiles; tokens in a block; blocks to take, and as tiles hold
    them; the precision of products.
    """

    HEADS: Any
    D: Any
    BLOCK_D: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_SIZE: Any
    COUNT: Any
    COUNT_P: Any
    PRECISION: Any


@triton.jit
def score_keys(b_score, o_n, m_n):
    """Keys of scores of blocks `o_n`, NONE where `m_n` is false. A score that is NaN is the worst."""
    # Adding 0 makes -0 the 0 that it equals. The bits of negative numbers order backwards.
    b_score = tl.where(b_score == b_score, b_score, -3.4028234663852886e38) + 0.0
    bits = b_score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(m_n, (bits.to(tl.int64) << 32) | (-o_n + LAST_BLOCK)[None, :].to(tl.int64), NONE)


@triton.jit(do_not_specialize=SIZES)
def bsa_choose_kernel(
    q, k_cmp, indices, public, q_strides, k_strides, cu, windows, n_batch, n_tokens, n_choosing, n_windows, n_tiles,
    scale_log2, SHAPE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M tokens x heads that choose: every one, or of HEADS that share a choice the first.
    # Owns: BLOCK_M tokens of one head.
    # Loops over: tiles of the blocks before the last token's own, and rounds until no block of a tile is better than
    # those kept.
    # Writes: each token's blocks, ascending, -1 behind the last, by token and by head.
    HEADS: tl.constexpr = SHAPE.HEADS
    BLOCK_M: tl.constexpr = SHAPE.BLOCK_M
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    COUNT: tl.constexpr = SHAPE.COUNT
    COUNT_P: tl.constexpr = SHAPE.COUNT_P
    i_tile = tl.program_id(0) % n_tiles
    i_h = tl.program_id(0) // n_tiles
    i_b, i_local, start, Tq = locate_slot(i_tile, cu, n_batch, n_tokens, BLOCK_M)
    i_m = i_local * BLOCK_M
    if i_m >= Tq:
        return
    i_bq, start_q, start_w, n_seen = i_b, 0, 0, n_windows
    if cu is not None:
        start_w, n_seen = sequence_bounds(windows, i_b, n_windows)
        i_bq, start_q = 0, start
    # [M, D]
    b_q = load_rows(Rows(q, q_strides, i_bq, i_h * HEADS, start_q, Tq), i_m, SHAPE.D, BLOCK_M, SHAPE.BLOCK_D, False)
    o_m = i_m + tl.arange(0, BLOCK_M)
    own = o_m // SHAPE.BLOCK_SIZE
    o_s = tl.arange(0, COUNT_P)
    # Places for all but the own block, different from each other; the others hold what nothing beats.
    kept = tl.where(o_s < COUNT - 1, o_s.to(tl.int64) + (NONE + 1), -(NONE + 1))[None, :] + tl.zeros(
        [BLOCK_M, COUNT_P], tl.int64
    )
    if COUNT > 1:
        n_before = (tl.minimum(i_m + BLOCK_M, Tq) - 1) // SHAPE.BLOCK_SIZE
        for i_n in range(0, n_before, BLOCK_N):
            # [N, D]
            b_k = load_rows(
                Rows(k_cmp, k_strides, i_bq, i_h * HEADS, start_w, n_seen), i_n, SHAPE.D, BLOCK_N, SHAPE.BLOCK_D, False
            )
            # [M, D] @ [D, N] -> [M, N]
            b_score = silu_weights(tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION), scale_log2, None)
            o_n = i_n + tl.arange(0, BLOCK_N)
            keys = score_keys(b_score, o_n, (o_n[None, :] < own[:, None]) & (o_m < Tq)[:, None])
            best = tl.max(keys, 1)
            worst = tl.min(kept, 1)
            while tl.max((best > worst).to(tl.int32), 0) > 0:
                kept = tl.where((kept == worst[:, None]) & (best > worst)[:, None], best[:, None], kept)
                keys = tl.where(keys == best[:, None], NONE, keys)
                best = tl.max(keys, 1)
                worst = tl.min(kept, 1)
    # A place that was never taken, and those beyond COUNT, end up last.
    taken = (o_s < COUNT - 1)[None, :] & (kept > NONE + COUNT_P)
    block = -tl.where(taken, kept & 0xFFFFFFFF, 0).to(tl.int32) + LAST_BLOCK
    block = tl.sort(tl.where((o_s == COUNT - 1)[None, :], own[:, None], block), 1)
    block = tl.where(block == LAST_BLOCK, -1, block)
    m_out = (o_m < Tq)[:, None] & (o_s < COUNT)[None, :]
    o_token = (start + o_m).to(tl.int64) * n_choosing + i_h
    tl.store(indices + o_token[:, None] * COUNT + o_s[None, :], block, mask=m_out)
    for i in range(HEADS):
        o_public = (tl.cast(i_bq, tl.int64) * n_choosing * HEADS + i_h * HEADS + i) * n_tokens + start_q + o_m
        tl.store(public + o_public[:, None] * COUNT + o_s[None, :], block, mask=m_out)
