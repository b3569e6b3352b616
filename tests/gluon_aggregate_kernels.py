"""What Gluon kernels are written with besides operations: aggregates, tuples, functions of constants."""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.ops._device.hopper.ring import aggregate

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


class Sizes(NamedTuple):
    rows: int
    columns: int


@gluon.constexpr_function
def log2(number):
    return number.bit_length() - 1


@gluon.constexpr_function
def line_of(per_thread):
    return gl.BlockedLayout([per_thread], [32], [4], [0])


@aggregate
class Span:
    """From a number on, so many: the width is known to the compiler."""

    first: gl.tensor
    WIDTH: gl.constexpr

    @gluon.jit
    def moved(self, by):
        return Span(self.first + by, self.WIDTH)

    @gluon.jit
    def last(self):
        return self.first + self.WIDTH - 1

    @gluon.constexpr_function
    def half(self):
        return self.WIDTH // 2


@aggregate
class State:
    """An aggregate in an aggregate, and a tuple."""

    span: Span
    total: gl.tensor
    seen: gl.tuple

    @gluon.jit
    def step(self, i):
        least, most = self.seen
        seen = (gl.minimum(least, i), gl.maximum(most, self.span.last()))
        return State(self.span.moved(2), self.total + self.span.first * i, seen)


@gluon.jit
def both_ends(span):
    return span.first, span.last()


@gluon.jit
def start(x):
    return State(Span(gl.load(x), 8), gl.to_tensor(0), (gl.to_tensor(100), gl.to_tensor(-100)))


@gluon.jit
def state_kernel(x, HOW: gl.constexpr):
    """Aggregates, carried by loops and through conditions; x[1] says how far, and the results follow it."""
    n, state = gl.load(x + 1), start(x)
    if HOW == "for":
        for i in range(n):
            state = state.step(i)
    elif HOW == "while":
        while state.total < n:
            state = state.step(state.span.last())
    elif HOW == "if":
        if n > 3:  # noqa: SIM108
            state = state.step(n)
        else:
            state = State(state.span, state.total - 1, state.seen)
    else:
        gl.static_assert(HOW == "static_range")
        for i in gl.static_range(3):
            state = state.step(i)
    gl.static_assert(state.span.WIDTH == 8, "the width stays a constant")
    WIDTH: gl.constexpr = state.span.half()
    first, last = both_ends(state.span)
    gl.store(x + 2, first)
    gl.store(x + 3, last)
    gl.store(x + 4, state.total)
    gl.store(x + 5, state.seen[0])
    gl.store(x + 6, state.seen[1])
    gl.store(x + 7, WIDTH)


@gluon.jit
def combined(pointers, sizes, scales, HOW: gl.constexpr):
    i = gl.arange(0, 128, line_of(1 << log2(gl.constexpr(1))))
    source, out = pointers
    if HOW == "named":
        gl.store(out + i, i * sizes.rows + sizes.columns)
    elif HOW == "joined":
        three = (sizes.rows,) + (sizes[1], scales[0])  # noqa: RUF005
        gl.static_assert(len(three) == 3)
        gl.store(out + i, i + three[0] * three[1] + three[-1])
    elif HOW == "carried":
        a, b = sizes.rows, sizes.columns
        for _ in range(gl.load(source)):
            a, b = b, a + b
        gl.store(out + i, a * 1000 + b)
    elif HOW == "unrolled":
        total = gl.load(source + i)
        for j in gl.static_range(len(scales)):
            total += scales[j] * (j + 1)
        gl.store(out + i, total)
    else:
        gl.static_assert(HOW == "nested")
        pair, c = (sizes.rows, 2), sizes.columns
        a, b = pair
        gl.store(out + i, a * 100 + b * 10 + c)


@gluon.jit
def tuples_kernel(x, HOW: gl.constexpr):
    """Tuples, named or not: handed on, put together and taken apart. The results begin at x[128]."""
    combined((x, x + 128), Sizes(gl.load(x), gl.load(x + 1)), (5, max(gl.load(x + 2), 11)), HOW)


@gluon.jit
def wrong_kernel(x, HOW: gl.constexpr):
    """What the compiler refuses."""
    n = gl.load(x)
    if HOW == "tensor for a constant":
        span = Span(n, n)
    elif HOW == "another aggregate":
        span = State(n, n, (n, n)).span
    elif HOW == "aggregate for a tensor":
        span = Span(Span(n, 8), 8)
    elif HOW == "field that changes":
        span = Span(n, 8)
        span.first = n + 1
    elif HOW == "field too few":
        span = Span(n)
    else:
        gl.static_assert(log2(gl.constexpr(8)) == 4, "of 8 it is 3")
        span = Span(n, 8)
    gl.store(x, span.last())


if hasattr(gl, "aggregate_replace"):

    @gluon.aggregate
    class Sized:
        first: gl.tensor
        WIDTH: gl.constexpr = 8

    @gluon.aggregate
    class Named(Sized):
        rank: gl.tensor

        @gluon.jit
        def sum(self):
            return self.first + self.WIDTH + self.rank

    @gluon.jit
    def inherited_kernel(x):
        """What Triton has from 3.9 on: defaults, inheritance, replacing."""
        n = gl.load(x)
        named = Named(n, rank=n * 10)
        gl.store(x + 1, named.sum())
        gl.store(x + 2, gl.aggregate_replace(named, rank=n, WIDTH=16).sum())
else:
    inherited_kernel = None
