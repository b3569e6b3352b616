"""Cold starts: what is compiled is written down in every process, and what is made of it."""

import json
import os
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import cold
import cold_child
import pytest
import table
import triton
from harness import Run
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from tilewise.bench.result import load


def event(kernel, seconds, hash="a", loaded=False, at=0.0):
    return {"kernel": kernel, "hash": hash * 20, "loaded": loaded, "seconds": seconds, "at": at, "process": 1}


EVENTS = [event("fwd", 2.0), event("fwd", 3.5, "b"), event("bwd", 1.0, "c"), event("bwd", 9.0, "c", loaded=True)]


@pytest.mark.slow
def test_kernels_are_written_down_in_helper_processes_too(tmp_path):
    script = Path(__file__).with_name("compile_twice.py")
    environment = cold.child_environment(Path("src"), tmp_path / "cache", tmp_path / "log", {})
    environment["PYTHONPATH"] += os.pathsep + os.pathsep.join(sys.path)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    events = cold.compilations(tmp_path / "log")
    assert [one["loaded"] for one in events] == [False, True, False, True]
    assert {one["kernel"] for one in events} == {"add_one"}
    assert len({one["process"] for one in events}) == 3
    assert events[0]["hash"] == events[1]["hash"] != events[2]["hash"] == events[3]["hash"]
    assert sorted(cold.times_compiled(events).values()) == [1, 1]
    assert 0.005 < cold.slowest(events)["seconds"] < 60.0


def test_a_hidden_sitecustomize_still_runs(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.hidden = 'ran'")
    path = os.pathsep.join([str(cold.HERE / "compile_log"), str(tmp_path)])
    command = [sys.executable, "-c", "import sys; print(sys.hidden)"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.stdout.strip() == "ran", done.stderr


def test_the_first_kernel_is_not_the_operators(tmp_path):
    lines = [json.dumps(event(cold.FIRST, 9.0)), json.dumps(event("fwd", 1.0))]
    (tmp_path / "1.jsonl").write_text("\n".join(lines))
    assert [one["kernel"] for one in cold.compilations(tmp_path)] == ["fwd"]
    assert f"def {cold.FIRST}(" in (cold.HERE / "cold_child.py").read_text()


def test_what_is_made_of_the_log():
    assert cold.slowest(EVENTS) == {"kernel": "fwd", "seconds": 3.5}
    assert cold.slowest(EVENTS[3:]) == {"kernel": "none", "seconds": 0.0}
    assert cold.kernels(EVENTS) == [{"kernel": "fwd", "seconds": [3.5, 2.0]}, {"kernel": "bwd", "seconds": [1.0]}]
    twice = cold.times_compiled([*EVENTS, event("fwd", 2.2)])
    assert sorted(twice.values()) == [1, 1, 2]
    assert cold.asked(3.5) == pytest.approx(1.3 * 3.5 + 3.0)


PHASES = {
    "imports": {"seconds": 4.0},
    "forward": {"seconds": 2.5, "imported": ["torch.fx", "torch.fx.a", "sympy"], "at": 10.0},
    "backward": {"seconds": 1.5, "imported": ["torch.fx.b"], "at": 12.0},
    "second": {"seconds": 0.25, "imported": [], "at": 13.0},
    "third": {"seconds": 0.01, "imported": [], "at": 14.0},
}


@pytest.fixture
def children(monkeypatch):
    """Children that have ended; each is known by its cache, log and what else it was told."""
    started = []

    def start(operator, environment, *more):
        started.append((operator, environment, more))
        log = Path(environment["COMPILE_LOG"]) / f"{len(started)}.jsonl"
        loaded = bool(os.path.exists(environment["TRITON_CACHE_DIR"]))
        os.makedirs(environment["TRITON_CACHE_DIR"], exist_ok=True)
        events = [{**one, "loaded": loaded or one["loaded"], "at": 11.0} for one in EVENTS]
        log.write_text("".join(json.dumps(one) + "\n" for one in events))
        if "--meet" in more:
            (Path(more[1]) / f"ready-{len(started)}").touch()
        return Ended()

    monkeypatch.setattr(cold, "start", start)
    monkeypatch.setattr(cold, "finish", lambda child: PHASES)
    return started


class Ended:
    def poll(self):
        return None

    def kill(self):
        pass


def test_an_operator_takes_three_processes(children, tmp_path):
    row = cold.operator_row("flash", "now", Path("somewhere"), tmp_path)
    caches = [environment["TRITON_CACHE_DIR"] for _, environment, _ in children]
    assert caches[0] == caches[2] != caches[1]
    assert [environment.get("TILEWISE_COMPILE_JOBS") for _, environment, _ in children] == [None, "1", None]
    assert [more for *_, more in children] == [(), ("--after-first-kernel",), ()]
    assert all(environment["PYTHONPATH"].split(os.pathsep)[1] == "somewhere" for _, environment, _ in children)
    seconds = {"imports": 4.0, "forward": 2.5, "backward": 1.5, "second": 0.25, "third": 0.01, "step": 4.0}
    assert row["cold"] == seconds | {"imported": 4, "imported_from": {"torch.fx": 3, "sympy": 1}}
    assert (row["variants"], row["compiled_after_the_first_step"], row["compiled_with_a_full_cache"]) == (3, 0, 0)
    assert row["asked"] == 7.55
    lines = table.lines({"benchmark": "cold", "rows": [row]})
    assert lines[0].startswith("| operator | first forward + backward s | slowest kernel s | asked |")
    assert lines[2] == "| flash | 4.0 | 3.5 (fwd) | ≤ 7.5 | 0.25 | 3 | 4 | 4.00 |"


def test_ranks_start_together_and_share_a_cache(children, tmp_path):
    row = cold.ranks_row("hstu", "before", Path("src"), tmp_path, 2)
    assert len({environment["TRITON_CACHE_DIR"] for _, environment, _ in children}) == 1
    assert [environment["LOCAL_RANK"] for _, environment, _ in children] == ["0", "1"]
    assert {environment["LOCAL_WORLD_SIZE"] for _, environment, _ in children} == {"2"}
    assert (tmp_path / "meeting" / "go").exists()
    assert row["seconds"] == {"last": 4.0, "rank 0": 4.0, "rank 1": 4.0}
    assert (row["variants"], row["compiled"], row["most"]) == (3, 3, 1)
    lines = table.lines({"benchmark": "cold", "rows": [row]})
    assert lines[0] == "| operator | ranks | s until all are done | kernels | compilations | most of one kernel |"
    assert lines[2] == "| hstu, before | 2 | 4.0 | 3 | 3 | 1 |"


def test_a_rank_that_ends_early_stops_the_wait(tmp_path):
    failed = Ended()
    failed.poll = lambda: 1
    with pytest.raises(RuntimeError, match="not all ranks"):
        cold.wait_for(tmp_path, 1, [failed])


def test_a_rank_waits_for_the_others(tmp_path):
    waited = []

    def wait(seconds):
        waited.append(seconds)
        assert len(list(tmp_path.glob("ready-*"))) == 1
        if len(waited) == 3:
            (tmp_path / "go").touch()

    cold_child.meet(tmp_path, wait)
    assert len(waited) == 3


def test_a_phase_counts_seconds_and_imports(monkeypatch):
    monkeypatch.setitem(sys.modules, "before_the_call", sys)

    def call():
        monkeypatch.setitem(sys.modules, "in_the_call", sys)
        time.sleep(0.02)
        return "result"

    result, found = cold_child.phase(call, lambda: time.sleep(0.02))
    assert result == "result"
    assert found["imported"] == ["in_the_call"]
    assert found["seconds"] > 0.035


@pytest.mark.parametrize(("code", "message"), [("print('{}')", None), ("raise SystemExit(4)", "code 4")])
def test_a_child_that_fails_is_an_error(code, message):
    child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    if message is None:
        assert cold.finish(child) == {}
    else:
        with pytest.raises(RuntimeError, match=message):
            cold.finish(child)


def test_the_command_names_no_folder():
    given = Namespace(only=["nsa"], ranks=8, compare=Path("/somewhere/src"), json=None)
    run = Run("cold", None, cold.words(given))
    assert run.document["command"] == "python benchmarks/cold.py --only nsa --ranks 8 --compare SRC"


def test_a_start_that_fails_is_a_row_and_the_exit_code(monkeypatch, tmp_path, capsys):
    def row(operator, version, source, folder):
        if operator == "nsa":
            raise RuntimeError("a child ended with code 4")
        return {"case": operator, "version": version}

    monkeypatch.setattr(cold, "operator_row", row)
    path = tmp_path / "cold.json"
    document = cold.run(Namespace(only=["flash", "nsa"], ranks=None, compare=None, json=path))
    assert document["rows"][1] == {"case": "nsa", "version": "now", "error": "a child ended with code 4"}
    assert load(path) == document
    assert "failed: a child ended with code 4" in capsys.readouterr().out


def test_the_first_kernel_compiles(monkeypatch):
    """Defined inside a function, where Triton must still find its language."""
    found = []
    monkeypatch.setattr("triton.jit", lambda function: found.append(JITFunction(function)) or Launched())
    monkeypatch.setattr("torch.empty", lambda *_, **__: None)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    cold_child.compile_first()
    source = ASTSource(found[0], {"pointer": "*i32"}, {})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).name == cold.FIRST


class Launched:
    def __getitem__(self, grid):
        return lambda *_: None
