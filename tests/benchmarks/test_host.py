"""Host times: the rounds, the calls and their inputs, and the table. What is timed itself needs a GPU."""

import gc
import io
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import host
import pytest
import table
import torch
from battery import first_quick
from host import Compilations, Local, Remote, measure, rounds_of, serve
from host_cases import (
    LENGTHS,
    NEW_SHAPES,
    PACKED,
    SHORT,
    Case,
    Compared,
    cases,
    flash,
    new_lengths,
    new_shapes,
    nsa,
    offsets_of,
    packed_calls,
    sdpa,
)

from tilewise.bench import timing
from tilewise.bench.timing import Varied, batch, host_times, time_batch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def ticking(monkeypatch):
    """A clock that calls move by hand, in seconds."""

    class Clock:
        now = 0.0

    monkeypatch.setattr(timing.time, "perf_counter", lambda: Clock.now)
    return Clock


def case(build, **fields):
    return Case("a case", "flash", lambda device: build, (Compared("ours", "other", 1.5),), **fields)


def test_a_batch_has_two_clocks(ticking):
    waits = itertools.chain([1.0], itertools.repeat(3.0))

    def call():
        ticking.now += 2.0

    def synchronize():
        ticking.now += next(waits)

    host, whole = time_batch([call] * 4, synchronize)
    assert host == pytest.approx(2e6)
    assert whole == pytest.approx((4 * 2 + 3) / 4 * 1e6)


def test_calls_that_differ_are_made_once_each():
    varied = Varied([], list("abcdef"))
    assert [batch(varied, turn, 2) for turn in range(3)] == [["a", "b"], ["c", "d"], ["e", "f"]]
    assert batch(len, 1, 3) == [len] * 3
    repeated, differing = case({}), case({}, calls=200, rounds=5, compiles_nothing=True)
    assert (rounds_of(repeated, 200, None), rounds_of(repeated, 200, 7)) == (30, 7)
    assert (rounds_of(differing, 200, None), rounds_of(differing, 200, 30), rounds_of(differing, 500, None)) == (
        5,
        5,
        2,
    )


def test_contenders_take_turns_with_the_collector_off():
    seen = []

    def contender(name):
        return lambda: seen.append((name, gc.isenabled(), torch.is_grad_enabled()))

    calls = {"ours": contender("ours"), "other": contender("other")}
    row = measure(case(calls, grad=False), {"now": Local({"a case": case(calls, grad=False)}, "cpu")}, 2, 3)
    timed = [name for name, collecting, _ in seen if not collecting]
    assert timed == ["ours", "ours", "other", "other"] * 3
    assert len(seen) - len(timed) == 2 * timing.HOST_WARM_UP
    assert not any(grad for *_, grad in seen)
    assert gc.isenabled()
    assert (row["rounds"], row["calls"]) == (3, 2)
    assert row["kernels"] == {"now": {name: {"compiled": 0, "loaded": 0} for name in calls}}
    assert "errors" not in row


def test_host_times_of_calls_in_turn(ticking):
    seen = []

    def contender(name, seconds):
        def call():
            ticking.now += seconds
            seen.append((name, gc.isenabled()))

        return call

    found = host_times({"a": contender("a", 2e-6), "b": contender("b", 3e-6)}, "cpu", count=2, rounds=3, warm_up=1)
    assert seen == [("a", True), ("b", True), *[(name, False) for name in "aabb"] * 3]
    assert {name: (one["host"], one["whole"]) for name, one in found.items()} == {"a": (2.0, 2.0), "b": (3.0, 3.0)}
    assert gc.isenabled()


class Given:
    """A session whose times are known."""

    def __init__(self, seen, version, times):
        self.seen, self.version, self.times = seen, version, iter(times)

    def open(self, name, calls):
        self.seen.append((self.version, name, calls))

    def round(self, turn):
        self.seen.append((self.version, turn))
        return {"ours": (next(self.times), 9.0), "other": (4.0, 8.0)}

    def close(self):
        return {"ours": {"compiled": 1, "loaded": 2}, "other": {"compiled": 0, "loaded": 0}}


def test_versions_take_turns_and_medians_count():
    seen = []
    sessions = {"now": Given(seen, "now", [2.0, 50.0, 3.0]), "before": Given(seen, "before", [6.0, 5.0, 7.0])}
    row = measure(case({}, compiles_nothing=True), sessions, 200, 3)
    turns = [(version, turn) for turn in range(3) for version in sessions]
    assert seen == [("now", "a case", 200), ("before", "a case", 200), *turns]
    assert row["microseconds"]["now"]["ours"]["host"] == 3.0
    assert row["microseconds"]["before"]["ours"] == {"host": 6.0, "whole": 9.0, "host_low": 5.0, "host_high": 7.0}
    document = json.loads(json.dumps({"benchmark": "host", "rows": [row]}))
    assert table.lines(document) == [
        "| case | ours µs | baseline | its µs | ratio | asked | before µs | now / before |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        "| a case | 3.0 | other | 4.0 | 0.75 | ≤ 1.50 | 6.0 | 0.50 |",
        "| a case: kernels compiled + loaded | 1 + 2 |  |  |  | 0 + 0 | 1 + 2 |  |",
    ]
    assert table.missed(document) == ["a case: kernels compiled and loaded: [1, 2]"]


def test_what_was_asked_and_missed_is_named():
    row = measure(case({}), {"now": Given([], "now", [8.0] * 2), "before": Given([], "before", [4.0] * 2)}, 1, 2)
    assert table.missed({"rows": [row]}) == ["a case: 2.00 of other, asked 1.50", "a case: 2.00 of the time before"]
    (*_, line) = table.host_lines({"rows": [measure(case({}, clock="whole"), {"now": Given([], "", [1.0])}, 1, 1)]})
    assert line == "| a case | 9.0 | other | 8.0 | 1.12 | ≤ 1.50 |"


def test_a_version_that_fails_leaves_the_others():
    def fail():
        raise ValueError("no such thing")

    failing = Local({"a case": case({"ours": fail})}, "cpu")
    row = measure(case({}), {"now": failing, "before": Given([], "before", [1.0])}, 1, 1)
    assert row["errors"] == {"now": "ValueError: no such thing"}
    assert list(row["microseconds"]) == ["before"]
    (*_, line) = table.host_lines({"rows": [row]})
    assert line == "| a case | - | other | - | - | ≤ 1.50 | 1.0 | - |"
    assert table.missed({"rows": [row]}) == ["a case: - of other, asked 1.50"]


def test_a_session_is_served_line_by_line():
    asked = [["open", ["a case", 2]], ["round", [0]], ["close", []], ["open", ["another", 2]]]
    answers = io.StringIO()
    calls = {"ours": lambda: None}
    serve(Local({"a case": case(calls)}, "cpu"), io.StringIO("".join(json.dumps(x) + "\n" for x in asked)), answers)
    opened, once, closed, unknown = map(json.loads, answers.getvalue().splitlines())
    assert opened == {"value": None}
    assert len(once["value"]["ours"]) == len(timing.CLOCKS)
    assert closed == {"value": {"ours": {"compiled": 0, "loaded": 0}}}
    assert unknown["error"].startswith("KeyError")


def test_another_process_answers(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(
        "import os, sys\n"
        "from host import own_stdout, serve\n"
        "answers = own_stdout()\n"
        "print('this goes elsewhere')\n"
        "class Session:\n"
        "    def open(self, name, calls): os.write(1, b'noise')\n"
        "    def round(self, turn): return {os.environ['VERSION']: [turn, 2.0]}\n"
        "    def close(self): sys.exit(3)\n"
        "serve(Session(), sys.stdin, answers)\n"
    )
    remote = Remote([sys.executable, str(script)], {"PYTHONPATH": str(BENCHMARKS), "VERSION": "before"})
    remote.open("a case", 5)
    assert remote.round(7) == {"before": [7, 2.0]}
    with pytest.raises(RuntimeError, match="ended with code 3"):
        remote.close()
    remote.end()


@pytest.mark.slow
def test_another_version_is_timed_by_this_ones_timer(tmp_path):
    """Its own may lack what the cases import, or measure otherwise."""
    folder = tmp_path / "tilewise" / "bench"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent):
        (package / "__init__.py").write_text("")
    (folder / "timing.py").write_text("raise SystemExit('the other version is asked')")
    code = (
        "from harness import TIMER, pin_timer\n"
        "pin_timer()\n"
        "import tilewise\n"
        "from tilewise.bench import timing\n"
        "from tilewise.bench.timing import Varied, time_batch\n"
        "from host import Local\n"
        "local = Local({}, 'cpu')\n"
        "assert local._timing is timing and timing.__file__ == str(TIMER)\n"
        "print(tilewise.__file__)\n"
    )
    path = os.pathsep.join([str(tmp_path), str(BENCHMARKS)])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path}
    )
    assert done.stdout.strip() == str(tmp_path / "tilewise" / "__init__.py"), done.stderr


def test_compiled_and_loaded_kernels_are_counted_apart():
    from triton import knobs

    count = Compilations()
    with count.listening():
        for hit in (False, True, True):
            knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=hit)
    assert count.counts == {"compiled": 1, "loaded": 2}
    assert knobs.compilation.listener is None


def test_new_lengths_are_new():
    forward, step = new_lengths(False), new_lengths(True)
    assert forward.warm == step.warm
    for lengths in (forward, step):
        assert len(set(lengths.timed)) == len(lengths.timed) == NEW_SHAPES
        assert not set(lengths.timed) & set(lengths.warm)
        assert lengths.repeated in lengths.timed
        assert abs(lengths.repeated - (LENGTHS.start + LENGTHS.stop) / 2) < 200
        assert lengths.timed != sorted(lengths.timed)
        # Both kinds of numbers that Triton tells apart, everywhere in the range.
        assert {length % 16 == 0 for length in lengths.warm} == {True, False}
    assert not set(forward.timed) & set(step.timed)
    with pytest.raises(ValueError, match="lengths are left"):
        new_lengths(True, count=3, among=range(128, 134))


def test_offsets_are_aligned_as_allocations_are():
    batches = [(5, 3), (7, 0, 1)]
    found = list(offsets_of(batches, "cpu"))
    assert [x.tolist() for x in found] == [[0, 5, 8], [0, 7, 7, 8]]
    assert all(x.is_contiguous() and (x.data_ptr() - found[0].data_ptr()) % 256 == 0 for x in found)


@pytest.mark.parametrize("grad", [False, True], ids=["forward", "step"])
@pytest.mark.parametrize("operator", PACKED)
def test_packed_calls_run(operator, grad, monkeypatch):
    """The same calls on the CPU, whose backend takes the same arguments."""
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    last = PACKED[operator]
    batches = [(40, 10), (33, 8)]
    for lengths, call in zip(batches, packed_calls(operator, batches, "cpu", grad), strict=True):
        found = call()
        expected = [(sum(lengths), *axes) for axes in last.values()] if grad else [(sum(lengths), last["q"][0], 64)]
        assert [tuple(x.shape) for x in (found if grad else [found])] == expected
        assert grad or not found.requires_grad


def test_new_shapes_are_prepared_before_they_are_timed(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    lengths = new_lengths(True, count=4, among=range(32, 48))
    found = new_shapes("flash", lengths, "cpu", True)
    varied = found["new shapes"]
    assert (len(varied.warm), len(varied.timed)) == (3 * len(lengths.warm), 4)
    shapes = [call()[0].shape[0] for call in varied.timed]
    assert shapes == [length + length // 4 for length in lengths.timed]
    assert found["repeated"]()[0].shape[0] == lengths.repeated + lengths.repeated // 4
    # Views into one allocation.
    assert len({call.__self__.leaves[0].data_ptr() for call in varied.timed}) == 1


@pytest.mark.parametrize("make", [flash, sdpa, nsa])
def test_dense_calls_run(make, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    attention = make(64, "cpu", True)
    assert [x.shape for x in attention.step()] == [x.shape for x in attention.leaves]
    assert not make(64, "cpu", False).attend().requires_grad


def test_every_case_has_what_it_compares():
    found = cases()
    assert sum(SHORT) == 512
    assert {one.topic for one in found.values()} == {"flash", "hstu", "bsa", "nsa", "new-shapes", "cnn"}
    assert sum(one.compiles_nothing for one in found.values()) == 2 * len(PACKED)
    assert all(one.calls * one.rounds == NEW_SHAPES for one in found.values() if one.compiles_nothing)
    assert {one.grad for name, one in found.items() if name.endswith(", forward")} == {False}
    assert {one.clock for one in found.values()} <= set(timing.CLOCKS)


@pytest.mark.parametrize("name", ["flash, T 128, forward", "hstu, 4 sequences, 512 tokens, forward"])
def test_contenders_are_those_that_are_compared(name):
    one = cases()[name]
    built = one.build("cpu")
    assert {name for pair in one.compared for name in (pair.ours, pair.other)} == set(built)


def test_a_version_is_measured_with_its_own_mytorch(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "given")
    mytorch = os.path.join("before", "packages", "mytorch", "src")
    assert host.import_path(Path("before/src")).split(os.pathsep) == [os.path.join("before", "src"), mytorch, "given"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", first_quick(["host.py", "cold.py"]))
def test_without_a_gpu_it_says_so(script):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(BENCHMARKS / script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert done.stderr.strip() == "this benchmark needs a CUDA GPU"
    assert "importing torch" in done.stdout


@pytest.mark.parametrize("script", ["host.py", "cold.py"])
@pytest.mark.parametrize(
    ("words", "message"),
    [(["--only", "nothing"], "invalid choice"), (["--compare", "nowhere"], "nowhere has no folder tilewise")],
)
def test_wrong_usage_says_what_to_give(script, words, message):
    done = subprocess.run([sys.executable, str(BENCHMARKS / script), *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr
