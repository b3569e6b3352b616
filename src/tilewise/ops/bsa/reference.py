"""Block-sparse attention's definition, in plain torch: readable, differentiable, any dtype up to fp64.

Builds every score matrix whole.
"""

import itertools
from collections.abc import Callable, Sequence

import torch

LAYER_NORM_EPS = 1e-6


def _block_means(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """[B, T, H, D] -> [B, T // block_size, H, D]; a last block that is not whole has no mean."""
    batch, tokens, heads, channels = x.shape
    whole = tokens // block_size
    return x[:, : whole * block_size].reshape(batch, whole, block_size, heads, channels).mean(2)


def _weights(q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """A(q·k) where kept, else 0: q [B, T, H, D], k [B, J, H, D], keep [T, J] or [B, H, T, J] -> [B, H, T, J]."""
    # SiLU(0) = 0, so a pair left out is given score 0 before SiLU, not weight 0 after it: nothing of its score then
    # enters the gradients.
    scores = torch.einsum("bihd,bjhd->bhij", q, k).masked_fill(~keep, 0.0)
    return torch.nn.functional.silu(scale * scores) / scale


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """One branch: the sum of A(q·k) v over what is kept, [B, T, H, Dv]; 0 in a row that sees nothing."""
    return torch.einsum("bhij,bjhd->bihd", _weights(q, k, keep, scale), v)


def _gated_norm(o: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """LN(gate · o) over all heads and channels of a token together; a row that sees nothing gives LN(0) = 0, with
    finite slope thanks to eps.
    """
    gated = o if gate is None else gate[..., None] * o
    return torch.nn.functional.layer_norm(gated, gated.shape[-2:], eps=LAYER_NORM_EPS)


def _choice_scores(q: torch.Tensor, k: torch.Tensor, block_size: int, scale: float) -> torch.Tensor:
    """One batch of equal lengths: q, k [B, T, H, D] -> [B, H, T, blocks]."""
    tokens = q.shape[1]
    whole, blocks = tokens // block_size, -(-tokens // block_size)
    current = torch.arange(tokens, device=q.device)[:, None] // block_size
    block = torch.arange(blocks, device=q.device)[None, :]
    before = block < current
    # Every block before the current one is whole; one that is not can only be the current one.
    scores = _weights(q, _block_means(k, block_size), before[:, :whole], scale)
    # Infinities are markers, so a score that overflowed or is NaN must be made finite: cur stays the best and a later
    # block the worst.
    scores = torch.nn.functional.pad(scores.nan_to_num(nan=torch.finfo(scores.dtype).min), (0, blocks - whole))
    return scores.masked_fill(block > current, -torch.inf).masked_fill(block == current, torch.inf)


def _choose(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` best of [B, H, T, blocks], ties to the lower index: int32 [B, H, T, count], ascending, -1
    at the end.
    """
    blocks = scores.shape[-1]
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    # What may not be chosen is numbered past the last block, so that it ends up behind what is.
    chosen = order.masked_fill(best == -torch.inf, blocks)[..., :count].sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == blocks, -1)
    return torch.nn.functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1).to(torch.int32)


def _selected(block_indices: torch.Tensor, tokens: int, block_size: int) -> torch.Tensor:
    """[B, H, T, S] -> [B, H, T, T], True where the key is not after the query and lies in one of its blocks; -1 is no
    block.
    """
    position = torch.arange(tokens, device=block_indices.device)
    block = torch.arange(-(-tokens // block_size), device=block_indices.device)
    chosen = (block_indices[..., None] == block).any(-2)
    return chosen[..., position // block_size] & (position[None, :] <= position[:, None])


def _one_length(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None],
    block_indices: torch.Tensor,
    block_size: int,
    window_size: int,
    scale: float,
) -> torch.Tensor:
    """One batch of equal lengths with its blocks chosen: q, k [B, T, H, D], v, u [B, T, H, Dv], gates [B, T, H] -> [B,
    T, H, Dv].
    """
    g_cmp, g_slc, g_swa = gates
    tokens = q.shape[1]
    position = torch.arange(tokens, device=q.device)
    block = torch.arange(tokens // block_size, device=q.device)
    ended = (block + 1) * block_size - 1 <= position[:, None]
    o_cmp = _attend(q, _block_means(k, block_size), _block_means(v, block_size), ended, scale)
    o_slc = _attend(q, k, v, _selected(block_indices, tokens, block_size), scale)
    total = _gated_norm(o_cmp, g_cmp) + _gated_norm(o_slc, g_slc)
    if window_size > 0:
        back = position[:, None] - position[None, :]
        total = total + _gated_norm(_attend(q, k, v, (back >= 0) & (back < window_size), scale), g_swa)
    return u * total


def choice_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    seq_offsets: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The scores by which each head's blocks are chosen: [B, H, T, blocks], packed [H, N, most blocks of a sequence].

    The query's own block, which is forced, has +inf; a block that may not be chosen, being later or beyond the
    sequence, has -inf. These are the scores before interleave gives head 2i's choice to head 2i+1. They carry no
    gradient. compute_dtype is as in `block_sparse_attn`.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    compute_dtype = compute_dtype or wide
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k = q.detach().to(compute_dtype), k.detach().to(compute_dtype)
    if seq_offsets is None:
        scores = _choice_scores(q, k, block_size, scale)
    else:
        rows = [slice(0, 0), *(slice(*ends) for ends in itertools.pairwise(seq_offsets.tolist()))]
        parts = [_choice_scores(q[None, r], k[None, r], block_size, scale)[0] for r in rows]
        most = max(part.shape[-1] for part in parts)
        scores = torch.cat(
            [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in parts], dim=1
        )
    return scores.to(torch.promote_types(wide, compute_dtype))


def block_sparse_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int = 0,
    *,
    scale: float | None = None,
    interleave: bool = True,
    seq_offsets: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
    block_indices: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output in q's dtype, and the chosen blocks: int32 [B, H, T, S], packed [H, N, block_counts].

    compute_dtype is the precision of every step, the choice too: by default fp32, or fp64 for fp64 inputs. In the
    inputs' own 16 bits this is what eager torch would give, which tells how much error a precision costs.
    block_indices, laid out as they are returned, are taken as they are in place of a choice, so that two
    implementations can be compared under the same one.
    """
    compute_dtype = compute_dtype or (torch.float64 if q.dtype == torch.float64 else torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    if packed := seq_offsets is not None:
        q, k, v, u = q[None], k[None], v[None], u[None]
        g_cmp, g_slc, g_swa = (None if gate is None else gate[None] for gate in (g_cmp, g_slc, g_swa))
        block_indices = None if block_indices is None else block_indices[None]

    def choose(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = choice_scores(q, k, block_size=block_size, scale=scale, compute_dtype=compute_dtype)
        chosen = _choose(scores, block_counts if packed else min(block_counts, scores.shape[-1]))
        return chosen[:, ::2].repeat_interleave(2, dim=1) if interleave else chosen

    def attend(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        one_q, one_k, one_v, one_u = (x[:, rows].to(compute_dtype) for x in (q, k, v, u))
        one_cmp, one_slc, one_swa = (
            None if gate is None else gate[:, rows].to(compute_dtype) for gate in (g_cmp, g_slc, g_swa)
        )
        chosen = choose(one_q, one_k) if block_indices is None else block_indices[:, :, rows].to(torch.int32)
        return _one_length(
            one_q, one_k, one_v, one_u, (one_cmp, one_slc, one_swa), chosen, block_size, window_size, scale
        ), chosen

    if seq_offsets is None:
        o, chosen = attend(slice(None))
    else:
        # An empty start keeps shape, dtype and graph when there is no sequence at all.
        parts = [attend(slice(0, 0)), *(attend(slice(*ends)) for ends in itertools.pairwise(seq_offsets.tolist()))]
        o = torch.cat([part[0] for part in parts], dim=1)[0]
        chosen = torch.cat([part[1] for part in parts], dim=2)[0]
    return o.to(q.dtype), chosen


def hstu_attention_with_bsa(
    num_heads: int,
    attention_dim: int,
    linear_dim: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    x_offsets: torch.Tensor,
    invalid_attn_mask: torch.Tensor,
    gate_model: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    block_counts: int = 4,
    block_size: int = 32,
    window_size: int = 0,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output [N, H · Dv] in q's dtype, and padded_q and padded_k, [B, n, H, D], each sequence by itself; gate_model
    runs in q's dtype.

    compute_dtype is as in `block_sparse_attn`.
    """
    length = invalid_attn_mask.shape[-1]
    q, k = (x.unflatten(-1, (num_heads, attention_dim)) for x in (q, k))
    v, u = (x.unflatten(-1, (num_heads, linear_dim)) for x in (v, u))
    rows = [slice(*ends) for ends in itertools.pairwise(x_offsets.tolist())]

    def padded(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.nn.functional.pad(x[r], (0, 0, 0, 0, 0, length - (r.stop - r.start))) for r in rows]
        return torch.stack(parts) if parts else x.reshape(0, length, *x.shape[1:])

    padded_q, padded_k = padded(q), padded(k)
    gates = gate_model(padded_q)
    outputs = [q.new_zeros(0, num_heads, linear_dim)]
    for b, r in enumerate(rows):
        one_q, one_k, one_v, one_u = (x[None, r] for x in (q, k, v, u))
        one_cmp, one_slc, one_swa = (gate[b : b + 1, : r.stop - r.start] for gate in gates)
        o, _ = block_sparse_attn(
            one_q,
            one_k,
            one_v,
            one_u,
            one_cmp,
            one_slc,
            one_swa,
            block_counts,
            block_size,
            window_size,
            interleave=num_heads % 2 == 0,
            compute_dtype=compute_dtype,
        )
        outputs.append(o[0])
    return torch.cat(outputs).flatten(1), padded_q, padded_k
