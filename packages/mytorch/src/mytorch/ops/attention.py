"""Attention as one operation: neither the scores nor their softmax are kept."""

from mytorch.autograd import Function
from mytorch.backends.base import Array


class Attention(Function):
    """softmax(q kᵀ · scale) v over `[B, T, H, D]`."""

    def __init__(self, causal: bool, scale: float) -> None:
        self.causal, self.scale = causal, scale

    def _forward(self, q: Array, k: Array, v: Array) -> Array:
        output, lse = self.backend.attention(q, k, v, self.causal, self.scale)
        self.save(q, k, v, output, lse)
        return output

    def _backward(self, grad: Array) -> tuple[Array, Array, Array]:
        q, k, v, output, lse = self.saved
        return self.backend.attention_grad(grad, q, k, v, output, lse, self.causal, self.scale)
