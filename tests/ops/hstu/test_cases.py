"""HSTU attention's cases through the kernels, as `tilewise verify` checks them."""

import pytest
from battery import check, triton_cases

from tilewise.verify.suite import GROWTH


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), triton_cases("hstu"))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.gpu
def test_memory_grows_with_the_length_alone(device):
    check("hstu", GROWTH, "bf16", "triton", device.type)
