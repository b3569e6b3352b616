"""native_sparse_attend on the CPU, a chunk of queries at a time: whole blocks, each as often as it is named, each with
a factor of its own.

The blocks that a chunk names are scored once, as a grid [queries, blocks, keys of a block]; every naming then takes its
block out of that grid (`take`), and what belongs to namings is summed back into it (`give_back`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.ops.nsa import cpu_tiles as tiles
from tilewise.ops.nsa.cpu_tiles import STATE


@dataclass(frozen=True)
class _Namings:
    """What one chunk's queries name: keys [blocks · block_size] of the blocks together, and for each naming (the own
    block too) its block's place [rows, S], the keys that take part [rows, S, block_size] and the factor of its scores
    [rows, S].
    """

    keys: torch.Tensor
    place: torch.Tensor
    keep: torch.Tensor
    factor: torch.Tensor

    def _at(self, group: int) -> torch.Tensor:
        return self.place[None, :, :, None].expand(group, *self.keep.shape)

    def take(self, grid: torch.Tensor) -> torch.Tensor:
        """[group · rows, keys of all blocks] -> [group, rows, S, block_size]."""
        grid = grid.unflatten(0, (-1, self.keep.shape[0])).unflatten(2, (-1, self.keep.shape[2]))
        return grid.gather(2, self._at(grid.shape[0]))

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """[group, rows, S, block_size] -> [group · rows, keys of all blocks], summed over the namings of a block."""
        blocks = self.keys.shape[0] // self.keep.shape[2]
        grid = torch.zeros(*x.shape[:2], blocks, x.shape[3], **STATE)
        return grid.scatter_add_(2, self._at(x.shape[0]), x).flatten(2, 3).flatten(0, 1)

    def seen(self, group: int) -> torch.Tensor:
        """[group · rows, keys of all blocks], True where any naming keeps the key."""
        return self.give_back(self.keep.float()[None]).repeat(group, 1) > 0


def _namings(
    chosen: torch.Tensor, factor: torch.Tensor | None, own: bool, rows: slice, tokens: int, block_size: int
) -> _Namings:
    """From a chunk's indices [rows, S], -1 where there is no block, and their factors."""
    query, inside = tiles.positions(rows), torch.arange(block_size, device="cpu")
    chosen = chosen.long()
    named = (chosen >= 0) & (chosen < -(-tokens // block_size))
    chosen = chosen.masked_fill(~named, 0)
    # A factor beside no block may be NaN.
    factor = torch.ones(chosen.shape, **STATE) if factor is None else factor.float().masked_fill(~named, 0.0)
    keep = named[..., None] & (chosen[..., None] * block_size + inside < tokens)
    if own:
        current = query // block_size
        chosen, factor = torch.cat([chosen, current], 1), torch.cat([factor, torch.ones(current.shape, **STATE)], 1)
        keep = torch.cat([keep, (current * block_size + inside <= query)[:, None]], 1)
    # Block 0 stands for what is not named: nothing of it is kept.
    blocks = chosen.unique()
    keys = (blocks[:, None] * block_size + inside).flatten().clamp(max=tokens - 1)
    return _Namings(keys, torch.searchsorted(blocks, chosen), keep, factor)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor, sel_scale: torch.Tensor | None, own: bool, block_size: int
) -> Iterator[tuple[int, slice, slice, int, int, _Namings]]:
    """Each batch entry, chunk of queries, the query heads that share indices, their key head, their place among the
    indices, what they name.
    """
    tokens, index_heads = q.shape[1], indices.shape[2]
    group, repeats = q.shape[2] // index_heads, index_heads // k.shape[2]
    for b in range(q.shape[0]):
        for rows in tiles.chunks(tokens):
            for i in range(index_heads):
                factor = None if sel_scale is None else sel_scale[b, rows, i]
                yield (
                    b,
                    rows,
                    slice(i * group, (i + 1) * group),
                    i // repeats,
                    i,
                    _namings(indices[b, rows, i], factor, own, rows, tokens, block_size),
                )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, group, D] -> fp32 [group · rows, D]."""
    return tiles.heads_first(x, 1)[0]


def _scores(products: torch.Tensor, namings: _Namings, scale: float) -> torch.Tensor:
    """[group, rows, S, block_size], -inf where a key takes no part."""
    return (products * namings.factor[..., None] * scale).masked_fill(~namings.keep, -torch.inf)


def attend_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, T, Hq, D], indices and sel_scale [B, T, Hk or Hq, S] -> output in q's dtype, and LSE [B, Hq, T]."""
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, **STATE)
    for b, rows, heads, h, _, namings in _chunks(q, k, indices, sel_scale, own, block_size):
        b_q, b_k, b_v = _rows(q[b, rows, heads]), k[b, namings.keys, h].float(), v[b, namings.keys, h].float()
        scores = _scores(namings.take(b_q @ b_k.T), namings, scale)
        p, b_lse = tiles.softmax(scores.flatten(2))
        weights = namings.give_back(p.view_as(scores).masked_fill(~namings.keep, 0.0))
        b_o = tiles.weighted(weights, namings.seen(scores.shape[0]), b_v)
        o[b, rows, heads] = tiles.tokens_first(b_o[None], rows.stop - rows.start).to(o.dtype)
        lse[b, heads, rows] = b_lse
    return o, lse


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and sel_scale's gradient, each in its input's dtype and contiguous; sums over chunks in fp32, in
    order.
    """
    dq = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    acc_dk, acc_dv = (torch.zeros(x.shape, **STATE) for x in (k, v))
    dsel = None if sel_scale is None else torch.zeros(sel_scale.shape, dtype=sel_scale.dtype, device="cpu")
    for b, rows, heads, h, i, namings in _chunks(q, k, indices, sel_scale, own, block_size):
        b_q, b_do, b_k, b_v = (
            _rows(q[b, rows, heads]),
            _rows(do[b, rows, heads]),
            k[b, namings.keys, h].float(),
            v[b, namings.keys, h].float(),
        )
        row_delta = tiles.delta(o[b, :, heads], do[b, :, heads], None if dlse is None else dlse[b, heads], rows)
        products = namings.take(b_q @ b_k.T)
        p = tiles.probabilities(_scores(products, namings, scale), lse[b, heads, rows, None])
        ds = (p * (namings.take(b_do @ b_v.T) - row_delta[..., None, None])).masked_fill(~namings.keep, 0.0) * scale
        if dsel is not None:
            by_naming = (ds * products.masked_fill(~namings.keep, 0.0)).sum((0, 3))
            dsel[b, rows, i] = by_naming[:, : dsel.shape[-1]].to(dsel.dtype)
        seen, by_key = namings.seen(ds.shape[0]), namings.give_back(ds * namings.factor[..., None])
        dq[b, rows, heads] = tiles.tokens_first(tiles.weighted(by_key, seen, b_k)[None], rows.stop - rows.start).to(
            dq.dtype
        )
        # Keys past the last token stand for it, and add 0.
        acc_dk[b, :, h].index_add_(0, namings.keys, tiles.weighted(by_key.T, seen.T, b_q))
        acc_dv[b, :, h].index_add_(0, namings.keys, tiles.weighted(namings.give_back(p).T, seen.T, b_do))
    return dq, acc_dk.to(k.dtype), acc_dv.to(v.dtype), dsel
