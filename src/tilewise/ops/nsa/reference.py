"""Native sparse attention's definition, in plain torch: readable, differentiable, any dtype up to fp64. Builds every
score matrix whole.

A value that is not finite counts as NaN, and reaches what sees it and nothing else, in gradients too.
"""

import itertools
from typing import Any

import torch


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q·k: q [B, T, Hq, D], k [B, J, Hk, D] -> [B, Hq, T, J]."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    # Products with 0 in place of NaN, then NaN in place of the score: a score that a mask leaves out then has gradient
    # 0, not 0 · NaN.
    broken_q, broken_k = ((~x.isfinite().all(-1)).transpose(1, 2) for x in (q, k))
    scores = torch.einsum("bihd,bjhd->bhij", q.nan_to_num(0.0, 0.0, 0.0), k.nan_to_num(0.0, 0.0, 0.0))
    return scores.masked_fill(broken_q[..., :, None] | broken_k[..., None, :], torch.nan)


def _softmax(scores: torch.Tensor, keep: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities over what is kept, 0 elsewhere, and LSE: scores [B, H, T, J], keep broadcast to it -> [B, H, T, J],
    [B, H, T].
    """
    sees = keep.any(-1)
    # A row that sees nothing is given scores of 0, so that no infinity enters the gradients, and its results are then
    # set by definition.
    scores = scores.masked_fill(~keep, -torch.inf).masked_fill(~sees[..., None], 0.0)
    probabilities = torch.softmax(scores, -1).masked_fill(~keep, 0.0)
    return probabilities, torch.logsumexp(scores, -1).masked_fill(~sees, -torch.inf)


def _weighted(probabilities: torch.Tensor, keep: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The sum of the values: probabilities and keep [B, Hq, T, J], v [B, J, Hk, Dv] -> [B, T, Hq, Dv]."""
    v = v.repeat_interleave(probabilities.shape[1] // v.shape[2], dim=2)
    broken = ~v.isfinite()
    o = torch.einsum("bhij,bjhd->bihd", probabilities, v.masked_fill(broken, 0.0))
    reached = torch.einsum("bhij,bjhd->bihd", keep.to(v.dtype).expand(probabilities.shape), broken.to(v.dtype)) > 0
    return o.masked_fill(reached, torch.nan)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of equal lengths: q [B, T, Hq, D], k [B, J, Hk, D], v [B, J, Hk, Dv], keep [T, J] or [B, Hq, T, J] -> o
    [B, T, Hq, Dv], lse.
    """
    probabilities, lse = _softmax(_scores(q, k) * scale, keep)
    return _weighted(probabilities, keep, v), lse


def _back(tokens: int, device: torch.device) -> torch.Tensor:
    """[T, T]: how many tokens the key lies before the query; negative where it lies after."""
    position = torch.arange(tokens, device=device)
    return position[:, None] - position[None, :]


def _rows(offsets: list[int]) -> list[slice]:
    """Each sequence's rows; first an empty start, which keeps shape, dtype and graph when there is no
    sequence at all.
    """
    return [slice(0, 0), *(slice(*ends) for ends in itertools.pairwise(offsets))]


def _window_offsets(offsets: list[int], compress_size: int, compress_stride: int) -> list[int]:
    """Where each sequence's windows begin: [B+1]."""
    counts = (_window_count(end - start, compress_size, compress_stride) for start, end in itertools.pairwise(offsets))
    return list(itertools.accumulate(counts, initial=0))


def _window_count(tokens: int, compress_size: int, compress_stride: int) -> int:
    return max(0, (tokens - compress_size) // compress_stride + 1)


def _ended(tokens: int, windows: int, compress_size: int, compress_stride: int, device: torch.device) -> torch.Tensor:
    """[T, C], True where the window ends no later than the query."""
    last = torch.arange(windows, device=device) * compress_stride + compress_size - 1
    return last[None, :] <= torch.arange(tokens, device=device)[:, None]


def compress_mean(
    x: torch.Tensor, compress_size: int, compress_stride: int, cu_seqlens: torch.Tensor | None = None
) -> torch.Tensor:
    """The means over whole windows, in x's dtype: [B, T, H, D] -> [B, C, H, D]; packed [N, H, D] -> [C of all
    sequences, H, D].
    """
    if cu_seqlens is not None:
        parts = [compress_mean(x[None, rows], compress_size, compress_stride)[0] for rows in _rows(cu_seqlens.tolist())]
        return torch.cat(parts)
    if _window_count(x.shape[1], compress_size, compress_stride) == 0:
        return x[:, :0]
    return x.to(_wide(x.dtype)).unfold(1, compress_size, compress_stride).mean(-1).to(x.dtype)


def compressed_attention(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    *,
    compress_size: int,
    compress_stride: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the windows that have ended: output in q's dtype, and LSE.

    compute_dtype is the precision of every step: by default fp32, or fp64 for fp64 inputs. In the inputs' own 16 bits
    this is what eager torch would give, which tells how much error a precision costs.
    """
    compute_dtype = compute_dtype or _wide(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(q: torch.Tensor, k_cmp: torch.Tensor, v_cmp: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = _ended(q.shape[1], k_cmp.shape[1], compress_size, compress_stride, q.device)
        return _attend(q.to(compute_dtype), k_cmp.to(compute_dtype), v_cmp.to(compute_dtype), keep, scale)

    if cu_seqlens is None:
        o, lse = attend(q, k_cmp, v_cmp)
    else:
        offsets = cu_seqlens.tolist()
        windows = _rows(_window_offsets(offsets, compress_size, compress_stride))
        parts = [
            attend(q[None, t], k_cmp[None, c], v_cmp[None, c]) for t, c in zip(_rows(offsets), windows, strict=True)
        ]
        o, lse = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], dim=-1)
    return o.to(q.dtype), lse.to(torch.promote_types(_wide(q.dtype), compute_dtype))


def choice_scores(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    *,
    compress_size: int,
    compress_stride: int,
    block_size: int,
    init_blocks: int = 1,
    local_blocks: int = 2,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The scores by which each kv head's blocks are chosen: [B, T, Hk, blocks], packed [N, Hk, most blocks of a
    sequence].

    A block that is forced has +inf; a block that may not be chosen, being later or beyond the sequence, has -inf. They
    carry no gradient. compute_dtype is as in `compressed_attention`.
    """
    compute_dtype = compute_dtype or _wide(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k_cmp = q.detach().to(compute_dtype), k_cmp.detach().to(compute_dtype)

    def score(q: torch.Tensor, k_cmp: torch.Tensor) -> torch.Tensor:
        tokens, windows = q.shape[1], k_cmp.shape[1]
        keep = _ended(tokens, windows, compress_size, compress_stride, q.device)
        probabilities, _ = _softmax(_scores(q, k_cmp) * scale, keep)
        # The query heads of one kv head choose together: [B, T, Hk, C].
        together = probabilities.unflatten(1, (k_cmp.shape[2], -1)).sum(2).transpose(1, 2)
        block = torch.arange(-(-tokens // block_size), device=q.device)
        # Tokens that window c and block j share, in strides: [C, blocks].
        first = torch.arange(windows, device=q.device)[:, None] * compress_stride
        shared = torch.minimum(first + compress_size, (block + 1) * block_size) - torch.maximum(
            first, block * block_size
        )
        scores = together @ (shared.clamp(min=0) / compress_stride).to(compute_dtype)
        # Infinities are markers, so a NaN score must be made finite: a forced block stays the best and a later one the
        # worst.
        scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)
        current = torch.arange(tokens, device=q.device)[:, None, None] // block_size
        forced = (block < init_blocks) | (block > current - local_blocks)
        return scores.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)

    if cu_seqlens is None:
        scores = score(q, k_cmp)
    else:
        offsets = cu_seqlens.tolist()
        windows = _rows(_window_offsets(offsets, compress_size, compress_stride))
        parts = [score(q[None, t], k_cmp[None, c])[0] for t, c in zip(_rows(offsets), windows, strict=True)]
        most = max(part.shape[-1] for part in parts)
        scores = torch.cat(
            [torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=-torch.inf) for part in parts]
        )
    return scores.to(torch.promote_types(_wide(q.dtype), compute_dtype))


def select_blocks(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    *,
    compress_size: int,
    compress_stride: int,
    block_size: int,
    block_count: int,
    init_blocks: int = 1,
    local_blocks: int = 2,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The block_count best blocks, ties to the lower index: int32 [B, T, Hk, block_count], packed [N, Hk, block_count];
    ascending, -1 at the end.
    """
    scores = choice_scores(
        q,
        k_cmp,
        compress_size=compress_size,
        compress_stride=compress_stride,
        block_size=block_size,
        init_blocks=init_blocks,
        local_blocks=local_blocks,
        scale=scale,
        cu_seqlens=cu_seqlens,
        compute_dtype=compute_dtype,
    )
    blocks = scores.shape[-1]
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    # What may not be chosen is numbered past the last block, so that it ends up behind what is.
    chosen = order.masked_fill(best == -torch.inf, blocks)[..., :block_count].sort(dim=-1).values
    chosen = chosen.masked_fill(chosen == blocks, -1)
    return torch.nn.functional.pad(chosen, (0, block_count - chosen.shape[-1]), value=-1).to(torch.int32)


def selected_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_indices: torch.Tensor,
    *,
    block_size: int,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the keys of the selected blocks, each key once: output in q's dtype, and LSE.

    A negative index, and one past the sequence, is no block. compute_dtype is as in `compressed_attention`.
    """
    compute_dtype = compute_dtype or _wide(q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, block_indices: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = q.shape[1]
        block = torch.arange(-(-tokens // block_size), device=q.device)
        selected = (block_indices[..., None] == block).any(-2).transpose(1, 2)
        of_key = torch.arange(tokens, device=q.device) // block_size
        keep = selected[..., of_key] & (_back(tokens, q.device) >= 0)
        keep = keep.repeat_interleave(q.shape[2] // k.shape[2], dim=1)
        return _attend(q.to(compute_dtype), k.to(compute_dtype), v.to(compute_dtype), keep, scale)

    if cu_seqlens is None:
        o, lse = attend(q, k, v, block_indices)
    else:
        parts = [attend(*(x[None, rows] for x in (q, k, v, block_indices))) for rows in _rows(cu_seqlens.tolist())]
        o, lse = torch.cat([part[0][0] for part in parts]), torch.cat([part[1][0] for part in parts], dim=-1)
    return o.to(q.dtype), lse.to(torch.promote_types(_wide(q.dtype), compute_dtype))


def _window_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window_size: int, scale: float, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Causal attention over the last window_size keys, the query's own included."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        back = _back(q.shape[1], q.device)
        return _attend(q, k, v, (back >= 0) & (back < window_size), scale)[0]

    if cu_seqlens is None:
        return attend(q, k, v)
    return torch.cat([attend(q[None, rows], k[None, rows], v[None, rows])[0] for rows in _rows(cu_seqlens.tolist())])


def native_sparse_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    k_cmp: torch.Tensor | None = None,
    v_cmp: torch.Tensor | None = None,
    compress_size: int = 32,
    compress_stride: int = 16,
    block_size: int = 64,
    block_count: int = 16,
    window_size: int = 512,
    init_blocks: int = 1,
    local_blocks: int = 2,
    scale: float | None = None,
    cu_seqlens: torch.Tensor | None = None,
    block_indices: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Output in q's dtype, and the selected blocks: int32 [B, T, Hk, block_count], packed [N, Hk, block_count]; None
    where g_slc is None.

    compute_dtype is the precision of every step, the choice too, as in `compressed_attention`. block_indices are taken
    as they are in place of a choice, so that two implementations can be compared under the same one.
    """
    compute_dtype, out_dtype = compute_dtype or _wide(q.dtype), q.dtype
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(compute_dtype) for x in (q, k, v))
    k_cmp = compress_mean(k, compress_size, compress_stride, cu_seqlens) if k_cmp is None else k_cmp.to(compute_dtype)
    v_cmp = compress_mean(v, compress_size, compress_stride, cu_seqlens) if v_cmp is None else v_cmp.to(compute_dtype)
    windows: dict[str, Any] = {
        "compress_size": compress_size,
        "compress_stride": compress_stride,
        "cu_seqlens": cu_seqlens,
        "compute_dtype": compute_dtype,
    }

    o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    if g_cmp is not None:
        o_cmp, _ = compressed_attention(q, k_cmp, v_cmp, scale=scale, **windows)
        o = o + g_cmp.to(compute_dtype)[..., None] * o_cmp
    if g_slc is None:
        block_indices = None
    else:
        if block_indices is None:
            choice: dict[str, Any] = {
                "block_size": block_size,
                "block_count": block_count,
                "init_blocks": init_blocks,
                "local_blocks": local_blocks,
            }
            block_indices = select_blocks(q, k_cmp, scale=scale, **choice, **windows)
        block_indices = block_indices.to(torch.int32)
        o_slc, _ = selected_attention(
            q,
            k,
            v,
            block_indices,
            block_size=block_size,
            scale=scale,
            cu_seqlens=cu_seqlens,
            compute_dtype=compute_dtype,
        )
        o = o + g_slc.to(compute_dtype)[..., None] * o_slc
    if g_swa is not None:
        o = o + g_swa.to(compute_dtype)[..., None] * _window_attention(q, k, v, window_size, scale, cu_seqlens)
    return o.to(out_dtype), block_indices


def native_sparse_attend(
    fq: torch.Tensor,
    fk: torch.Tensor,
    fv: torch.Tensor,
    block_size: int,
    selected_block_indices: torch.Tensor,
    fmask: torch.Tensor,
    sel_scale: torch.Tensor | None = None,
    include_block_causal: bool = True,
    return_sliding_window_out: bool = False,
    *,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor] | tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Whole selected blocks, each as often as it is named, and the query's own block up to the query: output in fq's
    dtype, and LSE.

    Everything is [B, H, T, ...]. With the sliding window: ((o, o_win), (lse, lse_win)). An index that names no block of
    the sequence takes no part. compute_dtype is as in `compressed_attention`.
    """
    compute_dtype = compute_dtype or _wide(fq.dtype)
    q, k, v = (x.to(compute_dtype).transpose(1, 2) for x in (fq, fk, fv))
    tokens, scale = q.shape[1], q.shape[-1] ** -0.5
    group = q.shape[2] // selected_block_indices.shape[1]
    indices = selected_block_indices.repeat_interleave(group, dim=1).long()
    named = fmask.repeat_interleave(group, dim=1) & (indices >= 0) & (indices < -(-tokens // block_size))
    products, position = _scores(q, k), torch.arange(tokens, device=q.device)

    # The keys of each naming, [B, Hq, T, S, block_size]; with the query's own block, which is masked, one more.
    key = indices[..., None] * block_size + torch.arange(block_size, device=q.device)
    keep = named[..., None] & (key < tokens)
    if include_block_causal:
        own = (position // block_size * block_size)[:, None, None] + torch.arange(block_size, device=q.device)
        key = torch.cat([key, own.expand(*key.shape[:-2], 1, block_size)], dim=-2)
        keep = torch.cat([keep, (own <= position[:, None, None]).expand(*keep.shape[:-2], 1, block_size)], dim=-2)
    key = key.masked_fill(~keep, 0)
    scores = products.gather(-1, key.flatten(-2)).view(key.shape).masked_fill(~keep, 0.0)
    if sel_scale is not None:
        # What a mask leaves out has factor 0, so that nothing of it is read.
        factor = sel_scale.to(compute_dtype).repeat_interleave(group, dim=1).masked_fill(~named, 0.0)
        factor = torch.nn.functional.pad(factor, (0, int(include_block_causal)), value=1.0)
        scores = scores * factor[..., None]
    key, keep = key.flatten(-2), keep.flatten(-2)

    probabilities, lse = _softmax(scores.flatten(-2) * scale, keep)
    # Back to one weight a key, the sum over its namings.
    seen = torch.zeros_like(products, dtype=torch.int32).scatter_add_(-1, key, keep.to(torch.int32)) > 0
    o = _weighted(torch.zeros_like(products).scatter_add(-1, key, probabilities), seen, v)
    results = [(o, lse)]
    if return_sliding_window_out:
        back = _back(tokens, q.device)
        near = (back >= 0) & (back <= block_size)
        probabilities, lse = _softmax(products * scale, near)
        results.append((_weighted(probabilities, near, v), lse))
    lse_dtype = torch.promote_types(_wide(fq.dtype), compute_dtype)
    outputs = [(o.transpose(1, 2).to(fq.dtype), lse.to(lse_dtype)) for o, lse in results]
    if not return_sliding_window_out:
        return outputs[0]
    return (outputs[0][0], outputs[1][0]), (outputs[0][1], outputs[1][1])
