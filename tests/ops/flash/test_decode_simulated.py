"""A prefill over a dense cache by the kernel for Hopper, simulated: cases that it takes, and bugs on the way to it."""

import pytest

from tilewise import interpreter, workbench
from tilewise.verify.api import score
from tilewise.verify.implementation import load_function
from tilewise.verify.leave_out import leave_out
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import HOPPER, Check, Implementation, Settings
from tilewise.verify.run import Runner
from tilewise.workbench.flash.decode.cases import SUITE
from tilewise.workbench.flash.decode.planted import HOPPER as BUGS

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
DECODE = workbench.find("flash-decode")
SIMULATED = Implementation(HOPPER, "cpu", interpreted=True)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SUITE.hopper[1:]]


@pytest.mark.parametrize("case", [SUITE.hopper[0], *SLOW])
@pytest.mark.parametrize("use", ["", pytest.param("invariance", marks=pytest.mark.nightly)])
def test_its_cases(case, use):
    """Bit for bit too, whatever is around an entry."""
    before = interpreter.simulated()
    runner = Runner(DECODE, load_function(DECODE, SIMULATED))
    result = runner.run(Check("flash-decode", SIMULATED, case, "bf16", use=use))
    assert result.passed
    assert result.findings == ()
    assert interpreter.simulated() > before


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bugs_on_the_way_are_caught(monkeypatch):
    monkeypatch.setattr("tilewise.verify.api.planted", lambda _: BUGS)
    found = {bug.name: bug.caught for bug in score(DECODE, (), DTYPES, Settings())}
    assert len(found) == len(BUGS)
    assert [name for name, caught in found.items() if not caught] == []


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_every_statement_that_synchronises_is_missed_when_it_is_left_out():
    statements = list(leave_out([Check("flash-decode", SIMULATED, case, "bf16") for case in SUITE.leave_out]))
    assert [str(one) for one in statements if not (one.found or one.redundant)] == []
