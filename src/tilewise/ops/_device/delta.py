"""What a softmax's backward wants to know of each query row."""

import triton
import triton.language as tl

from tilewise.ops._device.load import load_rows


@triton.jit
def row_gradients(
    o_rows,
    do_rows,
    lse,
    dlse,
    dlse_strides,
    i_m,
    n_heads,
    n_queries,
    DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """delta = rowsum(o · do) - dlse, and the LSE in base 2, for rows `i_m .. i_m + BLOCK_M`; where these are in
    `[..., H, T]`, and which exist.

    Rows that saw nothing, or lie past the end, have an LSE of +inf, so that their probabilities are 0; past the end
    delta is 0.
    """
    b_o = load_rows(o_rows, i_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
    b_do = load_rows(do_rows, i_m, DV, BLOCK_M, BLOCK_DV, False).to(tl.float32)
    b_delta = tl.sum(b_o * b_do, 1)
    o_m = i_m + tl.arange(0, BLOCK_M)
    o_t = (o_rows.start + o_m).to(tl.int64)
    o_row = (tl.cast(o_rows.i_b, tl.int64) * n_heads + o_rows.i_h) * n_queries + o_t
    b_lse = tl.load(lse + o_row, mask=o_m < o_rows.n_rows, other=float("-inf"))
    if dlse is not None:
        p_dlse = (
            dlse
            + tl.cast(o_rows.i_b, tl.int64) * dlse_strides.batch
            + tl.cast(o_rows.i_h, tl.int64) * dlse_strides.head
            + o_t * dlse_strides.token
        )
        b_delta -= tl.load(p_dlse, mask=o_m < o_rows.n_rows, other=0.0)
    b_lse_log2 = tl.where(b_lse != float("-inf"), b_lse * 1.4426950408889634, float("inf"))
    return b_delta, b_lse_log2, o_row, o_m < o_rows.n_rows
