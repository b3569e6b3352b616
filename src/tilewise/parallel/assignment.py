"""Which rank holds which tokens: numbers alone, without communication, the same on every rank.

Tokens are numbered over the whole batch. All is kept in runs and ranges of them, of which there are few, so that a plan
of a million tokens takes milliseconds.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from tilewise.ops._host.register import uncompiled

Tensor = torch.Tensor
Balance = Literal["head_tail", "contiguous"]
Function = TypeVar("Function", bound=Callable[..., Any])


def planning(function: Function) -> Function:
    """Around what makes tensors that a plan keeps: numbers on the CPU, whatever torch's default device is, and which
    may be saved for a backward, also where they are made in inference mode. Never compiled: values decide.
    """

    @uncompiled
    @functools.wraps(function)
    def plan(*arguments: Any, **named: Any) -> Any:
        with torch.inference_mode(False), torch.device("cpu"):
            return function(*arguments, **named)

    return plan  # type: ignore[return-value]


def checked_offsets(cu_seqlens: Tensor) -> list[int]:
    """Of packed sequences; raises where they are none."""
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens is a {type(cu_seqlens).__name__}: expected a tensor of offsets [B + 1]")
    if cu_seqlens.dim() != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or not len(cu_seqlens):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: expected offsets [B + 1] in int32 or int64"
        )
    offsets: list[int] = cu_seqlens.tolist()
    if offsets[0] != 0 or any(a > b for a, b in itertools.pairwise(offsets)):
        raise ValueError(f"cu_seqlens must begin with 0 and never decrease (got {offsets})")
    return offsets


class Runs(NamedTuple):
    """Tokens `starts .. stops` that stand side by side in one sequence and on one rank, there from local rows `rows`
    on; ascending, as long as can be. All int64 `[R]`.
    """

    starts: Tensor
    stops: Tensor
    sequences: Tensor
    ranks: Tensor
    rows: Tensor

    def on(self, rank: int) -> Runs:
        """Those of one rank."""
        here = self.ranks == rank
        return Runs(*(x[here] for x in self))


class Ranges(NamedTuple):
    """Tokens `starts .. stops` of one sequence that a rank needs: ascending, rank by rank. All int64 `[R]`."""

    starts: Tensor
    stops: Tensor
    sequences: Tensor
    ranks: Tensor

    def of(self, rank: int) -> Ranges:
        """Those of one rank."""
        here = self.ranks == rank
        return Ranges(*(x[here] for x in self))


class Pieces(NamedTuple):
    """What needed ranges and runs have in common: so many rows of `owners`, from `rows` on, for `ranks`. All int64."""

    counts: Tensor
    owners: Tensor
    rows: Tensor
    ranks: Tensor


def assign(bounds: Tensor, world: int, balance: Balance | Tensor) -> Runs:
    """Of sequences with offsets `bounds`, by name or by each token's rank."""
    if isinstance(balance, Tensor):
        begins = torch.ones_like(balance, dtype=torch.bool)
        begins[1:] = balance[1:] != balance[:-1]
        begins[bounds[bounds < len(balance)]] = True
        starts = begins.nonzero().flatten()
        # The last of the sequences that begin there: those before it are empty.
        sequences = torch.searchsorted(bounds, starts, right=True) - 1
        return _joined(starts, sequences, balance[starts], bounds, world)
    pieces = 2 * world if balance == "head_tail" else world
    number = torch.arange(pieces)
    ranks = torch.minimum(number, pieces - 1 - number) if balance == "head_tail" else number
    cuts = bounds[:-1, None] + torch.arange(pieces + 1) * bounds.diff()[:, None] // pieces
    held = cuts[:, :-1] < cuts[:, 1:]
    sequences = torch.arange(len(bounds) - 1)[:, None].expand_as(held)
    return _joined(cuts[:, :-1][held], sequences[held], ranks.expand_as(held)[held], bounds, world)


def _joined(starts: Tensor, sequences: Tensor, ranks: Tensor, bounds: Tensor, world: int) -> Runs:
    """Runs that cover all tokens, from the first tokens of pieces of them."""
    begins = torch.ones_like(starts, dtype=torch.bool)
    begins[1:] = (sequences[1:] != sequences[:-1]) | (ranks[1:] != ranks[:-1])
    starts, sequences, ranks = (x[begins] for x in (starts, sequences, ranks))
    stops = torch.cat((starts[1:], bounds[-1:]))[: len(starts)]
    counts = stops - starts
    # Rows count on from run to run of a rank.
    order = torch.argsort(ranks, stable=True)
    before = torch.empty_like(starts)
    before[order] = counts[order].cumsum(0) - counts[order]
    totals = sums(counts, ranks, world)
    return Runs(starts, stops, sequences, ranks, before - (totals.cumsum(0) - totals)[ranks])


def needed(runs: Runs, bounds: Tensor, left: int, right: int) -> Ranges:
    """The keys that each rank's queries see by a window, in ranges that do not touch; a limit of -1 is none."""
    tokens = int(bounds[-1])
    starts, stops = bounds[runs.sequences], bounds[runs.sequences + 1]
    if left >= 0:
        starts = torch.maximum(starts, runs.starts - min(left, tokens))
    if right >= 0:
        stops = torch.minimum(stops, runs.stops + min(right, tokens))
    order = torch.argsort(runs.ranks, stable=True)
    starts, stops, sequences, ranks = (x[order] for x in (starts, stops, runs.sequences, runs.ranks))
    # Both ends ascend in a rank's sequence, so that ranges can but touch the one before.
    begins = torch.ones_like(starts, dtype=torch.bool)
    begins[1:] = (ranks[1:] != ranks[:-1]) | (sequences[1:] != sequences[:-1]) | (starts[1:] > stops[:-1])
    ends = torch.cat((begins[1:], begins[:1]))
    return Ranges(starts[begins], stops[ends], sequences[begins], ranks[begins])


def everything(tokens: int, world: int) -> Ranges:
    """All tokens, needed by all ranks, whatever their sequences."""
    zeros = torch.zeros(world if tokens else 0, dtype=torch.int64)
    return Ranges(zeros, zeros + tokens, zeros, torch.arange(len(zeros)))


def gathers_all(needs: Ranges, tokens: int, world: int) -> bool:
    """Whether ranks need half of each other's tokens or more: then all are sent to all. Their own they all need."""
    return 2 * (int((needs.stops - needs.starts).sum()) - tokens) >= (world - 1) * tokens


def meet(runs: Runs, ranges: Ranges) -> Pieces:
    """In the order of ranges, then of runs."""
    first = torch.searchsorted(runs.stops, ranges.starts, right=True)
    last = torch.searchsorted(runs.starts, ranges.stops)
    run = numbers(first, last)
    of = torch.arange(len(first)).repeat_interleave(last - first)
    starts = torch.maximum(runs.starts[run], ranges.starts[of])
    stops = torch.minimum(runs.stops[run], ranges.stops[of])
    return Pieces(stops - starts, runs.ranks[run], runs.rows[run] + starts - runs.starts[run], ranges.ranks[of])


def sums(counts: Tensor, ranks: Tensor, world: int) -> Tensor:
    """The sum of each rank's counts."""
    return torch.zeros(world, dtype=torch.int64).index_add_(0, ranks, counts)


def numbers(starts: Tensor, stops: Tensor) -> Tensor:
    """`starts[0] .. stops[0]`, then `starts[1] .. stops[1]`, ..."""
    counts = stops - starts
    ends = counts.cumsum(0)
    return torch.arange(int(counts.sum())) + (starts - ends + counts).repeat_interleave(counts)
