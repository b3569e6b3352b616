"""Functions of one number, written so that loops over arrays of fp32 become vector instructions; in fp64 exp and tanh
are the C library's.
"""

import math

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic, overload

# Reordering would undo the reduction of exp's argument, which takes two steps to be exact; a loop with a call in it is
# not vectorised.
_OPTIONS = {"fastmath": {"contract"}, "error_model": "numpy", "forceinline": True}
exact = njit(cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)

_LOG2_E = np.float32(math.log2(math.e))
# The first has so few digits that its product with a small whole number is exact.
_LN2_HIGH, _LN2_LOW = np.float32(0.693145751953125), np.float32(math.log(2) - 0.693145751953125)
# Beyond these exp is 0 and infinite.
_LEAST, _MOST = np.float32(-110), np.float32(90)
_EXP_SERIES = tuple(np.float32(1 / math.factorial(n)) for n in range(7, -1, -1))
_TANH_SERIES = tuple(np.float32(c) for c in (62 / 2835, -17 / 315, 2 / 15, -1 / 3))
_ONE, _TWO, _HALF, _NEAR_ZERO = np.float32(1), np.float32(2), np.float32(0.5), np.float32(0.2)
_SQRT_2_OVER_PI, _CUBIC = 0.7978845608028654, 0.044715


@intrinsic
def _power_of_two(typing, exponent):
    """2 ** exponent as fp32, of int32 from -126 to 127, by its bits."""

    def generate(context, builder, signature, arguments):
        shifted = builder.shl(builder.add(arguments[0], ir.IntType(32)(127)), ir.IntType(32)(23))
        return builder.bitcast(shifted, ir.FloatType())

    return types.float32(types.int32), generate


def emit_exp2(builder, x):
    """Instructions for 2 ** x, a number or a vector of them: half of what exp takes."""
    element = getattr(x.type, "element", x.type)
    digits, most, terms, bits, rounded = (
        (23, 128.0, 7, ir.IntType(32), np.float32)
        if element == ir.FloatType()
        else (52, 1024.0, 14, ir.IntType(64), np.float64)
    )
    integers = bits if element == x.type else ir.VectorType(bits, x.type.count)

    def constant(value, kind=x.type):
        return ir.Constant(kind, value if element == x.type else [value] * x.type.count)

    given = x
    # Its bits are those of infinity.
    x = builder.select(builder.fcmp_ordered(">", x, constant(most)), constant(most), x)
    # Next to a number this large the sum has no place for a fraction: its last bits are the nearest whole number.
    large = constant(1.5 * 2**digits)
    moved = builder.fadd(x, large)
    r = builder.fsub(x, builder.fsub(moved, large))
    series = [constant(float(rounded(math.log(2) ** n / math.factorial(n)))) for n in range(terms)]
    value = series.pop()
    for term in reversed(series):
        value = builder.fadd(builder.fmul(value, r, flags=("contract",)), term, flags=("contract",))
    power = builder.add(
        builder.bitcast(value, integers), builder.shl(builder.bitcast(moved, integers), constant(digits, integers))
    )
    # What takes more than the smallest exponent is 0.
    least = builder.fcmp_ordered("<", x, constant(2 - most))
    power = builder.select(least, constant(0.0), builder.bitcast(power, x.type))
    # Of NaN, whose last bits may be anything, no exponent is made.
    return builder.select(builder.fcmp_unordered("uno", given, given), given, power)


@intrinsic
def _exp2(typing, x):
    return x(x), lambda context, builder, signature, arguments: emit_exp2(builder, arguments[0])


@intrinsic
def choose(typing, condition, x, y):
    """X where condition, else y, both known: never a branch, which data without order would make slow."""

    def generate(context, builder, signature, arguments):
        return builder.select(arguments[0], arguments[1], arguments[2])

    return x(types.boolean, x, x), generate


@exact
def _exp32(x):
    t = choose(x > _LEAST, x, _LEAST)
    t = choose(t < _MOST, t, _MOST)
    n = np.floor(t * _LOG2_E + _HALF)
    r = (t - n * _LN2_HIGH) - n * _LN2_LOW
    a, b, c, d, e, f, g, h = _EXP_SERIES
    value = ((((((a * r + b) * r + c) * r + d) * r + e) * r + f) * r + g) * r + h
    # In two steps, for 2 ** n may be too small or too large where the result is not.
    whole = np.int32(n)
    half = whole >> np.int32(1)
    value = value * _power_of_two(half) * _power_of_two(np.int32(whole - half))
    return choose(x == x, value, x)


@exact
def exp2(x):
    """2 to the power x."""
    return _exp2(x)


@exact
def _tanh32(x):
    e = _exp32(-_TWO * abs(x))
    far = (_ONE - e) / (_ONE + e)
    a, b, c, d = _TANH_SERIES
    s = x * x
    # Near 0 the difference above has few digits left.
    near = x + x * s * (((a * s + b) * s + c) * s + d)
    return choose(abs(x) < _NEAR_ZERO, near, choose(x > 0, far, -far))


def exp(x):
    """E to the power x, in compiled loops."""
    return math.exp(x)


def tanh(x):
    """The hyperbolic tangent, in compiled loops."""
    return math.tanh(x)


def like(x, value):
    """A number as x's type, in compiled loops: one in fp64 would widen what it meets."""
    return type(x)(value)


@overload(exp, jit_options=_OPTIONS)
def _exp_of(x):
    return (lambda x: _exp32(x)) if x == types.float32 else (lambda x: math.exp(x))


@overload(tanh, jit_options=_OPTIONS)
def _tanh_of(x):
    return (lambda x: _tanh32(x)) if x == types.float32 else (lambda x: math.tanh(x))


@overload(like, jit_options=_OPTIONS)
def _like_of(x, value):
    return (lambda x, value: np.float32(value)) if x == types.float32 else (lambda x, value: np.float64(value))


@exact
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow for any x."""
    one = like(x, 1)
    e = exp(-abs(x))
    return choose(x >= 0, one, e) / (one + e)


@exact
def _gelu_share(x):
    """What gelu multiplies x by: (1 + tanh(u)) / 2 is sigmoid(2 u)."""
    return sigmoid(like(x, 2 * _SQRT_2_OVER_PI) * (x + like(x, _CUBIC) * x * x * x))


@exact
def gelu(x):
    """In its tanh form."""
    return x * _gelu_share(x)


@exact
def gelu_grad(grad, x):
    """By x, of its tanh form."""
    s = _gelu_share(x)
    one = like(x, 1)
    slope = like(x, 2 * _SQRT_2_OVER_PI) * (one + like(x, 3 * _CUBIC) * x * x)
    return grad * (s + x * s * (one - s) * slope)


@exact
def silu_grad(grad, x):
    """By x."""
    s = sigmoid(x)
    return grad * s * (like(x, 1) + x * (like(x, 1) - s))
