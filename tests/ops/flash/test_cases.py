"""Every backend over the verification cases, as `tilewise verify` checks them, and over problems of more tiles."""

import pytest
import torch
from battery import check, cpu_cases, triton_cases

from tilewise.verify.plan import DTYPES
from tilewise.verify.suite import GROWTH

# Several key tiles, masks on both ends.
MORE = ("T=70,D=64,Dv=1", "T=700,H=1,D=64,causal=true,window=300/0", "T=300,H=1,D=64,softcap=20.0,window=100/30")


@pytest.mark.gpu
@pytest.mark.parametrize(("operator", "case", "dtype"), triton_cases("flash"))
def test_triton(operator, case, dtype, device):
    check(operator, case, dtype, "triton", device.type)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES if torch.cuda.is_available() else ["bf16", "fp32"])
@pytest.mark.parametrize("case", MORE)
def test_triton_more(case, dtype, device):
    check("flash", case, dtype, "triton", device.type)


@pytest.mark.parametrize(("operator", "case", "dtype"), cpu_cases("flash"))
def test_cpu(operator, case, dtype):
    check(operator, case, dtype, "cpu", "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MORE)
def test_cpu_more(case, dtype):
    check("flash", case, dtype, "cpu", "cpu")


@pytest.mark.gpu
def test_memory_grows_with_the_length_alone(device):
    check("flash", GROWTH, "bf16", "triton", device.type)
    check("flash", GROWTH, "bf16", "cpu", "cpu")
