"""Element by element, and copies between arrays of any strides. One program has BLOCK elements, counted in C order of
the result.

Axes that are contiguous with each other in every array are merged, so that arrays in C order and scalars need no
division.
"""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import number, program_number, quotient, store_as, strided_offsets, widened

SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def tanh(x):
    """A quotient of polynomials near 0, exact to rounding below 0.5, where exponentials would cancel;
    those elsewhere.
    """
    s = x * x
    near = x * (135135 + s * (17325 + s * (378 + s))) / (135135 + s * (62370 + s * (3150 + s * 28)))
    e = tl.exp(tl.abs(x) * -2)
    far = (1 - e) / (1 + e)
    return tl.where(tl.abs(x) < 0.5, near, tl.where(x < 0, -far, far))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow for any x."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1 + e)


@triton.jit
def square_root(x):
    """Rounded correctly."""
    if x.dtype == tl.float32:
        root = tl.sqrt_rn(x)
    else:
        root = tl.sqrt(x)
    return root


@triton.jit
def real_power(x, p):
    """x ** p through logarithms, in fp64: an error in p * log(x) is one of the result's many digits.

    A negative x needs an integer p.
    """
    base = x.to(tl.float64)
    exponent = p.to(tl.float64)
    magnitude = tl.exp(exponent * tl.log(tl.abs(base)))
    magnitude = tl.where((exponent == 0) | (tl.abs(base) == 1), 1.0, magnitude)
    half = exponent * 0.5
    whole = exponent == tl.floor(exponent)
    odd = whole & (half != tl.floor(half))
    broken = tl.where(base == float("-inf"), magnitude, float("nan"))
    signed = tl.where(whole, tl.where(odd, -magnitude, magnitude), broken)
    found = tl.where(base < 0, signed, magnitude)
    # 1 ** NaN is 1, any other power to NaN is NaN; so is a NaN to any power but 0.
    found = tl.where((base == 1) | (exponent == exponent), found, exponent)
    return tl.where((exponent == 0) | (base == base), found, base).to(x.dtype)


@triton.jit
def whole_power(x, p):
    """x ** p of integers, by squaring; p is not negative."""
    found = x * 0 + 1
    while tl.max(p, 0) > 0:
        found = tl.where(p % 2 == 1, found * x, found)
        x = x * x
        p = p // 2
    return found


@triton.jit
def power(x, p):
    """x ** p."""
    if x.dtype.is_floating():
        found = real_power(x, p)
    else:
        found = whole_power(x, p)
    return found


@triton.jit
def function_of_one(x, NAME: tl.constexpr):
    """One of `base.UNARY`."""
    if NAME == "neg":
        y = -x
    elif NAME == "exp":
        y = tl.exp(x)
    elif NAME == "log":
        y = tl.log(x)
    elif NAME == "sqrt":
        y = square_root(x)
    elif NAME == "tanh":
        y = tanh(x)
    elif NAME == "relu":
        # NaN stays NaN.
        y = tl.where(x < 0, 0.0, x)
    elif NAME == "gelu":
        y = 0.5 * x * (1 + tanh((x + x * x * x * CUBIC) * SQRT_2_OVER_PI))
    elif NAME == "silu":
        y = x * sigmoid(x)
    elif NAME == "sigmoid":
        y = sigmoid(x)
    else:
        tl.static_assert(False, "unknown function of one array")
    return y


@triton.jit
def gradient(grad, x, NAME: tl.constexpr):
    """One of `base.GRADIENTS`: of an incoming gradient and the operation's input or output."""
    if NAME == "sqrt_grad":
        y = quotient(grad, x * 2)
    elif NAME == "tanh_grad":
        y = grad * (1 - x * x)
    elif NAME == "relu_grad":
        y = tl.where(x > 0, grad, 0.0)
    elif NAME == "gelu_grad":
        t = tanh((x + x * x * x * CUBIC) * SQRT_2_OVER_PI)
        y = grad * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (x * x * CUBIC * 3 + 1) * SQRT_2_OVER_PI)
    elif NAME == "silu_grad":
        s = sigmoid(x)
        y = grad * s * (1 + x * (1 - s))
    elif NAME == "sigmoid_grad":
        y = grad * x * (1 - x)
    else:
        tl.static_assert(False, "unknown function of two arrays")
    return y


@triton.jit
def function_of_two(x, y, NAME: tl.constexpr):
    """One of `base.BINARY`."""
    if NAME == "add":
        z = x + y
    elif NAME == "sub":
        z = x - y
    elif NAME == "mul":
        z = x * y
    elif NAME == "div":
        z = quotient(x, y)
    elif NAME == "eq":
        z = x == y
    elif NAME == "lt":
        z = x < y
    elif NAME == "gt":
        z = x > y
    elif NAME == "pow":
        z = power(x, y)
    elif NAME == "pow_base":
        # 0 for p = 0, also at x = 0, where x ** -1 is infinite.
        z = tl.where(y == 0, 0.0, y * real_power(x, y - 1))
    elif NAME == "pow_exponent":
        # 0 at x = 0, where the logarithm is infinite; but for a negative exponent, where y is infinite too.
        z = tl.where((x == 0) & (y != float("inf")), 0.0, y * tl.log(x))
    else:
        z = gradient(x, y, NAME)
    return z


@triton.jit
def mytorch_unary_kernel(
    x, out, sizes, x_strides, n, NAME: tl.constexpr, NDIM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the result.
    # Loops over: nothing.
    # Writes: its elements of out, in C order.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + strided_offsets(o, sizes, x_strides, NDIM), mask=m, other=0)
    store_as(out + o, function_of_one(widened(b_x), NAME), m, False)


@triton.jit
def mytorch_binary_kernel(
    x, y, out, sizes, x_strides, y_strides, n,
    NAME: tl.constexpr, NDIM: tl.constexpr, AS_BOOL: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the result.
    # Loops over: nothing.
    # Writes: its elements of out, in C order.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + strided_offsets(o, sizes, x_strides, NDIM), mask=m, other=0)
    b_y = tl.load(y + strided_offsets(o, sizes, y_strides, NDIM), mask=m, other=0)
    store_as(out + o, function_of_two(widened(b_x), widened(b_y), NAME), m, AS_BOOL)


@triton.jit
def mytorch_where_kernel(
    condition, x, y, out, sizes, condition_strides, x_strides, y_strides, n, NDIM: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the result.
    # Loops over: nothing.
    # Writes: its elements of out, in C order.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_c = tl.load(condition + strided_offsets(o, sizes, condition_strides, NDIM), mask=m, other=0)
    b_x = tl.load(x + strided_offsets(o, sizes, x_strides, NDIM), mask=m, other=0)
    b_y = tl.load(y + strided_offsets(o, sizes, y_strides, NDIM), mask=m, other=0)
    tl.store(out + o, tl.where(b_c != 0, b_x, b_y), mask=m)


@triton.jit
def mytorch_copy_kernel(
    x, out, sizes, x_strides, out_strides, n, NDIM: tl.constexpr, AS_BOOL: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements.
    # Loops over: nothing.
    # Writes: its elements of out, which may have any strides, in out's type.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    b_x = tl.load(x + strided_offsets(o, sizes, x_strides, NDIM), mask=m, other=0)
    store_as(out + strided_offsets(o, sizes, out_strides, NDIM), b_x, m, AS_BOOL)


@triton.jit(do_not_specialize=("bits",))
def mytorch_fill_kernel(out, bits: tl.int64, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements.
    # Loops over: nothing.
    # Writes: the bits of one value, which out takes for an integer: so every type is filled exactly.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.full([BLOCK], bits, out.dtype.element_ty), mask=o < n)


@triton.jit(do_not_specialize=("seed",))
def mytorch_dropout_kernel(out, seed, p, scale: tl.float64, n, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements.
    # Loops over: nothing.
    # Writes: scale where a random number of the element's own is at least p, else 0.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + o, tl.where(tl.rand(seed, o) >= p, number(scale, out.dtype.element_ty), 0.0), mask=o < n)
