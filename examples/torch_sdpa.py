"""torch's own attention in the shape that verify takes: what docs/verify.md checks.

tilewise verify flash --impl examples/torch_sdpa.py:sdpa --config small --config block+1 --config gqa-3
"""

from torch.nn.functional import scaled_dot_product_attention


def sdpa(q, k, v, *, causal=False, scale=None):
    """[B, T, H, D] in and out; the LSE is not returned, and not judged."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)
    return o.transpose(1, 2)
