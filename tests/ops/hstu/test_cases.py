"""The kernels over the verification cases: outputs and gradients against fp64 truth."""

from functools import partial

import pytest
import torch

from tilewise import hstu_attention, registry
from tilewise.verify.cases.hstu import SUITE
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.suite import GROWTH
from tilewise.verify.text import result_lines

GPU = torch.cuda.is_available()


def check(case: str, dtype: str, device: str) -> None:
    implementation = Implementation("triton", device, interpreted=device == "cpu")
    result = Runner(registry.find("hstu"), partial(hstu_attention, backend="triton")).run(Check("hstu", implementation, case, dtype))
    assert result.passed, "\n".join(result_lines(result, verbose=False))


def cases(on_gpu: bool) -> list:
    """Interpreted, `make test` runs what `tilewise verify` does, in bf16; the other precisions are slow, and wider problems are left to a GPU."""
    chosen = SUITE.cases if on_gpu else SUITE.standard("cpu", interpreted=True)
    return [pytest.param(case.name, dtype, marks=[] if on_gpu or dtype == "bf16" else [pytest.mark.slow]) for case in chosen for dtype in DTYPES]


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "dtype"), cases(GPU))
def test_triton(case, dtype, device):
    check(case, dtype, device.type)


@pytest.mark.gpu
def test_memory_grows_with_the_length_alone(device):
    check(GROWTH, "bf16", device.type)
