"""Hopper's forward compiled for sm_90 where there is no GPU: it fits, does not spill, and its wgmma run side by side.

Spills are judged with the assembler of Triton 3.6 and 3.7, which the tiles were chosen with. Later ones spill more
where registers are few: with three warpgroups, at 64 channels, and at 256.
"""

from pathlib import Path

import pytest
from compiling import compiled

SCRIPT = Path(__file__).with_name("compile_hopper_fwd.py")
WIDTHS = (64, 128, 192, 256)
# That of Triton 3.6 and 3.7.
PTXAS = "12."


def check(
    dtype: str, channels: int, values: int, *variants: str, most_spilled: int = 0, spilled_later: int = 0
) -> None:
    kernels = compiled(SCRIPT, dtype, *(word for variant in variants for word in (channels, values, variant)))
    assert len(kernels) == len(variants)
    for kernel in kernels:
        assert kernel["kernel"] == "flash_fwd_hopper_kernel"
        assert (kernel["warps"], kernel["registers"]) in ((12, 168), (16, 128))
        assert kernel["wgmma"]
        assert not kernel["wgmma_serialised"], kernel
        assert kernel["tma"]
        chosen_with = kernel["ptxas"].startswith(PTXAS)
        judged = chosen_with or (kernel["warps"] == 12 and max(channels, values) <= 128)
        allowed = most_spilled + (0 if chosen_with else spilled_later) if judged else 1200
        assert kernel["spill_stores"] + kernel["spill_loads"] <= allowed, kernel


def test_the_usual_problem():
    check("bfloat16", 128, 128, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("channels", [pytest.param(64, marks=pytest.mark.nightly), 128])
def test_every_variant(channels):
    # Under a limit to the left 12 bytes, loaded again and again, with the assembler of Triton 3.9.
    check(
        "bfloat16",
        channels,
        channels,
        "causal",
        "causal-long",
        "plain",
        "packed",
        "windowed",
        "all",
        spilled_later=88 if channels == 64 else 0,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("values", WIDTHS)
@pytest.mark.parametrize("channels", WIDTHS)
def test_every_pair_of_widths(channels, values):
    check(
        "float16",
        channels,
        values,
        "plain",
        "packed",
        most_spilled={(128, 256): 24, (192, 192): 48, (192, 256): 48, (256, 256): 184}.get((channels, values), 0),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("channels", "values"),
    [
        (256, 256),
        *(
            pytest.param(*widths, marks=pytest.mark.nightly)
            for widths in ((64, 128), (128, 64), (192, 128), (128, 256))
        ),
    ],
)
def test_softcap_of_the_widest_tiles_spills_a_little(channels, values):
    check("bfloat16", channels, values, "all", most_spilled=250)
