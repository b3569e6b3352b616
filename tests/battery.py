"""An operator's named cases as tests: each backend through the same check that `tilewise verify` makes."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import pytest
import torch

from tilewise import workbench
from tilewise.verify.api import DTYPES
from tilewise.verify.result import Check, Implementation, Result
from tilewise.verify.run import Runner
from tilewise.verify.text import result_lines


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

    Interpreted, `make test` runs every second case of `tilewise verify`, in bf16; the others and fp32 are slow. Wider
    problems are left to a GPU, and so is fp16, which goes the way of bf16.
    """
    on_gpu = torch.cuda.is_available()
    found = []
    for operator in operators:
        suite = workbench.find(operator).load("suite")
        for i, case in enumerate(suite.cases if on_gpu else suite.standard("cpu", interpreted=True)):
            for dtype in DTYPES if on_gpu else ("bf16", "fp32"):
                quick = on_gpu or (dtype == "bf16" and i % 2 == 0)
                found.append(pytest.param(operator, case.name, dtype, marks=[] if quick else [pytest.mark.slow]))
    return found


def first_quick(values: Iterable[Any]) -> list:
    """Parameters of which, where there is no GPU, only the first is quick."""
    return [
        pytest.param(value, marks=[pytest.mark.slow] if i and not torch.cuda.is_available() else [])
        for i, value in enumerate(values)
    ]


def cpu_cases(*operators: str) -> list:
    """Operator, case and dtype for the CPU backend: all but the largest.

    `make test` runs what `tilewise verify` does by default, each in one dtype, in turn; the others are slow.
    """
    found = []
    for operator in operators:
        suite = workbench.find(operator).load("suite")
        by_default = [case.name for case in suite.standard("cpu", interpreted=False)]
        for case in suite.standard("cpu", interpreted=False, everything=True):
            turn = DTYPES[by_default.index(case.name) % 3] if case.name in by_default else None
            for dtype in DTYPES:
                marks = [] if dtype == turn else [pytest.mark.slow]
                found.append(pytest.param(operator, case.name, dtype, marks=marks))
    return found
