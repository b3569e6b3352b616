"""Every tile configuration of block-sparse attention's kernels against the reference; a wrong one is told from the
others.
"""

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.choose import launch as choose
from tilewise.ops.bsa.selected import launch as selected
from tilewise.ops.flash.configs import SHARED_MEMORY
from tilewise.verify.every_config import Request, run_entries
from tilewise.workbench.bsa import configs as bsa
from tilewise.workbench.nsa import configs as nsa_selected

ENTRIES = bsa.entries()
# Interpreted, these take a second or two.
QUICK = ("selected_fwd-fp32-d128", "selected_bwd-fp32-d128", "choose-fp32-d128")


def invoke(*words):
    return CliRunner().invoke(cli.app, ["sanity", "bsa", *words])


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
    (line, right), *_ = run_entries(Request("bsa", kernel=number))
    assert right, line


def test_the_table_is_whole():
    assert {(entry.element_size, entry.kernel) for entry in ENTRIES} == set(configs.TABLE)
    assert {entry.config for entry in ENTRIES} >= {config for row in configs.TABLE.values() for config in row}
    assert {family for entry in ENTRIES for family in entry.families} == set(SHARED_MEMORY)
    assert len({entry.short for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        # Run as if on the first of its families, it is the one that is run.
        card = nsa_selected.CARDS[entry.families[0]]
        assert configs.choose(entry.kernel, entry.channels, entry.element_size, card) == entry.config
        assert entry.shared_memory <= SHARED_MEMORY[entry.families[0]]


def test_list():
    listed = invoke("--list")
    assert listed.exit_code == 0
    lines = listed.output.splitlines()
    assert len(lines) == len(ENTRIES)
    # Columns line up.
    assert len({line.index(" MFLOP") for line in lines}) == 1


def test_wrong_usage():
    assert invoke("--kernel", "999").exit_code == 2


def test_a_wrong_kernel_fails_and_is_placed(monkeypatch):
    right = selected.forward

    def wrong(inputs):
        o = right(inputs)
        o[0, 5] = o[0, 5].flip(-1)
        return o

    monkeypatch.setattr(selected, "forward", wrong)
    outcome = invoke("--kernel", str(number_of("selected_fwd-fp32-d128")), "--small", "--diff")
    assert outcome.exit_code == 1, outcome.output
    assert "o mismatches by row: 5: 256\n" in outcome.output
    assert "o mismatches by head: 0: 128, 1: 128" in outcome.output
    assert "FAIL: 1 of 1 configurations are wrong" in outcome.output


def test_a_wrong_backward_fails_and_is_placed(monkeypatch):
    right = selected.backward

    def wrong(*arguments):
        dq, dk, dv = right(*arguments)
        dk[0, 7, 1, 3] += 1.0
        return dq, dk, dv

    monkeypatch.setattr(selected, "backward", wrong)
    outcome = invoke("--kernel", str(number_of("selected_bwd-fp32-d128")), "--small", "--diff")
    assert outcome.exit_code == 1, outcome.output
    assert "dk: 1 of 16384 mismatched" in outcome.output
    assert "dk mismatches by row: 7: 1\n" in outcome.output


def test_a_wrong_choice_fails(monkeypatch):
    right = choose.choose

    def wrong(*arguments):
        indices, public = right(*arguments)
        # The last block that is chosen is the token's own, which always is.
        public[0, 1, 40, -1] = -1
        return indices, public

    monkeypatch.setattr(choose, "choose", wrong)
    outcome = invoke("--kernel", str(number_of("choose-fp32-d128")), "--small", "--diff")
    assert outcome.exit_code == 1, outcome.output
    assert "indices: at [0, 1, 40] block 10, which is always chosen, is not in" in outcome.output
