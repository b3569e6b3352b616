"""Every backend over the verification cases of native sparse attention and its parts: outputs, choices and gradients against fp64 truth."""

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
OPERATORS = ("nsa", "nsa-compressed", "nsa-selected", "nsa-attend")


def check(operator: str, case: str, dtype: str, backend: str, device: str) -> None:
    implementation = Implementation(backend, device, interpreted=backend == "triton" and device == "cpu")
    found = registry.find(operator)
    result = Runner(found, partial(found.load("function"), backend=backend)).run(Check(operator, implementation, case, dtype))
    assert result.passed, "\n".join(result_lines(result, verbose=False))


def cases(on_gpu: bool) -> list:
    """Interpreted, `make test` runs what `tilewise verify` does, in bf16; the other precisions and wider problems are slow."""
    found = []
    for operator in OPERATORS:
        suite = registry.find(operator).load("suite")
        standard = {case.name for case in suite.standard("cpu", interpreted=True)}
        for case in suite.cases:
            for dtype in DTYPES:
                slow = not on_gpu and (case.name not in standard or dtype != "bf16")
                long = not on_gpu and case.name in ("large", "xl", "xxl", "nsa-507", "group-64", "block-128", "many-blocks")
                marks = [pytest.mark.skip(reason="interpreted it takes minutes: on a GPU")] if long else [pytest.mark.slow] if slow else []
                found.append(pytest.param(operator, case.name, dtype, marks=marks))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), cases(GPU))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.parametrize(
    ("operator", "case", "dtype"),
    [
        (operator, case.name, dtype)
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
