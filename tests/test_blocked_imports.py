"""Without triton the reference and CPU backends work, and without Gluon the portable kernels: each module is blocked in
turn.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "blocked_imports.py"


def run(blocked, *backends, **environment):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment}
    done = subprocess.run(
        [sys.executable, SCRIPT, blocked, *backends], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_without_triton():
    said = run("triton", "anybody", "cpu", TRITON_INTERPRET="0")
    assert "ImportError: backend is 'triton', for tensors on cpu, and triton cannot be imported: install it" in said
    assert "explain: backend is 'triton'" in said


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["triton.experimental.gluon", "triton.experimental"])
def test_without_gluon(blocked):
    said = run(blocked, "tilewise", "cpu", "triton", TRITON_INTERPRET="1")
    assert "triton runs" in said
    assert "forward: Gluon cannot be imported from Triton" in said
    assert "(no module named triton.experimental.gluon)" in said
    assert "portable kernels" in said


@pytest.mark.slow
@pytest.mark.parametrize("blocked", ["triton.experimental", "triton.experimental.gluon"])
def test_where_triton_lacks_gluon_too(blocked):
    """No kernel can be compiled then: Triton's compiler imports it. What needs no kernels works."""
    assert "forward: Gluon cannot be imported from Triton" in run(blocked, "anybody", "cpu", TRITON_INTERPRET="0")


@pytest.mark.slow
def test_portable_kernels_are_inspected_without_gluon():
    said = run("triton.experimental.gluon", "tilewise", "cpu", TRITON_INTERPRET="0")
    assert (
        "inspected: ['flash_bwd_dkdv_kernel', 'flash_bwd_dq_kernel', 'flash_bwd_prepare_kernel', 'flash_fwd_kernel']"
        in said
    )
