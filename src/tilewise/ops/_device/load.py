"""Loads and stores of tiles of rows: a tile is BLOCK consecutive tokens of one head.

`rows` bundles what names the rows of one head of one sequence: (x, strides, batch entry, head, first token, number of
rows). x is a pointer, or with TMA a descriptor over [B, H, T, D] (packed tokens are one batch entry); strides are
(batch, token, head), and the last axis is contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def tile_pointers(rows, i_row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows `i_row .. i_row + BLOCK`.

    From tile to tile one scalar changes, so that the rest is hoisted out of loops.
    """
    p_x, strides, i_b, i_h, start, _ = rows
    p_head = (
        p_x
        + tl.cast(i_b, tl.int64) * strides[0]
        + tl.cast(start, tl.int64) * strides[1]
        + tl.cast(i_h, tl.int64) * strides[2]
    )
    o_r = tl.arange(0, BLOCK).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    return (p_head + tl.cast(i_row, tl.int64) * strides[1]) + (o_r[:, None] * strides[1] + o_d[None, :])


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
    x, _, i_b, i_h, start, n_rows = rows
    if TMA:
        b_x = x.load([i_b, i_h, start + i_row, 0]).reshape([BLOCK, BLOCK_D])
        if TMA == 2 and not INSIDE:
            b_x = tl.where((i_row + tl.arange(0, BLOCK) < n_rows)[:, None], b_x, tl.zeros_like(b_x))
    else:
        p_x = tile_pointers(rows, i_row, BLOCK, BLOCK_D)
        m_r = (i_row + tl.arange(0, BLOCK) < n_rows)[:, None]
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
    m_r = (i_row + tl.arange(0, BLOCK) < rows[5])[:, None]
    m_d = (tl.arange(0, BLOCK_D) < D)[None, :]
    tl.store(tile_pointers(rows, i_row, BLOCK, BLOCK_D), b_x.to(rows[0].dtype.element_ty), mask=m_r & m_d)
