"""Where the branches meet.

*Norm*: their outputs, each times its gate and through layer norm over all heads and channels of a token, summed and
times u; and what that passes back. Every element is read and written once: the means and deviations of a token are
computed again in the backward.
*Keys*: the gradient of keys, or of values, from all branches: what a token got as a key, and its share of what its
block's mean got. One pass over it.
"""

import triton
import triton.language as tl

from tilewise.ops._device.load import load_rows, store_rows
from tilewise.ops._device.records import Rows
from tilewise.ops._device.varlen import locate_tile, sequence_bounds

SIZES = ("n_batch", "n_tiles", "n_heads", "n_rows", "n_tokens", "n_windows")


@triton.jit
def token_elements(
    n_rows, H: tl.constexpr, H_P: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr
):
    """A program's tokens [R]; offsets of their heads [R, H_P] and elements [R, H_P, BLOCK_DV] where they lie end to
    end; which elements exist.
    """
    o_r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    o_h = tl.arange(0, H_P)
    o_d = tl.arange(0, BLOCK_DV)
    o_head = o_r.to(tl.int64)[:, None] * H + o_h[None, :]
    m_x = (o_r < n_rows)[:, None, None] & (o_h < H)[None, :, None] & (o_d < DV)[None, None, :]
    return o_r, o_head, o_head[:, :, None] * DV + o_d[None, None, :], m_x


@triton.jit
def strided_elements(strides, o_r, n_tokens, H_P: tl.constexpr, BLOCK_DV: tl.constexpr):
    """Offsets of the same elements in a tensor of other strides over (batch, token, head)."""
    o_token = (o_r // n_tokens).to(tl.int64) * strides.batch + (o_r % n_tokens).to(tl.int64) * strides.token
    return (
        o_token[:, None, None]
        + (tl.arange(0, H_P).to(tl.int64) * strides.head)[None, :, None]
        + tl.arange(0, BLOCK_DV)[None, None, :]
    )


@triton.jit
def gated_branch(x, gate, o_head, o_x, m_x):
    """A branch's output of the tokens in fp32, and their gates, 1 where there is none."""
    b_x = tl.load(x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if gate is None:
        b_gate = tl.full(o_head.shape, 1.0, tl.float32)
    else:
        b_gate = tl.load(gate + o_head, mask=head_mask(m_x), other=0.0).to(tl.float32)
    return b_x, b_gate


@triton.jit
def head_mask(m_x):
    """Which heads of which tokens exist, from which elements do."""
    return tl.max(m_x.to(tl.int32), 2) > 0


@triton.jit
def token_sum(b_x):
    """The sum over all of a token's elements, [R, 1, 1]."""
    return tl.sum(tl.sum(b_x, 2), 1)[:, None, None]


@triton.jit
def normalise(b_x, m_x, N: tl.constexpr, EPS: tl.constexpr):
    """Layer norm of each token's N elements, and the factor that it divides deviations by, inverted."""
    b_x = tl.where(m_x, b_x - token_sum(b_x) / N, 0.0)
    inverse = 1.0 / tl.sqrt(token_sum(b_x * b_x) / N + EPS)
    return b_x * inverse, inverse


@triton.jit(do_not_specialize=SIZES)
def bsa_norm_fwd_kernel(
    o_cmp, o_slc, o_swa, g_cmp, g_slc, g_swa, u, u_strides, o, n_rows, n_tokens,
    H: tl.constexpr, H_P: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_R: tl.constexpr,
    EPS: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R tokens.
    # Owns: BLOCK_R tokens, all heads.
    # Loops over: nothing; two or three branches.
    # Writes: its rows of o.
    o_r, o_head, o_x, m_x = token_elements(n_rows, H, H_P, DV, BLOCK_DV, BLOCK_R)
    b_x, b_gate = gated_branch(o_cmp, g_cmp, o_head, o_x, m_x)
    acc, _ = normalise(b_x * b_gate[:, :, None], m_x, H * DV, EPS)
    b_x, b_gate = gated_branch(o_slc, g_slc, o_head, o_x, m_x)
    b_y, _ = normalise(b_x * b_gate[:, :, None], m_x, H * DV, EPS)
    acc += b_y
    if o_swa is not None:
        b_x, b_gate = gated_branch(o_swa, g_swa, o_head, o_x, m_x)
        b_y, _ = normalise(b_x * b_gate[:, :, None], m_x, H * DV, EPS)
        acc += b_y
    b_u = tl.load(u + strided_elements(u_strides, o_r, n_tokens, H_P, BLOCK_DV), mask=m_x, other=0.0).to(tl.float32)
    tl.store(o + o_x, (b_u * acc).to(o.dtype.element_ty), mask=m_x)


@triton.jit
def branch_backward(x, gate, dx, dgate, b_dy, o_head, o_x, m_x, H: tl.constexpr, DV: tl.constexpr, EPS: tl.constexpr):
    """One branch's normalised rows; writes the gradients of its output and its gate from that of the rows."""
    b_x, b_gate = gated_branch(x, gate, o_head, o_x, m_x)
    b_y, inverse = normalise(b_x * b_gate[:, :, None], m_x, H * DV, EPS)
    b_dx = inverse * (b_dy - token_sum(b_dy) / (H * DV) - b_y * (token_sum(b_dy * b_y) / (H * DV)))
    b_dx = tl.where(m_x, b_dx, 0.0)
    tl.store(dx + o_x, (b_dx * b_gate[:, :, None]).to(dx.dtype.element_ty), mask=m_x)
    if gate is not None:
        tl.store(dgate + o_head, tl.sum(b_dx * b_x, 2).to(dgate.dtype.element_ty), mask=head_mask(m_x))
    return b_y


@triton.jit(do_not_specialize=SIZES)
def bsa_norm_bwd_kernel(
    do, o_cmp, o_slc, o_swa, g_cmp, g_slc, g_swa, u, u_strides, do_cmp, do_slc, do_swa, dg_cmp, dg_slc, dg_swa, du,
    n_rows, n_tokens, H: tl.constexpr, H_P: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_R: tl.constexpr, EPS: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R tokens.
    # Owns: BLOCK_R tokens, all heads.
    # Loops over: nothing; two or three branches.
    # Writes: its rows of the branches', the gates' and u's gradients.
    o_r, o_head, o_x, m_x = token_elements(n_rows, H, H_P, DV, BLOCK_DV, BLOCK_R)
    b_u = tl.load(u + strided_elements(u_strides, o_r, n_tokens, H_P, BLOCK_DV), mask=m_x, other=0.0).to(tl.float32)
    b_do = tl.load(do + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_dy = b_do * b_u
    acc = branch_backward(o_cmp, g_cmp, do_cmp, dg_cmp, b_dy, o_head, o_x, m_x, H, DV, EPS)
    acc += branch_backward(o_slc, g_slc, do_slc, dg_slc, b_dy, o_head, o_x, m_x, H, DV, EPS)
    if o_swa is not None:
        acc += branch_backward(o_swa, g_swa, do_swa, dg_swa, b_dy, o_head, o_x, m_x, H, DV, EPS)
    tl.store(du + o_x, (b_do * acc).to(du.dtype.element_ty), mask=m_x)


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
