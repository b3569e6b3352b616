"""Sums and the largest over any axes of an array of any strides.

The axes that stay count the rows of a tile, those that go its columns. A tile's shape decides which of the two is read
along memory.
"""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import number, program_number, quotient, store_as, strided_offsets


@triton.jit
def mytorch_reduce_kernel(
    x, out, kept_sizes, kept_strides, sizes, strides, n_kept, n, chunk, n_tiles, divisor: tl.float64,
    LARGEST: tl.constexpr, START: tl.constexpr, MEAN: tl.constexpr, ACC: tl.constexpr, AS_BOOL: tl.constexpr,
    KEPT_NDIM: tl.constexpr, NDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M results x chunks of `chunk` elements of each.
    # Owns: one chunk of BLOCK_M results.
    # Loops over: the chunk's elements, BLOCK_N at a time; each column of the tile keeps its own result until the end.
    # Writes: its part of its results, out [parts, results]; of a MEAN, divided.
    i = program_number(WIDE)
    i_part = i // n_tiles
    o_m = i % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    m_m = o_m < n_kept
    p_m = x + strided_offsets(o_m, kept_sizes, kept_strides, KEPT_NDIM)
    acc = tl.full([BLOCK_M, BLOCK_N], START, ACC)
    begin = i_part * chunk
    end = tl.minimum(begin + chunk, n)
    for i_n in range(begin, end, BLOCK_N):
        o_n = i_n + tl.arange(0, BLOCK_N)
        o_x = strided_offsets(o_n, sizes, strides, NDIM)
        # [M, N]
        b_x = tl.load(p_m[:, None] + o_x[None, :], mask=m_m[:, None] & (o_n < end)[None, :], other=START).to(ACC)
        if LARGEST:
            # NaN, once there, stays: nothing is larger.
            acc = tl.where((b_x > acc) | (b_x != b_x), b_x, acc)
        else:
            acc += b_x
    if LARGEST:
        # A reduction may overlook NaN: it is added.
        found = tl.max(acc, 1) + tl.sum(tl.where(acc != acc, acc, tl.zeros_like(acc)), 1)
    else:
        found = tl.sum(acc, 1)
    if MEAN:
        found = quotient(found, number(divisor, ACC))
    store_as(out + i_part.to(tl.int64) * n_kept + o_m, found, m_m, AS_BOOL)
