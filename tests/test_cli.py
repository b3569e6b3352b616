"""The command line as a user meets it: output, exit codes, wrong usage."""

import os
import subprocess
import sys

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tilewise import cli, registry
from tilewise.verify import run as verify_run
from tilewise.verify.compare import Comparison
from tilewise.verify.report import print_results
from tilewise.verify.run import Result

runner = CliRunner()


def result(passed=True, problem=""):
    comparison = Comparison("o", passed, problem, 1e-3, 1e-4, 1e-5, 2e-3)
    return Result("flash", "small", "bf16", "cpu", (comparison, Comparison("lse", True, "", 0.0, 0.0, 0.0, 1e-6)))


def printed(results, verbose=False):
    console = Console(record=True, width=200, file=open(os.devnull, "w"))  # noqa: SIM115
    passed = print_results(results, console, verbose)
    return passed, console.export_text()


def test_help_names_the_commands():
    text = runner.invoke(cli.app, ["--help"]).output
    assert "verify" in text
    assert "doctor" in text


def test_an_unknown_operator_is_wrong_usage():
    outcome = runner.invoke(cli.app, ["verify", "flush"])
    assert outcome.exit_code == 2
    assert "there is no operator 'flush': expected one of flash" in outcome.output


@pytest.mark.parametrize(("passed", "code", "verdict"), [(True, 0, "PASS: all 1 checks passed"), (False, 1, "FAIL: 1 of 1 checks failed")])
def test_the_exit_code_is_the_verdict(monkeypatch, passed, code, verdict):
    monkeypatch.setattr(verify_run, "verify_operator", lambda operator: [result(passed, "" if passed else "worst at [0]: 1, expected 2")])
    outcome = runner.invoke(cli.app, ["verify", "flash"])
    assert outcome.exit_code == code
    assert verdict in outcome.output


def test_a_failure_prints_every_tensor():
    passed, text = printed([result(False, "worst at [0, 1]: 3, expected 2")])
    assert not passed
    assert "✗ flash small" in text
    assert "✗ o    max 1.00e-03  mean 1.00e-04  std 1.00e-05  allowed 2.00e-03  worst at [0, 1]: 3, expected 2" in text
    assert "✓ lse" in text


def test_a_pass_prints_one_line_unless_verbose():
    passed, text = printed([result()])
    assert passed
    assert len(text.strip().splitlines()) == 2
    assert len(printed([result()], verbose=True)[1].strip().splitlines()) == 4


def test_nothing_checked_is_no_pass():
    assert not printed([])[0]


def test_the_console_script_runs_the_whole_check_of_one_case(monkeypatch):
    """`python -m tilewise verify` in a process of its own, kernels and all, on the two smallest cases."""
    code = (
        "import sys; from tilewise.verify.cases import flash; flash.CASES = flash.CASES[3:5]\n"
        "sys.argv = ['tilewise', 'verify', 'flash']; from tilewise.cli import main; main()"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    lines = outcome.stdout.splitlines()
    assert sum(line.startswith("✓ flash") for line in lines) >= 6
    assert lines[-1].startswith("PASS: all")


def test_every_operator_of_the_registry_is_whole():
    for operator in registry.OPERATORS.values():
        assert callable(operator.load("function"))
        assert callable(operator.load("reference"))
        names = [case.name for case in operator.load("cases")]
        assert names
        assert len(names) == len(set(names))
