"""SiLU attention forward, for any GPU that Triton supports: `o = factor · Σ_j p(q_i·k_j) v_j` over the keys that the
mask keeps.

Tile plan, one program per query tile of BLOCK_M rows of one head: Q stays on chip; K and V tiles of BLOCK_N rows stream
through. There is no softmax, so nothing but the sum itself is carried from tile to tile. Operations: 2 · BLOCK_M ·
BLOCK_N · (D + Dv) a step, and a sigmoid a pair, which weighs as much as the products where D is small. Bytes from
memory: Q and O once; K and V once for each query tile, from the L2 cache for all but the first.

The mask is that of flash attention (left, right, KEY_STRIDE) or, where num_targets or context is given, that of
`_device.history`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.history import history_end, kept_pairs, keys_of
from tilewise.ops._device.records import History, Pairs, Rows, Window
from tilewise.ops._device.rows import load_rows, locate_ordered, same_or_other_side, store_rows, tap_once, tap_step
from tilewise.ops._device.scores import diagonal, keys_seen, silu_weights

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_tiles", "n_heads", "n_queries", "n_keys", "left", "right", "context")


class FwdStep(NamedTuple):
    """A step's tapped values, under the names that `tilewise trace` gives them."""

    K: Any
    S: Any
    P: Any
    V: Any
    O: Any


@triton.jit
def hstu_fwd_step(
    b_q, acc, k_rows, v_rows, i_m, i_n, mask, scales, taps, TILE: tl.constexpr, MASKED: tl.constexpr,
    INSIDE: tl.constexpr,
):  # fmt: skip
    """One key tile: scores, weights, sum with the values."""
    # [N, D]; scores of rows past the last are masked, whatever a descriptor reads there.
    b_k = load_rows(k_rows, i_n, TILE.D, TILE.BLOCK_N, TILE.BLOCK_D, TILE.TMA, INSIDE or TILE.TMA != 0)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=TILE.PRECISION)
    b_p = silu_weights(b_s, scales.alpha_log2, scales.gain)
    if MASKED:
        o_m = i_m + tl.arange(0, TILE.BLOCK_M)
        o_n = i_n + tl.arange(0, TILE.BLOCK_N)
        b_p = tl.where(kept_pairs(o_m[:, None], o_n[None, :], k_rows.n_rows, mask, TILE), b_p, 0.0)
    # [N, DV]
    b_v = load_rows(v_rows, i_n, TILE.DV, TILE.BLOCK_N, TILE.BLOCK_DV, TILE.TMA, INSIDE)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=TILE.PRECISION)
    tap_step(taps, i_n // TILE.BLOCK_N, FwdStep(b_k, b_s, b_p, b_v, acc), 1)
    return acc


@triton.jit(do_not_specialize=SIZES)
def hstu_fwd_kernel(
    q, k, v, strides, o, packed, num_targets, n_tiles, n_heads, n_queries, n_keys, left, right, context,
    scales, taps, TILE: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles of all sequences, longest sequences first, x heads.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its mask reaches.
    # Writes: its rows of o.
    i_b, i_h, i_m, start_q, Tq = locate_ordered(
        tl.program_id(0), packed.tiles, n_tiles, n_heads, n_queries, packed.cu, TILE.CAUSAL, TILE.BLOCK_M
    )
    if i_m >= Tq:
        return
    history = None
    if TILE.HISTORY:
        history = History(context, history_end(num_targets, context, i_b, Tq), left)
    i_b, start_k, Tk = same_or_other_side(packed.cu, packed.cu_other, i_b, start_q, Tq, n_keys)
    Tk = keys_seen(Tq, Tk, right, TILE.KEY_STRIDE)
    q_rows = Rows(q, strides.q, i_b, i_h, start_q, Tq)
    k_rows = Rows(k, strides.k, i_b, i_h, start_k, Tk)
    v_rows = Rows(v, strides.v, i_b, i_h, start_k, Tk)
    # [M, D]; of rows past the last nothing is stored.
    b_q = load_rows(q_rows, i_m, TILE.D, TILE.BLOCK_M, TILE.BLOCK_D, TILE.TMA, TILE.TMA != 0)
    tap_once(taps, b_q)
    acc = tl.full([TILE.BLOCK_M, TILE.BLOCK_DV], 0.0, tl.float32)
    mask = Pairs(Window(left, right, diagonal(Tq, Tk, TILE.KEY_STRIDE)), history)
    runs = keys_of(i_m, Tk, mask, TILE)
    for RUN in tl.static_range(4):
        if (
            RUN == 1
            or RUN == 3
            or (RUN == 0 and left is not None)
            or (RUN == 2 and (right is not None or TILE.HISTORY))
        ):
            for i_n in range(runs[RUN], runs[RUN + 1], TILE.BLOCK_N):
                acc = hstu_fwd_step(b_q, acc, k_rows, v_rows, i_m, i_n, mask, scales, taps, TILE, RUN != 1, RUN != 3)
    o_rows = Rows(o.x, o.strides, i_b, i_h, start_q, Tq)
    store_rows(o_rows, i_m, acc * scales.factor, TILE.DV, TILE.BLOCK_M, TILE.BLOCK_DV)
