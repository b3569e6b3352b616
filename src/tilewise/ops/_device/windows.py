"""Windows of tokens that compressed attention summarises: SIZE tokens each, one begins every STRIDE."""

import triton
import triton.language as tl


@triton.jit
def whole_windows(n_tokens, SIZE: tl.constexpr, STRIDE: tl.constexpr):
    """How many windows of SIZE lie in this many tokens."""
    return tl.where(n_tokens >= SIZE, (n_tokens - SIZE) // STRIDE + 1, 0)
