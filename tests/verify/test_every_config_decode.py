"""Every tile configuration of attention over a cache against the reference."""

import pytest
import torch

from tilewise.ops.flash.configs import SHARED_MEMORY, WIDTHS
from tilewise.ops.flash.decode import configs
from tilewise.verify.every_config import Request, run_entries
from tilewise.workbench.flash.decode.configs import entries

ENTRIES = entries()
# Interpreted, these take less than a second each; one of each width and dtype is slow, the others are nightly.
QUICK = ("step-fp32-d32-16x32", "step-bf16-d64-64x64")


def marks(entry):
    if entry.short.startswith(QUICK) or torch.cuda.is_available():
        return ()
    return pytest.mark.slow if entry.config.block_m == configs.FEWEST_ROWS else pytest.mark.nightly


@pytest.mark.gpu
@pytest.mark.parametrize(
    "number",
    [pytest.param(i, id=entry.short, marks=marks(entry)) for i, entry in enumerate(ENTRIES)],
)
def test_every_configuration_agrees(number):
    (line, right), *_ = run_entries(Request("flash-decode", kernel=number, small=True))
    assert right, line


def test_the_table_is_whole():
    found = {(family, entry.element_size, entry.channels) for entry in ENTRIES for family in entry.families}
    assert found == {(family, size, width) for family, size in configs.TABLE for width in WIDTHS}
    assert len({entry.short for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert all(entry.shared_memory <= SHARED_MEMORY[family] for family in entry.fits()), entry.short


@pytest.mark.parametrize("architecture", [80, 86, 90, 100])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("channels", WIDTHS)
def test_what_is_chosen_is_in_the_table(architecture, size, channels):
    table = {entry.config for entry in ENTRIES if (entry.element_size, entry.channels) == (size, channels)}
    assert {configs.choose(rows, channels, channels, size, architecture) for rows in (None, 1, 17, 64, 500)} <= table
