"""Convolution of images as matrix products with one operand that is never built: each step finds the pixels that it
multiplies.

Images and gradients of results may have any strides, weights are in C order: [O, C, KH, KW], of T = KH * KW taps. K
counts what an element of the result is the sum of.
"""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import add_product, program_number


@triton.jit
def pixels_of(o, rows, columns):
    """Image, row, column and place in its image of pixels that are counted through all images."""
    place = o % (rows * columns)
    return (o // (rows * columns)).to(tl.int64), place // columns, place % columns, place


@triton.jit
def places(image, channel, row, column, strides):
    """Where pixels lie; sums of places may be taken, for strides multiply each part."""
    return (
        image * strides[0]
        + channel.to(tl.int64) * strides[1]
        + row.to(tl.int64) * strides[2]
        + column.to(tl.int64) * strides[3]
    )


@triton.jit
def inside(m, row, column, rows, columns):
    """Which pixels of a tile lie in the image: the border around it is 0."""
    return m & (row >= 0) & (row < rows) & (column >= 0) & (column < columns)


@triton.jit
def mytorch_conv2d_kernel(
    x, weight, bias, out, x_strides, O, K, H, W, P, Q, n_pixels, tiles_o,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M output channels x tiles of BLOCK_N pixels of the result, all images' counted through.
    # Owns: one tile of the result.
    # Loops over: input channels and taps, BLOCK_K at a time.
    # Writes: its tile of out [B, O, P, Q].
    i = program_number(WIDE)
    o_m = i % tiles_o * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i // tiles_o * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < O
    m_n = o_n < n_pixels
    image, row, column, place = pixels_of(o_n, P, Q)
    row_x = row * SH - PH
    column_x = column * SW - PW
    p_x = x + places(image, o_n * 0, row_x, column_x, x_strides)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        i_h = o_k % (KH * KW) // KW
        i_w = o_k % KW
        # [O, K]
        b_w = tl.load(weight + o_m.to(tl.int64)[:, None] * K + o_k[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
        # [K, N]
        m_x = m_k[:, None] & m_n[None, :]
        if PH + PW > 0:
            m_x = inside(m_x, row_x[None, :] + i_h[:, None], column_x[None, :] + i_w[:, None], H, W)
        b_x = tl.load(p_x[None, :] + places(0, o_k // (KH * KW), i_h, i_w, x_strides)[:, None], mask=m_x, other=0)
        # [O, K] @ [K, N] -> [O, N]
        acc = add_product(acc, b_w, b_x, PRECISION)
    if bias is not None:
        acc += tl.load(bias + o_m, mask=m_m, other=0).to(ACC)[:, None]
    o_out = (image[None, :] * O + o_m[:, None]) * (P * Q) + place[None, :]
    tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def mytorch_conv2d_grad_input_kernel(
    grad, weight, out, grad_strides, C, K, H, W, P, Q, n_pixels, tiles_c,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M input channels x tiles of BLOCK_N pixels of x, all images' counted through.
    # Owns: one tile of x's gradient.
    # Loops over: output channels and taps, BLOCK_K at a time.
    # Writes: its tile of out [B, C, H, W].
    i = program_number(WIDE)
    o_m = i % tiles_c * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i // tiles_c * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < C
    m_n = o_n < n_pixels
    image, row, column, place = pixels_of(o_n, H, W)
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for i_k in range(0, K, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < K
        channel = o_k // (KH * KW)
        tap = o_k % (KH * KW)
        # [C, K]
        o_w = channel.to(tl.int64)[None, :] * C * (KH * KW) + o_m[:, None] * (KH * KW) + tap[None, :]
        b_w = tl.load(weight + o_w, mask=m_m[:, None] & m_k[None, :], other=0)
        # The window that has x's pixel at this tap, where one does. [K, N]
        start = (row + PH)[None, :] - (tap // KW)[:, None]
        start_w = (column + PW)[None, :] - (tap % KW)[:, None]
        m_grad = m_k[:, None] & m_n[None, :] & (start >= 0) & (start_w >= 0) & (start % SH == 0) & (start_w % SW == 0)
        o_grad = places(image[None, :], channel[:, None], start // SH, start_w // SW, grad_strides)
        b_grad = tl.load(grad + o_grad, mask=inside(m_grad, start // SH, start_w // SW, P, Q), other=0)
        # [C, K] @ [K, N] -> [C, N]
        acc = add_product(acc, b_w, b_grad, PRECISION)
    o_out = (image[None, :] * C + o_m[:, None]) * (H * W) + place[None, :]
    tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])


@triton.jit
def mytorch_conv2d_grad_weight_kernel(
    grad, x, out, grad_strides, x_strides, O, N, H, W, P, Q, n_pixels, chunk, tiles_o, tiles_n,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_M output channels x tiles of BLOCK_N input channels and taps x chunks of `chunk` pixels of
    # the result.
    # Owns: one chunk of a tile of the weight's gradient.
    # Loops over: the chunk's pixels, BLOCK_K at a time.
    # Writes: its tile of out [parts, O, C, KH, KW].
    i = program_number(WIDE)
    o_m = i % tiles_o * BLOCK_M + tl.arange(0, BLOCK_M)
    o_n = i // tiles_o % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    i_part = i // tiles_o // tiles_n
    m_m = o_m < O
    m_n = o_n < N
    i_h = o_n % (KH * KW) // KW
    i_w = o_n % KW
    o_tap = places(0, o_n // (KH * KW), i_h, i_w, x_strides)
    p_grad = grad + o_m.to(tl.int64) * grad_strides[1]
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    begin = i_part * chunk
    end = tl.minimum(begin + chunk, n_pixels)
    for i_k in range(begin, end, BLOCK_K):
        o_k = i_k + tl.arange(0, BLOCK_K)
        m_k = o_k < end
        image, row, column, _ = pixels_of(o_k, P, Q)
        # [O, K]
        o_grad = places(image, o_k * 0, row, column, grad_strides)
        b_grad = tl.load(p_grad[:, None] + o_grad[None, :], mask=m_m[:, None] & m_k[None, :], other=0)
        # [K, N]
        row_x = row * SH - PH
        column_x = column * SW - PW
        m_x = m_k[:, None] & m_n[None, :]
        if PH + PW > 0:
            m_x = inside(m_x, row_x[:, None] + i_h[None, :], column_x[:, None] + i_w[None, :], H, W)
        b_x = tl.load(
            x + places(image, o_k * 0, row_x, column_x, x_strides)[:, None] + o_tap[None, :], mask=m_x, other=0
        )
        # [O, K] @ [K, N] -> [O, N]
        acc = add_product(acc, b_grad, b_x, PRECISION)
    o_out = (i_part.to(tl.int64) * O + o_m[:, None]) * N + o_n[None, :]
    tl.store(out + o_out, acc.to(out.dtype.element_ty), mask=m_m[:, None] & m_n[None, :])
