"""Steps over a cache, timed: forward alone, over slots or pages."""

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.bench.contender import contenders, own_implementation
from tilewise.bench.run import Bench
from tilewise.bench.timing import Clock
from tilewise.verify.suite import Case

# Lengths, pages and new keys; the pairs of a query and a key, and who cannot run.
STEPS = {
    "lengths=40/40,Hk=2": (80, {"gathered": "there are no pages to gather"}),
    "lengths=40/40,Hk=2,page=16": (80, {"sdpa": "takes no pages"}),
    "lengths=40/9,Hk=2,new=1,page=16": (51, dict.fromkeys(("sdpa", "gathered"), "written for entries of one length")),
}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")


def rows(text):
    operator = workbench.find("flash-decode")
    timed, own, device = operator.load("bench"), own_implementation(operator), torch.device("cpu")
    everyone = contenders(operator, timed, [], ["sdpa", "gathered"], torch.float32, own)
    bench = Bench(operator, timed, everyone, ["fwd"], torch.float32, device, 1, 2, Clock(device))
    case = Case("it", "", operator.load("suite").find(text).problem)
    return {row.implementation: row for row in bench.time_case(case, {})}


@pytest.mark.parametrize("text", STEPS)
def test_a_step_is_timed_next_to_who_can_run(text):
    pairs, reasons = STEPS[text]
    found = rows(text)
    missing = {name: row.reason for name, row in found.items() if not row.times}
    assert missing.keys() == reasons.keys()
    assert all(missing[name].startswith(reason) for name, reason in reasons.items())
    assert found["tilewise"].operations == 2 * 4 * (16 + 16) * pairs
    # The caches count as read, and not as written.
    assert found["tilewise"].bytes < 40_000


def test_it_has_no_backward():
    outcome = CliRunner().invoke(cli.app, ["bench", "flash-decode", "--mode", "bwd"])
    assert outcome.exit_code == 2
    assert "flash-decode has no backward: expected --mode fwd" in outcome.output
