"""Which launches are inspected: every kernel there is, and every configuration that sanity numbers; compiled are none
of them.
"""

import re
from pathlib import Path

import pytest
from compiling import run_compiling

KERNELS = Path(__file__).parent.parent.parent / "src" / "tilewise" / "ops"


@pytest.mark.slow
def test_every_kernel_is_held_to_its_allowance():
    found = run_compiling(Path(__file__).with_name("list_launches.py"))
    sources = [path.read_text() for path in KERNELS.rglob("*.py") if "probe" not in path.parts]
    kernels = {name for source in sources for name in re.findall(r"(?m)jit.*\ndef (\w+_kernel)\(", source)}
    assert len(kernels) > 25
    assert kernels == {kernel for kernel, _, _ in found["checked"]}
    for kernel, direction, _ in found["checked"]:
        assert direction == "backward" or "_bwd_" not in kernel or "queries" in kernel
    # Each configuration is one kernel, in one way or two, with and without dQ.
    for operator, configurations in found["configurations"].items():
        assert all(1 <= len(names) <= 2 for names in configurations), operator
    labels = {label for _, _, label in found["checked"]}
    # At 64 channels alone, a forward has other tiles for many keys.
    assert {label.replace("D 64", "D 128") for label in labels if "D 64" in label} - labels == {
        "D 128 causal-long hopper"
    }
    # At 128 alone: named blocks.
    alone = {label.replace("D 128", "D 64") for label in labels if "D 128" in label} - labels
    assert alone == {"attend D 64"}
    assert found["limited"], "the launch has the limit of registers that a GPU's has"
