"""The kernels compiled for GPUs that are not here: they fit, spill no more than a little, and use the fast matrix
units.

The usual problems are `tilewise inspect --check`'s; these are the others.
"""

import pytest
from compiling import SCRIPT, compiled

MULTIPLYING = (
    "flash_fwd",
    "flash_bwd_dkdv",
    "flash_bwd_dq",
    "choose_scores",
    "fwd_lists",
    "fwd_union",
    "bwd_lists",
    "bwd_union",
)


def check(architecture: int, dtype: str, channels: int, block: int, group: int, spilled: int) -> None:
    kernels = compiled(SCRIPT, "nsa:launches", architecture, dtype, channels, block, group)
    names = [kernel["kernel"] for kernel in kernels]
    assert all(
        any(part in name for name in names)
        for part in (*MULTIPLYING[:5], "bwd_lists", "compress", "combine", "index_count", "choose_best")
    )
    for kernel in kernels:
        assert kernel["spill_stores"] <= spilled, kernel
        multiplies = any(part in kernel["kernel"] for part in MULTIPLYING)
        if architecture == 90 and dtype != "float32" and multiplies and block >= 64:
            assert kernel["wgmma"], kernel


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [86, 120])
@pytest.mark.parametrize(("channels", "block", "group"), [(64, 64, 4), (128, 128, 1), (256, 64, 4)])
def test_a_99_kb_card(architecture, channels, block, group):
    check(architecture, "bfloat16", channels, block, group, spilled=1600)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [192, 256])
def test_wide_heads_on_an_a100(channels):
    """Tiles of 64 rows, as on an H100, take 180,224 bytes in the backward, and a block may have 166,912."""
    check(80, "bfloat16", channels, 64, 4, spilled=1600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "channels"),
    [
        (86, 256),
        *(
            pytest.param(*at, marks=pytest.mark.nightly)
            for at in ((80, 128), (80, 256), (86, 64), (86, 128), (90, 64), (90, 128), (90, 256), (100, 128))
        ),
    ],
)
def test_fp32(architecture, channels):
    check(architecture, "float32", channels, 64, 4, spilled=3000)


@pytest.mark.nightly
@pytest.mark.parametrize(("channels", "block", "group"), [(40, 16, 3), (128, 48, 6), (256, 128, 64), (64, 32, 1)])
def test_other_shapes_on_hopper(channels, block, group):
    check(90, "bfloat16", channels, block, group, spilled=1600)
