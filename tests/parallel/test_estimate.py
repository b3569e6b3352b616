"""What is counted without processes is what processes send, receive and hold; FLOPs, and times, follow from it."""

import math

import pytest
import torch
from parallel import traffic_ranks
from processes import processes

from tilewise.ops.nsa.problem import window_count
from tilewise.parallel import balanced, flash
from tilewise.parallel.assignment import assign
from tilewise.parallel.balance import seen
from tilewise.parallel.estimate import (
    Sparse,
    flash_estimate,
    overlapped,
    rates,
    sparse_estimate,
    sparse_keys,
    sparse_work,
    work,
)
from tilewise.parallel.traffic import Layer, traffic

LAYER, WIDE = Layer(8, 4, 64, 32), Layer(64, 4, 128, 128)
DENSE, PACKED = torch.tensor([0, 4001]), torch.tensor([0, 2000, 2000, 2003, 3500, 3601, 4001])
A_HEAD = 4001 * (64 + 32) * 2
CASES = {
    "one by one": (DENSE, "head_tail", "all_gather", 1),
    "packed": (PACKED, "head_tail", "all_gather", 1),
    "ring": (DENSE, "head_tail", "ring", 1),
    "at once": (DENSE, "head_tail", "all_gather", 4 * A_HEAD),
    "two steps": (DENSE, "head_tail", "all_gather", 2 * A_HEAD),
    "contiguous": (DENSE, "contiguous", "all_gather", 1),
    "balanced": (PACKED, "balanced", "all_gather", 1),
    "whole sequences": (torch.arange(13) * 300, "balanced", "all_gather", 1),
    "packed ring": (PACKED, "head_tail", "ring", 1),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_what_is_counted_is_what_processes_do(monkeypatch, name, world):
    """Every byte that travels; memory within 20 % of the measured peak, and never 5 % below it."""
    bounds, balance, method, fetched = CASES[name]
    monkeypatch.setattr(flash, "FETCHED_BYTES", fetched)
    balance = balanced(bounds, world) if balance == "balanced" else balance
    runs = assign(bounds, world, balance)
    found = processes().run(traffic_ranks.measured, world, bounds, balance, method, LAYER, fetched)
    for i, direction in enumerate(("forward", "backward")):
        counted = traffic(runs, bounds, world, LAYER, method, direction)
        sent, received, memory = zip(*(of_rank[i] for of_rank in found), strict=True)
        assert (counted.sent + counted.gradients_sent).tolist() == list(sent)
        assert (counted.received + counted.gradients_received).tolist() == list(received)
        ratios = counted.memory / torch.tensor(memory)
        assert 0.95 < ratios.min() <= ratios.max() < 1.2, ratios


@pytest.mark.parametrize("fetched", [1, 1 << 28], ids=["one by one", "at once"])
def test_sparse_attention_is_what_processes_do(monkeypatch, fetched):
    """Memory within 20 %: the CPU's kernels hold something too."""
    world, bounds = 2, torch.tensor([0, 2011])
    monkeypatch.setattr(flash, "FETCHED_BYTES", fetched)
    found = processes().run(traffic_ranks.measured_sparse, world, 2011, LAYER, fetched)
    estimate = sparse_estimate(bounds, assign(bounds, world, "head_tail"), world, LAYER, 450e9)
    for i, counted in enumerate(estimate[1:]):
        sent, received, memory = zip(*(of_rank[i] for of_rank in found), strict=True)
        ratios = counted.memory / torch.tensor(memory)
        assert 0.8 < ratios.min() <= ratios.max() < 1.2, ratios
        assert counted.sent.tolist() == list(sent)
        assert counted.received.tolist() == list(received)


def test_flops():
    """As the benchmarks count them: 4 · D for each pair, 2.5 times as many in the backward."""
    pairs = torch.tensor([10, 0])
    assert work(pairs, Layer(6, 2, 16, 16), "forward").tolist() == [4 * 16 * 6 * 10, 0]
    assert work(pairs, Layer(6, 2, 16, 16), "backward").tolist() == [10 * 16 * 6 * 10, 0]
    assert work(pairs, Layer(1, 1, 16, 4), "backward").tolist() == [2 * (3 * 16 + 2 * 4) * 10, 0]


@pytest.mark.parametrize("world", [1, 3])
def test_keys_of_sparse_attention(world):
    """Windows that end before a query; its blocks and its sliding window."""
    sparse = Sparse(8, 4, 8, 3, 10)
    bounds = torch.tensor([0, 5, 5, 45, 52])
    runs = assign(bounds, world, "head_tail")
    found = sparse_keys(runs, bounds, sparse)
    for i, (start, stop, sequence) in enumerate(zip(runs.starts, runs.stops, runs.sequences, strict=True)):
        positions = range(start - bounds[sequence], stop - bounds[sequence])
        assert found.compressed[i] == sum(window_count(t + 1, 8, 4) for t in positions)
        assert found.near[i] == sum(min(t + 1, 24) + min(t + 1, 10) for t in positions)
    layer = Layer(4, 2, 16, 8)
    parts = sparse_work(found, layer, "forward")
    # S twice, O once.
    assert torch.equal(parts.compressed, found.compressed.double() * 2 * 4 * (2 * 16 + 8))
    assert torch.equal(sparse_work(found, layer, "backward").near, work(found.near, layer, "backward"))


def test_travelling_hides_behind_computing():
    """The first keys and the last gradients do not."""
    for steps in (1, 2, 3, 8):
        compute, coming, going = (torch.tensor([x], dtype=torch.float64) * steps for x in (5.0, 2.0, 1.0))
        assert overlapped(steps, steps, compute, coming, going).item() == pytest.approx(5 * steps + 2 + 1)
        # A slow link is what takes time.
        compute = torch.tensor([0.5], dtype=torch.float64) * steps
        assert overlapped(steps, steps, compute, coming, going).item() >= 3 * steps
    # A ring begins with a rank's own.
    compute, coming, going = (torch.tensor([x], dtype=torch.float64) for x in (20.0, 6.0, 3.0))
    assert overlapped(4, 3, compute, coming, going).item() == pytest.approx(20 + 1)


def test_one_gpu_takes_what_was_measured():
    """The largest case of the table that rates were fitted to, within the error that is told."""
    bounds = torch.tensor([0, 16384])
    runs = assign(bounds, 1, "head_tail")
    found = flash_estimate(bounds, runs, 1, Layer(16, 16, 128, 128), "all_gather", 450e9)
    error = rates()["flash"]["error"]["largest"]
    assert found.forward.seconds.item() == pytest.approx(1.6419e-3, rel=error)
    assert found.backward.seconds.item() == pytest.approx(5.4498e-3, rel=error)
    assert found.forward.sent.item() == found.backward.received.item() == 0
    bounds = torch.tensor([0, 65536])
    found = sparse_estimate(bounds, assign(bounds, 1, "head_tail"), 1, WIDE, 450e9)
    assert found.forward.seconds.item() == pytest.approx(37.834e-3, rel=0.05)
    assert found.backward.seconds.item() == pytest.approx(69.261e-3, rel=0.05)


@pytest.mark.parametrize("method", ["all_gather", "ring"])
def test_ten_million_tokens_on_1024_ranks(method):
    """Nothing overflows, and ranks add up to the whole."""
    bounds = torch.tensor([0, 10_000_000])
    one, many = (
        flash_estimate(bounds, assign(bounds, world, "head_tail"), world, WIDE, method, 450e9) for world in (1, 1024)
    )
    assert many.tokens.sum() == 10_000_000
    for alone, costs in zip(one[1:], many[1:], strict=True):
        assert costs.flops.sum().item() == pytest.approx(alone.flops.item(), rel=1e-9)
        assert costs.sent.sum().item() == pytest.approx(costs.received.sum().item(), rel=1e-9)
        assert all(x.isfinite().all() and (x > 0).all() for x in costs)
        assert costs.seconds.max() < alone.seconds.item()
    assert math.isclose(work(seen(assign(bounds, 1, "contiguous"), bounds, -1, 0), WIDE, "forward"), one[1].flops)
