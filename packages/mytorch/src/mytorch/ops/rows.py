"""What takes a whole row at a time: softmax, its logarithm, layer norm. All go over the last axis."""

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array


class Softmax(Function):
    """Exponentials over their sum."""

    def _forward(self, x: Array) -> Array:
        y = self.backend.softmax(x)
        self.save(y)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.softmax_grad(grad, *self.saved)


class LogSoftmax(Function):
    """The logarithm of softmax."""

    def _forward(self, x: Array) -> Array:
        y = self.backend.log_softmax(x)
        self.save(y)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.log_softmax_grad(grad, *self.saved)


class LayerNorm(Function):
    """Mean 0 and variance 1 along the last axis, then a weight and a bias for each place in it."""

    def __init__(self, eps: float) -> None:
        self.eps = eps

    def _forward(self, x: Array, weight: Array, bias: Array) -> Array:
        y, mean, rstd = self.backend.layer_norm(x, weight, bias, self.eps)
        self.save(x, weight, mean, rstd)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array, Array, Array]:
        return self.backend.layer_norm_grad(grad, *self.saved)
