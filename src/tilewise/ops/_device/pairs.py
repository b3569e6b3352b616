"""Which pairs of SiLU attention take part, and the ranges of tiles that hold them: by flash attention's mask, or with
HISTORY by `history`'s.
"""

import triton
import triton.language as tl

from tilewise.ops._device.history import history_key_range, history_query_range, keep_history
from tilewise.ops._device.mask import keep, key_range, query_range, split_tail


@triton.jit
def kept_pairs(
    o_m, o_n, n_keys, off, left, right, history, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr
):
    """True where key `o_n` takes part for query `o_m`."""
    if not HISTORY:
        m_keep = keep(o_m, o_n, n_keys, off, left, right, KEY_STRIDE)
    else:
        m_keep = keep_history(o_m, o_n, n_keys, history, CAUSAL)
    return m_keep


@triton.jit
def keys_of(
    i_m, Tq, Tk, left, right, history, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The key tiles that query tile `i_m` reaches, as split_tail gives them: only the second run needs no mask."""
    if not HISTORY:
        ends = key_range(i_m, Tq, Tk, left, right, BLOCK_M, BLOCK_N, KEY_STRIDE)
    else:
        ends = history_key_range(i_m, Tk, history, CAUSAL, BLOCK_M, BLOCK_N)
    return split_tail(ends, Tk, BLOCK_N)


@triton.jit
def queries_of(
    i_n, Tq, Tk, left, right, history, KEY_STRIDE: tl.constexpr, CAUSAL: tl.constexpr, HISTORY: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The query tiles that reach key tile `i_n`: the end of a run that begins at 0 and lies before the others, and
    those as split_tail gives them.
    """
    context_end = 0
    if not HISTORY:
        ends = query_range(i_n, Tq, Tk, left, right, BLOCK_M, BLOCK_N, KEY_STRIDE)
    else:
        context_end, low, full_low, full_high, high = history_query_range(i_n, Tq, history, CAUSAL, BLOCK_M, BLOCK_N)
        ends = (low, full_low, full_high, high)
    return context_end, split_tail(ends, Tq, BLOCK_M)
