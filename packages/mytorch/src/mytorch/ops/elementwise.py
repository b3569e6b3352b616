"""Element by element: what each operation is called in a backend, and its gradient."""

from mytorch.autograd import Function, gives_new_memory
from mytorch.backends.base import Array
from mytorch.dtypes import DType

# name -> which of the input x and the output y the gradient needs, and the function of (grad, that) which it is.
GRADIENTS = {
    "exp": ("y", "mul"),
    "log": ("x", "div"),
    "sqrt": ("y", "sqrt_grad"),
    "tanh": ("y", "tanh_grad"),
    "sigmoid": ("y", "sigmoid_grad"),
    "relu": ("y", "relu_grad"),
    "gelu": ("x", "gelu_grad"),
    "silu": ("x", "silu_grad"),
}


class Unary(Function):
    """A function of one tensor, from GRADIENTS."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _forward(self, x: Array) -> Array:
        y = self.backend.unary(self.name, x)
        self.save(x if GRADIENTS[self.name][0] == "x" else y)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.binary(GRADIENTS[self.name][1], grad, *self.saved)


class Neg(Function):
    """-x."""

    def _forward(self, x: Array) -> Array:
        return self.backend.unary("neg", x)

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.unary("neg", grad)


class Abs(Function):
    """The absolute value; its gradient at 0 is 0."""

    def _forward(self, x: Array) -> Array:
        self.save(x)
        b = self.backend
        self.zero = b.full((), 0, b.dtype(x))
        # 0 - x, not -x: of 0 and -0 it is 0.
        return b.where(b.binary("gt", x, self.zero), x, b.binary("sub", self.zero, x))

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        (x,) = self.saved
        b = self.backend
        falling = b.where(b.binary("lt", x, self.zero), b.unary("neg", grad), self.zero)
        return b.where(b.binary("gt", x, self.zero), grad, falling)


class Add(Function):
    """x + y."""

    def _forward(self, x: Array, y: Array) -> Array:
        return self.backend.binary("add", x, y)

    def _backward(self, grad: Array) -> tuple[Array, Array]:
        return grad, grad


class Sub(Function):
    """x - y."""

    def _forward(self, x: Array, y: Array) -> Array:
        return self.backend.binary("sub", x, y)

    def _backward(self, grad: Array) -> tuple[Array, Array | None]:
        return grad, self.backend.unary("neg", grad) if self.needs[1] else None


class Mul(Function):
    """x * y."""

    def _forward(self, x: Array, y: Array) -> Array:
        self.save(x, y)
        return self.backend.binary("mul", x, y)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, Array | None]:
        x, y = self.saved
        return (
            self.backend.binary("mul", grad, y) if self.needs[0] else None,
            self.backend.binary("mul", grad, x) if self.needs[1] else None,
        )


class Div(Function):
    """x / y."""

    def _forward(self, x: Array, y: Array) -> Array:
        out = self.backend.binary("div", x, y)
        self.save(y, out)
        return out

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array, Array | None]:
        y, out = self.saved
        by_x = self.backend.binary("div", grad, y)
        return by_x, self.backend.unary("neg", self.backend.binary("mul", by_x, out)) if self.needs[1] else None


class Pow(Function):
    """x ** y."""

    def _forward(self, x: Array, y: Array) -> Array:
        out = self.backend.binary("pow", x, y)
        self.save(x, y, out)
        return out

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array | None, Array | None]:
        x, y, out = self.saved
        b = self.backend
        return (
            b.binary("mul", grad, b.binary("pow_base", x, y)) if self.needs[0] else None,
            b.binary("mul", grad, b.binary("pow_exponent", x, out)) if self.needs[1] else None,
        )


class Compare(Function):
    """x == y, x < y or x > y, by name; has no gradient."""

    def __init__(self, name: str) -> None:
        self.name = name

    def _forward(self, x: Array, y: Array) -> Array:
        return self.backend.binary(self.name, x, y)


class Where(Function):
    """X where condition, else y."""

    def _forward(self, condition: Array, x: Array, y: Array) -> Array:
        self.save(condition)
        return self.backend.where(condition, x, y)

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[None, Array, Array]:
        (condition,) = self.saved
        zero = self.backend.full((), 0, self.backend.dtype(grad))
        return None, self.backend.where(condition, grad, zero), self.backend.where(condition, zero, grad)


class Clamp(Function):
    """x raised to a least and lowered to a most, of which one may be left out. Its gradients are torch's: none for
    NaN, none for the least where the most is not above it, all for the most where it is below the least.
    """

    def __init__(self, has_least: bool, has_most: bool) -> None:
        self.has_least, self.has_most = has_least, has_most

    def _forward(self, x: Array, *bounds: Array) -> Array:
        self.save(x, *bounds)
        b = self.backend
        y = x
        if self.has_least:
            y = b.where(b.binary("lt", y, bounds[0]), bounds[0], y)
        if self.has_most:
            y = b.where(b.binary("gt", y, bounds[-1]), bounds[-1], y)
        return y

    @gives_new_memory
    def _backward(self, grad: Array) -> tuple[Array, ...]:
        x, *bounds = self.saved
        b = self.backend
        zero = b.full((), 0, b.dtype(grad))
        # NaN equals nothing, not even itself.
        by_x = b.where(b.binary("eq", x, x), grad, zero)
        by_bounds = []
        if self.has_least:
            below = b.binary("lt", x, bounds[0])
            by_x = b.where(below, zero, by_x)
            by_bounds.append(b.where(below, grad, zero))
        if self.has_most:
            above = b.binary("gt", x, bounds[-1])
            by_x = b.where(above, zero, by_x)
            by_bounds.append(b.where(above, grad, zero))
        if len(bounds) == 2:
            least, most = bounds
            by_bounds = [
                b.where(b.binary("lt", least, most), by_bounds[0], zero),
                b.where(b.binary("lt", most, least), grad, by_bounds[1]),
            ]
        return by_x, *by_bounds


class Cast(Function):
    """Another element type; the gradient goes back in the old one."""

    def __init__(self, dtype: DType) -> None:
        self.dtype = dtype

    def _forward(self, x: Array) -> Array:
        return self.backend.cast(x, self.dtype)

    def _backward(self, grad: Array) -> Array:
        return grad


class Dropout(Function):
    """Zero with probability p, the rest scaled so that the mean stays."""

    def __init__(self, p: float, seed: int) -> None:
        self.p, self.seed = p, seed

    def _forward(self, x: Array) -> Array:
        mask = self.backend.dropout_mask(tuple(x.shape), self.p, self.seed, self.backend.dtype(x))
        self.save(mask)
        return self.backend.binary("mul", x, mask)

    @gives_new_memory
    def _backward(self, grad: Array) -> Array:
        return self.backend.binary("mul", grad, *self.saved)
