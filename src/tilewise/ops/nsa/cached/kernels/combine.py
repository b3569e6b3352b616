"""The parts of each branch merged in order, each branch times its gate, and the sum of the three.

Bytes: the parts once, read; the output once, written.
"""

import triton
import triton.language as tl

from tilewise.ops._device.cached import SIZES, locate_token, split_windows
from tilewise.ops._device.windows import whole_windows


@triton.jit
def merge_parts(parts, o_part, count, n_heads, SHAPE: tl.constexpr, BLOCK_S: tl.constexpr):
    """The output over `count` parts of one head, the first at `o_part`, BLOCK_S at a time: 0 where no key was seen."""
    o_s = tl.arange(0, BLOCK_S)
    o_dv = tl.arange(0, SHAPE.BLOCK_DV)
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    acc = tl.full([SHAPE.BLOCK_DV], 0.0, tl.float32)
    for i_s in range(0, count, BLOCK_S):
        m_s = i_s + o_s < count
        o_row = o_part + (i_s + o_s).to(tl.int64) * n_heads
        b_lse = tl.load(parts.lse + o_row, mask=m_s, other=float("-inf"))
        # [S, DV]
        p_o = parts.o + (o_row[:, None] * SHAPE.DV + o_dv[None, :])
        b_o = tl.load(p_o, mask=m_s[:, None] & (o_dv < SHAPE.DV)[None, :], other=0.0)
        m_new = tl.maximum(m, tl.max(b_lse, 0))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_w = tl.exp2((b_lse - shift) * 1.4426950408889634)
        rescale = tl.exp2((m - shift) * 1.4426950408889634)
        l = l * rescale + tl.sum(b_w, 0)
        acc = acc * rescale + tl.sum(b_w[:, None] * b_o, 0)
        m = m_new
    # Not `> 0`, which NaN fails too: a row with NaN in it has seen something.
    return acc / tl.where(l != 0.0, l, 1.0)


@triton.jit
def gate_of(gate, token, i_h):
    """A token's gate of one head, in fp32."""
    p_gate = tl.cast(token.i_b, tl.int64) * gate.strides.batch + tl.cast(token.i_i, tl.int64) * gate.strides.token
    return tl.load(gate.x + p_gate + tl.cast(i_h, tl.int64) * gate.strides.head).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_combine_kernel(
    parts, o, g_cmp, g_slc, g_swa, sequences, n_new, n_piece, first, n_heads, n_splits, n_parts, room,
    SHAPE: tl.constexpr, RULE: tl.constexpr, WINDOWS: tl.constexpr, SELECTED: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    # Grid: query heads x new tokens.
    # Owns: one row of o.
    # Loops over: the parts of each branch that has a gate, BLOCK_S at a time, in order.
    # Writes: its row of o, 0 for a token that is not there.
    i_h = tl.program_id(0) % n_heads
    i_row = tl.program_id(0) // n_heads
    token = locate_token(i_row, sequences, n_new, n_piece, first, room)
    o_dv = tl.arange(0, SHAPE.BLOCK_DV)
    acc = tl.full([SHAPE.BLOCK_DV], 0.0, tl.float32)
    o_part = tl.cast(i_row, tl.int64) * n_parts * n_heads + i_h
    if token.there > 0:
        if g_cmp is not None:
            n_seen = whole_windows(token.t + 1, WINDOWS.SIZE, WINDOWS.STRIDE)
            _, count = split_windows(n_seen, RULE)
            acc += gate_of(g_cmp, token, i_h) * merge_parts(parts, o_part, count, n_heads, SHAPE, BLOCK_S)
        o_part += tl.cast(n_splits, tl.int64) * n_heads
        if g_slc is not None:
            acc += gate_of(g_slc, token, i_h) * merge_parts(parts, o_part, SELECTED, n_heads, SHAPE, BLOCK_S)
        if g_swa is not None:
            o_part += SELECTED * n_heads
            near = n_parts - n_splits - SELECTED
            acc += gate_of(g_swa, token, i_h) * merge_parts(parts, o_part, near, n_heads, SHAPE, BLOCK_S)
    p_o = (tl.cast(token.i_b, tl.int64) * n_new + token.i_i) * n_heads + i_h
    tl.store(o + p_o * SHAPE.DV + o_dv, acc.to(o.dtype.element_ty), mask=o_dv < SHAPE.DV)
