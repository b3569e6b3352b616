"""HSTU attention's definition, in plain torch: readable, differentiable, any dtype up to fp64.

Builds every score matrix whole.
"""

import itertools

import torch


def keep_mask(
    tokens: int, causal: bool, targets: int | None, max_attn_len: int, contextual_seq_len: int, device: torch.device
) -> torch.Tensor:
    """[L, L], True where the key takes part for the query, in a sequence whose last `targets` tokens are targets."""
    position = torch.arange(tokens, device=device)
    ids, end = position, tokens
    if contextual_seq_len > 0:
        # The contextual tokens count as one, the first.
        ids, end = (position - contextual_seq_len + 1).clamp(min=0), tokens - contextual_seq_len + 1
    if targets is not None:
        # All targets count as the one token after the last that is none, so that they do not see each other.
        end -= targets
        ids = ids.clamp(max=end)
    distance = ids[:, None] - ids[None, :]
    if not causal:
        distance = distance.abs()
    keep = (position[:, None] == position[None, :]) | (distance > 0)
    if max_attn_len > 0:
        keep &= distance <= max_attn_len
    if contextual_seq_len > 0:
        keep |= (ids[:, None] == 0) & (ids[None, :] < end)
    return keep


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, alpha: float, max_seq_len: int
) -> torch.Tensor:
    """One sequence: q, k [L, H, D], v [L, H, Dv], keep [L, L] -> [L, H, Dv]."""
    # SiLU(0) = 0, so a pair left out is given score 0 before SiLU, not weight 0 after it: nothing of its score then
    # enters the gradients.
    scores = (torch.einsum("ihd,jhd->hij", q, k) * alpha).masked_fill(~keep, 0.0)
    return torch.einsum("hij,jhd->ihd", torch.nn.functional.silu(scores) / max_seq_len, v)


def hstu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    *,
    max_seq_len: int,
    alpha: float | None = None,
    causal: bool = True,
    num_targets: torch.Tensor | None = None,
    max_attn_len: int = 0,
    contextual_seq_len: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Output in q's dtype.

    compute_dtype is the precision of every step: by default fp32, or fp64 for fp64 inputs. In the inputs' own 16 bits
    this is what eager torch would give, which tells how much error a precision costs.
    """
    compute_dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    alpha = q.shape[-1] ** -0.5 if alpha is None else alpha

    def attend(rows: slice, targets: int | None) -> torch.Tensor:
        keep = keep_mask(rows.stop - rows.start, causal, targets, max_attn_len, contextual_seq_len, q.device)
        one_q, one_k, one_v = (x[rows].to(compute_dtype) for x in (q, k, v))
        return _attend(one_q, one_k, one_v, keep, alpha, max_seq_len)

    sequences = [slice(*ends) for ends in itertools.pairwise(seq_offsets.tolist())]
    targets = [None] * len(sequences) if num_targets is None else num_targets.tolist()
    # An empty start keeps shape, dtype and graph when there is no sequence at all.
    parts = [attend(slice(0, 0), None), *(attend(rows, n) for rows, n in zip(sequences, targets, strict=True))]
    return torch.cat(parts).to(q.dtype)
