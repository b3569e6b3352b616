"""What the kernels share: where elements lie, the types they are computed in, and one step of a matrix product."""

import triton
import triton.language as tl


@triton.jit
def program_number(WIDE: tl.constexpr):
    """This program's number; in 64 bits where WIDE, for numbers of elements are computed from it."""
    i = tl.program_id(0)
    if WIDE:
        i = i.to(tl.int64)
    return i


@triton.jit
def number(value, ACC: tl.constexpr):
    """A kernel's fp64 argument in another type, [1]; interpreted it is a Python number, of which a plain cast would
    keep fp32's digits only.
    """
    return tl.full([1], value, ACC)


@triton.jit
def quotient(x, y):
    """Rounded correctly; of integers, the quotient's whole part."""
    if x.dtype == tl.float32:
        ratio = tl.div_rn(x, y)
    elif x.dtype == tl.float64:
        ratio = x / y
    else:
        ratio = x.to(tl.float64) / y.to(tl.float64)
    return ratio


@triton.jit
def strided_offsets(o, sizes, strides, NDIM: tl.constexpr):
    """Where elements `o`, counted in C order, of an array of NDIM axes lie in its memory, in 64 bits."""
    rest = o
    offset = (o * 0).to(tl.int64)
    for i in tl.static_range(NDIM - 1):
        offset += (rest % sizes[NDIM - 1 - i]).to(tl.int64) * strides[NDIM - 1 - i]
        rest = rest // sizes[NDIM - 1 - i]
    return offset + rest.to(tl.int64) * strides[0]


@triton.jit
def widened(b_x):
    """fp16 as fp32, to compute in; bool, which lies in memory as uint8, as int32; other types as they are."""
    b_wide = b_x
    if b_x.dtype == tl.float16:
        b_wide = b_x.to(tl.float32)
    elif b_x.dtype == tl.uint8:
        b_wide = b_x.to(tl.int32)
    return b_wide


@triton.jit
def store_as(p_out, b_x, m_out, AS_BOOL: tl.constexpr):
    """Store in the memory's type; as a truth value, 1 for all but 0."""
    if AS_BOOL:
        b_x = b_x != 0
    tl.store(p_out, b_x.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def add_product(acc, b_x, b_y, PRECISION: tl.constexpr):
    """`acc + b_x @ b_y`, [M, K] @ [K, N] -> [M, N]; without a PRECISION element by element, for the types that matrix
    units do not take.
    """
    if PRECISION is None:
        acc += tl.sum(b_x[:, :, None].to(acc.dtype) * b_y[None, :, :].to(acc.dtype), 1)
    else:
        acc = tl.dot(b_x, b_y, acc, input_precision=PRECISION)
    return acc
