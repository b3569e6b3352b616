"""Layouts that Triton's compiler refuses, the simulation refuses too, at the kernel's line; those beside them run."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import gluon_layouts
from compiling import run_compiling
from gluon_layouts import CASES, COMPILED

from tilewise import interpreter
from tilewise._gluon.faults import KernelFaultError

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
# An access to shared memory that nothing has written is a fault of its own.
KINDS = {"refused", "layouts differ", "shapes differ", "dtypes differ", "operand"}


@pytest.mark.parametrize("name", CASES)
def test_what_the_simulation_refuses(name):
    case = CASES[name]
    x = torch.zeros(1 << 16, dtype=getattr(torch, case.dtype))
    if not case.refused:
        case.kernel[(1,)](x, **case.arguments, num_warps=case.warps)
        return
    with pytest.raises(KernelFaultError) as raised:
        case.kernel[(1,)](x, **case.arguments, num_warps=case.warps)
    assert raised.value.kind in KINDS
    assert Path(raised.value.lines[-1][0].file).name == "gluon_layout_kernels.py"


def test_tiles_of_pointers():
    case, x = CASES["pointers"], torch.arange(2048, dtype=torch.int32)
    case.kernel[(1,)](x, **case.arguments)
    assert torch.equal(x, torch.arange(0, 4096, 2, dtype=torch.int32))


@pytest.mark.parametrize("every", [pytest.param(6, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.nightly)])
def test_what_the_compiler_refuses(every):
    refused = run_compiling(Path(gluon_layouts.__file__), every)
    assert refused == [name for name in list(COMPILED)[::every] if COMPILED[name].refused]
