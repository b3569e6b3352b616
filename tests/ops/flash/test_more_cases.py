"""Problems of more tiles than the verification cases have: several key tiles, masks on both ends."""

import pytest
import torch
from battery import check

from tilewise.verify.plan import DTYPES

MORE = ("T=70,D=64,Dv=1", "T=700,H=1,D=64,causal=true,window=300/0", "T=300,H=1,D=64,softcap=20.0,window=100/30")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES if torch.cuda.is_available() else ["bf16", "fp32"])
@pytest.mark.parametrize("case", MORE)
def test_triton_more(case, dtype, device):
    check("flash", case, dtype, "triton", device.type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", MORE)
def test_cpu_more(case, dtype):
    check("flash", case, dtype, "cpu", "cpu")
