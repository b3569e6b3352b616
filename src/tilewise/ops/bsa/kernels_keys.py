"""The gradient of keys, or of values, from all branches: what a token got as a key, and its share of what its block's
mean got. One pass over it.
"""

import triton
import triton.language as tl

from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.records import Rows
from tilewise.ops._device.varlen import locate_tile, sequence_bounds

SIZES = ("n_batch", "n_tiles", "n_heads", "n_tokens", "n_windows")


@triton.jit(do_not_specialize=SIZES)
def bsa_bwd_keys_kernel(
    dx_slc, dx_cmp, dx_swa, dx, slc_strides, cmp_strides, swa_strides, strides, cu, windows, n_batch, n_tiles, n_heads,
    n_tokens, n_windows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of tokens x heads x batch, in one axis.
    # Owns: BLOCK_M tokens of one head.
    # Loops over: nothing.
    # Writes: its rows of dx.
    i_b, i_h, i_m, start, n_rows = locate_tile(
        tl.program_id(0), n_tiles, n_heads, n_batch, n_tokens, cu, False, BLOCK_M
    )
    if i_m >= n_rows:
        return
    start_w = 0
    n_mine = n_windows
    if cu is not None:
        start_w, n_mine = sequence_bounds(windows, i_b, n_windows)
        i_b = 0
    o_c = (i_m + tl.arange(0, BLOCK_M)) // BLOCK_SIZE
    o_d = tl.arange(0, BLOCK_D)
    m_c = (o_c < tl.minimum(n_mine, n_rows // BLOCK_SIZE))[:, None] & (o_d < D)[None, :]
    p_cmp = dx_cmp + tl.cast(i_b, tl.int64) * cmp_strides.batch + tl.cast(i_h, tl.int64) * cmp_strides.head
    # [M, D]
    acc = (
        tl.load(
            p_cmp + (start_w + o_c).to(tl.int64)[:, None] * cmp_strides.token + o_d[None, :], mask=m_c, other=0.0
        ).to(tl.float32)
        / BLOCK_SIZE
    )
    acc += load_rows(Rows(dx_slc, slc_strides, i_b, i_h, start, n_rows), i_m, D, BLOCK_M, BLOCK_D, False)
    if dx_swa is not None:
        acc += load_rows(Rows(dx_swa, swa_strides, i_b, i_h, start, n_rows), i_m, D, BLOCK_M, BLOCK_D, False).to(
            tl.float32
        )
    store_rows(Rows(dx, strides, i_b, i_h, start, n_rows), i_m, acc, D, BLOCK_M, BLOCK_D)
