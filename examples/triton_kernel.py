"""A small Triton attention with a bug, and the same kernel fixed: the story of docs/verify.md.

tilewise verify flash --impl examples/triton_kernel.py:broken --no-grad --config small --config block+1 --config
odd-lengths --config medium
"""

import torch
import triton
import triton.language as tl

BLOCK = 32


@triton.jit
def attention_example_kernel(
    q, k, v, o, lse, n_queries, n_keys, n_heads, scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK: tl.constexpr,
    CAUSAL: tl.constexpr, MASK_TAIL: tl.constexpr,
):  # fmt: skip
    # Grid: query tiles x (batch * heads).
    # Owns: BLOCK queries of one head.
    # Loops over: all key tiles.
    # Writes: its rows of o and lse.
    i_bh = tl.program_id(1)
    i_b, i_h = i_bh // n_heads, i_bh % n_heads
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    o_d, o_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row_q = ((i_b * n_queries + o_m) * n_heads + i_h)[:, None]
    b_q = tl.load(q + row_q * D + o_d[None, :], mask=(o_m < n_queries)[:, None] & (o_d < D)[None, :], other=0.0)
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_DV], tl.float32)
    for start in range(0, n_keys, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        row_k = ((i_b * n_keys + o_n) * n_heads + i_h)[:, None]
        b_k = tl.load(k + row_k * D + o_d[None, :], mask=(o_n < n_keys)[:, None] & (o_d < D)[None, :], other=0.0)
        b_v = tl.load(v + row_k * DV + o_dv[None, :], mask=(o_n < n_keys)[:, None] & (o_dv < DV)[None, :], other=0.0)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * scale
        if MASK_TAIL:
            b_s = tl.where((o_n < n_keys)[None, :], b_s, float("-inf"))
        if CAUSAL:
            b_s = tl.where(o_n[None, :] <= o_m[:, None] + n_keys - n_queries, b_s, float("-inf"))
        m_new = tl.maximum(m, tl.max(b_s, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        b_p = tl.exp(b_s - shift[:, None])
        rescale = tl.exp(m - shift)
        l = l * rescale + tl.sum(b_p, 1)
        acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision="ieee")
        m = m_new
    b_o = acc / tl.where(l > 0, l, 1.0)[:, None]
    tl.store(
        o + row_q * DV + o_dv[None, :],
        b_o.to(o.dtype.element_ty),
        mask=(o_m < n_queries)[:, None] & (o_dv < DV)[None, :],
    )
    tl.store(lse + i_bh * n_queries + o_m, tl.where(l > 0, m + tl.log(l), float("-inf")), mask=o_m < n_queries)


def broken(q, k, v, *, causal=False, scale=None, return_lse=False):
    """Wrong: zeros stand where there are no keys, and their scores of 0 take part in the softmax."""
    return _launch(q, k, v, causal, scale, return_lse, mask_tail=False)


def fixed(q, k, v, *, causal=False, scale=None, return_lse=False):
    """The same with the scores of keys past the end set to -inf."""
    return _launch(q, k, v, causal, scale, return_lse, mask_tail=True)


def _launch(q, k, v, causal, scale, return_lse, *, mask_tail):
    q, k, v = (x.contiguous() for x in (q, k, v))
    batch, queries, heads, channels = q.shape
    o = torch.empty(batch, queries, heads, v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    scale = channels**-0.5 if scale is None else scale
    widths = [max(16, triton.next_power_of_2(x)) for x in (channels, v.shape[-1])]
    grid = (triton.cdiv(queries, BLOCK), batch * heads)
    attention_example_kernel[grid](
        q,
        k,
        v,
        o,
        lse,
        queries,
        k.shape[1],
        heads,
        scale,
        channels,
        v.shape[-1],
        *widths,
        BLOCK,
        CAUSAL=causal,
        MASK_TAIL=mask_tail,
    )
    return (o, lse) if return_lse else o
