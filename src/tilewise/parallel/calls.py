"""Which calls of attention on one process make up a rank's part.

A segment's queries see a range of keys by a window of their own: attention aligns the last query with the last key, so
where keys end `shift` tokens behind the queries, the left limit is longer by that and the right one shorter.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from tilewise.parallel.assignment import numbers


class Segment(NamedTuple):
    """Tokens of one sequence that stand side by side, in it and on their rank: positions `start .. stop`, from local
    row `row` on.
    """

    sequence: int
    start: int
    stop: int
    row: int


class Range(NamedTuple):
    """Positions `start .. stop` of a sequence."""

    sequence: int
    start: int
    stop: int


class Pair(NamedTuple):
    """Queries of one sequence, from a local row on, that see keys of it, from a row of what was fetched on, by a window
    that aligns their ends.
    """

    sequence: int
    row: int
    queries: int
    key_row: int
    keys: int
    left: int
    right: int


class Part(NamedTuple):
    """Queries that one call computes, at most one segment of a sequence: their rows, offsets where packed, and at which
    position each sequence's first stands, int32 `[B]`.
    """

    rows: slice | torch.Tensor
    cu_q: torch.Tensor | None
    first: torch.Tensor


class Call(NamedTuple):
    """Pairs that one call computes: rows of queries, rows of keys, offsets where packed, the window."""

    rows: slice | torch.Tensor
    keys: slice
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    left: int
    right: int


def pair(segment: Segment, keys: Range, key_row: int, left: int, right: int) -> Pair | None:
    """A segment's queries with those of `keys`, the first of which is in row `key_row`, that they see; None where they
    see none.
    """
    start = max(keys.start, segment.start - left) if left >= 0 else keys.start
    stop = min(keys.stop, segment.stop + right) if right >= 0 else keys.stop
    # Queries that see no key at all.
    first = max(segment.start, start - right) if right >= 0 else segment.start
    last = min(segment.stop, stop + left) if left >= 0 else segment.stop
    if start >= stop or first >= last:
        return None
    shift = stop - last
    # A limit that cuts nothing is none, so that sequences of other lengths can share a call.
    cuts_left = left >= 0 and last - 1 - left > start
    cuts_right = right >= 0 and first + right < stop - 1
    return Pair(
        segment.sequence,
        segment.row + first - segment.start,
        last - first,
        key_row + start - keys.start,
        stop - start,
        left + shift if cuts_left else -1,
        right - shift if cuts_right else -1,
    )


def gathered(segments: Sequence[Segment], needs: Sequence[Range], window: tuple[int, int]) -> list[list[Pair]]:
    """Each segment with all keys that it sees, of `needs` row by row: lists of pairs of which no two are of one
    sequence.
    """
    found = []
    i = row = 0
    for segment in segments:
        # Both ascend. All that a segment sees is in the range that it is in itself.
        while needs[i].sequence < segment.sequence or needs[i].stop <= segment.start:
            row += needs[i].stop - needs[i].start
            i += 1
        found.append(pair(segment, needs[i], row, *window))
    return _one_a_sequence(found)


def met(segments: Sequence[Segment], others: Sequence[Segment], window: tuple[int, int]) -> list[list[Pair]]:
    """Each segment with the keys of each of another rank's segments that it sees."""
    by_sequence: dict[int, list[Segment]] = {}
    for other in others:
        by_sequence.setdefault(other.sequence, []).append(other)
    found = (
        pair(segment, Range(other.sequence, other.start, other.stop), other.row, *window)
        for segment in segments
        for other in by_sequence.get(segment.sequence, [])
    )
    return _one_a_sequence(found)


def _one_a_sequence(pairs: Iterable[Pair | None]) -> list[list[Pair]]:
    """Pairs of one window, at most one a sequence in each list, in the order of sequences."""
    lists: dict[tuple[int, int, int], list[Pair]] = {}
    counts: dict[tuple[int, int, int], int] = {}
    for one in pairs:
        if one is None:
            continue
        of = one.sequence, one.left, one.right
        counts[of] = counts.get(of, -1) + 1
        lists.setdefault((counts[of], one.left, one.right), []).append(one)
    return [sorted(found) for found in lists.values()]


def calls(lists: Sequence[list[Pair]], packed: bool, key_rows: int, device: torch.device) -> Iterator[Call]:
    """The calls for such lists."""
    for pairs in lists:
        left, right = pairs[0].left, pairs[0].right
        if not packed:
            for one in pairs:
                rows, keys = slice(one.row, one.row + one.queries), slice(one.key_row, one.key_row + one.keys)
                yield Call(rows, keys, None, None, left, right)
            continue
        first = torch.tensor([one.row for one in pairs])
        of_queries = numbers(first, first + torch.tensor([one.queries for one in pairs]))
        # Between the keys of two pairs others may lie: they are a sequence without queries.
        cu_q, cu_k = [0], [0]
        for one in pairs:
            cu_q += (cu_q[-1], cu_q[-1] + one.queries)
            cu_k += (one.key_row, one.key_row + one.keys)
        cu_q.append(cu_q[-1])
        cu_k.append(key_rows)
        offsets = [torch.tensor(cu, dtype=torch.int32, device=device) for cu in (cu_q, cu_k)]
        yield Call(_as_slice(of_queries, device), slice(0, key_rows), offsets[0], offsets[1], left, right)


def queries(segments: Sequence[Segment], sequences: int, packed: bool, device: torch.device) -> Iterator[Part]:
    """Parts that together are all segments of a batch of so many sequences."""
    if not packed:
        for one in segments:
            first = torch.full((sequences,), one.start, dtype=torch.int32, device=device)
            yield Part(slice(one.row, one.row + one.stop - one.start), None, first)
        return
    lists: list[list[Segment]] = []
    counts = [0] * sequences
    for one in segments:
        if counts[one.sequence] == len(lists):
            lists.append([])
        lists[counts[one.sequence]].append(one)
        counts[one.sequence] += 1
    for found in lists:
        of = torch.tensor([one.sequence for one in found])
        rows, starts, stops = (torch.tensor([one[i] for one in found]) for i in (3, 1, 2))
        cu = torch.zeros(sequences + 1, dtype=torch.int64).index_add_(0, of + 1, stops - starts).cumsum(0)
        first = torch.zeros(sequences, dtype=torch.int64).index_copy_(0, of, starts)
        where = _as_slice(numbers(rows, rows + stops - starts), device)
        yield Part(where, cu.to(device, torch.int32), first.to(device, torch.int32))


def nothing(packed: bool, device: torch.device) -> Call:
    """A call of no queries and no keys."""
    cu = torch.zeros(2, dtype=torch.int32, device=device) if packed else None
    return Call(slice(0, 0), slice(0, 0), cu, cu, -1, -1)


def _as_slice(rows: torch.Tensor, device: torch.device) -> slice | torch.Tensor:
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last + 1 - first == len(rows) else rows.to(device)
