"""Elements and rows by number."""

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array


class Take(Function):
    """Rows of a table by number (an embedding)."""

    def _forward(self, table: Array, index: Array) -> Array:
        self.save(index, table.shape[0])
        return self.backend.take(table, index)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array, None]:
        index, rows = self.saved
        return self.backend.take_grad(grad, index, rows), None


class Gather(Function):
    """One element along an axis for each number."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def _forward(self, x: Array, index: Array) -> Array:
        self.save(index, tuple(x.shape))
        return self.backend.gather(x, self.axis, index)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array, None]:
        index, shape = self.saved
        return self.backend.gather_grad(grad, self.axis, index, shape), None
