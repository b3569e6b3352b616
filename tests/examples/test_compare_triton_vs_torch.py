"""The comparison of kernels with torch: every tensor's line, the verdict, and the exit status, right and wrong."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

typer = pytest.importorskip("typer", reason="typer is not installed")
FILE = Path(__file__).parent.parent.parent / "examples" / "compare_triton_vs_torch.py"
NUMBER = r"\d\.\d\de[+-]\d\d"
ERRORS = rf"max abs error {NUMBER} +mean abs error {NUMBER} +"
STATISTICS = rf"{ERRORS}mean relative error {NUMBER} +allowed {NUMBER} +"
INDICES = rf"^  block_indices +{ERRORS}(\d+) of 512 differ +by score: "


@pytest.fixture
def example():
    spec = importlib.util.spec_from_file_location("compare_triton_vs_torch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def compare(example, capsys, **options):
    """What is printed for `small`, and the exit status."""
    given = {"config": ["small"], "dtype": "fp32", "seed": 42, "rtol": None, "atol": None} | options
    with pytest.raises(typer.Exit) as exit_:
        example.main(**given)
    return capsys.readouterr().out, exit_.value.exit_code


@pytest.mark.slow
@pytest.mark.gpu
def test_as_it_is_run():
    """By itself, without TRITON_INTERPRET: it decides before triton is imported."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, str(FILE), "--config", "small"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.startswith("device: ")
    assert "shapes: q [1, 64, 4, 16], k [1, 64, 4, 16], v [1, 64, 4, 32]" in run.stdout
    assert "shapes: q [57, 64], k [57, 64], v [57, 128]" in run.stdout
    for name in ("output", "attn_output", "padded_q", "padded_k"):
        assert len(re.findall(rf"^  {name} +{STATISTICS}passed", run.stdout, re.M)) == 1, name
    assert re.search(rf"{INDICES}passed$", run.stdout, re.M)
    assert "PASS: 2 of 2 cases passed" in run.stdout


@pytest.mark.gpu
def test_tolerances_are_obeyed(example, capsys):
    shown, status = compare(example, capsys, rtol=0.0, atol=0.0)
    assert status == 1
    assert re.search(rf"^  output +{STATISTICS}FAILED$", shown, re.M)
    assert re.search(rf"^  padded_q +{STATISTICS}passed$", shown, re.M)
    assert "FAIL: 0 of 2 cases passed" in shown
    shown, status = compare(example, capsys, rtol=1e-2, atol=1e-3)
    assert status == 0


@pytest.mark.gpu
def test_a_wrong_choice_fails(example, capsys, monkeypatch):
    right = example.OPERATORS["bsa"]

    def wrong(**arguments):
        o, indices = right(**arguments)
        return o, indices.flip(2)

    monkeypatch.setitem(example.OPERATORS, "bsa", wrong)
    shown, status = compare(example, capsys)
    assert status == 1
    (differing,) = re.findall(rf"{INDICES}FAILED$", shown, re.M)
    assert int(differing) > 100
    assert "wrong choice: block_indices: " in shown
    assert "FAIL: 1 of 2 cases passed" in shown


@pytest.mark.gpu
def test_an_error_fails_with_its_words(example, capsys, monkeypatch):
    def broken(**arguments):
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(example, "OPERATORS", {"bsa": broken})
    shown, status = compare(example, capsys)
    assert status == 1
    assert "no such kernel" in shown
    assert "FAIL: 0 of 1 cases passed" in shown
