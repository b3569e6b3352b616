"""Convolution and pooling of images `[B, C, H, W]`."""

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array, Shape

Pair = tuple[int, int]


class Conv2D(Function):
    """Cross-correlation with a weight `[O, C, h, w]`; a bias `[O]` may be left out."""

    def __init__(self, stride: Pair, padding: Pair) -> None:
        self.stride, self.padding = stride, padding

    def _forward(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        self.save(x, weight)
        return self.backend.conv2d(x, weight, bias, self.stride, self.padding)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight = self.saved
        b, where = self.backend, (self.stride, self.padding)
        return (
            b.conv2d_grad_input(grad, weight, tuple(x.shape), *where) if self.needs[0] else None,
            b.conv2d_grad_weight(grad, x, tuple(weight.shape), *where) if self.needs[1] else None,
            b.sum(grad, (0, 2, 3), False) if self.needs[2:] == (True,) else None,
        )[: len(self.inputs)]


class MaxPool2D(Function):
    """The largest of each window."""

    def __init__(self, size: Pair, stride: Pair) -> None:
        self.size, self.stride = size, stride

    def _forward(self, x: Array) -> Array:
        y, where = self.backend.max_pool2d(x, self.size, self.stride)
        self.save(where)
        self.shape: Shape = tuple(x.shape)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        (where,) = self.saved
        return self.backend.max_pool2d_grad(grad, where, self.shape, self.size, self.stride)
