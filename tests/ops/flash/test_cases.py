"""Every backend over the verification cases: outputs, LSE and gradients against fp64 truth."""

from functools import partial

import pytest
import torch

from tilewise import flash_attention, registry
from tilewise.verify.cases.flash import CASES
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.suite import GROWTH
from tilewise.verify.text import result_lines

FLASH = registry.find("flash")
GPU = torch.cuda.is_available()
# More tiles than the standard cases: several key tiles, masks on both ends.
MORE = ("T=70,D=64,Dv=1", "T=700,H=1,D=64,causal=true,window=300/0", "T=300,H=1,D=64,softcap=20.0,window=100/30")


def marked(name: str):
    """Sizes that interpretation takes minutes for."""
    marks = {
        "large": [pytest.mark.slow] if not GPU else [],
        "xl": pytest.mark.skipif(not GPU, reason="needs a GPU: interpreted it takes minutes"),
        "xxl": pytest.mark.skipif(not GPU, reason="needs a GPU: interpreted it takes an hour"),
    }
    return pytest.param(name, marks=marks.get(name, ()))


NAMES = [*(marked(case.name) for case in CASES), *MORE]


def check(case: str, dtype: str, backend: str, device: str) -> None:
    implementation = Implementation(backend, device, interpreted=backend == "triton" and device == "cpu")
    result = Runner(FLASH, partial(flash_attention, backend=backend)).run(Check("flash", implementation, case, dtype))
    assert result.passed, "\n".join(result_lines(result, verbose=False))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", NAMES)
def test_triton(case, dtype, device):
    check(case, dtype, "triton", device.type)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*(case.name for case in CASES if case.name not in ("xl", "xxl")), *MORE])
def test_cpu(case, dtype):
    check(case, dtype, "cpu", "cpu")


@pytest.mark.gpu
def test_memory_grows_with_the_length_alone(device):
    check(GROWTH, "bf16", "triton", device.type)
    check(GROWTH, "bf16", "cpu", "cpu")
