"""An operator's named cases as tests: each backend through the same check that `tilewise verify` makes."""

from functools import partial

import pytest
import torch

from tilewise import registry
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.text import result_lines


def check(operator: str, case: str, dtype: str, backend: str, device: str) -> None:
    """Run one case; fails with what verify would print."""
    implementation = Implementation(backend, device, interpreted=backend == "triton" and device == "cpu")
    found = registry.find(operator)
    result = Runner(found, partial(found.load("function"), backend=backend)).run(Check(operator, implementation, case, dtype))
    assert result.passed, "\n".join(result_lines(result, verbose=False))


def triton_cases(*operators: str) -> list:
    """Operator, case and dtype. On a GPU everything.

    Interpreted, `make test` runs what `tilewise verify` does, in bf16; fp32 is slow. Wider problems are left to a GPU, and so is fp16, which goes
    the way of bf16.
    """
    on_gpu = torch.cuda.is_available()
    found = []
    for operator in operators:
        suite = registry.find(operator).load("suite")
        for case in suite.cases if on_gpu else suite.standard("cpu", interpreted=True):
            for dtype in DTYPES if on_gpu else ("bf16", "fp32"):
                found.append(pytest.param(operator, case.name, dtype, marks=[] if on_gpu or dtype == "bf16" else [pytest.mark.slow]))
    return found


def cpu_cases(*operators: str) -> list:
    """Operator, case and dtype for the CPU backend: all but the largest, fp16 among the slow."""
    return [
        pytest.param(operator, case.name, dtype, marks=[pytest.mark.slow] if dtype == "fp16" else [])
        for operator in operators
        for case in registry.find(operator).load("suite").cases
        for dtype in DTYPES
        if case.name not in ("xl", "xxl")
    ]
