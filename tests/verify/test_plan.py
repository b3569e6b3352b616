"""Which checks a run consists of."""

import pytest

from tilewise import registry
from tilewise.verify.plan import DTYPES, plan
from tilewise.verify.result import Settings
from tilewise.verify.suite import GROWTH


def planned(name, external=None, configs=(), dtypes=DTYPES):
    """Cases of one implementation, each with its dtypes."""
    found = {}
    for check in plan(registry.find(name), external, configs, dtypes, Settings()):
        if check.implementation.name != "cpu":
            found.setdefault(check.case, []).append(check.dtype)
    return found


@pytest.mark.parametrize("name", registry.OPERATORS)
def test_interpreted_cases_take_dtypes_in_turn(name, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    cases = planned(name)
    assert cases.pop("small") == list(DTYPES)
    assert cases.pop(GROWTH) == ["bf16"]
    assert all(len(dtypes) == 1 for dtypes in cases.values())
    counts = [sum(dtypes == [dtype] for dtypes in cases.values()) for dtype in DTYPES]
    assert max(counts) - min(counts) <= 1
    assert set(cases) == {case.name for case in registry.find(name).load("suite").standard("cpu", interpreted=True)} - {"small"}


def test_one_dtype_or_a_case_by_name_leaves_nothing_out():
    narrow = [case.name for case in registry.find("flash").load("suite").standard("cpu", interpreted=True)]
    assert {name: dtypes for name, dtypes in planned("flash", dtypes=["bf16"]).items() if name in narrow} == {name: ["bf16"] for name in narrow}
    assert planned("flash", configs=["window", "T=9"]) == {"window": list(DTYPES), "T=9": list(DTYPES)}


def test_what_is_not_interpreted_runs_in_every_dtype():
    cases = planned("flash", external="mine.py:attention")
    assert cases.pop(GROWTH) == ["bf16"]
    assert all(dtypes == list(DTYPES) for dtypes in cases.values())
    backend = [check.dtype for check in plan(registry.find("flash"), None, (), DTYPES, Settings()) if check.implementation.name == "cpu"]
    assert backend.count("fp32") == backend.count("fp16") == backend.count("bf16") - 1
