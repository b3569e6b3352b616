"""Which pairs of SiLU attention take part, and the ranges of tiles that hold them: by flash attention's mask, or by
`history`'s. `mask` is a `Pairs`, TILE the kernel's constants.
"""

import triton
import triton.language as tl

from tilewise.ops._device.history import history_key_range, history_query_range, keep_history
from tilewise.ops._device.mask import keep, key_range, query_range, split_tail


@triton.jit
def kept_pairs(o_m, o_n, n_keys, mask, TILE: tl.constexpr):
    """True where key `o_n` takes part for query `o_m`."""
    if not TILE.HISTORY:
        m_keep = keep(o_m, o_n, n_keys, mask.window, TILE.KEY_STRIDE)
    else:
        m_keep = keep_history(o_m, o_n, n_keys, mask.history, TILE.CAUSAL)
    return m_keep


@triton.jit
def keys_of(i_m, Tk, mask, TILE: tl.constexpr):
    """The key tiles that query tile `i_m` reaches, as split_tail gives them: only the second run needs no mask."""
    if not TILE.HISTORY:
        runs = key_range(i_m, Tk, mask.window, TILE.BLOCK_M, TILE.BLOCK_N, TILE.KEY_STRIDE)
    else:
        runs = history_key_range(i_m, Tk, mask.history, TILE.CAUSAL, TILE.BLOCK_M, TILE.BLOCK_N)
    return split_tail(runs, Tk, TILE.BLOCK_N)


@triton.jit
def queries_of(i_n, Tq, Tk, mask, TILE: tl.constexpr):
    """The query tiles that reach key tile `i_n`: the end of a run that begins at 0 and lies before the others, and
    those as split_tail gives them.
    """
    context_end = 0
    if not TILE.HISTORY:
        runs = query_range(i_n, Tq, Tk, mask.window, TILE.BLOCK_M, TILE.BLOCK_N, TILE.KEY_STRIDE)
    else:
        context_end, runs = history_query_range(i_n, Tq, mask.history, TILE.CAUSAL, TILE.BLOCK_M, TILE.BLOCK_N)
    return context_end, split_tail(runs, Tq, TILE.BLOCK_M)
