"""Cases over the ranks of a ContextPlan."""

import json

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.verify import over_ranks, ranks, verify
from tilewise.verify.over_ranks import BALANCES, owners, plans, run_over_ranks
from tilewise.verify.plan import DTYPES, plan
from tilewise.verify.result import Settings
from tilewise.verify.suite import Mutant, make_inputs
from tilewise.verify.time_limits import Budget

OPERATORS = [workbench.find(name) for name in workbench.names("over_ranks")]
NAMED = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@pytest.fixture(autouse=True)
def _without_a_gpu(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def planned(operator, everything=False, configs=(), world=2):
    return plan(operator, None, configs, DTYPES, Settings(), everything, ranks=world)


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("head_tail", [0, 1, 1, 1, 0, 0, 1, 1, 0]),
        ("contiguous", [0, 0, 0, 1, 1, 1, 0, 1, 1]),
        ("scattered", [0, 0, 0, 0, 0, 1, 0, 0, 0]),
    ],
)
def test_who_has_which_token(balance, expected):
    """Of sequences of 6, 0 and 3 tokens over two ranks."""
    assert owners([6, 0, 3], 2, balance).tolist() == expected


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_plan_comes_up(operator):
    declared, suite = operator.load("over_ranks"), operator.load("suite")
    function = over_ranks._Function(None, operator.name, "cpu", declared)

    def chosen(check):
        problem = suite.find(check.case).problem
        inputs = make_inputs(problem, "random", 1)
        here = {name: x.to(NAMED[check.dtype]) for name, x in inputs.items() if x.is_floating_point()}
        return function._plan(here, problem.options() | problem.returning)

    checks = [check for check in planned(operator) if not check.implementation.interpreted]
    assert {chosen(check) for check in checks} == set(plans(declared.methods))
    assert len(plans(declared.methods)) == len(BALANCES) * len(declared.methods)


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_which_cases_run(operator):
    by_default, everything = planned(operator), planned(operator, everything=True)
    assert {check.implementation.name for check in by_default} == {"cpu", "triton"}
    assert {(check.case, check.dtype) for check in by_default} < {(check.case, check.dtype) for check in everything}
    # Small ones, over packed sequences too, and all of them over so many ranks.
    assert {check.implementation.ranks for check in everything} == {2}
    assert any("packed" in check.case for check in by_default if check.implementation.interpreted)
    assert by_default[0].command().endswith("--parallel 2")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["hstu"], "there is nothing over ranks of 'hstu': it takes no parallel=plan"),
        (["flash", "--config", "more-keys"], "flash: more-keys is no self-attention"),
        (["flash", "--config", "memory-growth"], "leave out --impl, --use, --schedules and memory-growth"),
        (["flash", "--use", "no-grad"], "leave out --impl, --use"),
        (["flash", "--search", "3"], "--search draws others: give one of them"),
        (["flash", "--every-config"], "no other option"),
    ],
)
def test_what_cannot_be_asked_for(words, message):
    outcome = CliRunner().invoke(cli.app, ["verify", *words, "--parallel", "2"], env={"COLUMNS": "200"})
    assert outcome.exit_code == 2
    assert message in outcome.output


def test_a_case_over_three_ranks(tmp_path):
    path = tmp_path / "report.json"
    words = ["verify", "flash", "--parallel", "3", "--config", "packed-window", "--dtype", "bf16", "--json", str(path)]
    outcome = CliRunner().invoke(cli.app, words, env={"TILEWISE_BACKEND": "cpu"})
    assert outcome.exit_code == 0, outcome.output
    (result,) = json.loads(path.read_text())["results"]
    assert result["implementation"] == "cpu × 3"
    assert [comparison["name"] for comparison in result["comparisons"]] == ["o", "lse", "dq", "dk", "dv"]


def bug(new):
    return Mutant("bug", "", "parallel.flash", "plan.check_local(x, name, axis)", new)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (bug("raise ArithmeticError('out of luck')"), "of 2: ArithmeticError: out of luck (line "),
        pytest.param(bug("import os; os._exit(3)"), "of 2: the process ended with exit code 3", marks=pytest.mark.slow),
        pytest.param(
            bug("import time; time.sleep(600)"), "no answer from rank 0, 1 within 9 seconds", marks=pytest.mark.slow
        ),
    ],
    ids=["raises", "ends", "hangs"],
)
def test_what_goes_wrong_on_a_rank_fails_the_case(mutant, message, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    monkeypatch.setattr(ranks, "ANSWER_LIMIT", 9.0)
    (operator,) = [operator for operator in OPERATORS if operator.name == "flash"]
    # Ranks start again for the next one.
    results = list(run_over_ranks(planned(operator, configs=["one-key"])[:2], Budget(), mutant))
    for result in results:
        finding, plan_of_it = result.findings
        assert message in finding.message
        assert plan_of_it.message.startswith("method ")
        assert not result.passed


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_all_pass_and_every_planted_bug_is_caught(operator):
    report = verify(operator.name, parallel=2, mutants=True)
    assert len(report.mutants) >= 12
    assert [mutant.name for mutant in report.mutants if not mutant.caught] == []
    assert report.failures == []
    assert report.passed
