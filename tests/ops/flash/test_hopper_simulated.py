"""Flash attention's kernels for Hopper, simulated: right in every case that they take, the same bits under every
schedule, and no statement that synchronises without a use.
"""

from pathlib import Path

import pytest
import torch

from tilewise import flash_attention, interpreter, workbench
from tilewise.ops._host import backend
from tilewise.ops.flash.hopper import launch as hopper_launch
from tilewise.verify.api import score
from tilewise.verify.leave_out import leave_out
from tilewise.verify.plan import DTYPES, plan
from tilewise.verify.result import HOPPER, NOTE, SCHEDULE, Check, Implementation, Settings
from tilewise.verify.run import NOT_TAKEN, Runner
from tilewise.verify.worker import Job, run_jobs
from tilewise.workbench.flash.cases import SUITE
from tilewise.workbench.flash.planted_sync import SYNC

pytestmark = pytest.mark.skipif(not interpreter.interpreting(), reason="kernels are compiled here")
FLASH = workbench.find("flash")
SIMULATED = Implementation(HOPPER, "cpu", interpreted=True)
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in SUITE.hopper[1:]]


def attend(order, seed=None, sms=2, channels=64, **options):
    """Output and gradients with T 300, in the order of additions that is named."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 300, 2, channels, generator=generator).bfloat16() for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    before = interpreter.simulated()
    with backend.as_if_on(90), backend.few_sms(sms), interpreter.scheduled(seed):
        o = flash_attention(*leaves, backend="triton", deterministic=order == "fixed", **options)
        results = [o, *torch.autograd.grad(o, leaves, do)]
    assert interpreter.simulated() == before + 2
    return [x.detach() for x in results]


def check(case, dtype="bf16", **settings):
    from tilewise.verify.implementation import load_function

    runner = Runner(FLASH, load_function(FLASH, SIMULATED))
    before = interpreter.simulated()
    result = runner.run(Check("flash", SIMULATED, case, dtype, Settings(**settings)))
    return result, interpreter.simulated() - before


@pytest.mark.parametrize("case", [SUITE.hopper[0], *SLOW])
def test_its_cases(case):
    result, launches = check(case)
    assert result.passed
    assert result.findings == ()
    # Forward and backward.
    assert launches >= 2


def test_the_default_run_has_one_of_them_and_all_of_them_ten():
    def planned(**options):
        checks = plan(FLASH, None, (), DTYPES, Settings(), **options)
        return [(one.case, one.dtype) for one in checks if one.implementation == SIMULATED]

    assert planned() == [(SUITE.hopper[0], "bf16")]
    assert planned(everything=True) == [(name, dtype) for name in SUITE.hopper for dtype in ("fp16", "bf16")]
    nsa = plan(workbench.find("nsa"), None, (), DTYPES, Settings())
    assert SIMULATED not in [one.implementation for one in nsa]


def test_a_case_that_they_do_not_take_says_so():
    result, launches = check("one-key")
    assert (result.passed, launches) == (True, 0)
    assert [(one.message, one.severity) for one in result.findings] == [(NOT_TAKEN.format("this case"), NOTE)]


def test_a_direction_that_they_do_not_take_says_so(monkeypatch):
    monkeypatch.setattr(hopper_launch, "fits", lambda _inputs: False)
    result, launches = check("long-window")
    assert (result.passed, launches) == (True, 1)
    assert [one.message for one in result.findings] == [NOT_TAKEN.format("the backward of this case")]
    result, launches = check("long-window", gradients=False)
    assert (result.findings, launches) == ((), 1)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sms", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("channels", [64, pytest.param(192, marks=pytest.mark.slow)])
def test_the_fixed_order_gives_the_same_bits_under_every_schedule(seed, sms, channels):
    usual, other = (attend("fixed", *how, channels=channels, causal=True) for how in ((), (seed, sms)))
    assert all(map(torch.equal, usual, other))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("causal", [False, True])
def test_the_free_order_differs_by_rounding(seed, causal):
    for fixed, free in zip(attend("fixed", causal=causal), attend("free", seed, causal=causal), strict=True):
        torch.testing.assert_close(free, fixed, rtol=2e-2, atol=2e-2)


@pytest.mark.nightly
@pytest.mark.parametrize("case", SUITE.hopper)
def test_twenty_schedules(case):
    result, _ = check(case, schedules=tuple(range(20)))
    assert result.passed
    assert SCHEDULE not in [finding.status for finding in result.findings]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_statement_that_synchronises_is_missed_when_it_is_left_out():
    statements = list(leave_out([Check("flash", SIMULATED, case, "bf16") for case in SUITE.leave_out]))
    assert len(statements) >= 100
    assert [str(one) for one in statements if not (one.found or one.redundant)] == []
    # A comment may not cover what is found.
    assert {one.what for one in statements if not one.found} == {"thread barrier"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_bugs_of_synchronisation_are_caught(monkeypatch):
    monkeypatch.setattr("tilewise.verify.api.planted", lambda _: SYNC)
    found = {bug.name: bug.caught for bug in score(FLASH, (), DTYPES, Settings())}
    assert len(found) >= 35
    assert [name for name, caught in found.items() if not caught] == []


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_bugs_of_values_are_caught(monkeypatch):
    monkeypatch.setattr(
        "tilewise.verify.api.planted", lambda _: [bug for bug in SUITE.planted_for_hopper() if not bug.simulated]
    )
    found = {bug.name: bug.caught for bug in score(FLASH, (), DTYPES, Settings())}
    assert len(found) == 47
    assert [name for name, caught in found.items() if not caught] == []


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("order", ["opened", "cleared"])
def test_bugs_are_caught_in_a_free_order(order):
    place = Path(__file__).with_name("free_orders.py")
    implementation = Implementation(f"{place}:{order}", "cpu", external=True, interpreted=True)
    checks = tuple(Check("flash", implementation, case, "bf16") for case in (*SUITE.leave_out, *SUITE.hopper))
    # A forward has no order of additions.
    bugs = [bug.name for bug in SUITE.planted_for_hopper() if bug.module != "flash.hopper.fwd"]
    jobs = [Job(checks, name, until_failure=True) for name in ("", *bugs)]
    right, *missed = [results[-1].passed for results in run_jobs(jobs)]
    assert right
    assert [name for name, passed in zip(bugs, missed, strict=True) if passed] == []
