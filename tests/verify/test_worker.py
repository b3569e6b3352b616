"""Crashes and hangs are findings, and the run goes on."""

import os
import re
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tilewise import workbench
from tilewise.verify import UsageError, api, suite, time_limits, verify, worker
from tilewise.verify.result import CRASH, HANG, NOTE, SKIPPED, Finding, Implementation, Result, Settings
from tilewise.verify.text import table_lines, verdict_lines

HERE = Path(__file__).parent / "implementations.py"


def run(name, *configs, **options):
    return verify("flash", f"{HERE}:{name}", configs=configs, dtypes=["fp32"], **options)


def test_a_crash_is_a_finding_and_the_worker_is_replaced():
    report = run("crashes_when_causal", "small", "T=9,causal=true", "T=12", "T=8,causal=true")
    assert [result.passed for result in report.results] == [True, False, True, False]
    assert report.results[1].statuses == (CRASH,)
    assert "SIGSEGV" in report.results[1].findings[0].message


def test_a_process_that_exits_is_a_crash():
    (result,) = run("exits", "small").results
    assert result.findings[0].message == "the process ended with exit code 7"


@pytest.fixture
def hasty(monkeypatch):
    """Two seconds a check, one after a hang, and one worker alone."""
    monkeypatch.setattr(suite, "TIME_LIMIT", 2.0)
    monkeypatch.setattr(time_limits, "LIMIT_AFTER_A_HANG", 1.0)
    monkeypatch.setattr(worker, "LOOK_EVERY", 0.1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})


def test_a_process_that_waits_for_nothing_is_a_hang(hasty):
    report = run("hangs", "small", "T=9")
    assert [result.statuses for result in report.results] == [(HANG,), (HANG,)]
    assert re.fullmatch(r"no result within [2-9] seconds, and it waits: .*", report.results[0].findings[0].message)


def test_two_hangs_are_waited_for_the_second_for_less_and_the_rest_is_skipped(hasty):
    report = run("spins", "small", "T=9", "T=3", "T=2")
    assert [result.statuses for result in report.results] == [(HANG,), (HANG,), (), ()]
    why = "; it has hung before, so its limit was 1 s, not 2"
    for limit, more, result in zip((2, 1), ("", why), report.failures, strict=True):
        message = result.findings[0].message
        assert re.fullmatch(rf"no result within {limit} CPU seconds \(\d+ s by the clock\){more}", message)
    why = f"{HERE}:spins hung 2 times"
    assert [result.findings for result in report.skipped] == [(Finding(SKIPPED, why, NOTE),)] * 2
    assert not report.passed
    assert verdict_lines(report)[-1] == f"FAIL: 2 of 4 checks failed, 2 skipped: {why}"
    (row,) = table_lines(report.results)[1:]
    assert " 2 of 2 ✗ " in row


def test_a_search_ends_after_two_hangs(hasty):
    report = run("spins_unless_small", "small", search=20)
    small, found, skipped = report.results
    assert small.passed
    assert found.statuses == (HANG,)
    assert skipped.skipped
    assert report.searched == {}


def test_a_starved_process_is_no_hang(hasty):
    assert run("is_stopped", "T=5").passed


LIMIT, BEFORE = 100.0, 1000.0


@pytest.mark.parametrize(
    ("threads", "ends", "message"),
    [
        # Each thread: its state, and what share of the clock it computes.
        ({"main": ("R", 0.25)}, 400, r"within 100 CPU seconds \(400 s by the clock\)"),
        ({"main": ("S", 0.0)}, 100, "within 100 seconds, and it waits"),
        ({"main": ("S", 0.01), "polls": ("S", 0.01)}, 100, "within 100 seconds, and it waits"),
        ({"main": ("S", 0.0), "starved": ("R", 0.0)}, 1000, r"within 1000 seconds by the clock \(0 CPU seconds\)"),
        ({"main": ("S", 0.0), "reads a disk": ("D", 0.0)}, 1000, "by the clock"),
        ({str(i): ("S", 0.09) for i in range(16)}, 1000, r"by the clock \(90 CPU seconds\)"),
        # No /proc.
        ({}, 1000, "by the clock"),
    ],
    ids=["spins", "waits", "polls", "starved", "disk", "many threads", "unknown"],
)
def test_what_counts_as_a_hang(threads, ends, message, monkeypatch):
    clock = 0.0
    monkeypatch.setattr(time_limits.time, "monotonic", lambda: clock)

    def read(process):
        return {name: time_limits._Thread(state, BEFORE + share * clock) for name, (state, share) in threads.items()}

    monkeypatch.setattr(time_limits, "_threads", read)
    watchdog = time_limits.Watchdog(0, LIMIT)
    while clock < ends - 0.5:
        clock += 0.5
        watchdog.look()
    clock = ends
    with pytest.raises(time_limits.HangError, match=message):
        watchdog.look()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="there is no /proc")
def test_what_a_process_starts_is_looked_at_too():
    child = subprocess.Popen(["sleep", "100"])
    try:
        assert {str(os.getpid()), str(child.pid)} <= time_limits._threads(os.getpid()).keys()
    finally:
        child.kill()
        child.wait()


def test_only_on_a_cpu_the_largest_cases_may_take_longer():
    case = workbench.find("flash").load("suite").find("xl")
    assert (case.time_limit("cpu"), case.time_limit("cuda")) == (suite.LONG_TIME_LIMIT, suite.TIME_LIMIT)


def test_what_has_not_begun_within_the_budget_is_skipped():
    def never(q, k, v, **options):
        raise AssertionError

    report = verify("flash", never, configs=["T=5", "T=6"], dtypes=["fp32"], search=20, budget=0)
    assert (len(report.skipped), len(report.results), report.passed) == (3, 3, False)


def test_results_come_in_order_and_what_is_printed_stays_out(capfd):
    names = [f"T={tokens}" for tokens in (40, 3, 33, 1, 17, 2)]
    report = run("prints", *names)
    assert [result.check.case for result in report.results] == names
    assert report.passed
    assert "a line of its own" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nowhere.py:f", "there is no file nowhere.py"),
        ("implementations", "expected FILE.py:FUNCTION or package.module:function"),
        ("no_such_package.module:f", "no_such_package.module does not import: ModuleNotFoundError"),
        (f"{HERE}:nothing", "has no function 'nothing': it has .*crashes_when_causal"),
        (f"{HERE}:not_a_function", "has no function 'not_a_function'"),
        (f"{HERE}:takes_too_many", "cannot be called with q, k, v, return_lse: missing a required argument: 'mask'"),
    ],
)
def test_wrong_usage_is_said(spec, message):
    with pytest.raises(UsageError, match=message):
        verify("flash", spec, configs=["small"], dtypes=["fp32"])


def test_a_file_that_does_not_import(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    with pytest.raises(
        UsageError, match="does not import: ModuleNotFoundError: No module named 'nothing_of_that_name'"
    ):
        verify("flash", f"{path}:f", configs=["small"])


@pytest.mark.slow
def test_a_connection_is_closed_by_one_thread_alone(tmp_path, monkeypatch):
    """Two processes refuse at about the same time; while the second's thread closes its connection, the first's refusal
    ends the run.
    """

    def close_slowly(connection):
        time.sleep(0.5)
        os.close(connection._handle)

    path = tmp_path / "broken.py"
    path.write_text("import nothing_of_that_name\n")
    monkeypatch.setattr(Connection, "_close", close_slowly)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    with pytest.raises(UsageError, match="does not import"):
        verify("flash", f"{path}:f", configs=["small", "medium"])


def test_arguments_that_cases_need_are_named():
    with pytest.raises(UsageError, match=r"lacks window_size \(for window\).*choose cases that do without"):
        run("lacks_the_window", "small", "window")
    assert run("lacks_the_window", "small", "medium").passed


def test_a_function_in_a_package():
    assert verify("flash", "tilewise:flash_attention", configs=["T=9"], dtypes=["bf16"]).passed


@pytest.mark.parametrize("name", ["random.py", "types.py", "my-kernel.py", "time.py"])
def test_a_file_may_be_called_as_a_module_of_pythons_is(tmp_path, name):
    (tmp_path / name).write_text(HERE.read_text())
    assert verify("flash", f"{tmp_path / name}:right", configs=["T=5"], dtypes=["fp32"]).passed


def test_a_module_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "my_module.py").write_text(HERE.read_text())
    monkeypatch.chdir(tmp_path)
    assert verify("flash", "my_module:right", configs=["T=5"], dtypes=["fp32"]).passed


@pytest.mark.slow
def test_a_script_without_a_guard(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"from tilewise.verify import verify\nprint(verify('flash', '{HERE}:right', configs=['T=5'],"
        " dtypes=['fp32']).passed)\n"
    )
    environment = os.environ | {"PYTHONPATH": ":".join(sys.path)}
    assert (
        subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment).stdout.strip()
        == "True"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rtol": float("nan")}, "rtol is nan"),
        ({"atol": -1.0}, "atol is -1.0"),
        ({"budget": float("nan")}, "budget is nan"),
        ({"configs": ["H=3,Hk=2"]}, "H=3 is not a multiple of Hk=2"),
        ({"configs": ["T=-5"]}, "must not be negative"),
        ({"configs": ["window=3"]}, "expected two limits"),
        ({"configs": ["layout=foo"]}, "there is no layout 'foo'"),
        ({"configs": ["lengths=3,lengths_k=3/4"]}, "the same number of sequences"),
        ({"dtypes": []}, "no dtype was given"),
    ],
)
def test_a_request_that_makes_no_sense(options, message):
    with pytest.raises(UsageError, match=message):
        verify("flash", f"{HERE}:right", **{"configs": ["T=5"], "dtypes": ["fp32"], **options})


def test_an_unknown_backend_is_wrong_usage(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "foo")
    with pytest.raises(UsageError, match="TILEWISE_BACKEND is 'foo': expected one that runs here"):
        verify("flash", configs=["T=5"])


def test_the_growth_of_memory_can_be_asked_for_by_its_command():
    (result,) = run("right", "memory-growth").results
    assert result.check.case == "memory-growth"


def test_search_survives_an_implementation_that_fails_now_and_then():
    calls = []

    def flaky(q, k, v, *, return_lse=False, **options):
        from tilewise.ops.flash.reference import flash_attention

        calls.append(1)
        o, lse = flash_attention(q, k, v, **options)
        return (o * 2, lse) if len(calls) == 9 else (o, lse)

    assert verify("flash", flaky, configs=["T=3"], dtypes=["fp32"], search=20, repeat=1).failures


@pytest.mark.slow
def test_search_shrinks_to_the_smallest_problem():
    report = run("fails_from_17_tokens_on", "T=3", search=40)
    (found,) = report.failures
    assert "T=17" in found.check.case or "lengths=17" in found.check.case
    assert "H=1" in found.check.case
    assert "--config" in found.check.command()
    assert report.searched == {"flash": 40}
    # The command does what it says.
    assert not run("fails_from_17_tokens_on", found.check.case).passed


@pytest.mark.slow
def test_search_in_this_process():
    def wrong(q, k, v, *, softcap=0.0, return_lse=False, **options):
        from tilewise.ops.flash.reference import flash_attention

        return flash_attention(q, k, v, **options)

    (found,) = verify("flash", wrong, configs=["T=3"], dtypes=["fp32"], search=40).failures
    assert "softcap=" in found.check.case
    assert verify("flash", "tilewise:flash_attention", configs=["T=3"], dtypes=["fp32"], search=5).passed


def test_planted_bugs_share_a_gpu_as_its_memory_allows(monkeypatch):
    plain, planted = worker.Job(()), worker.Job((), "a bug")
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: ((80 << 30) - 1, 90 << 30))
    assert worker._places_on_gpu([planted, planted]) == 9
    assert worker._places_on_gpu([planted, plain]) == 1
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (4 << 30, 90 << 30))
    assert worker._places_on_gpu([planted]) == 1


def test_a_planted_bug_that_hangs_in_company_is_judged_alone(monkeypatch):
    """Planted bugs share a GPU, and one that spins there takes the others' time."""
    kernels = Implementation("triton", "cuda", interpreted=False)
    monkeypatch.setattr(api, "implementations", lambda: [kernels])
    together = []

    def run_jobs(jobs, budget):
        together.append(len(jobs))
        for job in jobs:
            alone = len(jobs) == 1
            finding = Finding("wrong values" if alone or job.mutant != spinning else HANG, "")
            yield [Result(job.checks[0], findings=(finding,))]

    monkeypatch.setattr(api, "run_jobs", run_jobs)
    operator = workbench.find("flash")
    mutants = [mutant.name for mutant in api.planted(operator)]
    spinning = mutants[1]
    results = list(api.score(operator, ["small"], ["bf16"], Settings()))
    assert together == [len(mutants), 1]
    assert [result.name for result in results] == [mutants[0], *mutants[2:], spinning]
    assert {result.status for result in results} == {"wrong values"}
