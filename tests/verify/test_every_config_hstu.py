"""Every tile configuration of HSTU attention's kernels against the reference; a wrong one is counted and placed."""

import re

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops.flash.configs import SHARED_MEMORY
from tilewise.ops.hstu import configs, launch
from tilewise.verify.every_config import Request, run_entries
from tilewise.workbench.hstu import configs as hstu

ENTRIES = hstu.entries()
# Interpreted, these take a second or two.
QUICK = ("fwd-fp32-d64", "dkdv-fp32-d64", "dq-fp32-d64")


def invoke(*words):
    return CliRunner().invoke(cli.app, ["sanity", "hstu", *words])


def number_of(start):
    return next(i for i, entry in enumerate(ENTRIES) if entry.short.startswith(start))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(
            i,
            id=entry.short,
            marks=() if entry.short.startswith(QUICK) or torch.cuda.is_available() else pytest.mark.slow,
        )
        for i, entry in enumerate(ENTRIES)
    ],
)
def test_every_configuration_agrees(number):
    (line, right), *_ = run_entries(Request("hstu", kernel=number))
    assert right, line


def test_the_table_is_whole():
    assert {entry.config for entry in ENTRIES} == {
        config for rows in configs.TABLE.values() for row in rows for config in row
    }
    assert {(entry.kernel, entry.element_size, entry.channels) for entry in ENTRIES} == {
        (kernel, size, width // 2) for _, size, kernel in configs.TABLE for width in configs.WIDTHS
    }
    assert {family for entry in ENTRIES for family in entry.families} == set(SHARED_MEMORY)
    assert len({entry.short for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert all(entry.shared_memory <= SHARED_MEMORY[family] for family in entry.families if not entry.config.tma)


def test_list_and_one_configuration():
    listed = invoke("--list")
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    assert len(lines) == len(ENTRIES)
    # Columns line up.
    assert len({line.index(" MFLOP") for line in lines}) == 1
    outcome = invoke("--kernel", str(number_of("fwd-fp32-d64")), "--small", "-r")
    assert outcome.exit_code == 0
    assert "o with targets: 0 of" in outcome.output
    assert outcome.output.splitlines()[-1] == "PASS: all 1 configurations agree with the reference"


def test_wrong_usage():
    assert invoke("--kernel", "999").exit_code == 2


def test_a_wrong_configuration_fails_and_is_placed(monkeypatch):
    right = launch.forward

    def wrong(inputs, config=None, taps=None):
        o = right(inputs, config, taps)
        o[12, 1, 3] += 1.0
        return o

    monkeypatch.setattr(launch, "forward", wrong)
    outcome = invoke("--kernel", str(number_of("fwd-fp32-d64")), "--small", "--diff")
    assert outcome.exit_code == 1
    assert "o: 1 of 17024 mismatched" in outcome.output
    assert "o mismatches by row: 12: 1" in outcome.output
    assert "o with targets mismatches by channel: 3: 1" in outcome.output
    assert "FAIL: 1 of 1 configurations are wrong" in outcome.output


def test_targets_that_see_each_other_fail(monkeypatch):
    right = launch.make_inputs

    def without(q, k, v, offsets, _targets, *numbers):
        return right(q, k, v, offsets, None, *numbers)

    monkeypatch.setattr(launch, "make_inputs", without)
    outcome = invoke("--kernel", str(number_of("dq-fp32-d64")), "--small", "--diff")
    assert outcome.exit_code == 1
    assert "dq: 0 of 8832 mismatched" in outcome.output
    # The targets of the long sequence but for its first, which sees no other, and the context of both, which must not
    # see them.
    rows = {
        int(word.split(":")[0]) for word in re.findall(r"by row: (.*?)(?: \.\.\.)?\n", outcome.output)[0].split(", ")
    }
    assert rows
    assert rows <= {0, 1, 2, 5, 6, 7, *range(61, 69)}
