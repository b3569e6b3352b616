"""Which tokens are where, and what happens where ranks do not agree."""

import itertools

import pytest
import torch
from parallel import plan_ranks
from processes import processes
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.parallel import ContextPlan
from tilewise.parallel.assignment import assign, everything, needed, sums
from tilewise.parallel.exchange import Exchange
from tilewise.parallel.plan import _device


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"seq_len": 23},
        {"seq_len": 2},
        {"cu_seqlens": torch.tensor([0, 0, 13, 14, 27])},
        {"cu_seqlens": torch.tensor([0, 9, 20], dtype=torch.int32), "balance": "contiguous"},
        {"seq_len": 11, "balance": torch.arange(11) // 2 % 1},
    ],
    ids=["dense", "shorter", "packed", "contiguous", "free"],
)
def test_tokens_go_where_the_plan_says_and_come_back(world, options):
    found = processes().run(plan_ranks.pieces, world, options)
    offsets = options["cu_seqlens"].tolist() if "cu_seqlens" in options else [0, options["seq_len"]]
    balance = options.get("balance", "head_tail")
    runs = assign(torch.tensor(offsets), world, balance)
    owner = runs.ranks.repeat_interleave(runs.stops - runs.starts)
    whole = torch.arange(offsets[-1] * 6.0).reshape(3, -1, 2)
    position = torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(offsets)])
    sequence = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(itertools.pairwise(offsets))])
    for rank, (count, positions, cu, local, gradient) in enumerate(found):
        mine = owner == rank
        assert count == mine.sum()
        assert positions == position[mine].tolist()
        assert torch.equal(local, whole[:, mine])
        if "cu_seqlens" in options:
            assert cu == [0, *sequence[mine].bincount(minlength=len(offsets) - 1).cumsum(0).tolist()]
        # Zeros elsewhere; unshard's is summed over the ranks.
        assert torch.equal(gradient[:, mine], torch.full_like(local, world * (world + 1.0) + 1.0))
        assert not gradient[:, ~mine].any()


class Counting(TorchDispatchMode):
    """Calls of torch's operators, and the elements of what they return."""

    calls = elements = 0

    def __torch_dispatch__(self, function, _types, arguments=(), named=None):
        found = function(*arguments, **(named or {}))
        self.calls += 1
        self.elements += found.numel() if isinstance(found, torch.Tensor) else 0
        return found


def test_a_plan_is_made_in_a_few_steps_of_its_tokens():
    """It is made once a batch: no loop over sequences or ranks."""
    tokens, world = 100_000, 64
    bounds = torch.arange(51) * 2000
    with Counting() as made:
        runs = assign(bounds, world, "head_tail")
        counts = sums(runs.stops - runs.starts, runs.ranks, world).tolist()
        for needs in (everything(tokens, world), needed(runs, bounds, -1, 0), needed(runs, bounds, 4095, 0)):
            Exchange(None, 3, counts, runs, needs, torch.device("cpu"))
    assert made.calls < 600
    assert made.elements < 100 * tokens


def test_one_dimension_of_a_mesh():
    found = processes().run(plan_ranks.on_a_mesh, 4)
    assert [(rank, world) for rank, world, *_ in found] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [count for _, _, count, _ in found] == [5, 5, 5, 5]
    assert "the mesh has 2 dimensions: give one of them" in found[0][3]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (plan_ranks.disagreeing, ("[1, 'tokens', 2, 16]", "[1, 'tokens', 4, 16]")),
        (plan_ranks.other_plans, ("of seq_len 64, all_gather",)),
        (plan_ranks.other_offsets, ("of 2 packed sequences",)),
    ],
)
def test_ranks_that_disagree_hear_so_everywhere(function, words):
    for _, error, _ in processes().results(function, 2):
        assert "the ranks of a ContextPlan make different calls" in error
        assert all(word in error for word in words)
        # Each rank's line shows that it is another.
        first, second = (line.split(": ", 1)[1] for line in error.splitlines() if line.startswith("  rank"))
        assert first != second


def test_a_process_outside_the_group():
    (_, inside, _), *others = processes().results(plan_ranks.outside, 4)
    assert inside is None
    assert all("this process is not in the group" in outside for _, outside, _ in others)


@pytest.mark.parametrize(
    ("config", "there_are_gpus", "device"),
    [("cuda:nccl", True, "cuda"), ("cpu:gloo,cuda:nccl", True, "cuda"), ("cpu:gloo,cuda:nccl", False, "cpu")],
)
def test_where_a_plan_has_its_positions(monkeypatch, config, there_are_gpus, device):
    monkeypatch.setattr("torch.distributed.get_backend_config", lambda _group: config)
    monkeypatch.setattr("torch.cuda.is_available", lambda: there_are_gpus)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    assert _device(None, None).type == device


def test_a_rank_that_stops_is_no_hang():
    (_, first, _), (_, second, _) = processes().results(plan_ranks.one_stops, "impatient")
    assert second == "ArithmeticError: out of luck"
    assert "a rank may have stopped" in first


def test_what_cannot_be_is_refused_before_anything_is_sent():
    for messages in processes().run(plan_ranks.refused, 2):
        for message, words in zip(
            messages,
            (
                "q has 64 tokens in axis 1",
                "num_splits is given with parallel",
                "seqused_k is given with parallel",
                "cu_seqlens_q is given with parallel",
                "scale is nan",
                "softcap is -1.0",
                "sinks holds nan",
                "q is torch.float64",
                "x has 32 tokens in axis 1: the plan is for 64",
                "holds 32; use plan.shard",
                "give one of them",
                "seq_len is -1",
                "never decrease",
                "expected offsets",
                "balance is 'zigzag'",
                "int64 [8]",
                "balance has ranks 0 to 2: expected 0 to 1",
                "method is 'broadcast'",
                "balance is a list",
                "cu_seqlens is a list",
                "group is a str",
            ),
            strict=True,
        ):
            assert words in message


def test_without_a_process_group():
    with pytest.raises(RuntimeError, match="torch.distributed is not initialised"):
        ContextPlan(None, seq_len=8)
