"""Which checks a run consists of."""

import pytest

from tilewise import workbench
from tilewise.verify import api
from tilewise.verify.plan import DTYPES, plan
from tilewise.verify.result import Result, Settings
from tilewise.workbench.operator import GROWTH


def planned(name, external=None, configs=(), dtypes=DTYPES, backend="triton", everything=False):
    """Cases of one implementation in ordinary use, each with its dtypes."""
    found = {}
    for check in plan(workbench.find(name), external, configs, dtypes, Settings(), everything):
        if check.implementation.name == (external or backend) and not check.use:
            found.setdefault(check.case, []).append(check.dtype)
    return found


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("name", workbench.names("suite"))
def test_without_a_gpu_cases_take_dtypes_in_turn(name, backend, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cases = planned(name, backend=backend)
    assert cases["small"] == ["bf16" if backend == "triton" else "fp32"]
    assert cases.pop(GROWTH) == ["bf16"]
    assert all(len(dtypes) == 1 for dtypes in cases.values())
    counts = [sum(dtypes == [dtype] for dtypes in cases.values()) for dtype in DTYPES]
    assert min(counts) * 5 >= len(cases)
    suite = workbench.find(name).load("suite")
    dear = set(suite.dear) if backend == "triton" else set()
    assert dear <= {case.name for case in suite.cases}
    expected = {case.name for case in suite.standard("cpu", interpreted=backend == "triton")}
    assert set(cases) == expected - dear


@pytest.mark.parametrize("name", workbench.names("suite"))
def test_all_takes_larger_cases_and_every_dtype(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "large" not in planned(name, backend="cpu")
    cases = planned(name, backend="cpu", everything=True)
    assert cases.pop(GROWTH) == ["bf16"]
    assert all(dtypes == list(DTYPES) for dtypes in cases.values())
    assert set(cases) == {case.name for case in workbench.find(name).load("suite").cases} - {"xl", "xxl"}
    assert planned(name, everything=True)["small"] == list(DTYPES)


def test_the_backends_take_different_dtypes(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert planned("flash")["window"] != planned("flash", backend="cpu")["window"]


def test_one_dtype_or_a_case_by_name_leaves_nothing_out():
    narrow = [case.name for case in workbench.find("flash").load("suite").standard("cpu", interpreted=True)]
    assert {name: dtypes for name, dtypes in planned("flash", dtypes=["bf16"]).items() if name in narrow} == {
        name: ["bf16"] for name in narrow
    }
    assert planned("flash", configs=["window", "T=9"]) == {"window": list(DTYPES), "T=9": list(DTYPES)}


def test_others_implementations_run_in_every_dtype():
    cases = planned("flash", external="mine.py:attention")
    assert cases.pop(GROWTH) == ["bf16"]
    assert all(dtypes == list(DTYPES) for dtypes in cases.values())


def test_our_dearest_checks_go_first_and_are_reported_in_order(monkeypatch):
    asked = []

    def run_jobs(jobs, budget):
        asked.extend(check.case for job in jobs for check in job.checks)
        return [[Result(check) for check in job.checks] for job in jobs]

    monkeypatch.setattr(api, "run_jobs", run_jobs)
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    cases = ["T=5", "T=40", "T=9"]
    report = api.verify("flash", configs=cases, dtypes=["fp32"])
    assert asked == ["T=40", "T=9", "T=5"]
    assert [result.check.case for result in report.results] == cases
    asked.clear()
    api.verify("flash", "mine.py:attention", configs=cases, dtypes=["fp32"])
    assert asked == cases
