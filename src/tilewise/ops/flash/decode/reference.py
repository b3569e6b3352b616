"""Attention over a cache by definition, in plain torch: each entry's keys gathered, then flash attention's reference.

Any dtype up to fp64; nothing is borrowed from the kernels.
"""

import itertools
from collections.abc import Iterator

import torch

from tilewise.ops.flash import reference


def entry_keys(
    x: torch.Tensor, b: int, first: int, end: int, page_table: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows `first .. end` of entry b's keys or values, [end - first, Hk, ·]; and which of them exist: a page out of
    range has none.
    """
    position = torch.arange(first, end, device=x.device)
    if page_table is None:
        return x[b, first:end], torch.ones_like(position, dtype=torch.bool)
    pages, page_size = x.shape[:2]
    page = page_table[b, position // page_size].long()
    exists = (page >= 0) & (page < pages)
    return x[page[exists], position[exists] % page_size], exists


def queries_of(q: torch.Tensor, cu_seqlens_q: torch.Tensor | None) -> Iterator[torch.Tensor]:
    """Each entry's queries [Tq, Hq, D], views of q."""
    if cu_seqlens_q is None:
        yield from q
    else:
        yield from (q[start:end] for start, end in itertools.pairwise(cu_seqlens_q.tolist()))


def lengths_of(seqused_k: torch.Tensor | None, batch: int, added: int, longest: int) -> list[int]:
    """Each entry's keys: seqused_k (0 without), and `added`, within 0 .. longest."""
    used = [0] * batch if seqused_k is None else seqused_k.tolist()
    return [min(min(max(n, 0), longest) + added, longest) for n in used]


def attend_cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    added: int = 0,
    leftpad_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype, and LSE [..., Hq, Tq]; packed where cu_seqlens_q is given.

    Entry b has seqused_k[b] + `added` keys; without seqused_k, `added`. compute_dtype is the precision of every step,
    as in flash attention's reference.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    compute_dtype = compute_dtype or wide
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    longest = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    queries = list(queries_of(q, cu_seqlens_q))
    outputs, lses = [], []
    for b, length in enumerate(lengths_of(seqused_k, len(queries), added, longest)):
        first = 0 if leftpad_k is None else min(max(int(leftpad_k[b]), 0), length)
        (keys, exists), (values, _) = (entry_keys(x, b, first, length, page_table) for x in (k, v))
        keep = reference.keep_mask(len(queries[b]), len(exists), causal, window_size, q.device)[:, exists]
        b_q, b_k, b_v = (x[None].to(compute_dtype) for x in (queries[b], keys, values))
        b_sinks = None if sinks is None else sinks.to(compute_dtype)
        (o,), (lse,) = reference.attend_whole(b_q, b_k, b_v, b_sinks, keep, scale, softcap)
        outputs.append(o)
        lses.append(lse)
    if not queries:
        return q.new_zeros(*q.shape[:-1], v.shape[-1]), q.new_zeros(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=wide)
    packed = cu_seqlens_q is not None
    o, lse = (torch.cat(outputs), torch.cat(lses, -1)) if packed else (torch.stack(outputs), torch.stack(lses))
    return o.to(q.dtype), lse.to(torch.promote_types(wide, compute_dtype))


def append(
    cache: torch.Tensor, new: torch.Tensor, seqused: torch.Tensor | None, at: int, page_table: torch.Tensor | None
) -> None:
    """Write new [B, Tn, Hk, ·] in place into [B, T_max, Hk, ·], or a pool's pages, at positions seqused[b] + `at` and
    on; without seqused at `at`. What does not fit is left out.
    """
    starts = [0] * len(new) if seqused is None else seqused.tolist()
    room = cache.shape[1] if page_table is None else page_table.shape[1] * cache.shape[1]
    for b, start in enumerate(starts):
        for i in range(new.shape[1]):
            position = start + at + i
            if not 0 <= position < room:
                continue
            if page_table is None:
                cache[b, position] = new[b, i]
                continue
            page = int(page_table[b, position // cache.shape[1]])
            if 0 <= page < len(cache):
                cache[page, position % cache.shape[1]] = new[b, i]


def flash_attention_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    *,
    cache_seqlens: torch.Tensor | int,
    leftpad_k: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    causal: bool = True,
    window_size: tuple[int, int] = (-1, -1),
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    num_splits: int = 0,
    compute_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write k and v into the caches, attend to all keys: output and LSE. num_splits changes nothing here."""
    lengths, at = (None, cache_seqlens) if isinstance(cache_seqlens, int) else (cache_seqlens, 0)
    if k is not None and v is not None:
        append(k_cache, k, lengths, at, page_table)
        append(v_cache, v, lengths, at, page_table)
        at += k.shape[1]
    return attend_cached(
        q,
        k_cache,
        v_cache,
        causal=causal,
        window_size=window_size,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        seqused_k=lengths,
        added=at,
        leftpad_k=leftpad_k,
        page_table=page_table,
        compute_dtype=compute_dtype,
    )
