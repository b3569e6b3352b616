"""What losses need beyond the other operations."""

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array
from mytorch.dtypes import float32, promote

# As torch has them: no logarithm is below the one, no variance p (1 - p) of a gradient's divisor below the other.
LEAST_LOGARITHM, LEAST_VARIANCE = -100.0, 1e-12


class BinaryCrossEntropy(Function):
    """-(target * log p + (1 - target) * log(1 - p)), element by element; finite at p = 0 and p = 1."""

    def _forward(self, p: Array, target: Array) -> Array:
        b = self.backend
        # In fp32 at least: in fp16 the least variance is 0.
        dtype = b.dtype(p)
        self.wide = promote(dtype, float32)
        p, target = b.cast(p, self.wide), b.cast(target, self.wide)
        self.save(p, target)
        right, wrong = (self._at_least(LEAST_LOGARITHM, x) for x in self._logarithms(p))
        loss = b.binary(
            "sub", b.binary("mul", b.binary("sub", target, self._number(1)), wrong), b.binary("mul", target, right)
        )
        return b.cast(loss, dtype)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, Array | None]:
        p, target = self.saved
        b = self.backend
        grad = b.cast(grad, self.wide)
        by_p = by_target = None
        if self.needs[0]:
            variance = self._at_least(LEAST_VARIANCE, b.binary("mul", p, b.binary("sub", self._number(1), p)))
            by_p = b.binary("mul", grad, b.binary("div", b.binary("sub", p, target), variance))
        if self.needs[1]:
            right, wrong = self._logarithms(p)
            by_target = b.binary("mul", grad, b.binary("sub", wrong, right))
        return by_p, by_target

    def _number(self, value: float) -> Array:
        return self.backend.full((), value, self.wide)

    def _logarithms(self, p: Array) -> tuple[Array, Array]:
        """Of p and of 1 - p."""
        b = self.backend
        return b.unary("log", p), b.unary("log", b.binary("sub", self._number(1), p))

    def _at_least(self, least: float, x: Array) -> Array:
        b, number = self.backend, self._number(least)
        return b.where(b.binary("lt", x, number), number, x)
