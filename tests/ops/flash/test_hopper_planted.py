"""The bugs that are planted in Hopper's kernels compile: one that did not would be caught for that alone."""

from pathlib import Path

import pytest
from compiling import compiled

from tilewise.workbench.flash.planted import HOPPER

SCRIPT = Path(__file__).with_name("compile_hopper_planted.py")
FORWARD = ["flash_fwd_hopper_kernel"]
BACKWARD = ["flash_bwd_hopper_prepare_kernel", "flash_bwd_hopper_kernel", "flash_bwd_hopper_finish_kernel"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [mutant.name for mutant in HOPPER])
def test_planted_bugs_compile(name):
    names = [kernel["kernel"] for kernel in compiled(SCRIPT, name)]
    assert names in (FORWARD, BACKWARD, FORWARD + BACKWARD)
