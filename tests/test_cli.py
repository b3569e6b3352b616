"""The command line as a user meets it: output, exit codes, wrong usage, reports."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise import cli

jsonschema = pytest.importorskip("jsonschema")
runner = CliRunner()
IMPLEMENTATIONS = Path(__file__).parent / "verify" / "implementations.py"
SCHEMA = json.loads(files("tilewise.verify").joinpath("report.schema.json").read_text())


def invoke(*words: str):
    return runner.invoke(cli.app, ["verify", *words])


def test_help_names_the_commands():
    text = runner.invoke(cli.app, ["--help"]).output
    assert "verify" in text
    assert "doctor" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flush"], "there is no operator 'flush': did you mean flash? expected one of flash"),
        (["flash", "--config", "smal"], "flash: there is no case 'smal': did you mean small? expected a name"),
        (["flash", "--config", "T=x"], "'T=x': expected an integer"),
        (["flash", "--dtype", "fp8"], "there is no dtype 'fp8': expected some of fp32,fp16,bf16"),
        (["--impl", "a.py:f"], "--impl implements one operator: name it, one of flash"),
        (["flash", "--impl", "a.py:f"], "there is no file a.py"),
        (["flash", "--range", "--range-raw"], "give one of them"),
        (["flash", "--config", "T=3", "--json", "nowhere/report.json"], "there is no folder nowhere"),
        (["flash", "--repeat", "0"], "equal to 1"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(words, message):
    outcome = invoke(*words)
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.output.split())


@pytest.mark.slow
def test_a_pass_prints_a_line_a_check_on_request_and_exits_with_0():
    outcome = invoke("flash", "--config", "T=9,causal=true", "--config", "T=5", "--dtype", "bf16", "-v")
    assert outcome.exit_code == 0
    lines = outcome.output.splitlines()
    assert len(lines) == 7
    assert re.fullmatch(r"✓ flash T=9,causal=true +bf16 triton \(interpreted\) \w+ 0\.\d\d of allowed", lines[0])
    assert lines[-1] == "PASS: all 4 checks passed: outputs and gradients against fp64 truth"
    verbose = invoke("flash", "--config", "T=5", "--dtype", "bf16", "-vv").output
    assert all(f"    ✓ {name}" in verbose for name in ("o", "lse", "dq", "dk", "dv"))


def test_a_failure_prints_all_that_is_known_and_exits_with_1():
    outcome = invoke(
        "flash",
        "--impl",
        f"{IMPLEMENTATIONS}:fails_from_17_tokens_on",
        "--config",
        "T=64,H=1",
        "--config",
        "T=5",
        "--dtype",
        "fp32",
        "--no-grad",
    )
    assert outcome.exit_code == 1
    text = outcome.output
    assert "wrong values" in text
    assert "max_diff" in text
    assert "max_rel_diff" in text
    assert re.search(r"\d+ of \d+ elements \(.+ %\) exceed the \d\.\d\de-\d\d allowed", text)
    assert "looks like: only from row 16 on, of 64" in text
    assert (
        f"repeat: tilewise verify flash --config T=64,H=1 --dtype fp32 --impl {IMPLEMENTATIONS}:fails_from_17_tokens_on"
        " --no-grad" in text
    )
    assert text.splitlines()[-1] == "FAIL: 1 of 2 checks failed"


@pytest.mark.slow
def test_fail_fast_stops():
    outcome = invoke(
        "flash",
        "--impl",
        f"{IMPLEMENTATIONS}:fails_from_17_tokens_on",
        "--config",
        "T=64",
        "--config",
        "T=5",
        "--dtype",
        "fp32",
        "--fail-fast",
    )
    assert outcome.exit_code == 1
    assert "FAIL: 1 of 1 checks failed" in outcome.output


def test_list_names_cases_and_planted_bugs():
    text = invoke("--list").output
    assert "large-logits" in text
    assert "T=65,causal=true,size=2500.0" in text
    assert "forgotten-rescale" in text
    assert invoke("flush", "--list").exit_code == 2


def test_reports_are_written(tmp_path):
    implementation = f"{IMPLEMENTATIONS}:fails_from_17_tokens_on"
    report, page = tmp_path / "report.json", tmp_path / "report.html"
    words = [
        "flash",
        "--impl",
        implementation,
        "--config",
        "T=64",
        "--config",
        "no-keys",
        "--dtype",
        "fp16",
        "--json",
        str(report),
        "--html",
        str(page),
    ]
    assert invoke(*words).exit_code == 1
    document = json.loads(report.read_text())
    jsonschema.validate(document, SCHEMA)
    assert not document["passed"]
    assert [result["case"] for result in document["results"]] == ["T=64", "no-keys"]
    assert document["results"][0]["comparisons"][0]["failure"]["diagnosis"]
    assert document["environment"]["torch"]
    assert "FAIL" in page.read_text()


def test_what_is_skipped_is_reported_and_prints_no_line_of_its_own(tmp_path):
    report = tmp_path / "report.json"
    words = ["flash", "--config", "T=5", "--config", "T=6", "--dtype", "fp32", "--search", "3", "--mutants"]
    outcome = invoke(*words, "--budget", "0", "--json", str(report))
    assert outcome.exit_code == 1
    document = json.loads(report.read_text())
    jsonschema.validate(document, SCHEMA)
    results, bugs = document["results"], document["mutants"]
    why = "the budget of 0 minutes is used up (--budget)"
    assert all(result["skipped"] and not result["passed"] for result in results)
    assert {result["findings"][0]["message"] for result in results} == {why}
    assert all(bug["skipped"] and bug["status"] == why for bug in bugs)
    head, *lines = outcome.output.splitlines()
    assert head.startswith("operator")
    assert lines == [
        f"planted bugs: 0 of {len(bugs)} caught",
        f"FAIL: 0 of {len(results)} checks passed, {len(results)} skipped, {len(bugs)} planted bugs skipped: {why}",
    ]


def test_the_schema_would_refuse_another_document(tmp_path):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "tilewise.verify", "version": 2}, SCHEMA)


@pytest.mark.slow
def test_range_gives_the_same_numbers_every_time(tmp_path):
    documents = []
    for number in range(2):
        path = tmp_path / f"{number}.json"
        assert invoke("flash", "--config", "T=20", "--dtype", "fp32", "-r", "--json", str(path)).exit_code == 0
        documents.append([result["comparisons"] for result in json.loads(path.read_text())["results"]])
    assert documents[0] == documents[1]


@pytest.mark.slow
def test_the_console_script_runs_in_a_process_of_its_own():
    words = [sys.executable, "-m", "tilewise", "verify", "flash", "--config", "one-key", "--config", "no-keys", "-v"]
    outcome = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)})
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    lines = outcome.stdout.splitlines()
    assert sum(line.startswith("✓ flash") for line in lines) >= 6
    assert lines[-1].startswith("PASS: all")
