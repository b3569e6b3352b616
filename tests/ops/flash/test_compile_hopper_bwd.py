"""Hopper's backward compiled without a GPU: it fits, hardly spills, and uses TMA and the fast matrix units."""

from pathlib import Path

import pytest
from compiling import compiled

SCRIPT = Path(__file__).with_name("compile_hopper_bwd.py")
NAMES = ["flash_bwd_hopper_prepare_kernel", "flash_bwd_hopper_kernel", "flash_bwd_hopper_finish_kernel"]


# Bytes that a thread spills at 128 channels, the most of what Triton 3.6.0, 3.7.1 and 3.9.0 give in every order: what
# the end of a block needs is kept in memory during the loop, and softcap keeps some there in its own.
SPILLED = {
    "plain": 100,
    "causal": 96,
    "groups": 100,
    "sweeps": 156,
    "window": 180,
    "one-head-window": 80,
    "packed": 92,
    "softcap": 300,
    "all": 372,
}


def most_spilled(channels: int, values: int, variant: str) -> int:
    """Bytes that a thread may spill."""
    if max(channels, values) > 128:
        # One more number that the loop keeps, under a left limit.
        return 16 if channels == 256 and variant in ("window", "one-head-window") else 0
    if min(channels, values) > 64:
        return SPILLED[variant]
    return 96 if max(channels, values) > 64 else 16


def check(dtype: str, channels: int, values: int, variant: str, order: str = "fixed") -> None:
    prepare, main, finish = compiled(SCRIPT, dtype, channels, values, variant, order)
    assert [kernel["kernel"] for kernel in (prepare, main, finish)] == NAMES
    assert prepare["spill_stores"] == finish["spill_stores"] == 0
    assert main["spill_stores"] <= most_spilled(channels, values, variant), main
    assert main["wgmma"], main
    assert main["tma"], main
    assert not main["wgmma_serialised"], main
    # Two warpgroups of 4 warps, and one of single warps that fetch tiles and keep the order.
    assert main["warps"] == 12, main


@pytest.mark.parametrize("channels", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_causal(channels):
    check("bfloat16", channels, channels, "causal")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("variant", "order"),
    [
        *((variant, "fixed") for variant in SPILLED),
        *((variant, "opened") for variant in ("plain", "softcap")),
        *((variant, "cleared") for variant in ("causal", "groups", "packed")),
    ],
)
def test_every_variant(variant, order):
    """In the orders that `choose_order` gives it at this width."""
    check("bfloat16", 128, 128, variant, order)


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "order"), [("causal", "opened"), ("packed", "opened"), ("groups", "cleared")])
def test_narrow_ones_in_a_free_order(variant, order):
    check("bfloat16", 64, 64, variant, order)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "channels", "values"),
    [("float16", 40, 40), ("bfloat16", 64, 64), ("bfloat16", 128, 64), ("bfloat16", 64, 96)],
)
def test_every_width(dtype, channels, values):
    check(dtype, channels, values, "all")


@pytest.mark.parametrize(
    ("channels", "values"),
    [
        (192, 128),
        pytest.param(192, 192, marks=pytest.mark.slow),
        pytest.param(256, 256, marks=pytest.mark.slow),
        *(pytest.param(*widths, marks=pytest.mark.nightly) for widths in ((128, 192), (128, 256), (256, 64))),
    ],
)
@pytest.mark.parametrize(
    ("variant", "order"),
    [
        ("causal", "fixed"),
        *(
            pytest.param(variant, order, marks=pytest.mark.nightly)
            for variant, order in (
                *(
                    (one, "fixed")
                    for one in ("plain", "groups", "sweeps", "window", "one-head-window", "packed", "uncapped")
                ),
                ("causal", "cleared"),
            )
        ),
    ],
)
def test_wide_ones_do_not_spill(channels, values, variant, order):
    check("bfloat16", channels, values, variant, order)
