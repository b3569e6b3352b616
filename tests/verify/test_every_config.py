"""Every tile configuration against the reference; a wrong one is counted and placed."""

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli
from tilewise.ops.flash import configs, launch
from tilewise.verify.every_config import Outcome, Request, run_entries
from tilewise.workbench.flash import configs as flash

ENTRIES = flash.entries()


def invoke(*words):
    return CliRunner().invoke(cli.app, ["sanity", "flash", *words])


def narrow(number):
    """Whether interpretation takes seconds at most."""
    return ENTRIES[number].channels <= 64


@pytest.mark.gpu
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=entry.short, marks=() if narrow(i) or torch.cuda.is_available() else pytest.mark.slow)
        for i, entry in enumerate(ENTRIES)
    ],
)
def test_every_configuration_agrees(number):
    (line, right), *_ = run_entries(Request("flash", kernel=number))
    assert right, line


def test_the_table_is_whole():
    assert {entry.config for entry in ENTRIES} >= {
        config for rows in configs.TABLE.values() for row in rows for config in row
    }
    assert {entry.config for entry in ENTRIES} >= {config for row in configs.SHORT.values() for config in row.values()}
    assert len({entry.short for entry in ENTRIES}) == len(ENTRIES)
    for entry in ENTRIES:
        assert entry.fits()
        assert all(
            entry.shared_memory <= configs.SHARED_MEMORY[family] for family in entry.fits() if "tma" not in entry.short
        )


def test_list_and_one_configuration():
    listed = invoke("--list")
    assert listed.exit_code == 0
    assert len(listed.output.splitlines()) == len(ENTRIES)
    assert "MFLOP" in listed.output
    outcome = invoke("--kernel", "3", "--small", "-r")
    assert outcome.exit_code == 0
    assert outcome.output.splitlines()[-1] == "PASS: all 1 configurations agree with the reference"


def test_wrong_usage():
    assert invoke("--kernel", "999").exit_code == 2
    unknown = CliRunner().invoke(cli.app, ["sanity", "flush"])
    assert unknown.exit_code == 2
    assert "expected one of flash, flash-hopper, flash-decode, nsa-compressed, nsa-selected" in " ".join(
        unknown.output.split()
    )


def test_a_wrong_configuration_fails_and_is_placed(monkeypatch):
    right = launch.forward

    def wrong(inputs, config=None, taps=None):
        o, lse = right(inputs, config, taps)
        o[0, 5, 1, 3] += 1.0
        return o, lse

    monkeypatch.setattr(launch, "forward", wrong)
    outcome = invoke("--kernel", "1", "--small", "--diff")
    assert outcome.exit_code == 1
    assert "o: 1 of 16384 mismatched" in outcome.output
    assert "o mismatches by row: 5: 1" in outcome.output
    assert "o mismatches by channel: 3: 1" in outcome.output
    assert "FAIL: 1 of 1 configurations are wrong" in outcome.output


def test_fp32_is_held_to_plain_tolerances():
    truth = torch.ones(4, dtype=torch.float64)
    outcome = Outcome("o", torch.tensor([1.0, 1.002, 1.0005, torch.nan]), truth, truth.float())
    assert outcome.bad.tolist() == [False, True, False, True]
    assert not outcome.right
    assert outcome.text == "o: 2 of 4 mismatched (50.00 %), max inf"
    nothing = torch.tensor([-torch.inf, -torch.inf], dtype=torch.float64)
    assert Outcome("lse", torch.tensor([-torch.inf, 3.0]), nothing, nothing.float()).bad.tolist() == [False, True]


@pytest.mark.parametrize("words", [["--list"], ["--kernel", "3", "--small", "-r"], ["--kernel", "999"]])
def test_it_is_a_mode_of_verify(words):
    outcome = CliRunner().invoke(cli.app, ["verify", "flash", "--every-config", *words])
    assert (outcome.output, outcome.exit_code) == (invoke(*words).output, invoke(*words).exit_code)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--every-config"], "name it, one of flash, flash-hopper, flash-decode, nsa-compressed"),
        (["flash", "hstu", "--every-config"], "of one operator: name it"),
        (["flash", "--every-config", "--mutants"], "no other option"),
        (["flash", "--every-config", "--config", "small"], "no other option"),
        (["flash", "--every-config", "--dtype", "bf16"], "no other option"),
        (["flash", "--every-config", "--rtol", "0"], "no other option"),
        (["flash", "--small"], "add --every-config"),
        (["flash", "--kernel", "0"], "add --every-config"),
        (["nsa", "--every-config"], "there are no tile configurations of 'nsa': its branches have tables of their own"),
    ],
)
def test_wrong_usage_of_the_mode(words, message):
    outcome = CliRunner().invoke(cli.app, ["verify", *words])
    assert outcome.exit_code == 2
    assert message in " ".join(outcome.output.split())
