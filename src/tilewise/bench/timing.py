"""The timer of `tilewise bench` and of the scripts in benchmarks/: two kinds of measurement.

Device time is that of single runs: device events on a GPU, a steady clock on a CPU, the caches emptied before each run.
Host time is that of batches of calls without a synchronisation between them, by the wall clock. In both, contenders
take turns and medians count.

Nothing else of tilewise is imported here: benchmarks/host.py loads this file next to another version of the operators.
"""

import contextlib
import functools
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

# More than the L2 cache of any GPU, or the last-level cache of most CPUs, holds.
FLUSHED_BYTES = {"cuda": 256 << 20, "cpu": 64 << 20}
# How often implementations take turns, so that a clock change affects all of them.
TURNS = 5
# If no number of runs was requested, a call is timed for at most this long, but at least this often.
MOST_SECONDS, LEAST_RUNS = 2.0, 5
# Runs before those of `take_turns`, and the seconds that each of its calls may take.
WARM_UP, SCRIPT_SECONDS = 5, 0.5
# A timed graph holds enough calls to take this long: emptying the cache before it then does not count.
GRAPH_MS = 20.0
# The probe for work on other streams holds all streams for twice the call's host time and HELD_MS more. It reports work
# that ends LATE_MS after the current stream's in each of PROBES tries.
HELD_MS, LATE_MS, PROBES = 2.0, 0.01, 5

# Calls of each contender before its first batch.
HOST_WARM_UP = 20
# Both clocks of a batch start with its first call: `host` stops when the last call has returned, `whole` when the
# device is idle.
CLOCKS = ("host", "whole")

Call = Callable[[], object]
Calls = Sequence[Call]


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
    """What is reported of single runs. The p-th percentile is the least time that p percent of runs do not exceed."""
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

    def run(self, calls: Calls, count: int, start: int = 0, all_streams: bool = False) -> list[float]:
        """Milliseconds of `count` runs, the calls in rotation from number `start` on.

        On a GPU a run is what the current stream takes for it; with `all_streams`, until the whole device is idle.
        """
        wanted = [calls[(start + i) % len(calls)] for i in range(count)]
        if self._device.type != "cuda":
            return [self._on_cpu(call) for call in wanted]
        return self._on_device(wanted) if all_streams else self._on_stream(wanted)

    def uses_other_streams(self, calls: Calls) -> bool:
        """Whether a call, already warm, leaves work on other streams that ends after the current stream's."""
        return self._device.type == "cuda" and any(self._probe.sees(call) for call in calls)

    @functools.cached_property
    def _probe(self) -> "_Probe":
        return _Probe(self._device, self._flushed)

    def _on_stream(self, calls: Calls) -> list[float]:
        """The host does not wait between runs, so that the GPU has work while Python launches."""
        pairs = [_pair() for _ in calls]
        torch.cuda.synchronize(self._device)
        for call, (begin, end) in zip(calls, pairs, strict=True):
            self._flushed.zero_()
            begin.record()
            call()
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _on_device(self, calls: Calls) -> list[float]:
        """An event covers its own stream only, so the host waits for the whole device before and after each run.

        Without the first wait, work on another stream would start while the cache is emptied, and not count. The price:
        the host's launch time counts, and some 10 µs of its wait.
        """
        pairs = [_pair() for _ in calls]
        for call, (begin, end) in zip(calls, pairs, strict=True):
            self._flushed.zero_()
            torch.cuda.synchronize(self._device)
            begin.record()
            call()
            torch.cuda.synchronize(self._device)
            end.record()
        torch.cuda.synchronize(self._device)
        return [begin.elapsed_time(end) for begin, end in pairs]

    def _on_cpu(self, call: Call) -> float:
        self._flushed.zero_()
        begin = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - begin)


def _pair() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


class _Probe:
    """Finds calls whose work on other streams outlasts their work on the current one.

    All streams wait for one event until the whole call is launched: a short kernel would otherwise be done before the
    host looks. Then they start together, and the device must be idle when the current stream is.
    """

    def __init__(self, device: torch.device, flushed: torch.Tensor) -> None:
        self._device, self._flushed = device, flushed
        current = torch.cuda.current_stream(device)
        self._holder, *self._others = (x for x in _pool_streams(device) if x.cuda_stream != current.cuda_stream)
        begin, end = _pair()
        flushed.zero_()
        begin.record()
        flushed.zero_()
        end.record()
        torch.cuda.synchronize(device)
        self._flush_ms = max(begin.elapsed_time(end), 1e-3)
        # The cost of the host's own wait, if no other stream has work.
        self._nothing = min(self._late(lambda: flushed[:1].zero_(), HELD_MS) for _ in range(PROBES))

    def sees(self, call: Call) -> bool:
        """Whether the device is busy after the call's own stream, in every try."""
        torch.cuda.synchronize(self._device)
        begin = time.perf_counter()
        call()
        held = 2e3 * (time.perf_counter() - begin) + HELD_MS
        return all(self._late(call, held) > self._nothing + LATE_MS for _ in range(PROBES))

    def _late(self, call: Call, held: float) -> float:
        """Milliseconds from the end of the current stream's work until the host finds the device idle."""
        (end, idle), (opened, _) = _pair(), _pair()
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._holder):
            for _ in range(math.ceil(held / self._flush_ms)):
                self._flushed.zero_()
            opened.record()
        for stream in (torch.cuda.current_stream(self._device), *self._others):
            stream.wait_event(opened)
        call()
        if held and opened.query():
            # The call waited for a result, so nothing was held when it returned: try without holding.
            return self._late(call, 0.0)
        end.record()
        torch.cuda.synchronize(self._device)
        idle.record()
        idle.synchronize()
        return end.elapsed_time(idle)


def _pool_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Every stream of torch's pool, which hands them out in a ring for each priority."""
    found: dict[int, torch.cuda.Stream] = {}
    least, greatest = torch.cuda.Stream(device).priority_range()
    for priority in range(greatest, least + 1):
        while (stream := torch.cuda.Stream(device, priority=priority)).cuda_stream not in found:
            found[stream.cuda_stream] = stream
    return list(found.values())


def runs_that_fit(asked: int | None, milliseconds: float, seconds: float = MOST_SECONDS) -> int:
    """How often to time a call that takes this long: as often as requested, else 100 times or what fits `seconds`."""
    if asked is not None:
        return asked
    return min(100, max(LEAST_RUNS, int(1e3 * seconds / max(milliseconds, 1e-6))))


def in_turns(count: int) -> list[int]:
    """`count` runs, split as evenly as possible over the turns."""
    return [count // TURNS + (turn < count % TURNS) for turn in range(TURNS)]


class Entry:
    """A contender, already warm: one set of runs, and its times, a turn at a time."""

    def __init__(self, clock: Clock, runs: Calls, asked: int | None = None, seconds: float = MOST_SECONDS) -> None:
        self._clock, self._runs, self._samples = clock, runs, list[float]()
        self._all_streams = clock.uses_other_streams(runs)
        once = clock.run(runs, 1, all_streams=self._all_streams)[0]
        self._counts = in_turns(runs_that_fit(asked, once, seconds))

    def take_turn(self, turn: int) -> None:
        """This turn's share of the runs."""
        done = len(self._samples)
        self._samples += self._clock.run(self._runs, self._counts[turn], done, self._all_streams)

    @property
    def times(self) -> Times:
        """Of all turns so far."""
        return summarise(self._samples)


def take_turns(clock: Clock, calls: Mapping[str, Call], seconds: float = SCRIPT_SECONDS) -> dict[str, Times]:
    """Times of each call, the calls taking turns."""
    entries = {}
    for name, call in calls.items():
        clock.run([call], WARM_UP)
        entries[name] = Entry(clock, [call], seconds=seconds)
    for turn in range(TURNS):
        for entry in entries.values():
            entry.take_turn(turn)
    return {name: entry.times for name, entry in entries.items()}


def captured(step: Call) -> Call:
    """The step as a CUDA graph, after some steps that compile its kernels."""
    return _capture(step, 1, _warm_stream(step))


def graph_milliseconds(clock: Clock, step: Call) -> float:
    """The median of a step in a CUDA graph of many, which leaves the host out."""
    stream = _warm_stream(step)
    once = _capture(step, 1, stream)
    clock.run([once], 1)
    count = max(1, int(GRAPH_MS / clock.run([once], 1)[0]))
    return take_turns(clock, {"graph": _capture(step, count, stream)})["graph"].median / count


def _warm_stream(step: Call) -> torch.cuda.Stream:
    """A stream that has run the step. Warm-up and capture share it: autograd ties a leaf to the first stream that it is
    used on.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    return side


def _capture(step: Call, count: int, stream: torch.cuda.Stream) -> Call:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(count):
            step()

    def replay(_kept: object = step) -> None:
        # The graph reads the step's tensors, but does not keep them alive.
        graph.replay()

    return replay


class Varied(NamedTuple):
    """Calls that all differ: each of `timed` is made once, after `warm`."""

    warm: Calls
    timed: Calls


def batch(calls: Call | Varied, turn: int, count: int) -> Calls:
    """The calls of one round."""
    if isinstance(calls, Varied):
        return calls.timed[turn * count : (turn + 1) * count]
    return [calls] * count


def time_batch(calls: Calls, synchronize: Call) -> tuple[float, float]:
    """Microseconds a call, by both clocks."""
    synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    returned = time.perf_counter()
    synchronize()
    idle = time.perf_counter()
    return 1e6 * (returned - begin) / len(calls), 1e6 * (idle - begin) / len(calls)


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, the garbage collector is off; it runs before, so that rounds start alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def summarise_host(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians of a contender's rounds by both clocks, and the quartiles of the host's."""
    host, whole = ([one[i] for one in samples] for i in range(len(CLOCKS)))
    low, _, high = statistics.quantiles(host, n=4) if len(host) > 1 else host * 3
    figures = {"host": statistics.median(host), "whole": statistics.median(whole), "host_low": low, "host_high": high}
    return {name: round(value, 2) for name, value in figures.items()}


def host_times(
    calls: Mapping[str, Call], device: str, count: int, rounds: int, warm_up: int = HOST_WARM_UP
) -> dict[str, dict[str, float]]:
    """Microseconds a call by both clocks: `rounds` batches of `count` calls, the contenders in turn."""
    synchronize = synchronizer(device)
    for call in calls.values():
        for _ in range(warm_up):
            call()
    samples: dict[str, list[Sequence[float]]] = {name: [] for name in calls}
    for _ in range(rounds):
        with no_collection():
            for name, call in calls.items():
                samples[name].append(time_batch([call] * count, synchronize))
    return {name: summarise_host(found) for name, found in samples.items()}


def synchronizer(device: str) -> Call:
    """A function that waits until the device is idle."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
