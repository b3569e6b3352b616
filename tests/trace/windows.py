"""Functions for `tilewise trace nsa-compressed --impl`."""

from tilewise import compressed_attention
from tilewise.ops.nsa.compress.launch import compressed_forward


def right(q, k_cmp, v_cmp, compress_size, compress_stride):
    return compressed_attention(
        q, k_cmp, v_cmp, compress_size=compress_size, compress_stride=compress_stride, backend="triton"
    )


def early(q, k_cmp, v_cmp, compress_size, compress_stride):
    """Sees a window one token before it has ended."""
    return compressed_forward(q, k_cmp, v_cmp, None, None, compress_size - 1, compress_stride, q.shape[-1] ** -0.5)[0]
