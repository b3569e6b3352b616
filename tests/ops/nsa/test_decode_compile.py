"""The kernels of decoding over an NSACache compiled for GPUs that are not here: they fit, and spill little."""

import pytest
from compiling import SCRIPT, compiled

NAMES = ("write", "scores", "importance", "choose", "attend", "combine", "commit")


def check(architecture: int, dtype: str, channels: int, variant: str) -> None:
    kernels = compiled(SCRIPT, "nsa.decode:launches", architecture, dtype, channels, variant)
    assert [kernel["kernel"] for kernel in kernels] == [f"nsa_cached_{name}_kernel" for name in NAMES]
    for kernel in kernels:
        assert kernel["spill_stores"] <= (1500 if dtype == "float32" and channels == 256 else 0), kernel


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_a_step(architecture):
    check(architecture, "bfloat16", 128, "step")


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["step-paged", "odd"])
def test_on_hopper(variant):
    check(90, "bfloat16", 128, variant)


@pytest.mark.nightly
@pytest.mark.parametrize("variant", ["step", "step-paged", "mqa", "long", "odd"])
@pytest.mark.parametrize(("dtype", "channels"), [("bfloat16", 64), ("float16", 40), ("float16", 256), ("float32", 128)])
@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
def test_every_variant(architecture, dtype, channels, variant):
    check(architecture, dtype, channels, variant)
