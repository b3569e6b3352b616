"""Where the branches meet.

*Norm*: their outputs, each times its gate and through layer norm over all heads and channels of a token, summed and
times u; and what that passes back. Every element is read and written once: the means and deviations of a token are
computed again in the backward.
*Keys*: the gradient of keys, or of values, from all branches: what a token got as a key, and its share of what its
block's mean got, from all chunks of the queries. One pass over it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.records import Rows
from tilewise.ops._device.rows import load_rows, locate_tile, sequence_bounds, store_rows

SIZES = ("n_batch", "n_tiles", "n_heads", "n_rows", "n_tokens", "n_windows", "n_chunks")


class NormShape(NamedTuple):
    """Constants: heads and channels of a token, and as tiles hold them; tokens of a program; layer norm's eps."""

    H: Any
    H_P: Any
    DV: Any
    BLOCK_DV: Any
    BLOCK_R: Any
    EPS: Any


class Elements(NamedTuple):
    """A program's tokens [R]; offsets of their heads [R, H_P] and elements [R, H_P, BLOCK_DV] where they lie end to
    end; which elements exist.
    """

    o_r: Any
    o_head: Any
    o_x: Any
    m_x: Any


class Branch(NamedTuple):
    """A branch's output, None where it is left out, and its gate, None where there is none; or their gradients."""

    x: Any
    gate: Any


@triton.jit
def token_elements(n_rows, SHAPE: tl.constexpr):
    """The `Elements` of this program."""
    o_r = tl.program_id(0) * SHAPE.BLOCK_R + tl.arange(0, SHAPE.BLOCK_R)
    o_h = tl.arange(0, SHAPE.H_P)
    o_d = tl.arange(0, SHAPE.BLOCK_DV)
    o_head = o_r.to(tl.int64)[:, None] * SHAPE.H + o_h[None, :]
    m_x = (o_r < n_rows)[:, None, None] & (o_h < SHAPE.H)[None, :, None] & (o_d < SHAPE.DV)[None, None, :]
    return Elements(o_r, o_head, o_head[:, :, None] * SHAPE.DV + o_d[None, None, :], m_x)


@triton.jit
def strided_elements(strides, o_r, n_tokens, SHAPE: tl.constexpr):
    """Offsets of the same elements in a tensor of other strides over (batch, token, head)."""
    o_token = (o_r // n_tokens).to(tl.int64) * strides.batch + (o_r % n_tokens).to(tl.int64) * strides.token
    return (
        o_token[:, None, None]
        + (tl.arange(0, SHAPE.H_P).to(tl.int64) * strides.head)[None, :, None]
        + tl.arange(0, SHAPE.BLOCK_DV)[None, None, :]
    )


@triton.jit
def gated_branch(branch, at):
    """A branch's output of the tokens in fp32, and their gates, 1 where there is none."""
    b_x = tl.load(branch.x + at.o_x, mask=at.m_x, other=0.0).to(tl.float32)
    if branch.gate is None:
        b_gate = tl.full(at.o_head.shape, 1.0, tl.float32)
    else:
        b_gate = tl.load(branch.gate + at.o_head, mask=head_mask(at.m_x), other=0.0).to(tl.float32)
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
def bsa_norm_fwd_kernel(cmp, slc, swa, u, o, n_rows, n_tokens, SHAPE: tl.constexpr):
    # Grid: tiles of BLOCK_R tokens.
    # Owns: BLOCK_R tokens, all heads.
    # Loops over: nothing; two or three branches.
    # Writes: its rows of o.
    N: tl.constexpr = SHAPE.H * SHAPE.DV
    at = token_elements(n_rows, SHAPE)
    b_x, b_gate = gated_branch(cmp, at)
    acc, _ = normalise(b_x * b_gate[:, :, None], at.m_x, N, SHAPE.EPS)
    b_x, b_gate = gated_branch(slc, at)
    b_y, _ = normalise(b_x * b_gate[:, :, None], at.m_x, N, SHAPE.EPS)
    acc += b_y
    if swa.x is not None:
        b_x, b_gate = gated_branch(swa, at)
        b_y, _ = normalise(b_x * b_gate[:, :, None], at.m_x, N, SHAPE.EPS)
        acc += b_y
    b_u = tl.load(u.x + strided_elements(u.strides, at.o_r, n_tokens, SHAPE), mask=at.m_x, other=0.0).to(tl.float32)
    tl.store(o + at.o_x, (b_u * acc).to(o.dtype.element_ty), mask=at.m_x)


@triton.jit
def branch_backward(branch, gradient, b_dy, at, N: tl.constexpr, EPS: tl.constexpr):
    """One branch's normalised rows; writes the gradients of its output and its gate from that of the rows."""
    b_x, b_gate = gated_branch(branch, at)
    b_y, inverse = normalise(b_x * b_gate[:, :, None], at.m_x, N, EPS)
    b_dx = inverse * (b_dy - token_sum(b_dy) / N - b_y * (token_sum(b_dy * b_y) / N))
    b_dx = tl.where(at.m_x, b_dx, 0.0)
    tl.store(gradient.x + at.o_x, (b_dx * b_gate[:, :, None]).to(gradient.x.dtype.element_ty), mask=at.m_x)
    if branch.gate is not None:
        p_dgate = gradient.gate + at.o_head
        tl.store(p_dgate, tl.sum(b_dx * b_x, 2).to(gradient.gate.dtype.element_ty), mask=head_mask(at.m_x))
    return b_y


@triton.jit(do_not_specialize=SIZES)
def bsa_norm_bwd_kernel(do, cmp, slc, swa, u, dcmp, dslc, dswa, du, n_rows, n_tokens, SHAPE: tl.constexpr):
    # Grid: tiles of BLOCK_R tokens.
    # Owns: BLOCK_R tokens, all heads.
    # Loops over: nothing; two or three branches.
    # Writes: its rows of the branches', the gates' and u's gradients.
    N: tl.constexpr = SHAPE.H * SHAPE.DV
    at = token_elements(n_rows, SHAPE)
    b_u = tl.load(u.x + strided_elements(u.strides, at.o_r, n_tokens, SHAPE), mask=at.m_x, other=0.0).to(tl.float32)
    b_do = tl.load(do + at.o_x, mask=at.m_x, other=0.0).to(tl.float32)
    b_dy = b_do * b_u
    acc = branch_backward(cmp, dcmp, b_dy, at, N, SHAPE.EPS)
    acc += branch_backward(slc, dslc, b_dy, at, N, SHAPE.EPS)
    if swa.x is not None:
        acc += branch_backward(swa, dswa, b_dy, at, N, SHAPE.EPS)
    tl.store(du + at.o_x, (b_do * acc).to(du.dtype.element_ty), mask=at.m_x)


@triton.jit(do_not_specialize=SIZES)
def bsa_bwd_keys_kernel(
    dx_slc, dx_cmp, dx_swa, dx, cu, windows, n_batch, n_tiles, n_heads, n_tokens, n_windows, n_chunks,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of tokens x heads x batch, in one axis.
    # Owns: BLOCK_M tokens of one head.
    # Loops over: chunks of queries, whose sums for the means lie end to end.
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
    p_cmp = dx_cmp.x + tl.cast(i_b, tl.int64) * dx_cmp.strides.batch + tl.cast(i_h, tl.int64) * dx_cmp.strides.head
    p_cmp += (start_w + o_c).to(tl.int64)[:, None] * dx_cmp.strides.token + o_d[None, :]
    # [M, D]
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for _ in range(n_chunks):
        acc += tl.load(p_cmp, mask=m_c, other=0.0).to(tl.float32)
        p_cmp += tl.cast(n_windows, tl.int64) * dx_cmp.strides.token
    acc /= BLOCK_SIZE
    acc += load_rows(Rows(dx_slc.x, dx_slc.strides, i_b, i_h, start, n_rows), i_m, D, BLOCK_M, BLOCK_D, False)
    if dx_swa is not None:
        acc += load_rows(Rows(dx_swa.x, dx_swa.strides, i_b, i_h, start, n_rows), i_m, D, BLOCK_M, BLOCK_D, False).to(
            tl.float32
        )
    store_rows(Rows(dx.x, dx.strides, i_b, i_h, start, n_rows), i_m, acc, D, BLOCK_M, BLOCK_D)
