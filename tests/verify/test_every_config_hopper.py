"""The tiles of the kernels for Hopper: all listed anywhere, each right on such a GPU and simulated."""

import itertools

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops.flash.configs import SHARED_MEMORY
from tilewise.ops.flash.hopper.configs import BACKWARD, FORWARD, FORWARD_CAPPED, FORWARD_SHORT
from tilewise.verify.every_config import Request, run_entries
from tilewise.workbench.flash.configs_hopper import BackwardEntry, ForwardEntry, entries

ENTRIES = entries()
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


# Simulated, the narrow ones take a few seconds each.
WIDE = [] if HOPPER else [pytest.mark.nightly]
NARROW = [] if HOPPER else [pytest.mark.slow]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.is_available() and not HOPPER, reason="needs a Hopper GPU, or none")
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=entry.short, marks=NARROW if entry.channels == entry.values == 64 else WIDE)
        for i, entry in enumerate(ENTRIES)
    ],
)
def test_every_configuration_agrees(number):
    (line, right), *_ = run_entries(Request("flash-hopper", kernel=number))
    assert right, line


def test_the_tables_are_whole():
    forward = [entry for entry in ENTRIES if isinstance(entry, ForwardEntry)]
    assert [((entry.channels, entry.values), entry.config) for entry in forward if not entry.capped] == [
        *FORWARD.items(),
        *FORWARD_SHORT.items(),
    ]
    assert {(entry.channels, entry.values): entry.config for entry in forward if entry.capped} == FORWARD_CAPPED
    backward = [entry for entry in ENTRIES if isinstance(entry, BackwardEntry)]
    orders = ("fixed", "opened", "cleared")
    assert {(entry.channels, entry.values, entry.order) for entry in backward} == {
        (*widths, order) for widths, order in itertools.product(BACKWARD, orders)
    }
    assert len({entry.short for entry in ENTRIES}) == len(ENTRIES)
    assert all(entry.shared_memory <= SHARED_MEMORY["hopper"] for entry in ENTRIES)


def test_listed_anywhere_and_run_on_hopper_or_simulated():
    listed = CliRunner().invoke(cli.app, ["sanity", "flash-hopper", "--list"])
    assert listed.exit_code == 0
    assert len(listed.output.splitlines()) == len(ENTRIES)
    if not torch.cuda.is_available():
        run = CliRunner().invoke(cli.app, ["sanity", "flash-hopper", "--small", "--kernel", "0"])
        assert run.exit_code == 0
        assert "PASS: all 1 configurations agree" in run.output
