"""Native sparse attention's cases on every backend, as `tilewise verify` checks them."""

import pytest
from battery import check, cpu_cases, first_quick, triton_cases

from tilewise.verify.suite import GROWTH

OPERATORS = ("nsa", "nsa-compressed", "nsa-selected", "nsa-attend")


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), triton_cases(*OPERATORS))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.parametrize(("operator", "case", "dtype"), cpu_cases(*OPERATORS))
def test_cpu(operator, case, dtype):
    check(operator, case, dtype, "cpu", "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("operator", first_quick(OPERATORS))
def test_memory_grows_with_the_length_alone(operator, device):
    check(operator, GROWTH, "bf16", "triton", device.type)
    check(operator, GROWTH, "bf16", "cpu", "cpu")
