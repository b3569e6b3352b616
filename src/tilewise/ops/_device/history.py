"""Which pairs the masks of SiLU attention keep, flash attention's mask or a `History`, and the ranges of tiles that
hold them.

A `History` is one sequence's mask in HSTU attention with targets or a contextual prefix: a context of None is none, a
reach of None no limit. Token i stands at `position(i) = min(max(i - context + 1, 0), end)`: the first `context` tokens
share position 0, and the targets at the end share position `end`. With `d = position(i) - position(j)`, or its absolute
value where not causal, key j takes part for query i where `i == j` or `0 < d <= reach`; and, where there is a context,
for a query at position 0 every key before `end`.

`kept_pairs`, `keys_of` and `queries_of` serve both masks: `mask` is a `Pairs`, TILE the kernel's constants.
"""

import triton
import triton.language as tl

from tilewise.ops._device.scores import keep, key_range, query_range, split_range, split_tail


@triton.jit
def history_end(num_targets, context, i_b, n_tokens):
    """`end` of sequence `i_b`, for any value in num_targets."""
    end = n_tokens
    if context is not None:
        end = n_tokens - (context - 1)
    if num_targets is not None:
        end -= tl.minimum(tl.maximum(tl.load(num_targets + i_b), 0), n_tokens).to(tl.int32)
    return end


@triton.jit
def position(o, history):
    """Positions of tokens `o`."""
    context, end, _ = history
    if context is not None:
        o = tl.maximum(o - (context - 1), 0)
    return tl.minimum(o, end)


@triton.jit
def first_at(i_position, history):
    """The first token at `i_position` or later, for a position up to `end`."""
    i_first = tl.maximum(i_position, 0)
    if history.context is not None:
        i_first = tl.where(i_position > 0, i_position + (history.context - 1), 0)
    return i_first


@triton.jit
def keep_history(o_m, o_n, n_tokens, history, CAUSAL: tl.constexpr):
    """True where key `o_n` takes part for query `o_m`; the two broadcast against each other."""
    context, end, reach = history
    at_m = position(o_m, history)
    at_n = position(o_n, history)
    d = at_m - at_n
    if not CAUSAL:
        d = tl.abs(d)
    m_keep = (o_m == o_n) | (d > 0)
    if reach is not None:
        m_keep = m_keep & (d <= reach)
    if context is not None:
        m_keep = m_keep | ((at_m == 0) & (at_n < end))
    return m_keep & (o_n < n_tokens)


@triton.jit
def history_key_range(i_m, n_tokens, history, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The key tiles that query tile `i_m` reaches, as split_range gives them: only the middle run needs no mask."""
    context, end, reach = history
    at_first = position(i_m, history)
    at_last = position(tl.minimum(i_m + BLOCK_M, n_tokens) - 1, history)
    low = 0
    high = n_tokens
    full_low = 0
    full_high = 0
    if reach is not None:
        low = first_at(at_first - reach, history)
        if not CAUSAL:
            # Past its reach lie no tokens but, where it reaches the targets, all of them.
            high = tl.where(at_last + reach >= end, n_tokens, first_at(at_last + reach + 1, history))
    if CAUSAL:
        high = tl.minimum(n_tokens, i_m + BLOCK_M)
        full_high = tl.where(at_first > 0, first_at(at_first, history), 0)
        if reach is not None:
            full_low = first_at(at_last - reach, history)
    if context is not None:
        high = tl.where(at_first == 0, tl.maximum(high, tl.minimum(end + (context - 1), n_tokens)), high)
    return split_range(low, full_low, tl.maximum(full_high, 0) // BLOCK_N * BLOCK_N, high, BLOCK_N)


@triton.jit
def history_query_range(i_n, n_tokens, history, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The query tiles that reach key tile `i_n`, likewise; where there is a context, the tiles from 0 up to the first
    bound come before them.
    """
    context, end, reach = history
    at_first = position(i_n, history)
    at_last = position(tl.minimum(i_n + BLOCK_N, n_tokens) - 1, history)
    low = 0
    high = n_tokens
    full_low = n_tokens
    full_high = 0
    if reach is not None:
        high = tl.where(at_last + reach >= end, n_tokens, first_at(at_last + reach + 1, history))
        if not CAUSAL:
            low = tl.minimum(i_n, first_at(at_first - reach, history))
    if CAUSAL:
        low = i_n
        high = tl.maximum(high, tl.minimum(i_n + BLOCK_N, n_tokens))
        full_low = tl.where(at_last < end, first_at(at_last + 1, history), n_tokens)
        full_high = n_tokens
        if reach is not None:
            full_high = tl.where(at_first + reach >= end, n_tokens, first_at(at_first + reach + 1, history))
    runs = split_range(low, full_low, tl.maximum(full_high, 0) // BLOCK_M * BLOCK_M, high, BLOCK_M)
    context_end = 0
    if context is not None:
        context_end = tl.where(i_n < end + (context - 1), tl.minimum(context, runs.low), 0)
    return context_end, runs


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
