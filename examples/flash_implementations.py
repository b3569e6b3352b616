"""A flash attention in plain torch, tile by tile, and three wrong ones that look right, for `tilewise verify --impl` to
judge.

tilewise verify flash --impl examples/flash_implementations.py:correct
tilewise verify flash --impl examples/flash_implementations.py:unmasked_tail
"""

from functools import partial

import torch

TILE = 64


def correct(q, k, v, **options):
    """Online softmax over key tiles, a backward by hand, every option of the operator."""
    return _attention(q, k, v, bug="", **options)


def missing_rescale(q, k, v, **options):
    """Wrong: when a later tile has a larger maximum, the output summed so far is not rescaled to it."""
    return _attention(q, k, v, bug="missing rescale", **options)


def unmasked_tail(q, k, v, **options):
    """Wrong: the last key tile is padded with zeros, and the padding takes part in the softmax."""
    return _attention(q, k, v, bug="unmasked tail", **options)


def swapped_gradients(q, k, v, **options):
    """Wrong: the backward returns dV for dK and dK for dV."""
    return _attention(q, k, v, bug="swapped gradients", **options)


def _attention(
    q,
    k,
    v,
    *,
    bug,
    causal=False,
    window_size=(-1, -1),
    scale=None,
    softcap=0.0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    sinks=None,
    return_lse=False,
):
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    attend = partial(_one_batch, causal=causal, window=window_size, scale=scale, softcap=softcap, bug=bug)
    if cu_seqlens_q is None:
        o, lse = attend(q, k, v)
    else:
        ends_q, ends_k = cu_seqlens_q.tolist(), (cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k).tolist()
        parts = [
            attend(
                q[None, ends_q[b] : ends_q[b + 1]],
                k[None, ends_k[b] : ends_k[b + 1]],
                v[None, ends_k[b] : ends_k[b + 1]],
            )
            for b in range(len(ends_q) - 1)
        ]
        o, lse = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], -1)
    if sinks is not None:
        # One more logit a head, without a value: it only takes weight from the others. A difference of two -inf, and
        # its gradient, would be NaN.
        lse, sinks = (x.float().clamp(min=-1e30) for x in (lse, sinks))
        total = torch.logaddexp(lse, sinks[:, None])
        o = (o * torch.exp(lse - total).transpose(-1, -2)[..., None]).to(o.dtype)
        lse = total.masked_fill(total < -1e29, -torch.inf)
    return (o, lse) if return_lse else o


def _one_batch(q, k, v, *, causal, window, scale, softcap, bug):
    """[B, T, H, D] -> o [B, T, H, Dv], lse [B, H, T]; heads are put side by side, so that the tiles see
    [B, H, T, D].
    """
    group = q.shape[2] // k.shape[2]
    wide = [x.float().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))]
    o, lse = Tiled.apply(*wide, causal, window, scale, softcap, bug)
    return o.transpose(1, 2).to(q.dtype), lse


def _scores(q, k, start, keys, causal, window, scale, softcap, bug):
    """Scores of one key tile, and which of them are kept."""
    scores = scale * q @ k.transpose(-1, -2)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[-2], device=q.device)[:, None] + keys - q.shape[-2]
    key = start + torch.arange(k.shape[-2], device=q.device)
    keep = (key < keys) | torch.tensor(bug == "unmasked tail", device=q.device)
    left, right = window[0], 0 if causal and window[1] < 0 else min(window[1], 0) if causal else window[1]
    keep = (
        keep
        & (key <= position + right if right >= 0 else key >= 0)
        & (key >= position - left if left >= 0 else key >= 0)
    )
    return scores, keep


class Tiled(torch.autograd.Function):
    """Forward and backward over tiles of keys; rows of queries are not tiled, to keep it short."""

    @staticmethod
    def forward(ctx, q, k, v, causal, window, scale, softcap, bug):
        keys = k.shape[-2]
        # The last tile is whole: zeros stand where there are no keys.
        k, v = (torch.nn.functional.pad(x, (0, 0, 0, -keys % TILE)) for x in (k, v))
        m = torch.full(q.shape[:-1], -torch.inf, device=q.device)
        total, acc = torch.zeros_like(m), q.new_zeros(*q.shape[:-1], v.shape[-1])
        for start in range(0, k.shape[-2], TILE):
            scores, keep = _scores(q, k[..., start : start + TILE, :], start, keys, causal, window, scale, softcap, bug)
            scores = scores.masked_fill(~keep, -torch.inf)
            m_new = torch.maximum(m, scores.amax(-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(scores - shift[..., None])
            rescale = torch.exp(m - shift)
            total = total * rescale + p.sum(-1)
            acc = (acc if bug == "missing rescale" else acc * rescale[..., None]) + p @ v[..., start : start + TILE, :]
            m = m_new
        o = acc / total.masked_fill(total == 0, 1.0)[..., None]
        lse = m + torch.log(total)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.options = (keys, causal, window, scale, softcap, bug)
        return o, lse

    @staticmethod
    def backward(ctx, do, dlse):
        q, k, v, o, lse = ctx.saved_tensors
        keys, causal, window, scale, softcap, bug = ctx.options
        delta = (o * do).sum(-1) - dlse
        lse = lse.masked_fill(lse == -torch.inf, torch.inf)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start in range(0, k.shape[-2], TILE):
            tile = slice(start, start + TILE)
            scores, keep = _scores(q, k[..., tile, :], start, keys, causal, window, scale, softcap, bug)
            p = torch.exp(scores - lse[..., None]).masked_fill(~keep, 0.0)
            ds = p * (do @ v[..., tile, :].transpose(-1, -2) - delta[..., None])
            if softcap > 0:
                ds = ds * (1 - (scores / softcap) ** 2)
            dv[..., tile, :] = p.transpose(-1, -2) @ do
            dk[..., tile, :] = scale * ds.transpose(-1, -2) @ q
            dq += scale * ds @ k[..., tile, :]
        dk, dv = dk[..., :keys, :], dv[..., :keys, :]
        if bug == "swapped gradients" and dk.shape == dv.shape:
            dk, dv = dv, dk
        return dq, dk, dv, None, None, None, None, None
