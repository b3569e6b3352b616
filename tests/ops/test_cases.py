"""Every operator's cases on every backend, as `tilewise verify` checks them."""

import pytest
from battery import check, cpu_cases, first_quick, triton_cases

from tilewise import workbench
from tilewise.workbench.operator import GROWTH

OPERATORS = workbench.names("suite")
# Interpreted, these take minutes of long sequences for some.
growing = pytest.mark.parametrize("operator", first_quick(OPERATORS))


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
