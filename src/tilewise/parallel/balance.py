"""How much each rank computes, and the assignment of a packed batch that levels it. Numbers alone, as in assignment."""

from __future__ import annotations

import heapq

import torch

from tilewise.ops._host.checks import check_window
from tilewise.parallel.assignment import Runs, assign, checked_offsets, planning, sums

Tensor = torch.Tensor


def seen(runs: Runs, bounds: Tensor, left: int, right: int) -> Tensor:
    """How many keys the queries of each run see, all in all, by a window; a limit of -1 is none."""
    begins, lengths = bounds[runs.sequences], bounds.diff()[runs.sequences]
    return _seen_before(runs.stops - begins, lengths, left, right) - _seen_before(
        runs.starts - begins, lengths, left, right
    )


def _seen_before(n: Tensor, lengths: Tensor, left: int, right: int) -> Tensor:
    """By the first n queries: query p sees keys from p - left to p + right."""
    ends = n * lengths
    if right >= 0:
        # Those whose window ends inside the sequence.
        inside = (lengths - right - 1).clamp(min=0).minimum(n)
        ends = inside * (inside - 1) // 2 + inside * (right + 1) + (n - inside) * lengths
    if left < 0:
        return ends
    past = (n - left).clamp(min=0)
    return ends - past * (past - 1) // 2


@planning
def balanced(cu_seqlens: Tensor, world: int, *, causal: bool = True, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """The assignment of packed sequences to ranks that levels their work: the longest are cut head-tail over all ranks,
    each of the others is whole on one, where its keys need not travel. Of none, 1, 2, 4, ..., or all of them as few are
    cut as leave the largest rank's work within 1 % of the least.

    Args:
        cu_seqlens: offsets `[B + 1]` of the sequences.
        world: how many ranks there are.
        causal, window_size: as of the attention that is to be computed: work is counted in pairs of a query and a key
            that it sees.

    Returns:
        Every token's rank, int64 `[N]`: ContextPlan's balance.
    """
    bounds = torch.tensor(checked_offsets(cu_seqlens))
    if not isinstance(world, int) or world < 1:
        raise ValueError(f"world is {world!r}: expected how many ranks there are, 1 at least")
    check_window(window_size)
    window = window_size[0], 0 if causal else window_size[1]
    cut_up = assign(bounds, world, "head_tail")
    cut_work = seen(cut_up, bounds, *window)
    work = sums(cut_work, cut_up.sequences, len(bounds) - 1)
    longest = torch.argsort(work, descending=True, stable=True)
    place = torch.empty_like(longest)
    place[longest] = torch.arange(len(longest))
    found: dict[int, tuple[int, list[int]]] = {}
    for count in _counts(len(longest)):
        cut = place[cut_up.sequences] < count
        loads = sums(cut_work[cut], cut_up.ranks[cut], world).tolist()
        found[count] = _dealt(work[longest[count:]].tolist(), loads)
    least = min(largest for largest, _ in found.values())
    count, owners = next((n, owners) for n, (largest, owners) in found.items() if 100 * largest <= 101 * least)
    owner = torch.zeros_like(longest)
    owner[longest[count:]] = torch.tensor(owners, dtype=torch.int64)
    ranks = torch.where(place[cut_up.sequences] < count, cut_up.ranks, owner[cut_up.sequences])
    return ranks.repeat_interleave(cut_up.stops - cut_up.starts)


def _counts(sequences: int) -> list[int]:
    """0, 1, 2, 4, ... and all of them."""
    return sorted({0, sequences, *(2**i for i in range(sequences.bit_length()))})


def _dealt(work: list[int], loads: list[int]) -> tuple[int, list[int]]:
    """The largest load, and who got what, where the largest piece goes first, each to who has least."""
    heap = sorted((load, rank) for rank, load in enumerate(loads))
    owners = []
    for one in work:
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + one, rank))
        owners.append(rank)
    return max(heap)[0], owners
