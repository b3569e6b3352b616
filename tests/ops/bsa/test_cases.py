"""Every backend over the verification cases of block-sparse attention, alone and as an HSTU layer calls it, against fp64 truth."""

from functools import partial

import pytest
import torch

from tilewise import registry
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.suite import GROWTH
from tilewise.verify.text import result_lines

GPU = torch.cuda.is_available()
OPERATORS = ("bsa", "hstu-bsa")


def check(operator: str, case: str, dtype: str, backend: str, device: str) -> None:
    implementation = Implementation(backend, device, interpreted=backend == "triton" and device == "cpu")
    found = registry.find(operator)
    result = Runner(found, partial(found.load("function"), backend=backend)).run(Check(operator, implementation, case, dtype))
    assert result.passed, "\n".join(result_lines(result, verbose=False))


def cases(on_gpu: bool) -> list:
    """Interpreted, `make test` runs what `tilewise verify` does, in bf16; the other precisions are slow, and wider problems are left to a GPU."""
    found = []
    for operator in OPERATORS:
        suite = registry.find(operator).load("suite")
        chosen = suite.cases if on_gpu else suite.standard("cpu", interpreted=True)
        for case in chosen:
            for dtype in DTYPES:
                marks = [] if on_gpu or dtype == "bf16" else [pytest.mark.slow]
                found.append(pytest.param(operator, case.name, dtype, marks=marks))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), cases(GPU))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.parametrize(
    ("operator", "case", "dtype"),
    [
        pytest.param(operator, case.name, dtype, marks=[pytest.mark.slow] if dtype == "fp16" else [])
        for operator in OPERATORS
        for case in registry.find(operator).load("suite").cases
        for dtype in DTYPES
        if case.name not in ("xl", "xxl")
    ],
)
def test_cpu(operator, case, dtype):
    check(operator, case, dtype, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
def test_memory_grows_with_the_length_alone(operator, device):
    check(operator, GROWTH, "bf16", "triton", device.type)
    check(operator, GROWTH, "bf16", "cpu", "cpu")
