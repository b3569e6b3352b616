"""What the CPU backend's branches share: sequences, chunks of their queries, and attention of one chunk to given keys.

Heads lie in front and the query heads of one KV head are rows like queries: q [Hk, group · rows, D] against k [Hk,
keys, D]. A value that is not finite reaches what sees it, and nothing else.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

# Queries worked on at once: score matrices have this many rows for each query head, at any length.
CHUNK = 64
# The accumulators' dtype and device, independent of torch's defaults.
STATE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}

Place = int | slice


def sequences(
    batch: int, cu: torch.Tensor | None, windows: torch.Tensor | None = None
) -> Iterator[tuple[Place, Any, Place]]:
    """What takes one sequence out of [.., T, H, D], out of [.., H, T], and its windows' (or keys') room out of
    [.., C, H, D].
    """
    if cu is None:
        yield from ((b, b, b) for b in range(batch))
        return
    ends = cu.tolist()
    rooms = ends if windows is None else windows.tolist()
    for b in range(len(ends) - 1):
        tokens = slice(ends[b], ends[b + 1])
        yield tokens, (slice(None), tokens), slice(rooms[b], rooms[b + 1])


def placed(
    batch: int, cu: torch.Tensor | None, rooms: torch.Tensor | None, first: torch.Tensor | None
) -> Iterator[tuple[Place, Any, Place, int]]:
    """The same, and the position of each sequence's first query."""
    starts = itertools.repeat(0) if first is None else first.tolist()
    yield from ((*one, start) for one, start in zip(sequences(batch, cu, rooms), starts, strict=False))


def chunks(tokens: int) -> Iterator[slice]:
    """The queries of one sequence, CHUNK at a time."""
    yield from (slice(start, min(start + CHUNK, tokens)) for start in range(0, tokens, CHUNK))


def placed_chunks(tokens: int, start: int) -> Iterator[tuple[slice, slice]]:
    """The same, and their positions, where the first query stands at `start`."""
    yield from ((rows, slice(rows.start + start, rows.stop + start)) for rows in chunks(tokens))


def positions(rows: slice) -> torch.Tensor:
    """The chunk's queries as a column, [rows, 1]."""
    return torch.arange(rows.start, rows.stop, device="cpu")[:, None]


def heads_first(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[rows, Hq, D] -> fp32 [Hk, group · rows, D]; [rows, Hk, D] of keys -> [Hk, rows, D]."""
    return x.float().transpose(0, 1).unflatten(0, (kv_heads, -1)).flatten(1, 2)


def tokens_first(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[Hk, group · rows, D] -> [rows, Hq, D]."""
    return x.unflatten(1, (-1, rows)).flatten(0, 1).transpose(0, 1)


def delta(o: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None, rows: slice) -> torch.Tensor:
    """What a score's gradient subtracts, [Hq, rows]: rowsum(o · do) less the LSE's own gradient."""
    by_output = (o[rows].float() * do[rows].float()).sum(-1).T
    return by_output if dlse is None else by_output - dlse[:, rows]


def weighted(weights: torch.Tensor, keep: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """weights @ x, the weights 0 where `keep` is False: there nothing of x is taken, even where it is NaN."""
    broken = ~x.isfinite()
    if not bool(broken.any()):
        return weights @ x
    return (weights @ x.masked_fill(broken, 0.0)).masked_fill(keep.float() @ broken.float() > 0, torch.nan)


def softmax(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities and LSE of [.., keys], -inf where a key takes no part; a row of nothing else gives 0 and -inf."""
    if scores.shape[-1] == 0:
        return scores, scores.new_full(scores.shape[:-1], -torch.inf)
    m = scores.amax(-1, keepdim=True)
    m = m.masked_fill(m == -torch.inf, 0.0)
    p = torch.exp(scores - m)
    l = p.sum(-1, keepdim=True)
    return p / l.masked_fill(l == 0, 1.0), (m + torch.log(l)).squeeze(-1)


def probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """The softmax again, from its LSE [..]; 0 where the score is -inf, even in a row of NaN."""
    p = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None])
    return p.masked_fill(scores == -torch.inf, 0.0)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [.., M, D], k [.., N, D], v [.., N, Dv], keep [M, N] -> o [.., M, Dv], lse [.., M]."""
    p, lse = softmax((q @ k.mT * scale).masked_fill(~keep, -torch.inf))
    return weighted(p, keep, v), lse


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    row_delta: torch.Tensor,
    keep: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of `attend`; `row_delta` [.., M] as `delta` gives it."""
    p = probabilities((q @ k.mT * scale).masked_fill(~keep, -torch.inf), lse)
    ds = (p * (do @ v.mT - row_delta[..., None])).masked_fill(~keep, 0.0) * scale
    return weighted(ds, keep, k), weighted(ds.mT, keep.mT, q), weighted(p.mT, keep.mT, do)
