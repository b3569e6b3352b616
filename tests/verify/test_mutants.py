"""Every planted bug is caught by the standard check; and the score can be less."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from battery import FAST, triton_cases
from fast_cases import checks_for, choose, features, is_wrong, shape

from tilewise import workbench
from tilewise.verify import verify
from tilewise.verify.api import score
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Settings
from tilewise.verify.suite import Case, Mutant
from tilewise.verify.worker import Job, run_jobs
from tilewise.workbench.flash import cases as flash
from tilewise.workbench.flash import planted, planted_sync, planted_uses

OPERATORS = [workbench.find(name) for name in workbench.names("suite")]
IN_FILE = [operator for operator in OPERATORS if operator.name in FAST]
# Planted bugs that only one shape of all cases catches.
ONCE = {("flash", "low-precision-sum")}


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "operator",
    [operator for operator in OPERATORS if torch.cuda.is_available() or operator.name not in FAST],
    ids=lambda operator: operator.name,
)
def test_every_planted_bug_is_caught(operator):
    mutants = list(score(operator, (), DTYPES, Settings()))
    assert len(mutants) >= 15
    assert [mutant.name for mutant in mutants if not mutant.caught] == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(torch.cuda.is_available(), reason="the fast cases are those of interpreted kernels")
@pytest.mark.parametrize("operator", IN_FILE, ids=lambda operator: operator.name)
def test_the_fast_cases_catch_every_planted_bug_twice(operator):
    """Or once, where the file says so: in all of the battery no second shape catches those."""
    caught_by = FAST[operator.name]["caught_by"]
    jobs = [Job(checks_for(operator, bug, cases), bug) for bug, cases in caught_by.items()]
    assert len(jobs) >= 15
    missed = [
        (bug, result.check.case)
        for bug, results in zip(caught_by, run_jobs(jobs), strict=True)
        for result in results
        if not is_wrong(result)
    ]
    assert missed == []


@pytest.mark.parametrize("operator", IN_FILE, ids=lambda operator: operator.name)
def test_the_fast_cases_are_those_of_every_bug_and_have_every_feature(operator):
    suite, fast = operator.load("suite"), FAST[operator.name]
    by_name = {case.name: case for case in suite.cases}
    assert fast["caught_by"].keys() == {bug.name for bug in suite.planted(None) if not bug.use}
    for bug, cases in fast["caught_by"].items():
        assert set(cases) <= set(fast["cases"]), bug
        assert len({shape(by_name[case]) for case in cases}) == len(cases) in (1, 2), bug
    collected = {param.values[1] for param in triton_cases(operator.name) if not param.marks}
    assert torch.cuda.is_available() or collected == set(fast["cases"])
    every = {feature for case in suite.standard("cpu", interpreted=True) for feature in features(case)}
    assert every <= {feature for name in fast["cases"] for feature in features(by_name[name])}


def test_the_bugs_that_only_one_shape_of_all_catches():
    once = {(name, bug) for name, fast in FAST.items() for bug, cases in fast["caught_by"].items() if len(cases) < 2}
    assert once == ONCE


def test_the_choice_of_cases_is_small_and_catches_twice():
    cases = [
        Case(name, "", flash.Flash(T=tokens, **options))
        for name, tokens, options in (
            ("long", 9, {}),
            ("short", 5, {}),
            ("as-long", 9, {"softcap": 1.0}),
            ("causal", 5, {"causal": True}),
        )
    ]
    caught = {
        "anywhere": ["long", "short", "as-long", "causal"],
        "twice": ["long", "as-long", "causal"],
        "in-one": ["short"],
    }
    cost = {"long": 1.0, "short": 1.0, "as-long": 9.0, "causal": 1.0}
    # The softcap is nowhere else, and the bug of the long ones is caught by two of one shape and one of another.
    assert choose(cases, caught, cost) == ["short", "as-long", "causal"]


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_bug_can_be_planted(operator):
    mutants = operator.load("suite").mutants
    mutants += operator.load("over_ranks").mutants if operator.has("over_ranks") else ()
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        source = Path(importlib.util.find_spec(mutant.planted_in).origin).read_text()
        planted = mutant.plant(source)
        assert planted != source
        compile(planted, mutant.name, "exec")


def test_bugs_in_kernels_for_hopper_are_planted_there_alone():
    suite = flash.SUITE
    assert suite.planted(None) == suite.planted((8, 0)) == planted.PORTABLE + planted_uses.USES
    assert suite.planted((9, 0)) == planted.PORTABLE + planted.HOPPER + planted_uses.USES
    assert suite.planted_for_hopper() == planted.HOPPER + planted_sync.SYNC


@pytest.mark.slow
def test_a_weak_check_scores_less_than_all(monkeypatch):
    """Without a mask in the one case, a bug in the mask gets away; a missing scale does not."""
    chosen = tuple(
        mutant
        for mutant in planted.PORTABLE
        if mutant.name in ("missing-scale", "delta-dropped", "causal-long", "softcap-ignored")
    )
    monkeypatch.setattr(flash, "SUITE", dataclasses.replace(flash.SUITE, mutants=chosen))
    report = verify("flash", configs=["T=5,H=1"], dtypes=["bf16"], mutants=True)
    caught = {mutant.name: mutant.caught for mutant in report.mutants}
    assert caught["missing-scale"]
    assert caught["delta-dropped"]
    assert not caught["causal-long"]
    assert not caught["softcap-ignored"]
    assert not report.passed
    assert all(result.passed for result in report.results)


def test_a_mutant_that_finds_nothing_to_change_is_an_error():
    with pytest.raises(ValueError, match="bring it up to date"):
        Mutant("gone", "", "flash.kernels.fwd", "no such line", "").plant("x = 1")


def test_line_breaks_do_not_disarm_a_mutant():
    assert Mutant("m", "", "", "f(a, b)", "g()").plant("y = f(a,\n      b)") == "y = g()"
