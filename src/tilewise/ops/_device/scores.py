"""Scores of a tile: which of them take part, the tiles that follow from that, and what weights they become.

Key j takes part for query i where `i + off - left <= j <= i + off + right` with `off = Tk - Tq`: a `Window`. A limit of
None does not exist; causal is `right = 0`. The same predicate serves forward, dQ and dK/dV.

With a KEY_STRIDE (None elsewhere) key j stands at `j * KEY_STRIDE` in its sequence, and query 0 at `off` (0, but where
queries are a part of their sequence): the key takes part where `j * KEY_STRIDE <= i + off + right`. There is no left
limit then, and right may be negative.

Softmax is computed online and in base 2: `scale_log2` holds log2(e), so that one FMA and one exp2 make a probability.
A sink is one more score of every row of its head, with no value; it takes part once, after all keys.
SiLU attention's weights are `p = gain · s · sigmoid(alpha · s)` of a score s; a gain of None is 1.
"""

import triton
import triton.language as tl

from tilewise.ops._device.records import Runs, TailRuns
from tilewise.ops._device.rows import load_rows


@triton.jit
def diagonal(n_queries, n_keys, KEY_STRIDE: tl.constexpr):
    """`off`: where query 0 stands among the keys' positions."""
    off = n_keys - n_queries
    if KEY_STRIDE is not None:
        off = 0
    return off


@triton.jit
def key_position(o_n, KEY_STRIDE: tl.constexpr):
    """Position of key `o_n`."""
    if KEY_STRIDE is not None:
        o_n = o_n * KEY_STRIDE
    return o_n


@triton.jit
def keep(o_m, o_n, n_keys, window, KEY_STRIDE: tl.constexpr = None):
    """True where key `o_n` takes part for query `o_m`; the two broadcast against each other."""
    left, right, off = window
    m_keep = o_n < n_keys
    o_n = key_position(o_n, KEY_STRIDE)
    if right is not None:
        m_keep = m_keep & (o_n <= o_m + (off + right))
    if left is not None:
        m_keep = m_keep & (o_n >= o_m + (off - left))
    return m_keep


@triton.jit
def split_range(low, full_low, full_high, high, BLOCK: tl.constexpr):
    """Bounds of three runs of tiles, in order and on multiples of BLOCK but for ends: masked, whole, masked."""
    high = tl.maximum(high, 0)
    low = tl.minimum(tl.maximum(low, 0), high) // BLOCK * BLOCK
    full_low = tl.maximum(low, tl.cdiv(tl.minimum(tl.maximum(full_low, 0), high), BLOCK) * BLOCK)
    full_high = tl.maximum(full_high, full_low)
    return Runs(low, full_low, full_high, high)


@triton.jit
def split_tail(runs, n_rows, BLOCK: tl.constexpr):
    """Bounds of four runs from split_range's three: masked, whole, masked, and at last the tile that reaches past the
    last row, if one does.
    """
    low, full_low, full_high, high = runs
    inside = tl.maximum(low, n_rows // BLOCK * BLOCK)
    full_low = tl.minimum(full_low, inside)
    full_high = tl.minimum(tl.maximum(full_high, full_low), inside)
    return TailRuns(low, full_low, full_high, tl.minimum(inside, high), high)


@triton.jit
def keys_before(position, KEY_STRIDE: tl.constexpr):
    """How many keys stand before `position`: 0 or less where there is none, whichever way `//` rounds below 0."""
    if KEY_STRIDE is not None:
        position = (position + (KEY_STRIDE - 1)) // KEY_STRIDE
    return position


@triton.jit
def keys_seen(n_queries, n_keys, right, KEY_STRIDE: tl.constexpr):
    """Keys up to the last that any query sees, where they have a stride, else all; `n_queries` up to the last of them,
    from the sequence's first.

    A packed sequence has room for one key more, or not, depending on its start: how tiles are masked, and so how sums
    round, must not depend on that.
    """
    if KEY_STRIDE is not None:
        n_keys = tl.minimum(n_keys, tl.maximum(keys_before(n_queries + right, KEY_STRIDE), 0))
    return n_keys


@triton.jit
def zero_unseen(b_x, i_n, n_seen, KEY_STRIDE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Rows of keys `i_n .. i_n + BLOCK_N`, 0 for those that no query sees: a tile that needs no mask for the others
    leaves something there.
    """
    if KEY_STRIDE is not None:
        b_x = tl.where((i_n + tl.arange(0, BLOCK_N) < n_seen)[:, None], b_x, 0.0)
    return b_x


@triton.jit
def key_range(i_m, n_keys, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr = None):
    """The key tiles that query tile `i_m` reaches, as split_range gives them: only the middle run needs no mask."""
    left, right, off = window
    low = 0
    full_low = 0
    high = n_keys
    full_high = n_keys
    if right is not None:
        high = tl.minimum(n_keys, keys_before(i_m + BLOCK_M + off + right, KEY_STRIDE))
        full_high = tl.minimum(n_keys, keys_before(i_m + 1 + off + right, KEY_STRIDE))
    if left is not None:
        low = i_m + off - left
        full_low = i_m + BLOCK_M - 1 + off - left
    return split_range(low, full_low, tl.maximum(full_high, 0) // BLOCK_N * BLOCK_N, high, BLOCK_N)


@triton.jit
def query_range(
    i_n, n_queries, n_keys, window, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, KEY_STRIDE: tl.constexpr = None
):
    """The query tiles that reach key tile `i_n`, likewise.

    A tile that runs past the last query counts as whole: those rows are zero.
    """
    left, right, off = window
    low = 0
    full_low = 0
    high = n_queries
    full_high = n_queries
    if right is not None:
        low = key_position(i_n, KEY_STRIDE) - off - right
        last = i_n + BLOCK_N - 1
        if KEY_STRIDE is not None:
            # Keys past the end stand far beyond the queries: they would leave no whole tile, and what is made of them
            # is not stored.
            last = tl.minimum(last, n_keys - 1)
        full_low = key_position(last, KEY_STRIDE) - off - right
    if left is not None:
        high = tl.minimum(n_queries, i_n + BLOCK_N - off + left)
        full_high = tl.maximum(tl.minimum(n_queries, i_n + 1 - off + left), 0) // BLOCK_M * BLOCK_M
    return split_range(low, full_low, full_high, high, BLOCK_M)


@triton.jit
def tanh(x):
    """tanh to fp32 rounding: a polynomial near 0, where `1 - 2 / (e^2x + 1)` would cancel (libdevice is missing in the
    interpreter).
    """
    z = x * x
    poly = (
        ((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1
    ) * z - 3.33332819422e-1
    near = poly * z * x + x
    far = 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)
    return tl.where(tl.abs(x) < 0.625, near, far)


@triton.jit
def cap_scores(b_s, score_scale):
    """Scores under softcap, in units of softcap: `tanh(scale / softcap · s)`; unchanged where there is none
    (score_scale is None).
    """
    if score_scale is not None:
        b_s = tanh(b_s * score_scale)
    return b_s


@triton.jit
def score_gradient(b_p, b_dp, b_delta, b_s, score_scale):
    """The gradient of the plain scores, but for `scale`, from probabilities, their gradient, delta and cap_scores'
    result.
    """
    b_ds = b_p * (b_dp - b_delta)
    if score_scale is not None:
        b_ds = b_ds * (1.0 - b_s * b_s)
    return b_ds


@triton.jit
def online_softmax_terms(b_s, m, scale_log2, MASKED: tl.constexpr):
    """One step over scores `b_s` [M, N] (-inf where masked) and running maximum `m` (base 2), scale_log2 > 0.

    Returns the probabilities relative to the new maximum, the new m, and the factor that earlier sums must be
    multiplied by.
    """
    m_new = tl.maximum(m, tl.max(b_s, 1) * scale_log2)
    shift = m_new
    if MASKED:
        # A row that has seen nothing yet keeps -inf: shift it by 0 instead, so that its terms are 0 and not NaN.
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    b_p = tl.exp2(b_s * scale_log2 - shift[:, None])
    rescale = tl.exp2(m - shift)
    return b_p, m_new, rescale


@triton.jit
def online_softmax_step(b_s, m, l, scale_log2, MASKED: tl.constexpr):
    """The same with the running sum `l`, whose new value comes before the factor."""
    b_p, m_new, rescale = online_softmax_terms(b_s, m, scale_log2, MASKED)
    l_new = l * rescale + tl.sum(b_p, 1)
    return b_p, m_new, l_new, rescale


@triton.jit
def add_sink(m, l, b_sink):
    """A sink, or one for each row, added to the final sums: the maximum, the sum, and the factor of what was summed
    before.

    The maximum is natural from here on, so that a row that sees no key has the sink itself as its LSE, and no finite
    sink overflows.
    """
    b_sink = b_sink.to(tl.float32)
    m = m * 0.6931471805599453
    m_new = tl.maximum(m, b_sink)
    # -inf where a row sees no key and there is no sink: shift it by 0 instead, so that its sum stays 0.
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    rescale = tl.exp2((m - shift) * 1.4426950408889634)
    l = l * rescale + tl.exp2((b_sink - shift) * 1.4426950408889634)
    return m_new, l, rescale


@triton.jit
def softmax_finish(acc, m, l, NATURAL: tl.constexpr = False):
    """Output and natural LSE from the final sums: 0 and -inf for a row that saw nothing. The maximum is NATURAL after a
    sink, else in base 2.
    """
    # Not `> 0`, which NaN fails too: a row with NaN in it has seen something.
    seen = l != 0.0
    l = tl.where(seen, l, 1.0)
    b_o = acc / l[:, None]
    if NATURAL:
        b_lse = tl.where(seen, m + tl.log2(l) * 0.6931471805599453, float("-inf"))
    else:
        b_lse = tl.where(seen, (m + tl.log2(l)) * 0.6931471805599453, float("-inf"))
    return b_o, b_lse


@triton.jit
def row_gradients(
    o_rows,
    do_rows,
    lse,
    dlse,
    dlse_strides,
    i_m,
    n_heads,
    n_queries,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """delta = rowsum(o · do) - dlse, and the LSE, for rows `i_m .. i_m + BLOCK_M`; where these are in `[..., H, T]`,
    and which exist.

    Past the end the LSE is -inf, as where a row saw nothing, and delta is 0.
    """
    b_o = load_rows(o_rows, i_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
    b_do = load_rows(do_rows, i_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_t = (o_rows.start + o_m).to(tl.int64)
    o_row = (tl.cast(o_rows.i_b, tl.int64) * n_heads + o_rows.i_h) * n_queries + o_t
    b_lse = tl.load(lse + o_row, mask=o_m < o_rows.n_rows, other=float("-inf"))
    if dlse is not None:
        p_dlse = (
            dlse
            + tl.cast(o_rows.i_b, tl.int64) * dlse_strides.batch
            + tl.cast(o_rows.i_h, tl.int64) * dlse_strides.head
            + o_t * dlse_strides.token
        )
        b_delta -= tl.load(p_dlse, mask=o_m < o_rows.n_rows, other=0.0)
    return b_delta, b_lse, o_row, o_m < o_rows.n_rows


@triton.jit
def lse_in_base_2(b_lse):
    """The LSE in base 2; +inf for a row that saw nothing, so that its probabilities are 0."""
    return tl.where(b_lse != float("-inf"), b_lse * 1.4426950408889634, float("inf"))


@triton.jit
def sink_gradient(sinks, i_h, b_delta, b_lse):
    """What rows add to the gradient of head `i_h`'s sink, whose probability in a row is exp(sink - LSE) and whose value
    is 0: minus the sum of probability times delta.
    """
    b_sink = tl.load(sinks + i_h).to(tl.float32)
    b_p = tl.where(b_lse != float("-inf"), tl.exp2((b_sink - b_lse) * 1.4426950408889634), 0.0)
    return -tl.sum(b_p * b_delta, 0)


@triton.jit
def sigmoid(b_s, alpha_log2):
    """`1 / (1 + 2 ** (-alpha_log2 · s))`, in two fast operations and no division: the square of a reciprocal root."""
    b_root = tl.rsqrt(1.0 + tl.exp2(b_s * -alpha_log2))
    return b_root * b_root


@triton.jit
def silu_weights(b_s, alpha_log2, gain):
    """The weights of scores."""
    b_p = b_s * sigmoid(b_s, alpha_log2)
    if gain is not None:
        b_p = b_p * gain
    return b_p


@triton.jit
def silu_slopes(b_s, alpha_log2, gain, ratio):
    """Weights and their derivatives by the scores, but for a factor `gain`; `ratio` is alpha / gain."""
    b_sigmoid = sigmoid(b_s, alpha_log2)
    b_p = b_s * b_sigmoid
    if gain is not None:
        b_p = b_p * gain
    return b_p, b_p * (ratio - ratio * b_sigmoid) + b_sigmoid
