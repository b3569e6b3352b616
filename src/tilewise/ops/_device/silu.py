"""SiLU attention's weights: `p = gain · s · sigmoid(alpha · s)` of a score s, and their slope. A gain of None is 1."""

import triton
import triton.language as tl


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
