"""Every backend over the verification cases: outputs, LSE and gradients against fp64 truth."""

from functools import partial

import pytest
import torch

from tilewise import flash_attention, registry
from tilewise.verify.case import Case
from tilewise.verify.cases.flash import CASES, dense, packed
from tilewise.verify.run import DTYPES, verify_case

FLASH = registry.find("flash")

# Larger channels and more tiles than the standard cases: several key tiles, masks on both ends, every width of the table.
WIDE = (
    Case("d-80", "", dense(1, 150, 2, 80), {"causal": True}),
    Case("d-96-dv-128", "", dense(1, 150, 2, 96, values=128), {"causal": True}),
    Case("d-128", "", dense(2, 200, 4, 128, kv_heads=2), {"causal": True}),
    Case("d-192-dv-256", "", dense(1, 130, 1, 192, values=256), {"causal": True}),
    Case("d-256", "", dense(1, 150, 1, 256), {"window_size": (70, 20)}),
    Case("dv-1", "", dense(1, 70, 2, 64, values=1), {}),
    Case("many-tiles", "", dense(1, 700, 1, 64), {"causal": True, "window_size": (300, 0)}),
    Case("softcap-window", "", dense(1, 300, 1, 64), {"softcap": 20.0, "window_size": (100, 30)}),
    Case("packed-128", "", packed([130, 0, 257, 1], 2, 128, kv_heads=1), {"causal": True}),
)


def check(case: Case, dtype: str, backend: str, device: torch.device) -> None:
    comparisons = verify_case(FLASH, case, partial(flash_attention, return_lse=True, backend=backend), DTYPES[dtype], device)
    failed = [comparison.line() for comparison in comparisons if not comparison.passed]
    assert not failed, "\n".join(failed)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name, marks=pytest.mark.slow if case.name == "large" else ()) for case in CASES])
def test_triton(case, dtype, device):
    check(case, dtype, "triton", device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_cpu(case, dtype):
    check(case, dtype, "cpu", torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_triton_wide(case, dtype, device):
    check(case, dtype, "triton", device)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("case", WIDE, ids=lambda case: case.name)
def test_cpu_wide(case, dtype):
    check(case, dtype, "cpu", torch.device("cpu"))


def test_a_wrong_function_fails():
    """The check can fail: a kernel that forgets the scale, or returns zeros, is caught in every dtype."""
    case = next(case for case in CASES if case.name == "small")
    for wrong in (
        partial(flash_attention, return_lse=True, scale=1.0),
        lambda q, k, v: tuple(0 * x for x in flash_attention(q, k, v, return_lse=True)),
    ):
        for dtype in DTYPES.values():
            assert not all(c.passed for c in verify_case(FLASH, case, wrong, dtype, torch.device("cpu")))
