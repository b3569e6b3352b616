"""Times of calls: device events on a GPU, a steady clock on a CPU, the caches emptied before each."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

# More than the second-level cache of any GPU, or the last-level cache of most CPUs, holds.
FLUSHED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
# How often implementations take turns, so that a change of clocks meets all of them.
TURNS = 5
# Where no number of runs was asked for, a call is timed at most so long, but so often at least.
MOST_SECONDS, LEAST_RUNS = 2.0, 5


@dataclass(frozen=True)
class Times:
    """Milliseconds of `count` runs."""

    count: int
    mean: float
    std: float
    min: float
    max: float
    median: float
    p95: float
    p99: float


def summarise(milliseconds: Sequence[float]) -> Times:
    """What is reported of single runs. A percentile is the least run that so many percent do not exceed."""
    ordered = sorted(milliseconds)

    def percentile(share: float) -> float:
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    return Times(
        len(ordered),
        statistics.fmean(ordered),
        statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        ordered[0],
        ordered[-1],
        statistics.median(ordered),
        percentile(0.95),
        percentile(0.99),
    )


class Clock:
    """Times runs on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flushed = torch.empty(FLUSHED_BYTES[device.type], dtype=torch.int8, device=device)

    def run(self, calls: Sequence[Callable[[], object]], count: int, start: int = 0) -> list[float]:
        """Milliseconds of `count` runs, the calls in rotation from number `start` on."""
        wanted = [calls[(start + i) % len(calls)] for i in range(count)]
        return self._on_gpu(wanted) if self._device.type == "cuda" else [self._on_cpu(call) for call in wanted]

    def _on_gpu(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in calls]
        torch.cuda.synchronize(self._device)
        for call, (begin, end) in zip(calls, pairs, strict=True):
            self._flushed.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _on_cpu(self, call: Callable[[], object]) -> float:
        self._flushed.zero_()
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)


def runs_that_fit(asked: int | None, milliseconds: float) -> int:
    """How often to time a call that takes so long: as often as was asked for, else 100 times or what fits MOST_SECONDS."""
    if asked is not None:
        return asked
    return min(100, max(LEAST_RUNS, int(1e3 * MOST_SECONDS / max(milliseconds, 1e-6))))


def in_turns(count: int) -> list[int]:
    """`count` runs divided over the turns, as evenly as they go."""
    return [count // TURNS + (turn < count % TURNS) for turn in range(TURNS)]
