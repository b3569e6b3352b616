"""Loads and stores of tiles of rows: a tile is BLOCK consecutive tokens of one head of one sequence (`Rows`).

Rows that lie end to end: loads and stores by row number.
"""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(rows, i_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows `i_row .. i_row + BLOCK`.

    From tile to tile one scalar changes, so that the rest is hoisted out of loops.
    """
    strides = rows.strides
    p_head = (
        rows.x
        + tl.cast(rows.i_b, tl.int64) * strides.batch
        + tl.cast(rows.start, tl.int64) * strides.token
        + tl.cast(rows.i_h, tl.int64) * strides.head
    )
    o_r = tl.arange(0, BLOCK).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    return (p_head + tl.cast(i_row, tl.int64) * strides.token) + (o_r[:, None] * strides.token + o_d[None, :])


@triton.jit
def load_rows(
    rows,
    i_row,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TMA: tl.constexpr,
    INSIDE: tl.constexpr = False,
):
    """Rows `i_row .. i_row + BLOCK` as [BLOCK, BLOCK_D]; what lies past the last row or past D is 0.

    INSIDE promises that no row lies past the last. TMA is 1 for dense batches: the descriptor zeroes what lies past T
    by itself; and 2 for packed ones, where the next sequence's rows lie there.
    """
    if TMA:
        b_x = rows.x.load([rows.i_b, rows.i_h, rows.start + i_row, 0]).reshape([BLOCK, BLOCK_D])
        if TMA == 2 and not INSIDE:
            b_x = tl.where((i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None], b_x, tl.zeros_like(b_x))
    else:
        p_x = tile_pointers(rows, i_row, BLOCK, BLOCK_D)
        m_r = (i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None]
        m_d = (tl.arange(0, BLOCK_D) < D)[None, :]
        if INSIDE and D == BLOCK_D:
            b_x = tl.load(p_x)
        elif INSIDE:
            b_x = tl.load(p_x, mask=m_d, other=0.0)
        elif D == BLOCK_D:
            b_x = tl.load(p_x, mask=m_r, other=0.0)
        else:
            b_x = tl.load(p_x, mask=m_r & m_d, other=0.0)
    return b_x


@triton.jit
def store_rows(rows, i_row, b_x, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store [BLOCK, BLOCK_D] to rows `i_row .. i_row + BLOCK`, leaving out what lies past the last row or past D."""
    m_r = (i_row + tl.arange(0, BLOCK) < rows.n_rows)[:, None]
    m_d = (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(tile_pointers(rows, i_row, BLOCK, BLOCK_D), b_x.to(rows.x.dtype.element_ty), mask=m_r & m_d)


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
