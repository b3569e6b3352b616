"""Batched matrix products of arrays of any strides."""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import add_product, strided_offsets


@triton.jit
def tile_of(i, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Row and column of a result's i-th tile: GROUP rows of tiles at a time, column by column, so that what they read
    is still in the cache.
    """
    first = i // (GROUP * tiles_n) * GROUP
    rows = tl.minimum(tiles_m - first, GROUP)
    inside = i % (GROUP * tiles_n)
    return first + inside % rows, inside // rows


@triton.jit
def mytorch_matmul_kernel(
    x, y, bias, out, batch_sizes, x_batch, y_batch, x_strides, y_strides, n_batch, M, N, K, chunk, tiles_m, tiles_n,
    NDIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr, DIVIDED: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of a result x batch x, where DIVIDED (split-K), chunks of `chunk` of the K products of an element.
    # Owns: one chunk of a tile of one batch entry's result.
    # Loops over: its chunk of K, BLOCK_K at a time.
    # Writes: its tile of out [parts, batch, M, N].
    i = tl.program_id(0)
    i_m, i_n = tile_of(i % (tiles_m * tiles_n), tiles_m, tiles_n, 8)
    i_entry = i // (tiles_m * tiles_n)
    i_b = i_entry % n_batch
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < M
    m_n = o_n < N
    p_x = x + strided_offsets(i_b, batch_sizes, x_batch, NDIM) + o_m.to(tl.int64)[:, None] * x_strides[0]
    p_y = y + strided_offsets(i_b, batch_sizes, y_batch, NDIM) + o_n.to(tl.int64)[None, :] * y_strides[1]
    begin = 0
    end = K
    if DIVIDED:
        begin = i_entry // n_batch * chunk
        end = tl.minimum(begin + chunk, K)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        # A chunk ends at K or between two tiles. [M, K]
        b_x = tl.load(p_x + o_k.to(tl.int64)[None, :] * x_strides[1], mask=m_m[:, None] & (o_k < K)[None, :], other=0)
        # [K, N]
        b_y = tl.load(p_y + o_k.to(tl.int64)[:, None] * y_strides[0], mask=(o_k < K)[:, None] & m_n[None, :], other=0)
        # [M, K] @ [K, N] -> [M, N]
        acc = add_product(acc, b_x, b_y, PRECISION)
    if bias is not None:
        acc += tl.load(bias + o_n, mask=m_n, other=0).to(ACC)[None, :]
    o_out = (i_entry.to(tl.int64) * M + o_m[:, None]) * N + o_n[None, :]
    tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
