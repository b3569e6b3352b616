"""How much each rank computes, and who gets what of a packed batch."""

import pytest
import torch

from tilewise.parallel import balanced
from tilewise.parallel.assignment import assign, sums
from tilewise.parallel.balance import seen

LENGTHS = [0, 70, 3, 0, 131, 1, 40, 41, 5]
CAUSAL = -1, 0


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def work(cu, world, balance, window=CAUSAL):
    """Pairs of a query and a key that it sees, by rank."""
    runs = assign(cu, world, balance)
    return sums(seen(runs, cu, *window), runs.ranks, world)


@pytest.mark.parametrize("window", [(-1, -1), CAUSAL, (9, 0), (6, 50), (-1, 5), (300, 300), (0, 0)])
@pytest.mark.parametrize("balance", ["head_tail", "contiguous", "striped"])
def test_the_keys_that_are_seen(window, balance):
    cu = offsets(LENGTHS)
    balance = torch.arange(int(cu[-1])) // 3 % 4 if balance == "striped" else balance
    runs = assign(cu, 4, balance)
    owner = runs.ranks.repeat_interleave(runs.stops - runs.starts)
    sequence = torch.repeat_interleave(torch.tensor(LENGTHS))
    token = torch.arange(len(owner))
    apart = token - token[:, None]
    left, right = (len(token) if limit < 0 else limit for limit in window)
    mask = (sequence == sequence[:, None]) & (apart >= -left) & (apart <= right)
    assert work(cu, 4, balance, window).tolist() == [int(mask[owner == rank].sum()) for rank in range(4)]


@pytest.mark.parametrize("world", [2, 3, 7, 64, 1024])
def test_head_tail_is_level_under_a_causal_mask(world):
    """Within 2 % of equal work from 128 tokens a rank on: every remainder of a length, and longer ones."""
    lengths = [*range(128 * world, 130 * world), 1000 * world + 13, 10_000_019]
    for length in lengths if world < 64 else [*lengths[:: world // 8], *lengths[-2:]]:
        found = work(offsets([length]), world, "head_tail")
        assert found.max() * 100 * world <= 102 * (length * (length + 1) // 2)


@pytest.mark.parametrize("world", [1, 2, 5, 16])
@pytest.mark.parametrize(
    "lengths",
    [LENGTHS, [5000], [4096] * 32, [60_000] + [500] * 40, [1] * 7, [], [0, 0], [2**i for i in range(15)]],
    ids=["mixed", "one", "equal", "one long", "tiny", "none", "empty", "powers"],
)
def test_no_named_balance_is_more_level(world, lengths):
    cu = offsets(lengths)
    ranks = balanced(cu, world)
    assert (ranks.dtype, len(ranks)) == (torch.int64, int(cu[-1]))
    largest = work(cu, world, ranks).max()
    assert 100 * largest <= 101 * min(work(cu, world, name).max() for name in ("head_tail", "contiguous"))
    assert work(cu, world, ranks).sum() == sum(n * (n + 1) // 2 for n in lengths)


def test_what_is_cut_and_what_is_whole():
    """A sequence that is more than a rank's share is cut head-tail, and short ones fill up whole, the longest first."""
    lengths = [30, 1000, 40, 50]
    parts = balanced(offsets(lengths), 2).split(lengths)
    assert torch.equal(parts[1], balanced(offsets([1000]), 2))
    assert [part.unique().tolist() for part in (parts[0], parts[2], parts[3])] == [[1], [1], [0]]
    # Nothing is cut to level less than 1 %.
    ranks = balanced(offsets([10_000, *[400] * 30]), 4)
    assert ranks[:10_000].unique().tolist() == [0, 1, 2, 3]
    assert all(len(part.unique()) == 1 for part in ranks[10_000:].split(400))
    # Equal ones that the world divides stay whole, each on one rank.
    assert balanced(offsets([7] * 6), 3).view(6, 7).unique(dim=1).flatten().tolist() == [0, 1, 2, 0, 1, 2]


def test_it_levels_what_a_window_leaves():
    """Under a window work is linear in the length."""
    cu = offsets([400, 100, 100, 100, 100])
    loads = work(cu, 2, balanced(cu, 2, window_size=(0, 0)), (0, 0))
    assert loads.tolist() == [400, 400]
    assert balanced(cu, 2, window_size=(0, 0))[:400].unique().tolist() == [0]
    assert balanced(cu, 2)[:400].unique().tolist() == [0, 1]
    # Without a mask a sequence's work is its length squared.
    assert work(cu, 2, balanced(cu, 2, causal=False), (-1, -1)).tolist() == [100_000, 100_000]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((torch.tensor([0, 5, 3]), 2), "never decrease"),
        (([0, 5], 2), "cu_seqlens is a list"),
        ((torch.tensor([0, 5]), 0), "world is 0"),
    ],
)
def test_what_cannot_be(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        balanced(*arguments)
