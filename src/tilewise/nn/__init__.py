"""torch modules over the operators."""

from tilewise.nn.compression import WindowCompression
from tilewise.nn.native_sparse_attention import NativeSparseAttention

__all__ = ["NativeSparseAttention", "WindowCompression"]
