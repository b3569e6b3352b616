"""Flash attention's definition, in plain torch: readable, differentiable, any dtype up to fp64.

Builds every score matrix whole.
"""

import torch


def keep_mask(
    queries: int, keys: int, causal: bool, window_size: tuple[int, int], device: torch.device
) -> torch.Tensor:
    """[Tq, Tk], True where the key takes part for the query; aligned at the bottom right."""
    position = torch.arange(queries, device=device)[:, None] + (keys - queries)
    key = torch.arange(keys, device=device)[None, :]
    left, right = window_size
    keep = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        keep &= key <= position
    if left >= 0:
        keep &= key >= position - left
    if right >= 0:
        keep &= key <= position + right
    return keep


def attend_whole(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    keep: torch.Tensor,
    scale: float,
    softcap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of equal lengths: q [B, Tq, Hq, D], k [B, Tk, Hk, D], v [B, Tk, Hk, Dv], sinks [Hq] -> o [B, Tq, Hq,
    Dv], lse [B, Hq, Tq].
    """
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~keep, -torch.inf)
    sees = keep.any(-1)
    if sinks is not None:
        # One more score of each row, for a key that has no value.
        sink = sinks[:, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:-1], 1)], -1)
        sees = sees | (sink[..., 0] != -torch.inf)
    # A row that sees nothing is given scores of 0, so that no infinity enters the gradients, and its results are then
    # set by definition.
    scores = scores.masked_fill(~sees[..., None], 0.0)
    probabilities = torch.softmax(scores, -1).masked_fill(~sees[..., None], 0.0)[..., : k.shape[1]]
    lse = torch.logsumexp(scores, -1).masked_fill(~sees, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", probabilities, v), lse


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in q's dtype, and LSE.

    compute_dtype is the precision of every step: by default fp32, or fp64 for fp64 inputs. In the inputs' own 16 bits
    this is what eager torch would give, which tells how much error a precision costs.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    compute_dtype = compute_dtype or wide
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = keep_mask(q.shape[1], k.shape[1], causal, window_size, q.device)
        q, k, v = (x.to(compute_dtype) for x in (q, k, v))
        return attend_whole(q, k, v, None if sinks is None else sinks.to(compute_dtype), keep, scale, softcap)

    if cu_seqlens_q is None:
        o, lse = attend(q, k, v)
    else:
        ends_q = cu_seqlens_q.tolist()
        ends_k = ends_q if cu_seqlens_k is None else cu_seqlens_k.tolist()
        # An empty start keeps shape, dtype and graph when there is no sequence at all.
        parts = [attend(q[None, :0], k[None, :0], v[None, :0])]
        for b in range(len(ends_q) - 1):
            rows_q, rows_k = slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])
            parts.append(attend(q[None, rows_q], k[None, rows_k], v[None, rows_k]))
        o = torch.cat([part[0][0] for part in parts])
        lse = torch.cat([part[1][0] for part in parts], dim=-1)
    return o.to(q.dtype), lse.to(torch.promote_types(wide, compute_dtype))
