"""Matrix products."""

import math

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array


def transposed(function: Function, x: Array) -> Array:
    """The last two axes exchanged."""
    n = len(x.shape)
    return function.backend.permute(x, (*range(n - 2), n - 1, n - 2))


class MatMul(Function):
    """`[..., M, K] @ [..., K, N]`, leading axes broadcast."""

    def _forward(self, x: Array, y: Array) -> Array:
        self.save(x, y)
        return self.backend.matmul(x, y)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, Array | None]:
        x, y = self.saved
        return (
            self.backend.matmul(grad, transposed(self, y)) if self.needs[0] else None,
            self.backend.matmul(transposed(self, x), grad) if self.needs[1] else None,
        )


class Linear(Function):
    """`x [..., K] @ weight [K, N] + bias [N]`; the bias may be left out."""

    def _forward(self, x: Array, weight: Array, bias: Array | None = None) -> Array:
        self.leading = tuple(x.shape[:-1])
        rows = self.backend.reshape(x, (math.prod(self.leading), x.shape[-1]))
        self.save(rows, weight)
        return self.backend.reshape(self.backend.linear(rows, weight, bias), (*self.leading, weight.shape[1]))

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, ...]:
        x, weight = self.saved
        b = self.backend
        rows = b.reshape(grad, (x.shape[0], weight.shape[1]))
        return (
            b.reshape(b.matmul(rows, transposed(self, weight)), (*self.leading, x.shape[1])) if self.needs[0] else None,
            b.matmul(transposed(self, x), rows) if self.needs[1] else None,
            b.sum(rows, (0,), False) if self.needs[2:] == (True,) else None,
        )[: len(self.inputs)]
