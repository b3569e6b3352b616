"""The order of work of Hopper's backward: which blocks of keys add to which query tile, who comes first, and that
nobody waits forever.
"""

import heapq
import itertools
import random

import pytest
import torch
import triton
import triton.language as tl

from tilewise.ops._device.hopper.semaphore import (
    by_head,
    first_from,
    head_and_slot,
    key_blocks,
    meets_first,
    query_tiles,
    tile_and_head,
    whole_tiles,
)
from tilewise.ops._device.records import Limits
from tilewise.ops.flash.hopper.launch import TOGETHER_SHORT

BLOCK_M = 64
# Of up to 128 channels, and of more.
BLOCKS_N = (128, 64)
MOST = 16

pytestmark = pytest.mark.gpu


@triton.jit
def reach_kernel(out, n_queries, n_keys, left, right, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MOST: tl.constexpr):
    limits = Limits(left, right)
    o = tl.arange(0, MOST)
    none = tl.zeros([MOST], tl.int32)
    low, high = query_tiles(o * BLOCK_N, n_queries, n_keys, limits, BLOCK_M, BLOCK_N)
    whole_low, whole_high = whole_tiles(o * BLOCK_N, n_queries, n_keys, limits, BLOCK_M, BLOCK_N)
    first, end = key_blocks(o * BLOCK_M, n_queries, n_keys, limits, BLOCK_M, BLOCK_N)
    first_tile = first_from(o * BLOCK_N, n_keys - n_queries, limits, BLOCK_M)
    o_tile = tl.arange(0, MOST)[:, None]
    is_first = meets_first(o_tile, (none + first_tile)[None, :], o[None, :], limits)
    tl.store(out + o, none + low)
    tl.store(out + MOST + o, none + high)
    tl.store(out + 2 * MOST + o, none + whole_low)
    tl.store(out + 3 * MOST + o, none + whole_high)
    tl.store(out + 4 * MOST + o, none + first)
    tl.store(out + 5 * MOST + o, none + end)
    tl.store(out + 6 * MOST + o_tile * MOST + o[None, :], none[None, :] + is_first)


def reach(device, block_n, n_queries, n_keys, left, right):
    """For each block of keys its query tiles and those that need no mask, for each tile its blocks: rows of first and
    end.

    And for each tile of those that it meets whether a block is the first.
    """
    out = torch.zeros(6 + MOST, MOST, dtype=torch.int32, device=device)
    reach_kernel[(1,)](out, n_queries, n_keys, left, right, BLOCK_M, block_n, MOST)
    return *out[:6].tolist(), out[6:].tolist()


def meets(block_n, n_queries, n_keys, left, right):
    """Whether tile m meets block n, and needs no mask there: from the definition, of all rows and keys that a tile and
    a block have room for.
    """
    off = n_keys - n_queries
    tiles, blocks = -(-n_queries // BLOCK_M), -(-n_keys // block_n)
    i = torch.arange(tiles * BLOCK_M)[:, None]
    j = torch.arange(blocks * block_n)[None, :]
    keep = torch.ones(len(i), j.shape[1], dtype=torch.bool)
    if left is not None:
        keep &= j >= i + off - left
    if right is not None:
        keep &= j <= i + off + right
    by_tile = keep.view(tiles, BLOCK_M, blocks, block_n)
    inside = (keep & (j < n_keys)).view(tiles, BLOCK_M, blocks, block_n)
    return by_tile.any(1).any(-1), inside.all(1).all(-1)


SIZES = (1, 63, 64, 65, 128, 129, 300, 512, 700)
LIMITS = (None, 0, 1, 63, 64, 130, 700)
PROBLEMS = list(itertools.product(SIZES, SIZES, LIMITS, LIMITS))


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize("block_n", BLOCKS_N)
def test_tiles_and_blocks_find_each_other(block_n, part, device):
    """Both sides say the same, and what the mask says; all of it on a GPU, a sample where kernels are interpreted."""
    problems = PROBLEMS[part::4] if device.type == "cuda" else random.Random(part).sample(PROBLEMS, 30)
    for problem in problems:
        low, high, whole_low, whole_high, first, end, is_first = reach(device, block_n, *problem)
        met, whole = meets(block_n, *problem)
        for m, n in itertools.product(range(met.shape[0]), range(met.shape[1])):
            assert (low[n] <= m < high[n]) == (first[m] <= n < end[m]) == met[m, n], (problem, m, n)
            if met[m, n]:
                assert (whole_low[n] <= m < whole_high[n]) == whole[m, n], (problem, m, n)
                assert is_first[m][n] == (n == first[m]), (problem, m, n)
        for n in range(met.shape[1], MOST):
            assert low[n] >= high[n], (problem, n)


@triton.jit
def places_kernel(out, n_slots, n_heads, together):
    place = tl.program_id(0)
    i_head, i_slot = head_and_slot(place, n_slots, n_heads, together)
    tl.store(out + place * 2, i_head)
    tl.store(out + place * 2 + 1, i_slot)


@pytest.mark.parametrize(("n_slots", "n_heads", "together"), [(1, 1, 4), (5, 3, 4), (5, 4, 4), (3, 11, 4), (4, 6, 1)])
def test_every_head_and_slot_has_one_place(n_slots, n_heads, together, device):
    out = torch.full((n_slots * n_heads, 2), -1, dtype=torch.int32, device=device)
    places_kernel[(n_slots * n_heads,)](out, n_slots, n_heads, together)
    found = [tuple(row) for row in out.tolist()]
    assert sorted(found) == list(itertools.product(range(n_heads), range(n_slots)))
    for head in range(n_heads):
        assert [slot for i_head, slot in found if i_head == head] == list(range(n_slots))


@triton.jit
def visits_kernel(out, n_slots, inside):
    i_visit = tl.program_id(0)
    i_tile, i_g = tile_and_head(i_visit, inside)
    tl.store(out + i_visit * 3, i_tile)
    tl.store(out + i_visit * 3 + 1, i_g)
    tl.store(out + i_visit * 3 + 2, by_head(i_visit, n_slots, inside))


def test_visits_are_numbered_tile_by_tile_and_by_the_heads_inside(device):
    """Two key heads of 4 slots, 3 query heads each."""
    out = torch.zeros(24, 3, dtype=torch.int32, device=device)
    visits_kernel[(24,)](out, 4, 3)
    assert out.tolist() == [[m, g, (m // 4 * 3 + g) * 4 + m % 4] for m in range(8) for g in range(3)]


class Block:
    """A block of a key head's keys: its steps, and how many have been made."""

    def __init__(self, block, low, high, group, sweeps):
        self.block = block
        tiles, heads = range(high - 1, low - 1, -1), range(group)
        self.steps = [(m, g) for g in heads for m in tiles] if sweeps else [(m, g) for m in tiles for g in heads[::-1]]
        self.done = 0


ORDERED = [(700, 700, None, None), (700, 700, None, 0), (700, 700, 130, 0), (300, 700, 64, 64), (700, 300, None, 0)]
FREE = [problem for problem in ORDERED if problem[2] is None]


@pytest.mark.parametrize(
    ("problem", "group"), [*itertools.product(ORDERED, (1, 2, 3)), *((problem, None) for problem in FREE)], ids=str
)
@pytest.mark.parametrize("processors", [1, 2, 5])
@pytest.mark.parametrize("block_n", BLOCKS_N)
def test_nobody_waits_forever_and_every_block_adds_once(problem, group, processors, block_n, device):
    """Programs take blocks in the order of tickets, the next while the last steps of one are made, and go on at random.

    Ordered, a tile gets its blocks from the first to the last; without a group, sums are opened.
    """
    low, high, _, _, first, end, _ = reach(device, block_n, *problem)
    ordered, group, blocks = group is not None, group or 1, -(-problem[1] // block_n)
    rng = random.Random(processors)
    sweeps = problem[2] is not None or problem[3] is None
    waiting = [Block(n, low[n], high[n], group, sweeps) for n in range(blocks)]
    programs: list[list[Block]] = [[] for _ in range(processors)]
    turns: dict[tuple[int, int], int] = {}
    added: dict[tuple[int, int], list[int]] = {}

    def may_go_on(block):
        if block.done == len(block.steps):
            return True
        step = block.steps[block.done]
        return block.block == first[step[0]] or turns.get(step, 0) >= (block.block if ordered else 1)

    while waiting or any(programs):
        for taken in rng.sample(programs, processors):
            if waiting and sum(len(block.steps) - block.done for block in taken) <= 2:
                taken.append(waiting.pop(0))
        ready = [taken for taken in programs if taken and may_go_on(taken[0])]
        assert ready, "all that run wait"
        taken = rng.choice(ready)
        block = taken[0]
        if block.done == len(block.steps):
            taken.pop(0)
            continue
        step = block.steps[block.done]
        added.setdefault(step, []).append(block.block)
        if ordered or block.block == first[step[0]]:
            turns[step] = block.block + 1
        block.done += 1
    tiles = -(-problem[0] // BLOCK_M)
    expected = {(m, g): list(range(first[m], end[m])) for m in range(tiles) for g in range(group) if first[m] < end[m]}
    assert (added if ordered else {step: sorted(blocks) for step, blocks in added.items()}) == expected


def busy(heads, blocks, group, together, downwards):
    """Which share of the time processors work under a causal mask, in a model.

    A step takes 1, a block's beginning and its end 1 each, and to pass on a turn 0.4.
    """
    tiles = 2 * blocks
    free = [0.0] * 132
    turns = {head: torch.full((tiles, group), -1e9, dtype=torch.float64) for head in range(heads)}
    work = 0.0
    for bundle in range(0, heads, together):
        for block, head in itertools.product(range(blocks), range(bundle, min(bundle + together, heads))):
            begin = heapq.heappop(free) + 1
            before = turns[head][2 * block :]
            steps = before.flip(0).flatten() if downwards else before.flatten()
            i = torch.arange(1, len(steps) + 1)
            # A step ends 1 after the one before it, and not before its turn has come.
            ends = (steps + 0.4 - i).clamp(min=begin).cummax(0).values + i
            turns[head][2 * block :] = ends.view_as(before).flip(0) if downwards else ends.view_as(before)
            heapq.heappush(free, ends[-1].item() + 1)
            work += len(steps) + 2
    return work / len(free) / max(free)


@pytest.mark.parametrize(("heads", "blocks", "group"), [(128, 16, 1), (32, 16, 4)])
def test_waiting_for_turns_costs_little(heads, blocks, group):
    """Tiles from the last to the first keep all busy; from the first to the last, programs overtake those that they
    must wait for.
    """
    assert busy(heads, blocks, group, TOGETHER_SHORT, downwards=True) > 0.95
    assert busy(heads, blocks, group, TOGETHER_SHORT, downwards=False) < 0.8
