"""Elements and rows by index, and their gradients, which are gathered: the program that owns a row walks the indices
and adds what belongs to it, in their order, so that the same inputs give the same bits.
"""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import program_number, strided_offsets


@triton.jit
def mytorch_take_kernel(
    table, index, out, n, n_tiles, rows, D, OUTSIDE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    # Grid: blocks of BLOCK_R indices x tiles of BLOCK_D columns.
    # Owns: one tile of the result.
    # Loops over: nothing.
    # Writes: the rows of table [rows, D] that its indices name; OUTSIDE for an index that names none.
    o_r = tl.program_id(0) // n_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    o_d = tl.program_id(0) % n_tiles * BLOCK_D + tl.arange(0, BLOCK_D)
    m = (o_r < n)[:, None] & (o_d < D)[None, :]
    b_row = tl.load(index + o_r, mask=o_r < n, other=0)
    m_row = (b_row >= 0) & (b_row < rows)
    # [R, D]
    b_x = tl.load(table + b_row[:, None] * D + o_d[None, :], mask=m & m_row[:, None], other=OUTSIDE)
    tl.store(out + o_r.to(tl.int64)[:, None] * D + o_d[None, :], b_x, mask=m)


@triton.jit
def mytorch_take_grad_kernel(
    grad, index, out, rows, n, chunk, tiles_v, tiles_d, D, ACC: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK_D columns x blocks of BLOCK_V rows of the table x chunks of `chunk` indices.
    # Owns: a tile of the table's gradient, of one chunk.
    # Loops over: the chunk's indices, BLOCK_N at a time; where none names a row of the tile, nothing more is read.
    # Writes: its tile of out [parts, rows, D].
    i = tl.program_id(0)
    o_d = i % tiles_d * BLOCK_D + tl.arange(0, BLOCK_D)
    i_v = i // tiles_d % tiles_v
    i_part = i // tiles_d // tiles_v
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    acc = tl.zeros([BLOCK_V, BLOCK_D], ACC)
    begin = i_part * chunk
    end = tl.minimum(begin + chunk, n)
    for i_n in range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        b_row = tl.load(index + o_n, mask=o_n < end, other=-1)
        # [V, N]
        named = o_v[:, None] == b_row[None, :]
        if tl.max(tl.max(named.to(tl.int32), 1), 0) > 0:
            # [N, D]
            m_grad = (o_n < end)[:, None] & (o_d < D)[None, :]
            b_grad = tl.load(grad + o_n.to(tl.int64)[:, None] * D + o_d[None, :], mask=m_grad, other=0).to(ACC)
            # [V, N, D] -> [V, D]. What is not named must not take part, not even as 0 times it: it may be infinite.
            acc += tl.sum(
                tl.where(named[:, :, None], b_grad[None, :, :], tl.zeros([BLOCK_V, BLOCK_N, BLOCK_D], ACC)), 1
            )
    o_out = (i_part.to(tl.int64) * rows + o_v[:, None]) * D + o_d[None, :]
    tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=(o_v < rows)[:, None] & (o_d < D)[None, :])


@triton.jit
def mytorch_gather_kernel(
    x, index, out, sizes, x_strides, x_stride, length, n, OUTSIDE: tl.constexpr, NDIM: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of the result.
    # Loops over: nothing.
    # Writes: for each index the element that it names along x's axis of x_stride, or OUTSIDE; x_strides are 0 along
    # that axis.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    b_number = tl.load(index + o, mask=o < n, other=0)
    m = (o < n) & (b_number >= 0) & (b_number < length)
    b_x = tl.load(x + strided_offsets(o, sizes, x_strides, NDIM) + b_number * x_stride, mask=m, other=OUTSIDE)
    tl.store(out + o, b_x, mask=o < n)


@triton.jit
def covered(o, sizes, lengths, NDIM: tl.constexpr):
    """Whether each element's place along every axis is below a length."""
    rest = o
    inside = o >= 0
    for i in tl.static_range(NDIM):
        inside = inside & (rest % sizes[NDIM - 1 - i] < lengths[NDIM - 1 - i])
        rest = rest // sizes[NDIM - 1 - i]
    return inside


@triton.jit
def mytorch_gather_grad_kernel(
    grad, index, out, sizes, lengths, index_strides, grad_strides, inner, length, count, index_stride, grad_stride, n,
    ACC: tl.constexpr, NDIM: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK elements.
    # Owns: BLOCK elements of x's gradient, of `sizes`.
    # Loops over: the `count` indices that may name an element, index_stride apart, and their gradients, grad_stride
    # apart. The other strides are 0 along that axis.
    # Writes: the sum of the gradients whose indices name the element.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    # The indices' other axes may be shorter than x's.
    m = (o < n) & covered(o, sizes, lengths, NDIM)
    place = o // inner % length
    o_index = strided_offsets(o, sizes, index_strides, NDIM)
    o_grad = strided_offsets(o, sizes, grad_strides, NDIM)
    acc = tl.zeros([BLOCK], ACC)
    for j in range(count):
        b_number = tl.load(index + o_index + tl.cast(j, tl.int64) * index_stride, mask=m, other=-1)
        named = m & (b_number == place)
        acc += tl.load(grad + o_grad + tl.cast(j, tl.int64) * grad_stride, mask=named, other=0).to(ACC)
    tl.store(out + o, acc.to(out.dtype.element_ty), mask=o < n)
