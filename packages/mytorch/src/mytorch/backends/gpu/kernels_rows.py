"""Over the last axis: softmax, its logarithm, layer norm, and what they pass back.

A program has BLOCK_R rows and reads them BLOCK_N elements at a time. Rows may lie anywhere, and so may their elements;
what is written is in C order.
"""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import number, strided_offsets


@triton.jit
def load_tile(p_rows, stride, m_r, i_n, N, OTHER: tl.constexpr, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    """Elements i_n and on of rows, [R, N] in ACC, OTHER where there is none."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    return tl.load(
        p_rows[:, None] + o_n.to(tl.int64)[None, :] * stride, mask=m_r[:, None] & (o_n < N)[None, :], other=OTHER
    ).to(ACC)


@triton.jit
def load_columns(x, i_n, N, ACC: tl.constexpr, BLOCK_N: tl.constexpr):
    """Elements i_n and on of one row that serves all, [1, N] in ACC."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    return tl.load(x + o_n, mask=o_n < N, other=0).to(ACC)[None, :]


@triton.jit
def store_tile(out, b_x, o_r, m_r, i_n, N, BLOCK_N: tl.constexpr):
    """Write elements i_n and on of rows."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    tl.store(
        out + o_r.to(tl.int64)[:, None] * N + o_n[None, :],
        b_x.to(out.dtype.element_ty),
        mask=m_r[:, None] & (o_n < N)[None, :],
    )


@triton.jit
def mytorch_softmax_kernel(
    x, out, sizes, x_strides, x_stride, n_rows, N,
    LOG: tl.constexpr, ACC: tl.constexpr, NDIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK_R rows.
    # Owns: BLOCK_R rows.
    # Loops over: the rows' elements twice: for the largest and the sum of exponentials, then to write.
    # Writes: softmax of its rows, or its logarithm.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    p_x = x + strided_offsets(o_r, sizes, x_strides, NDIM)
    top = tl.full([BLOCK_R], float("-inf"), ACC)
    total = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        # [R, N]
        b_x = load_tile(p_x, x_stride, m_r, i_n, N, float("-inf"), ACC, BLOCK_N)
        higher = tl.maximum(top, tl.max(b_x, 1))
        # While all is -inf there is nothing to measure from.
        level = tl.where(higher == float("-inf"), tl.zeros_like(higher), higher)
        total = total * tl.exp(top - level) + tl.sum(tl.exp(b_x - level[:, None]), 1)
        top = higher
    level = tl.where(top == float("-inf"), tl.zeros_like(top), top)
    for i_n in range(0, N, BLOCK_N):
        b_x = load_tile(p_x, x_stride, m_r, i_n, N, float("-inf"), ACC, BLOCK_N)
        if LOG:
            b_y = b_x - top[:, None] - tl.log(total)[:, None]
        else:
            b_y = tl.exp(b_x - level[:, None]) / total[:, None]
        store_tile(out, b_y, o_r, m_r, i_n, N, BLOCK_N)


@triton.jit
def mytorch_softmax_grad_kernel(
    grad, y, out, grad_sizes, grad_strides, grad_stride, y_sizes, y_strides, y_stride, n_rows, N,
    LOG: tl.constexpr, ACC: tl.constexpr, GRAD_NDIM: tl.constexpr, Y_NDIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK_R rows.
    # Owns: BLOCK_R rows.
    # Loops over: the rows' elements twice: for the sum that all share, then to write.
    # Writes: the gradient of softmax's input, or of its logarithm's.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    p_grad = grad + strided_offsets(o_r, grad_sizes, grad_strides, GRAD_NDIM)
    p_y = y + strided_offsets(o_r, y_sizes, y_strides, Y_NDIM)
    total = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        # [R, N]
        b_grad = load_tile(p_grad, grad_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N)
        if not LOG:
            b_grad *= load_tile(p_y, y_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N)
        total += tl.sum(b_grad, 1)
    for i_n in range(0, N, BLOCK_N):
        b_grad = load_tile(p_grad, grad_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N)
        b_y = load_tile(p_y, y_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N)
        if LOG:
            b_x = b_grad - tl.exp(b_y) * total[:, None]
        else:
            b_x = b_y * (b_grad - total[:, None])
        store_tile(out, b_x, o_r, m_r, i_n, N, BLOCK_N)


@triton.jit
def mytorch_layer_norm_kernel(
    x, weight, bias, out, mean, rstd, sizes, x_strides, x_stride, eps: tl.float64, n_rows, N,
    ACC: tl.constexpr, NDIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK_R rows.
    # Owns: BLOCK_R rows.
    # Loops over: the rows' elements four times: for the mean, for its rounding, for the variance around it, then to
    # write.
    # Writes: its rows normalised, and their means and 1 / deviations.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    p_x = x + strided_offsets(o_r, sizes, x_strides, NDIM)
    b_mean = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        b_mean += tl.sum(load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N), 1)
    b_mean = b_mean / N
    # The sum's rounding, which would pass for deviation where all are about equal.
    rest = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        m_n = i_n + tl.arange(0, BLOCK_N) < N
        b_x = load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) - b_mean[:, None]
        rest += tl.sum(tl.where(m_n[None, :], b_x, tl.zeros_like(b_x)), 1)
    b_mean += rest / N
    variance = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        m_n = i_n + tl.arange(0, BLOCK_N) < N
        # [R, N]
        b_x = load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) - b_mean[:, None]
        variance += tl.sum(tl.where(m_n[None, :], b_x * b_x, tl.zeros_like(b_x)), 1)
    b_rstd = 1 / tl.sqrt(variance / N + number(eps, ACC))
    for i_n in range(0, N, BLOCK_N):
        b_x = (load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) - b_mean[:, None]) * b_rstd[:, None]
        b_y = b_x * load_columns(weight, i_n, N, ACC, BLOCK_N) + load_columns(bias, i_n, N, ACC, BLOCK_N)
        store_tile(out, b_y, o_r, m_r, i_n, N, BLOCK_N)
    tl.store(mean + o_r, b_mean, mask=m_r)
    tl.store(rstd + o_r, b_rstd, mask=m_r)


@triton.jit
def mytorch_layer_norm_grad_kernel(
    grad, x, weight, mean, rstd, out, grad_sizes, grad_strides, grad_stride, x_sizes, x_strides, x_stride, n_rows, N,
    ACC: tl.constexpr, GRAD_NDIM: tl.constexpr, X_NDIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK_R rows.
    # Owns: BLOCK_R rows.
    # Loops over: the rows' elements twice: for the two means that all share, then to write.
    # Writes: the gradient of its rows of x.
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    p_grad = grad + strided_offsets(o_r, grad_sizes, grad_strides, GRAD_NDIM)
    p_x = x + strided_offsets(o_r, x_sizes, x_strides, X_NDIM)
    b_mean = tl.load(mean + o_r, mask=m_r, other=0)[:, None]
    b_rstd = tl.load(rstd + o_r, mask=m_r, other=0)[:, None]
    plain = tl.zeros([BLOCK_R], ACC)
    along = tl.zeros([BLOCK_R], ACC)
    for i_n in range(0, N, BLOCK_N):
        # [R, N]
        b_grad = load_tile(p_grad, grad_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) * load_columns(
            weight, i_n, N, ACC, BLOCK_N
        )
        b_x = (load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) - b_mean) * b_rstd
        plain += tl.sum(b_grad, 1)
        along += tl.sum(b_grad * b_x, 1)
    for i_n in range(0, N, BLOCK_N):
        b_grad = load_tile(p_grad, grad_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) * load_columns(
            weight, i_n, N, ACC, BLOCK_N
        )
        b_x = (load_tile(p_x, x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N) - b_mean) * b_rstd
        store_tile(
            out, b_rstd * (b_grad - (plain / N)[:, None] - b_x * (along / N)[:, None]), o_r, m_r, i_n, N, BLOCK_N
        )


@triton.jit
def mytorch_layer_norm_columns_kernel(
    grad, x, mean, rstd, dweight, dbias, grad_sizes, grad_strides, grad_stride, x_sizes, x_strides, x_stride, n_rows,
    N, chunk, n_tiles, ACC: tl.constexpr, GRAD_NDIM: tl.constexpr, X_NDIM: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_N columns x chunks of `chunk` rows.
    # Owns: BLOCK_N columns of one chunk.
    # Loops over: the chunk's rows, BLOCK_R at a time; each row of the tile keeps its own sums until the end.
    # Writes: its part of weight's and bias's gradients, [parts, N].
    i_n = tl.program_id(0) % n_tiles * BLOCK_N
    i_part = tl.program_id(0) // n_tiles
    acc_w = tl.zeros([BLOCK_R, BLOCK_N], ACC)
    acc_b = tl.zeros([BLOCK_R, BLOCK_N], ACC)
    begin = i_part * chunk
    end = tl.minimum(begin + chunk, n_rows)
    for i_r in range(begin, end, BLOCK_R):
        o_r = i_r + tl.arange(0, BLOCK_R)
        m_r = o_r < end
        # [R, N]
        b_grad = load_tile(
            grad + strided_offsets(o_r, grad_sizes, grad_strides, GRAD_NDIM),
            grad_stride,
            m_r,
            i_n,
            N,
            0.0,
            ACC,
            BLOCK_N,
        )
        b_x = load_tile(x + strided_offsets(o_r, x_sizes, x_strides, X_NDIM), x_stride, m_r, i_n, N, 0.0, ACC, BLOCK_N)
        b_mean = tl.load(mean + o_r, mask=m_r, other=0)[:, None]
        b_rstd = tl.load(rstd + o_r, mask=m_r, other=0)[:, None]
        acc_w += b_grad * (b_x - b_mean) * b_rstd
        acc_b += b_grad
    o_n = i_n + tl.arange(0, BLOCK_N)
    o_out = i_part.to(tl.int64) * N + o_n
    tl.store(dweight + o_out, tl.sum(acc_w, 0), mask=o_n < N)
    tl.store(dbias + o_out, tl.sum(acc_b, 0), mask=o_n < N)
