"""An operator's named cases as tests: each backend through the same check that `tilewise verify` makes."""

import json
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tilewise import workbench
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Check, Implementation, Result
from tilewise.verify.run import Runner
from tilewise.verify.text import result_lines

# By operator the few cases that catch every planted bug twice, as `tools/fast_cases.py` chooses them.
FAST = json.loads((Path(__file__).parent / "data/fast_cases.json").read_text())


def chosen(operator: str, case: str) -> bool:
    """Whether the case is one of those."""
    return operator in FAST and case in FAST[operator]["cases"]


def is_fast(operator: str, case: str) -> bool:
    """Whether `make test` runs the case: every one of an operator for which none have been chosen."""
    return operator not in FAST or chosen(operator, case)


def check(operator: str, case: str, dtype: str, backend: str, device: str) -> Result:
    """Run one case, and return what was compared; fails with what verify would print."""
    implementation = Implementation(backend, device, interpreted=backend == "triton" and device == "cpu")
    found = workbench.find(operator)
    result = Runner(found, partial(found.load("function"), backend=backend)).run(
        Check(operator, implementation, case, dtype)
    )
    assert result.passed, "\n".join(result_lines(result))
    return result


def triton_cases(*operators: str) -> list:
    """Operator, case and dtype. On a GPU everything.

    Interpreted, `make test` runs the fast cases in bf16; the slow tests run all of `tilewise verify`'s, and the fast
    ones in fp32; the others in fp32 are nightly. Wider problems that catch nothing more are left to a GPU, and so is
    fp16, which goes the way of bf16.
    """
    on_gpu = torch.cuda.is_available()
    found = []
    for operator in operators:
        suite = workbench.find(operator).load("suite")
        standard = suite.standard("cpu", interpreted=True)
        for case in suite.cases if on_gpu else [x for x in suite.cases if x in standard or chosen(operator, x.name)]:
            for dtype in DTYPES if on_gpu else ("bf16", "fp32"):
                left_out = 0 if on_gpu else (not is_fast(operator, case.name)) + (dtype != "bf16")
                marks = ([], [pytest.mark.slow], [pytest.mark.nightly])[left_out]
                found.append(pytest.param(operator, case.name, dtype, marks=marks))
    return found


def first_quick(values: Iterable[Any]) -> list:
    """Parameters of which, where there is no GPU, only the first is quick."""
    return [
        pytest.param(value, marks=[pytest.mark.slow] if i and not torch.cuda.is_available() else [])
        for i, value in enumerate(values)
    ]


def some_quick(values: Iterable[Any], every: int) -> list:
    """Parameters of which every so many is quick, the first and others after it."""
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=[pytest.mark.slow] if i % every else [])
        for i, value in enumerate(values)
    ]


def cpu_cases(*operators: str) -> list:
    """Operator, case and dtype for the CPU backend: all but the largest.

    `make test` runs the fast cases, each in one dtype, in turn; the slow tests run what `tilewise verify` does by
    default, and the others in one dtype; the rest is nightly.
    """
    found = []
    for operator in operators:
        suite = workbench.find(operator).load("suite")
        by_default = [case.name for case in suite.standard("cpu", interpreted=False)]
        for i, case in enumerate(suite.standard("cpu", interpreted=False, everything=True)):
            for j, dtype in enumerate(DTYPES):
                in_turn = i % len(DTYPES) == j
                marks = [] if is_fast(operator, case.name) and in_turn else [pytest.mark.slow]
                if not in_turn and case.name not in by_default:
                    marks = [pytest.mark.nightly]
                found.append(pytest.param(operator, case.name, dtype, marks=marks))
    return found
