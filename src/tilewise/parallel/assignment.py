"""Which rank holds which tokens: numbers alone, without communication, the same on every rank."""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

Balance = Literal["head_tail", "contiguous"]


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


def assign(offsets: Sequence[int], world: int, balance: Balance) -> torch.Tensor:
    """The rank of every token, int64 `[N]`."""
    owner = torch.empty(offsets[-1], dtype=torch.int64)
    pieces = 2 * world if balance == "head_tail" else world
    for begin, end in itertools.pairwise(offsets):
        for i in range(pieces):
            low, high = (begin + x * (end - begin) // pieces for x in (i, i + 1))
            owner[low:high] = min(i, pieces - 1 - i) if balance == "head_tail" else i
    return owner


def segments_of(tokens: torch.Tensor, offsets: Sequence[int]) -> list[Segment]:
    """The segments of a rank that holds these tokens, ascending numbers of the whole batch."""
    if not len(tokens):
        return []
    bounds = torch.tensor(offsets)
    # The last of the sequences that begin there: those before it are empty.
    sequence = torch.searchsorted(bounds, tokens, right=True) - 1
    begins = torch.ones(len(tokens), dtype=torch.bool)
    begins[1:] = (tokens[1:] != tokens[:-1] + 1) | (sequence[1:] != sequence[:-1])
    rows = [*begins.nonzero().flatten().tolist(), len(tokens)]
    found = []
    for row, end in itertools.pairwise(rows):
        i = int(sequence[row])
        start = int(tokens[row]) - offsets[i]
        found.append(Segment(i, start, start + end - row, row))
    return found


def reach(segment: Segment, length: int, left: int, right: int) -> Range:
    """The keys that a segment's queries see; a limit of -1 is none."""
    start = 0 if left < 0 else max(0, segment.start - left)
    stop = length if right < 0 else min(length, segment.stop + right)
    return Range(segment.sequence, start, stop)


def join(ranges: Sequence[Range]) -> list[Range]:
    """The same positions in ranges that do not touch; sorted by sequence and start."""
    joined: list[Range] = []
    for one in sorted(ranges):
        if joined and joined[-1].sequence == one.sequence and one.start <= joined[-1].stop:
            joined[-1] = joined[-1]._replace(stop=max(joined[-1].stop, one.stop))
        else:
            joined.append(one)
    return joined
