"""Attention over a cache on the CPU: each entry's keys gathered, then flash attention's CPU backend, tile by tile."""

import itertools
from typing import Any

import torch

from tilewise.ops.flash import cpu


def _rows(x: torch.Tensor, b: int, first: int, end: int, table: torch.Tensor | None) -> torch.Tensor:
    """Positions `first .. end` of entry b, [end - first, Hk, ·]: a view, or gathered from pages."""
    if table is None:
        return x[b, first:end]
    pages = table[b, : -(-end // x.shape[1])].long()
    return x[pages].flatten(0, 1)[first:end]


def append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    first: int,
) -> None:
    """Copy k and v into the caches at positions lengths[b] + `first` and on."""
    batch, new = k.shape[:2]
    start = torch.zeros(batch, dtype=torch.int64, device="cpu") if lengths is None else lengths.long()
    position = (start + first)[:, None] + torch.arange(new, device="cpu")
    entry = torch.arange(batch, device="cpu")[:, None].expand_as(position)
    if table is not None:
        page_size = k_cache.shape[1]
        entry, position = table.gather(1, position // page_size).long(), position % page_size
    k_cache[entry, position] = k
    v_cache[entry, position] = v


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    lengths: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    added: int,
    options: cpu.Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, Tq]."""
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device="cpu")
    places: list[Any] = list(range(q.shape[0]))
    if cu_q is not None:
        places = [slice(start, end) for start, end in itertools.pairwise(cu_q.tolist())]
    for b, place in enumerate(places):
        end = added + (0 if lengths is None else int(lengths[b]))
        first = 0 if leftpad is None else min(int(leftpad[b]), end)
        keys, values = (_rows(x, b, first, end, table)[None] for x in (k, v))
        # By itself, so that its result does not depend on the batch.
        o_entry, lse_entry = cpu.forward(q[place][None], keys, values, None, None, options)
        o[place] = o_entry[0]
        lse[place if cu_q is None else (slice(None), place)] = lse_entry[0]
    return o, lse
