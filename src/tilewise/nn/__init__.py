"""torch modules over the operators."""

from tilewise.nn.hstu_layer import GateModel, HSTULayer
from tilewise.nn.native_sparse_attention import NativeSparseAttention, WindowCompression

__all__ = ["GateModel", "HSTULayer", "NativeSparseAttention", "WindowCompression"]
