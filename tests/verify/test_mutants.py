"""Every planted bug is caught by the standard check; and the score can be less."""

import dataclasses
import importlib.util
from pathlib import Path

import pytest

from tilewise import workbench
from tilewise.verify import verify
from tilewise.verify.api import DTYPES, score
from tilewise.verify.result import Settings
from tilewise.verify.suite import Mutant
from tilewise.workbench.flash import cases as flash
from tilewise.workbench.flash import planted

OPERATORS = [workbench.find(name) for name in workbench.names("suite")]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_planted_bug_is_caught(operator):
    mutants = list(score(operator, (), DTYPES, Settings()))
    assert len(mutants) >= 15
    assert [mutant.name for mutant in mutants if not mutant.caught] == []


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_bug_can_be_planted(operator):
    mutants = operator.load("suite").mutants
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        source = Path(importlib.util.find_spec(f"tilewise.ops.{mutant.module}").origin).read_text()
        planted = mutant.plant(source)
        assert planted != source
        compile(planted, mutant.name, "exec")


def test_bugs_in_kernels_for_hopper_are_planted_there_alone():
    suite = flash.SUITE
    assert suite.planted(None) == suite.planted((8, 0)) == planted.PORTABLE
    assert suite.planted((9, 0)) == suite.mutants
    assert len(suite.mutants) - len(planted.PORTABLE) >= 15


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
