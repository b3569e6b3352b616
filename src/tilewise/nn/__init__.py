"""torch modules over the operators."""

from tilewise.nn.compression import GateModel, WindowCompression
from tilewise.nn.hstu_layer import HSTULayer
from tilewise.nn.native_sparse_attention import NativeSparseAttention

__all__ = ["GateModel", "HSTULayer", "NativeSparseAttention", "WindowCompression"]
