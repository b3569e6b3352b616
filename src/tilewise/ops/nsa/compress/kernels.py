"""Means of windows, and their gradient: every token is read, or written, once for each window it lies in."""

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import locate_tile, sequence_bounds, store_rows
from tilewise.ops._device.windows import whole_windows

SIZES = ("n_batch", "n_tiles", "n_heads", "n_tokens", "n_windows")


@triton.jit(do_not_specialize=("n_offsets", "n_windows"))
def nsa_windows_kernel(cu, windows, n_offsets, n_windows, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    # Grid: tiles of BLOCK offsets.
    # Owns: where the windows of as many sequences begin.
    # Loops over: nothing.
    # Writes: that, with room for one window a stride, so that no length is needed on the host.
    o_b = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Offsets that were not checked must not lead out of bounds.
    first = tl.minimum(tl.maximum(tl.load(cu + o_b, mask=o_b < n_offsets, other=0) // STRIDE, 0), n_windows)
    tl.store(windows + o_b, first.to(tl.int32), mask=o_b < n_offsets)


@triton.jit(do_not_specialize=SIZES)
def nsa_compress_fwd_kernel(
    x, y, x_strides, y_strides, cu, windows, n_batch, n_tiles, n_heads, n_tokens, n_windows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of windows x heads x batch, in one axis.
    # Owns: BLOCK_N windows of one head.
    # Loops over: the tokens of a window.
    # Writes: its rows of y, 0 where a sequence's room goes on behind its last window.
    i_b, i_h, i_n, start_w, n_room = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_windows, windows, False, BLOCK_N
    )
    start = 0
    if cu is not None:
        start, n_tokens = sequence_bounds(cu, i_b, n_tokens)
        i_b = 0
    o_c = i_n + tl.arange(0, BLOCK_N)
    o_d = tl.arange(0, BLOCK_D)
    m_x = (o_c < whole_windows(n_tokens, SIZE, STRIDE))[:, None] & (o_d < D)[None, :]
    p_head = x + tl.cast(i_b, tl.int64) * x_strides.batch + tl.cast(i_h, tl.int64) * x_strides.head
    p_x = p_head + (start + o_c * STRIDE).to(tl.int64)[:, None] * x_strides.token + o_d[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for i in range(SIZE):
        # [N, D]
        acc += tl.load(p_x + tl.cast(i, tl.int64) * x_strides.token, mask=m_x, other=0.0).to(tl.float32)
    store_rows(Rows(y, y_strides, i_b, i_h, start_w, n_room), i_n, acc / SIZE, D, BLOCK_N, BLOCK_D)


@triton.jit(do_not_specialize=SIZES)
def nsa_compress_bwd_kernel(
    dy, dx, dy_strides, dx_strides, cu, windows, n_batch, n_tiles, n_heads, n_tokens, n_windows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, SIZE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of tokens x heads x batch, in one axis.
    # Owns: BLOCK_M tokens of one head.
    # Loops over: the windows that a token lies in, from the last.
    # Writes: its rows of dx.
    i_b, i_h, i_m, start, n_rows = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_tokens, cu, False, BLOCK_M
    )
    start_w = 0
    if cu is not None:
        start_w, n_windows = sequence_bounds(windows, i_b, n_windows)
        i_b = 0
    n_windows = tl.minimum(n_windows, whole_windows(n_rows, SIZE, STRIDE))
    o_d = tl.arange(0, BLOCK_D)
    p_head = dy + tl.cast(i_b, tl.int64) * dy_strides.batch + tl.cast(i_h, tl.int64) * dy_strides.head
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(SIZE // STRIDE):
        o_c = (i_m + tl.arange(0, BLOCK_M)) // STRIDE - i
        m_y = ((o_c >= 0) & (o_c < n_windows))[:, None] & (o_d < D)[None, :]
        # [M, D]
        acc += tl.load(
            p_head + (start_w + o_c).to(tl.int64)[:, None] * dy_strides.token + o_d[None, :], mask=m_y, other=0.0
        ).to(tl.float32)
    store_rows(Rows(dx, dx_strides, i_b, i_h, start, n_rows), i_m, acc / SIZE, D, BLOCK_M, BLOCK_D)
