"""SiLU attention forward, for any GPU that Triton serves: `o = factor · Σ_j p(q_i·k_j) v_j` over the keys that the mask
keeps.

Tile plan, one program a query tile of BLOCK_M rows of one head: Q stays on chip; K and V tiles of BLOCK_N rows stream
through. There is no softmax, so nothing but the sum itself is carried from tile to tile. Operations: 2 · BLOCK_M ·
BLOCK_N · (D + Dv) a step, and a sigmoid a pair, which weighs as much as the products where D is small. Bytes from
memory: Q and O once; K and V once for each query tile, from the L2 cache for all but the first.

The mask is that of flash attention (left, right, KEY_STRIDE) or, where num_targets or context is given, that of
`_device.history`.
"""

import triton
import triton.language as tl

from tilewise.ops._device.history import history_end
from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.mask import diagonal, keys_seen
from tilewise.ops._device.pairs import kept_pairs, keys_of
from tilewise.ops._device.records import Rows
from tilewise.ops._device.silu import silu_weights
from tilewise.ops._device.tap import tap
from tilewise.ops._device.varlen import locate_ordered, same_or_other_side

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = ("n_tiles", "n_heads", "n_queries", "n_keys", "left", "right", "context")


@triton.jit
def hstu_fwd_step(
    b_q, acc, k_rows, v_rows, i_m, i_n, off, left, right, history, alpha_log2, gain, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr, MASKED: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """One key tile: scores, weights, sum with the values."""
    # [N, D]; scores of rows past the last are masked, whatever a descriptor reads there.
    b_k = load_rows(k_rows, i_n, D, BLOCK_N, BLOCK_D, TMA, INSIDE or TMA != 0)
    # [M, D] @ [D, N] -> [M, N]
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 1, b_k)
    tap(taps, i_n // BLOCK_N, 2, b_s)
    b_p = silu_weights(b_s, alpha_log2, gain)
    if MASKED:
        o_m = i_m + tl.arange(0, BLOCK_M)
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_p = tl.where(
            kept_pairs(
                o_m[:, None], o_n[None, :], k_rows.n_rows, off, left, right, history, KEY_STRIDE, CAUSAL, HISTORY
            ),
            b_p,
            0.0,
        )
    # [N, DV]
    b_v = load_rows(v_rows, i_n, DV, BLOCK_N, BLOCK_DV, TMA, INSIDE)
    tap(taps, i_n // BLOCK_N, 3, b_p)
    tap(taps, i_n // BLOCK_N, 4, b_v)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc, input_precision=PRECISION)
    tap(taps, i_n // BLOCK_N, 5, acc)
    return acc


@triton.jit(do_not_specialize=SIZES)
def hstu_fwd_kernel(
    q, k, v, o, q_strides, k_strides, v_strides, o_strides, cu, cu_other, tiles, num_targets, n_tiles, n_heads,
    n_queries, n_keys, left, right, context, alpha_log2, gain, factor, taps,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr, TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles of all sequences, longest sequences first, x heads.
    # Owns: BLOCK_M queries of one head.
    # Loops over: the key tiles that its mask reaches.
    # Writes: its rows of o.
    i_b, i_h, i_m, start_q, Tq = locate_ordered(
        tl.program_id(0), tiles, n_tiles, n_heads, n_queries, cu, CAUSAL, BLOCK_M
    )
    if i_m >= Tq:
        return
    history = (context, history_end(num_targets, context, i_b, Tq), left)
    i_b, start_k, Tk = same_or_other_side(cu, cu_other, i_b, start_q, Tq, n_keys)
    Tk = keys_seen(Tq, Tk, right, KEY_STRIDE)
    k_rows = Rows(k, k_strides, i_b, i_h, start_k, Tk)
    v_rows = Rows(v, v_strides, i_b, i_h, start_k, Tk)
    # [M, D]; of rows past the last nothing is stored.
    b_q = load_rows(Rows(q, q_strides, i_b, i_h, start_q, Tq), i_m, D, BLOCK_M, BLOCK_D, TMA, TMA != 0)
    tap(taps, 0, 0, b_q)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    off = diagonal(Tq, Tk, KEY_STRIDE)
    ends = keys_of(i_m, Tq, Tk, left, right, history, KEY_STRIDE, CAUSAL, HISTORY, BLOCK_M, BLOCK_N)
    for PART in tl.static_range(4):
        if PART == 1 or PART == 3 or (PART == 0 and left is not None) or (PART == 2 and (right is not None or HISTORY)):
            for i_n in range(ends[PART], ends[PART + 1], BLOCK_N):
                acc = hstu_fwd_step(
                    b_q, acc, k_rows, v_rows, i_m, i_n, off, left, right, history, alpha_log2, gain, taps,
                    D, DV, BLOCK_D, BLOCK_DV, BLOCK_M, BLOCK_N, KEY_STRIDE, CAUSAL, HISTORY, TMA, PRECISION, PART != 1,
                    PART != 3,
                )  # fmt: skip
    store_rows(Rows(o, o_strides, i_b, i_h, start_q, Tq), i_m, acc * factor, DV, BLOCK_M, BLOCK_DV)
