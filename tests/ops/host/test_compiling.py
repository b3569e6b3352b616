"""First calls compile all that they need, side by side and once, however many processes begin together."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import triton
from compiling import run_compiling

from tilewise.ops._host import compiling
from tilewise.ops._host.backend import jobs
from tilewise.ops._host.compiling import Task, compile_all, expected, expecting

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling.cache, "triton_key", lambda: "")
    with triton.knobs.cache.scope():
        yield tmp_path


@pytest.mark.parametrize(
    ("variables", "count"),
    [
        ({}, 16),
        ({"LOCAL_WORLD_SIZE": "8"}, 2),
        ({"LOCAL_WORLD_SIZE": "64"}, 1),
        ({"LOCAL_WORLD_SIZE": "8", "TILEWISE_COMPILE_JOBS": "5"}, 5),
        ({"TILEWISE_COMPILE_JOBS": "1"}, 1),
    ],
)
def test_jobs_are_this_ranks_share_of_the_cores(monkeypatch, variables, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16), raising=False)
    for name in ("LOCAL_WORLD_SIZE", "TILEWISE_COMPILE_JOBS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert jobs() == count


@pytest.mark.parametrize("value", ["0", "-1", "many"])
def test_a_wrong_number_of_jobs_is_said(monkeypatch, value):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", value)
    with pytest.raises(ValueError, match="TILEWISE_COMPILE_JOBS is .*: expected how many kernels"):
        jobs()


class Watch:
    """Tasks that know how many of them run at a time, and where."""

    def __init__(self):
        self.running = self.most = 0
        self.names, self.threads = [], set()
        self._lock = threading.Lock()

    def task(self, name, length=0, error=None):
        def run():
            with self._lock:
                self.running += 1
                self.most = max(self.most, self.running)
                self.names.append(name)
                self.threads.add(threading.current_thread())
            time.sleep(0.02)
            with self._lock:
                self.running -= 1
            if error:
                raise error

        return Task(name, run, length)


def test_no_more_run_at_a_time_than_jobs(monkeypatch):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", "3")
    watch = Watch()
    compile_all([watch.task(f"kernel-{i}") for i in range(12)])
    assert sorted(watch.names) == sorted(f"kernel-{i}" for i in range(12))
    assert watch.most == 3
    assert not any(thread.is_alive() for thread in watch.threads)


def test_one_job_starts_no_thread_and_takes_the_longest_first(monkeypatch):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", "1")
    watch = Watch()
    compile_all([watch.task("short", 1), watch.task("long", 9), watch.task("middle", 5)])
    assert watch.names == ["long", "middle", "short"]
    assert watch.threads == {threading.current_thread()}


@pytest.mark.parametrize("count", ["1", "2"])
def test_an_error_stops_no_other_kernel(monkeypatch, count):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", count)
    watch, told = Watch(), {}
    tasks = [watch.task("wrong", 2, ValueError("no such layout")), watch.task("right", 1)]
    compile_all(tasks, lambda task, error: told.update({task.name: error}))
    assert told["right"] is None
    assert str(told["wrong"]) == "no such layout"


def test_a_kernel_that_another_process_compiles_is_waited_for(monkeypatch):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", "1")
    watch, held = Watch(), compiling._Lock("theirs")
    assert held.take()
    threading.Timer(0.3, held.give_back).start()
    began = time.monotonic()
    compile_all([watch.task("theirs", 2), watch.task("ours", 1)])
    assert watch.names == ["ours", "theirs"]
    assert time.monotonic() - began > 0.25


def test_waiting_has_a_limit(monkeypatch):
    monkeypatch.setattr(compiling, "MOST_WAITED", 0.1)
    watch, held = Watch(), compiling._Lock("theirs")
    assert held.take()
    compile_all([watch.task("theirs")])
    assert watch.names == ["theirs"]
    held.give_back()


def test_where_nothing_can_be_locked_kernels_are_compiled(cache, monkeypatch):
    (cache / compiling.LOCKS).write_text("a file where a folder is wanted")
    watch = Watch()
    compile_all([watch.task("one"), watch.task("two")])
    assert sorted(watch.names) == ["one", "two"]
    monkeypatch.setattr(compiling, "fcntl", None)
    compile_all([watch.task("three")])
    assert watch.names[-1] == "three"


def start(folder, *words):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": ":".join(sys.path), "TILEWISE_COMPILE_JOBS": "2"}
    return subprocess.Popen(
        [sys.executable, str(HERE / "share_kernels.py"), str(folder), "12", *words], env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("daemonic",)])
def test_processes_that_begin_together_compile_each_kernel_once(cache, words):
    processes = [start(cache, *words) for _ in range(2)]
    try:
        deadline = time.monotonic() + 120
        while len(list(cache.glob("ready-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        (cache / "go").touch()
        assert [process.wait(timeout=60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    lines = [line.split() for line in (cache / "compiled").read_text().splitlines()]
    assert sorted(number for number, _ in lines) == sorted(str(i) for i in range(12))
    assert len({process for _, process in lines}) == 2, "both had a share"


def test_what_a_call_expects_is_asked_for_once_and_the_outer_call_knows_best():
    assert expected() == ()
    with expecting(lambda: ["forward", "backward"]):
        with expecting(lambda: ["forward"]):
            assert expected() == ["forward", "backward"]
        assert expected() == ()
    assert expected() == ()


@pytest.fixture(scope="module")
def first_steps():
    return run_compiling(HERE / "first_step.py")


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["flash", "hstu", "bsa", "nsa"])
def test_a_training_step_is_handed_over_once(first_steps, operator):
    first, second = first_steps[operator]["handed_over"]
    assert len(first) == 1, "by the forward, with all of the backward"
    assert len(first[0]) > 3
    assert second == [], "another shape needs the same kernels"


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["flash", "hstu", "bsa", "nsa"])
def test_a_warm_up_fills_the_cache_for_a_first_call(first_steps, operator):
    """Triton's own keys, on sm_90."""
    assert first_steps[operator]["warmed"] == first_steps[operator]["slots"]


@pytest.mark.slow
def test_a_compilation_imports_nothing():
    found = run_compiling(HERE / "compile_first.py")
    assert found == {"imported": [], "errors": [""] * 8}
