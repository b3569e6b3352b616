"""Scores and the online softmax, in base 2: `scale_log2` holds log2(e), so that one FMA and one exp2 make a
probability.

What a softmax's backward needs of each query row.
"""

import triton
import triton.language as tl

from tilewise.ops._device.rows import load_rows


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
def softmax_finish(acc, m, l):
    """Output and natural LSE from the final sums: 0 and -inf for a row that saw nothing."""
    # Not `> 0`, which NaN fails too: a row with NaN in it has seen something.
    seen = l != 0.0
    l = tl.where(seen, l, 1.0)
    b_o = acc / l[:, None]
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
    """delta = rowsum(o · do) - dlse, and the LSE in base 2, for rows `i_m .. i_m + BLOCK_M`; where these are in
    `[..., H, T]`, and which exist.

    Rows that saw nothing, or lie past the end, have an LSE of +inf, so that their probabilities are 0; past the end
    delta is 0.
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
    b_lse_log2 = tl.where(b_lse != float("-inf"), b_lse * 1.4426950408889634, float("inf"))
    return b_delta, b_lse_log2, o_row, o_m < o_rows.n_rows
