"""Each repair of Triton's interpreter is needed, and works.

Kernels are interpreted here: these tests are about the interpreter itself.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from packaging.version import Version

release = Version(triton.__version__)
KERNELS = Path(__file__).with_name("interpreter_kernels.py")
# What every release gets wrong.
WRONG = ("arithmetic", "rounding", "fma", "dot", "sum", "scan", "constant", "where")


def run(check: str, repaired: bool) -> subprocess.CompletedProcess[str]:
    return interpret(KERNELS, check, str(int(repaired)))


def interpret(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize("check", [*WRONG, "cumsum"])
def test_bf16_is_right_when_repaired(check):
    result = run(check, repaired=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "right"


@pytest.mark.parametrize("check", WRONG)
def test_bf16_is_wrong_without_the_repair(check):
    """Where this fails, Triton has mended its interpreter and the repair can go."""
    result = run(check, repaired=False)
    assert result.returncode != 0 or result.stdout.strip() == "wrong"


def test_cumsum_is_wrong_without_the_repair_since_it_adds_in_bf16():
    """Up to 3.8 tl.cumsum widens bf16 before it scans; since 3.9 it scans bf16, which the interpreter adds as bits."""
    result = run("cumsum", repaired=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == ("right" if release < Version("3.9") else "wrong")


def test_range_over_a_tensor_works_when_repaired():
    result = run("range", repaired=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "right"


@pytest.mark.skipif(release >= Version("3.7"), reason="only Triton 3.6 with NumPy 2.4 needs it")
def test_range_over_a_tensor_fails_without_the_repair():
    assert run("range", repaired=False).returncode != 0


def test_types_that_are_kept_are_kept_apart():
    """Blocks of one shape and of different elements, the same elements in different shapes, scalars, and sizes given as
    constants.
    """
    result = run("types", repaired=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "right"


@pytest.mark.parametrize("check", ["threads", "warnings"])
def test_launches_are_right_when_repaired(check):
    """Those of two threads at once; those that overflow, with NumPy's warnings as errors."""
    result = run(check, repaired=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "right"


@pytest.mark.parametrize("check", ["threads", "warnings"])
def test_launches_are_wrong_without_the_repair(check):
    result = run(check, repaired=False)
    assert result.returncode != 0 or result.stdout.strip() == "wrong"


def test_operators_are_triton_s_own():
    """Of numbers, scalars and blocks of every type that kernels use: the same types, shapes, bits and errors."""
    theirs, ours = (interpret(KERNELS.with_name("interpreter_operators.py"), repaired) for repaired in "01")
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    lines = theirs.stdout.splitlines()
    assert len(lines) > 6000
    assert ours.stdout.splitlines() == lines
