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


def run(*checks: str, repaired: bool) -> list[str]:
    """What each comes out as: right, wrong, or, for those after one that fails, nothing."""
    result = interpret(KERNELS, ",".join(checks), str(int(repaired)))
    assert result.returncode == 0 or not repaired, result.stderr
    found = dict(line.split() for line in result.stdout.splitlines())
    return [found.get(check, "failed") for check in checks]


def interpret(*command: str | Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(sys.path), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)


def test_all_of_it_is_right_when_repaired():
    """bf16; a range over a tensor; blocks of one shape and of different elements, the same elements in different
    shapes, scalars, and sizes given as constants; launches of two threads at once, and those that overflow, with
    NumPy's warnings as errors.
    """
    checks = [*WRONG, "cumsum", "range", "types", "threads", "warnings"]
    assert dict(zip(checks, run(*checks, repaired=True), strict=True)) == dict.fromkeys(checks, "right")


@pytest.mark.slow
@pytest.mark.parametrize("check", [*WRONG, "threads", "warnings"])
def test_it_is_wrong_without_the_repair(check):
    """Where this fails, Triton has mended its interpreter and the repair can go."""
    assert run(check, repaired=False) != ["right"]


@pytest.mark.slow
def test_cumsum_is_wrong_without_the_repair_since_it_adds_in_bf16():
    """Up to 3.8 tl.cumsum widens bf16 before it scans; since 3.9 it scans bf16, which the interpreter adds as bits."""
    assert run("cumsum", repaired=False) == ["right" if release < Version("3.9") else "wrong"]


@pytest.mark.slow
@pytest.mark.skipif(release >= Version("3.7"), reason="only Triton 3.6 with NumPy 2.4 needs it")
def test_range_over_a_tensor_fails_without_the_repair():
    assert run("range", repaired=False) == ["failed"]


@pytest.mark.slow
def test_operators_are_triton_s_own():
    """Of numbers, scalars and blocks of every type that kernels use: the same types, shapes, bits and errors."""
    theirs, ours = (interpret(KERNELS.with_name("interpreter_operators.py"), repaired) for repaired in "01")
    assert ours.returncode == theirs.returncode == 0, ours.stderr + theirs.stderr
    lines = theirs.stdout.splitlines()
    assert len(lines) > 6000
    assert ours.stdout.splitlines() == lines
