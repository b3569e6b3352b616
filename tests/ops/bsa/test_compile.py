"""The kernels of HSTU attention, dense and block-sparse, compiled for GPUs that are not here: they fit, spill little,
use fast matrix units.

The usual problems are `tilewise inspect --check`'s; these are the others.
"""

import pytest
from compiling import SCRIPT, compiled

MULTIPLYING = ("hstu_fwd", "hstu_bwd_dkdv", "hstu_bwd_dq")
OTHERS = (
    "bsa_choose",
    "bsa_selected_fwd",
    "bsa_selected_bwd",
    "bsa_norm_fwd",
    "bsa_norm_bwd",
    "bsa_bwd_keys",
    "order_tiles",
)


def check(architecture: int, dtype: str, channels: int, values: int, block: int, spilled: int) -> None:
    kernels = compiled(SCRIPT, "hstu:launches", architecture, dtype, channels, values)
    kernels += compiled(SCRIPT, "bsa:launches", architecture, dtype, channels, values, block)
    names = [kernel["kernel"] for kernel in kernels]
    assert all(any(part in name for name in names) for part in (*MULTIPLYING, *OTHERS))
    for kernel in kernels:
        assert kernel["spill_stores"] <= spilled, kernel
        # dK and dV take query tiles of 32 rows where channels are few, and so plain matrix instructions for one
        # product.
        if architecture == 90 and dtype != "float32" and any(part in kernel["kernel"] for part in MULTIPLYING):
            assert kernel["wgmma"], kernel


@pytest.mark.slow
def test_hopper():
    check(90, "bfloat16", 32, 64, 32, spilled=400)


@pytest.mark.nightly
@pytest.mark.parametrize("architecture", [80, 86, 100, 120])
@pytest.mark.parametrize(("channels", "values", "block"), [(32, 64, 32), (128, 128, 128), (256, 256, 64)])
def test_other_cards(architecture, channels, values, block):
    check(architecture, "bfloat16", channels, values, block, spilled=1600)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "channels"),
    [
        (86, 256),
        *(
            pytest.param(*at, marks=pytest.mark.nightly)
            for at in ((80, 128), (86, 64), (86, 128), (90, 64), (90, 128), (90, 256), (100, 128))
        ),
    ],
)
def test_fp32(architecture, channels):
    check(architecture, "float32", channels, channels, 64, spilled=3000)


@pytest.mark.nightly
@pytest.mark.parametrize(("channels", "values", "block"), [(40, 24, 16), (16, 48, 13), (256, 256, 128), (64, 128, 64)])
def test_other_shapes_on_hopper(channels, values, block):
    check(90, "bfloat16", channels, values, block, spilled=1600)
