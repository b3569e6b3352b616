"""Pooling of images: the largest of each window, and where it stood."""

import triton
import triton.language as tl

from mytorch.backends.gpu.kernels_tile import program_number


@triton.jit
def mytorch_max_pool2d_kernel(
    x, out, where, x_strides, C, W, P, Q, n,
    KH: tl.constexpr, KW: tl.constexpr, SH: tl.constexpr, SW: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK windows, of all channels and images.
    # Owns: BLOCK windows.
    # Loops over: a window's pixels, row by row: the first of equals stays, and so does the first NaN.
    # Writes: the largest of each window and its place in the image, row * W + column.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    m = o < n
    plane = o // (P * Q)
    row = o % (P * Q) // Q * SH
    column = o % Q * SW
    o_x = (plane // C).to(tl.int64) * x_strides[0] + (plane % C).to(tl.int64) * x_strides[1]
    p_x = x + o_x + row.to(tl.int64) * x_strides[2] + column.to(tl.int64) * x_strides[3]
    best = tl.load(p_x, mask=m, other=0)
    place = row.to(tl.int64) * W + column
    for i in range(1, KH * KW):
        i_h = i // KW
        i_w = i % KW
        b_x = tl.load(
            p_x + tl.cast(i_h, tl.int64) * x_strides[2] + tl.cast(i_w, tl.int64) * x_strides[3], mask=m, other=0
        )
        better = (b_x > best) | ((b_x != b_x) & (best == best))
        best = tl.where(better, b_x, best)
        place = tl.where(better, (row + i_h).to(tl.int64) * W + column + i_w, place)
    tl.store(out + o, best, mask=m)
    tl.store(where + o, place, mask=m)


@triton.jit
def mytorch_max_pool2d_grad_kernel(
    grad, where, out, H, W, P, Q, SH, SW, reach_h, reach_w, n, ACC: tl.constexpr, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    # Grid: blocks of BLOCK pixels, of all channels and images.
    # Owns: BLOCK pixels.
    # Loops over: the windows that may contain a pixel, reach_h x reach_w of them.
    # Writes: the sum of the gradients of those windows whose largest it was.
    o = program_number(WIDE) * BLOCK + tl.arange(0, BLOCK)
    place = o % (H * W)
    row = place // W
    column = place % W
    o_plane = (o // (H * W)).to(tl.int64) * (P * Q)
    # The last windows that begin at or before the pixel; of a window that ends before it, the largest cannot be the
    # pixel.
    last_h = row // SH
    last_w = column // SW
    acc = tl.zeros([BLOCK], ACC)
    for i in range(reach_h * reach_w):
        i_p = last_h - i // reach_w
        i_q = last_w - i % reach_w
        m = (o < n) & (i_p >= 0) & (i_p < P) & (i_q >= 0) & (i_q < Q)
        o_window = o_plane + i_p * Q + i_q
        mine = m & (tl.load(where + o_window, mask=m, other=-1) == place)
        acc += tl.load(grad + o_window, mask=mine, other=0).to(ACC)
    tl.store(out + o, acc.to(out.dtype.element_ty), mask=o < n)
