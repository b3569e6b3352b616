"""Rows that lie end to end: loads and stores by row number."""

import triton
import triton.language as tl


@triton.jit
def plain_rows(x, o_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows [N, BLOCK_D] of width D, end to end, and which elements exist."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_row[:, None]
    if D != BLOCK_D:
        m_x = m_x & (o_d < D)[None, :]
    return x + (o_row[:, None] * D + o_d[None, :]), m_x


@triton.jit
def store_plain(x, o_row, m_row, b_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store rows [N, BLOCK_D] of width D."""
    p_x, m_x = plain_rows(x, o_row, m_row, D, BLOCK_D)
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m_x)


@triton.jit
def store_sums(sums, o_row, m_row, acc_dk, acc_dv, WIDTHS: tl.constexpr):
    """Store the rows of dK and dV; WIDTHS is any record of D, DV, BLOCK_D and BLOCK_DV."""
    store_plain(sums.dk, o_row, m_row, acc_dk, WIDTHS.D, WIDTHS.BLOCK_D)
    store_plain(sums.dv, o_row, m_row, acc_dv, WIDTHS.DV, WIDTHS.BLOCK_DV)


@triton.jit
def load_plain(x, o_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load rows [N, BLOCK_D] of width D, 0 where there is none."""
    p_x, m_x = plain_rows(x, o_row, m_row, D, BLOCK_D)
    return tl.load(p_x, mask=m_x, other=0.0)
