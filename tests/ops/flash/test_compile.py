"""The default kernels compiled for GPUs that are not here: they fit, do not spill more than a little, and use the fast matrix units."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.ops.flash.configs import SHARED_MEMORY, family

SCRIPT = Path(__file__).with_name("compile_kernels.py")


def most_spilled(dtype: str, channels: int, variant: str) -> int:
    """Bytes that a thread may spill: a little more than it does. Some problems are short of registers by nature."""
    if dtype == "float32":
        return 2400 if channels == 256 else 1400  # three TF32 products, each operand split in two
    if variant == "all" or channels % 16 != 0:
        return 1250  # softcap and both window limits; rows that Triton does not know to be aligned, so an address an element
    if variant == "compressed-packed":
        return 250  # rows through pointers, whose addresses take registers
    return 450 if channels == 256 else 120


def compiled(architecture: int, dtype: str, channels: int, variant: str) -> list[dict]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, str(SCRIPT), str(architecture), dtype, str(channels), variant]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def check(architecture: int, dtype: str, channels: int, variant: str) -> None:
    kernels = compiled(architecture, dtype, channels, variant)
    assert [kernel["name"] for kernel in kernels] == ["flash_fwd_kernel", "flash_bwd_prepare_kernel", "flash_bwd_dkdv_kernel", "flash_bwd_dq_kernel"]
    for kernel in kernels:
        assert kernel["shared_memory"] <= SHARED_MEMORY[family(architecture)], kernel
        assert kernel["spilled"] <= most_spilled(dtype, channels, variant), kernel
        assert kernel["registers"] >= 16, "a kernel that does its work needs more"
        assert not kernel["wgmma_serialised"] or (channels == 256 and variant == "all"), kernel
        if architecture == 90 and dtype != "float32" and "prepare" not in kernel["name"]:
            assert kernel["wgmma"], kernel


def slow(*values: int):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(("architecture", "channels"), [(80, 128), (90, 64), (90, 128), (100, 128), slow(80, 64), slow(100, 64)])
def test_default_kernels(architecture, channels):
    check(architecture, "bfloat16", channels, "causal")


@pytest.mark.parametrize(("architecture", "channels"), [(86, 128), slow(86, 32), slow(86, 64), slow(86, 256), slow(120, 128)])
def test_every_width_fits_a_99_kb_card(architecture, channels):
    check(architecture, "bfloat16", channels, "causal")


@pytest.mark.parametrize(("architecture", "variant"), [(90, "compressed"), (90, "compressed-packed"), (86, "compressed")])
def test_strided_keys(architecture, variant):
    check(architecture, "bfloat16", 128, variant)


@pytest.mark.parametrize("architecture", [86, 90])
def test_fp32(architecture):
    check(architecture, "float32", 64, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["plain", "packed", "all"])
@pytest.mark.parametrize(("dtype", "channels"), [("float16", 16), ("bfloat16", 40), ("bfloat16", 64), ("bfloat16", 128), ("float16", 256)])
@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
def test_every_variant(architecture, dtype, channels, variant):
    check(architecture, dtype, channels, variant)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [32, 128, 256])
@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
def test_fp32_every_width(architecture, channels):
    check(architecture, "float32", channels, "all")


@pytest.mark.parametrize("module", ["flash.kernels_fwd", "flash.kernels_bwd"])
def test_taps_that_are_off_leave_no_trace_in_the_code(module):
    """The PTX is the same, instruction for instruction, with every tap line taken out of the source."""
    script = Path(__file__).parent / "compile_taps.py"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": ":".join(sys.path)}
    digests = []
    for words in ([], ["without"]):
        outcome = subprocess.run([sys.executable, str(script), module, *words], capture_output=True, text=True, env=environment)
        assert outcome.returncode == 0, outcome.stderr
        digests.append(json.loads(outcome.stdout))
    assert len(digests[0]) == 4
    assert digests[0] == digests[1]
