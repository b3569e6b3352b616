"""The branches' outputs, each times its gate, summed; and what that passes back.

Every element is read and written once.
"""

import triton
import triton.language as tl

SIZES = ("n_rows",)


@triton.jit
def gated(x, gate, o_r, m_r, m_x, o_x):
    """Rows of a branch times their gates, in fp32; 0 where the branch is left out."""
    return (
        tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
        * tl.load(gate + o_r, mask=m_r, other=0.0).to(tl.float32)[:, None]
    )


@triton.jit(do_not_specialize=SIZES)
def nsa_combine_fwd_kernel(
    x0, x1, x2, gate0, gate1, gate2, y, n_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    # Grid: tiles of rows: tokens x heads.
    # Owns: BLOCK_R rows.
    # Loops over: nothing; up to three branches.
    # Writes: its rows of y.
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    o_d = tl.arange(0, BLOCK_D)
    o_x = o_r[:, None] * D + o_d[None, :]
    m_x = m_r[:, None] & (o_d < D)[None, :]
    acc = gated(x0, gate0, o_r, m_r, m_x, o_x)
    if x1 is not None:
        acc += gated(x1, gate1, o_r, m_r, m_x, o_x)
    if x2 is not None:
        acc += gated(x2, gate2, o_r, m_r, m_x, o_x)
    tl.store(y + o_x, acc.to(y.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=SIZES)
def nsa_combine_bwd_kernel(
    dy, x, gate, dx, dgate, n_rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr
):
    # Grid: tiles of rows: tokens x heads.
    # Owns: BLOCK_R rows of one branch.
    # Loops over: nothing.
    # Writes: its rows of the branch's and the gate's gradients.
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    o_d = tl.arange(0, BLOCK_D)
    o_x = o_r[:, None] * D + o_d[None, :]
    m_x = m_r[:, None] & (o_d < D)[None, :]
    b_dy = tl.load(dy + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_gate = tl.load(gate + o_r, mask=m_r, other=0.0).to(tl.float32)
    tl.store(dx + o_x, (b_dy * b_gate[:, None]).to(dx.dtype.element_ty), mask=m_x)
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(dgate + o_r, tl.sum(b_dy * b_x, 1).to(dgate.dtype.element_ty), mask=m_r)
