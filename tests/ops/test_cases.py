"""Every operator's cases on every backend, as `tilewise verify` checks them."""

import pytest
import torch
from battery import check, cpu_cases, triton_cases

from tilewise import workbench
from tilewise.workbench.operator import GROWTH

OPERATORS = workbench.names("suite")
# Interpreted, the others take minutes of long sequences, and these run the same kernels.
QUICK = OPERATORS if torch.cuda.is_available() else ("flash", "nsa", "hstu", "bsa")
growing = pytest.mark.parametrize(
    "operator", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPERATORS]
)


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), triton_cases(*OPERATORS))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.parametrize(("operator", "case", "dtype"), cpu_cases(*OPERATORS))
def test_cpu(operator, case, dtype):
    check(operator, case, dtype, "cpu", "cpu")


@pytest.mark.gpu
@growing
def test_memory_of_triton_grows_with_the_length_alone(operator, device):
    check(operator, GROWTH, "bf16", "triton", device.type)


@growing
def test_memory_of_cpu_grows_with_the_length_alone(operator):
    check(operator, GROWTH, "bf16", "cpu", "cpu")
