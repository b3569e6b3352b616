"""Native sparse attention's steps, written apart from the reference, each with ways to be wrong.

Softmax over weighted keys, where a weight says how often a key counts; or, where each naming has a factor of its own,
over all keys once a naming.
"""

import itertools

import torch


def weighted(q, k, v, weight, scale):
    """Softmax over the keys, each as often as its weight says: q [B, T, H, D], weight [B, H, T, J] -> o,
    lse; in fp32.
    """
    group = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(group, 2) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = torch.einsum("bthd,bjhd->bhtj", q.float(), k) * scale + torch.where(weight > 0, weight.log(), -1e30)
    sees = (weight > 0).any(-1, keepdim=True)
    p = torch.where(sees, scores.softmax(-1), 0.0) if k.shape[1] else scores
    lse = torch.where(sees[..., 0], scores.logsumexp(-1), -torch.inf)
    return torch.einsum("bhtj,bjhd->bthd", p, v).to(q.dtype), lse


def one_by_one(function, cu_seqlens, *tensors):
    """`function` of each sequence alone; outputs are joined along tokens, which lse has last."""
    if cu_seqlens is None:
        return function(*tensors)
    ends = cu_seqlens.tolist()
    parts = [function(*(x[None, a:b] for x in tensors)) for a, b in itertools.pairwise(ends)]
    return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], -1)


def positions(tokens):
    return torch.arange(tokens)[:, None], torch.arange(tokens)


def selected(
    q, k, v, block_indices, *, block_size, scale=None, cu_seqlens=None, return_lse=True, causal=True, once=True, shift=0
):
    def one(q, k, v, indices):
        t, j = positions(q.shape[1])
        named = (
            (indices[..., None] + shift == j // block_size)
            .sum(-2)
            .transpose(1, 2)
            .repeat_interleave(q.shape[2] // k.shape[2], 1)
        )
        named = named.clamp(max=1) if once else named
        return weighted(q, k, v, (named * (j <= t) if causal else named).float(), scale)

    return one_by_one(one, cu_seqlens, q, k, v, block_indices)


def compressed(
    q, k_cmp, v_cmp, *, compress_size, compress_stride, scale=None, cu_seqlens=None, return_lse=True, early=0
):
    def one(q, k_cmp, v_cmp):
        ended = (
            torch.arange(k_cmp.shape[1]) * compress_stride + compress_size - 1 - early
            <= torch.arange(q.shape[1])[:, None]
        )
        return weighted(q, k_cmp, v_cmp, ended.float().expand(q.shape[0], q.shape[2], -1, -1), scale)

    if cu_seqlens is None:
        return one(q, k_cmp, v_cmp)
    counts = [max(0, (length - compress_size) // compress_stride + 1) for length in cu_seqlens.diff().tolist()]
    parts = zip(q.split(cu_seqlens.diff().tolist()), k_cmp.split(counts), v_cmp.split(counts), strict=True)
    results = [one(*(x[None] for x in part)) for part in parts]
    return torch.cat([o[0] for o, _ in results]), torch.cat([lse[0] for _, lse in results], -1)


def attend(
    fq,
    fk,
    fv,
    block_size,
    selected_block_indices,
    fmask,
    sel_scale=None,
    include_block_causal=True,
    return_lse=True,
    return_sliding_window_out=False,
    causal=False,
    once=False,
    straight_through=False,
    reach=0,
):
    """Every naming as keys of its own: scores of all keys, slot by slot, end to end."""
    group = fq.shape[1] // fk.shape[1]
    k, v = (x.float().repeat_interleave(group, 1) for x in (fk, fv))
    each = fq.shape[1] // fmask.shape[1]
    t, j = positions(fq.shape[2])
    scores = fq.float() @ k.mT * fq.shape[-1] ** -0.5
    parts, keeps = (
        [scores],
        [((j // block_size == t // block_size) & (j <= t) & include_block_causal).expand(scores.shape)],
    )
    before = torch.zeros_like(keeps[0])
    for slot in range(fmask.shape[-1]):
        index, mask = (x[..., slot, None].repeat_interleave(each, 1) for x in (selected_block_indices, fmask))
        keep = mask & (index == j // block_size) & ((j <= t) | (not causal)) & ~(before & once)
        factor = 1.0
        if sel_scale is not None:
            factor = sel_scale[..., slot, None].repeat_interleave(each, 1).float()
        scaled = scores * factor
        if straight_through and sel_scale is not None:
            scaled = scores * factor.detach() + factor - factor.detach()
        parts.append(scaled)
        keeps.append(keep)
        before = before | keep

    def softmax(scores, keep, v):
        sees = keep.any(-1, keepdim=True)
        scores = scores.masked_fill(~keep, -1e30)
        p = torch.where(sees, scores.softmax(-1), 0.0) if scores.shape[-1] else scores
        return (p @ v).to(fq.dtype), torch.where(sees[..., 0], scores.logsumexp(-1), -torch.inf)

    o, lse = softmax(torch.cat(parts, -1), torch.cat(keeps, -1), torch.cat([v] * len(parts), -2))
    if not return_sliding_window_out:
        return o, lse
    o_win, lse_win = softmax(scores, ((j <= t) & (j >= t - block_size - reach)).expand(scores.shape), v)
    return (o, o_win), (lse, lse_win)
