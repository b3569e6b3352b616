"""Element by element, flat arrays in as many parts as there are threads.

One compiled function serves all operations by number, each with its own loop: numba takes half a second to compile
a threaded function, and a few milliseconds for a loop in it.
"""

import math

from mytorch.backends.loops.compiled import bounds, prange, private, threaded
from mytorch.backends.loops.functions import exp, gelu, gelu_grad, like, sigmoid, silu_grad, tanh

UNARY = ("neg", "exp", "sqrt", "tanh", "relu", "gelu", "silu", "sigmoid")
_NEG, _EXP, _SQRT, _TANH, _RELU, _GELU, _SILU, _SIGMOID = range(len(UNARY))
# The first six also take one number for many, the second or, by the names with "from", the first.
BINARY = (
    "add",
    "sub",
    "mul",
    "div",
    "sub from",
    "div from",
    "sqrt_grad",
    "tanh_grad",
    "relu_grad",
    "gelu_grad",
    "silu_grad",
    "sigmoid_grad",
)
(
    _ADD,
    _SUB,
    _MUL,
    _DIV,
    _SUB_FROM,
    _DIV_FROM,
    _SQRT_GRAD,
    _TANH_GRAD,
    _RELU_GRAD,
    _GELU_GRAD,
    _SILU_GRAD,
    _SIGMOID_GRAD,
) = range(len(BINARY))


@private
def unary_part(operation, x, start, stop, out):
    """From start to stop."""
    if operation == _NEG:
        for i in range(start, stop):
            out[i] = -x[i]
    elif operation == _EXP:
        for i in range(start, stop):
            out[i] = exp(x[i])
    elif operation == _SQRT:
        for i in range(start, stop):
            out[i] = math.sqrt(x[i])
    elif operation == _TANH:
        for i in range(start, stop):
            out[i] = tanh(x[i])
    elif operation == _RELU:
        for i in range(start, stop):
            # A comparison with NaN is false, and NaN stays.
            out[i] = like(x[i], 0) if x[i] < 0 else x[i]
    elif operation == _GELU:
        for i in range(start, stop):
            out[i] = gelu(x[i])
    elif operation == _SILU:
        for i in range(start, stop):
            out[i] = x[i] * sigmoid(x[i])
    elif operation == _SIGMOID:
        for i in range(start, stop):
            out[i] = sigmoid(x[i])


@threaded
def unary(operation, x, parts, out):
    """One of UNARY."""
    for part in prange(parts):
        start, stop = bounds(part, parts, len(x))
        unary_part(operation, x, start, stop, out)


@private
def with_one(operation, x, y, start, stop, out):
    """One of the first six of BINARY with the same number y for all."""
    if operation == _ADD:
        for i in range(start, stop):
            out[i] = x[i] + y
    elif operation == _SUB:
        for i in range(start, stop):
            out[i] = x[i] - y
    elif operation == _MUL:
        for i in range(start, stop):
            out[i] = x[i] * y
    elif operation == _DIV:
        for i in range(start, stop):
            out[i] = x[i] / y
    elif operation == _SUB_FROM:
        for i in range(start, stop):
            out[i] = y - x[i]
    elif operation == _DIV_FROM:
        for i in range(start, stop):
            out[i] = y / x[i]


@private
def with_many(operation, x, y, shift, start, stop, out):
    """One of the first six of BINARY with `y[i + shift]`."""
    if operation == _ADD:
        for i in range(start, stop):
            out[i] = x[i] + y[i + shift]
    elif operation == _SUB:
        for i in range(start, stop):
            out[i] = x[i] - y[i + shift]
    elif operation == _MUL:
        for i in range(start, stop):
            out[i] = x[i] * y[i + shift]
    elif operation == _DIV:
        for i in range(start, stop):
            out[i] = x[i] / y[i + shift]
    elif operation == _SUB_FROM:
        for i in range(start, stop):
            out[i] = y[i + shift] - x[i]
    elif operation == _DIV_FROM:
        for i in range(start, stop):
            out[i] = y[i + shift] / x[i]


@private
def gradient(operation, grad, x, start, stop, out):
    """One of the last six of BINARY; x is the operation's input or output."""
    if operation == _SQRT_GRAD:
        for i in range(start, stop):
            out[i] = grad[i] / (x[i] + x[i])
    elif operation == _TANH_GRAD:
        for i in range(start, stop):
            out[i] = grad[i] * (like(x[i], 1) - x[i] * x[i])
    elif operation == _RELU_GRAD:
        for i in range(start, stop):
            # Read whether it is needed or not: a condition on the read alone would be a branch.
            g = grad[i]
            out[i] = g if x[i] > 0 else like(g, 0)
    elif operation == _GELU_GRAD:
        for i in range(start, stop):
            out[i] = gelu_grad(grad[i], x[i])
    elif operation == _SILU_GRAD:
        for i in range(start, stop):
            out[i] = silu_grad(grad[i], x[i])
    elif operation == _SIGMOID_GRAD:
        for i in range(start, stop):
            out[i] = grad[i] * x[i] * (like(x[i], 1) - x[i])


@private
def binary_part(operation, x, y, length, step, single, start, stop, out):
    """From start to stop, a segment at a time."""
    while start < stop:
        i = start // length
        end = min(stop, (i + 1) * length)
        if single:
            with_one(operation, x, y[i * step], start, end, out)
        elif operation < _SQRT_GRAD:
            with_many(operation, x, y, i * (step - length), start, end, out)
        else:
            gradient(operation, x, y, start, end, out)
        start = end


@threaded
def binary(operation, x, y, length, step, single, parts, out):
    """One of BINARY: x in segments of a length, segment i against `y[i * step]`, which serves all of it (single) or is
    the first of as many.
    """
    for part in prange(parts):
        start, stop = bounds(part, parts, len(x))
        binary_part(operation, x, y, length, step, single, start, stop, out)
