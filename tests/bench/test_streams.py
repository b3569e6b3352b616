"""A run's time covers what it starts on other streams, and a run that starts nothing there is timed as ever."""

import itertools

import pytest
import torch

from tilewise.bench import timing
from tilewise.bench.timing import TURNS, Clock, graph_milliseconds, take_turns

# Milliseconds of the fake device: emptying the cache, launching from the host, and its wait for the device.
FLUSH, LAUNCH, WAIT = 0.1, 0.004, 0.008
RING = 4


class Device:
    """Streams that run side by side, and the host's clock, in milliseconds."""

    def __init__(self):
        self.now, self.handles = 0.0, itertools.count(1)
        self.rings = {priority: [Stream(self) for _ in range(RING)] for priority in (-1, 0)}
        self.turns = {priority: itertools.cycle(ring) for priority, ring in self.rings.items()}
        self.current = self.default = Stream(self)

    def launch(self, milliseconds, stream=None):
        stream = stream or self.current
        self.now += LAUNCH
        stream.free = max(stream.free, self.now) + milliseconds

    def synchronize(self, device=None):
        ends = [stream.free for ring in self.rings.values() for stream in ring]
        self.now = max(self.now, self.default.free, *ends) + WAIT

    def draw(self, device=None, priority=0):
        return next(self.turns[priority])


class Stream:
    def __init__(self, device):
        self.device, self.free, self.cuda_stream = device, 0.0, next(device.handles)

    def priority_range(self):
        return 0, -1

    def wait_event(self, event):
        self.free = max(self.free, event.at)

    def __enter__(self):
        self.before, self.device.current = self.device.current, self

    def __exit__(self, *_):
        self.device.current = self.before


class Event:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.current.free = max(self.device.current.free, self.device.now)

    def query(self):
        return self.at <= self.device.now

    def synchronize(self):
        self.device.now = max(self.device.now, self.at)

    def elapsed_time(self, other):
        return other.at - self.at


class Flushed:
    def __init__(self, device):
        self.device = device

    def zero_(self):
        self.device.launch(FLUSH)

    def __getitem__(self, _):
        return self


@pytest.fixture
def device(monkeypatch):
    fake = Device()
    monkeypatch.setattr(torch.cuda, "Stream", fake.draw)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(fake))
    monkeypatch.setattr(torch.cuda, "synchronize", fake.synchronize)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: fake.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(timing.torch, "empty", lambda *_, **__: Flushed(fake))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: fake.now / 1e3)
    return fake


def timed(call, count=5):
    """As `tilewise bench` times it."""
    clock = Clock(torch.device("cuda"))
    return clock.run([call], count, all_streams=clock.uses_other_streams([call]))


@pytest.mark.parametrize("milliseconds", [0.03, 20.0])
def test_work_that_is_left_on_another_stream_is_timed(device, milliseconds):
    side = device.rings[0][2]
    for time in timed(lambda: device.launch(milliseconds, side)):
        assert milliseconds <= time <= milliseconds + LAUNCH + WAIT + 1e-9


def test_another_stream_at_every_call_is_found_too(device):
    assert min(timed(lambda: device.launch(0.5, device.draw()), 2 * RING)) >= 0.5


def test_what_the_current_stream_does_first_does_not_hide_the_rest(device):
    def call():
        device.launch(0.2)
        device.launch(0.3, device.rings[-1][0])

    assert min(timed(call)) >= 0.3


def test_a_call_on_its_own_stream_is_timed_without_the_wait_or_the_launch(device):
    assert timed(lambda: device.launch(0.05)) == pytest.approx([0.05] * 5)


def test_streams_that_are_joined_are_timed_without_the_wait(device):
    def call():
        fork, join, side = Event(device), Event(device), device.rings[0][1]
        fork.record()
        side.wait_event(fork)
        device.launch(0.5, side)
        with side:
            join.record()
        device.current.wait_event(join)

    clock = Clock(torch.device("cuda"))
    assert not clock.uses_other_streams([call])
    assert clock.run([call], 3) == pytest.approx([0.5] * 3)


def test_a_call_that_waits_for_its_result_is_not_taken_for_one(device):
    def call():
        device.launch(0.05)
        device.synchronize()

    assert not Clock(torch.device("cuda")).uses_other_streams([call])


def test_contenders_take_turns(device):
    seen = []

    def contender(name, milliseconds):
        def call():
            seen.append(name)
            device.launch(milliseconds)

        return call

    # A tenth of a second is 20 runs of 5 ms, four a turn, and 10 of 10 ms, two a turn.
    calls = {"a": contender("a", 5.0), "b": contender("b", 10.0)}
    found = take_turns(Clock(torch.device("cuda")), calls, seconds=0.1)
    assert {name: (times.count, round(times.median, 6)) for name, times in found.items()} == {
        "a": (20, 5.0),
        "b": (10, 10.0),
    }
    assert seen[-6 * TURNS :] == [*"aaaabb"] * TURNS


def test_a_graph_is_timed_by_the_call(device, monkeypatch):
    """A graph of so many calls that emptying the cache before it does not count."""
    captures = []

    def capture(step, count, stream):
        captures.append((count, stream))
        return lambda: [step() for _ in range(count)]

    monkeypatch.setattr(timing, "_warm_stream", lambda step: "side")
    monkeypatch.setattr(timing, "_capture", capture)
    assert graph_milliseconds(Clock(torch.device("cuda")), lambda: device.launch(0.5)) == pytest.approx(0.5)
    # One for an estimate, and as many as take 20 ms.
    assert captures == [(1, "side"), (40, "side")]


def test_all_streams_that_torch_gives_out_are_known(device):
    known = {stream for ring in device.rings.values() for stream in ring}
    assert set(timing._pool_streams(torch.device("cuda"))) == known


def test_a_cpu_has_no_streams():
    assert not Clock(torch.device("cpu")).uses_other_streams([lambda: None])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_a_kernel_on_a_side_stream_is_timed():
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    side = torch.cuda.Stream()

    def work(times):
        for _ in range(times):
            torch.matmul(x, x)

    def aside():
        with torch.cuda.stream(side):
            work(8)

    clock = Clock(torch.device("cuda"))
    for call in (aside, lambda: work(8)):
        clock.run([call], 3, all_streams=True)
    (alone,) = clock.run([lambda: work(8)], 1)
    assert clock.uses_other_streams([aside])
    assert min(clock.run([aside], 5, all_streams=True)) > 0.7 * alone
    assert not clock.uses_other_streams([lambda: work(8)])
