"""Checks of one function: cases, the growth of memory, and uses."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tilewise import interpreter
from tilewise._interpreter_speed import idle
from tilewise.verify import uses
from tilewise.verify.attempt import error_finding
from tilewise.verify.implementation import pinned
from tilewise.verify.result import FAILURE, HOPPER, MEMORY, NOT_JUDGED, NOTE, SKIPPED, WARNING, Check, Finding, Result
from tilewise.verify.single import Single
from tilewise.verify.suite import Suite
from tilewise.verify.watch import grows_as_square, peak_memory
from tilewise.workbench.operator import GROWTH, Operator

# By the directions that no kernel for Hopper ran, of those that were computed.
NOT_TAKEN = "the kernels for Hopper do not take {}, which the portable ones ran (tilewise.explain says why)"


def _not_taken(ran: list[str], computed: tuple[str, ...]) -> tuple[Finding, ...]:
    """A note where kernels for Hopper ran no direction, or one alone. Their names say which they are of."""
    missing = [way for way in computed if not any(f"_{way[0]}wd_" in name for name in ran)]
    if not missing:
        return ()
    what = "this case" if missing == list(computed) else f"the {missing[0]} of this case"
    return (Finding(NOT_JUDGED, NOT_TAKEN.format(what), NOTE),)


class Runner:
    """Checks of one function, called as the operator's public function is."""

    def __init__(self, operator: Operator, function: Callable[..., Any]) -> None:
        self._reference = operator.load("reference")
        self._suite: Suite = operator.load("suite")
        self._function = function
        # Of the last case that was used in some way; None where it fails.
        self._ordinary: tuple[Check, uses.Ordinary | None] | None = None

    def run(self, check: Check) -> Result:
        """Make the check.

        What the function raises is a finding; a ValueError says that the check names no known case.
        """
        started, launches, simulated = time.perf_counter(), interpreter.launches(), interpreter.simulated()
        if check.case == GROWTH:
            return Result(check, findings=self._growth(check), seconds=time.perf_counter() - started)
        if check.use:
            return Result(check, findings=self._use(check), seconds=time.perf_counter() - started)
        single = self._single(check)
        comparisons, findings = single.judge()
        if check.implementation.name == HOPPER and not check.implementation.external and comparisons:
            ran = interpreter.simulated_since(simulated)
            findings += _not_taken(ran, ("forward", "backward") if single.incoming else ("forward",))
        interpreted = interpreter.launches() > launches
        return Result(check, comparisons, findings, time.perf_counter() - started, interpreted)

    def _single(self, check: Check) -> "Single":
        problem = self._suite.find(check.case).problem
        with pinned():
            return Single(self._reference, self._function, problem, check)

    def _use(self, check: Check) -> tuple[Finding, ...]:
        """Uses of one case share its ordinary use."""
        ordinary = replace(check, use="")
        if self._ordinary is None or self._ordinary[0] != ordinary:
            self._ordinary = None
            single = self._single(ordinary)
            self._ordinary = ordinary, single.ordinary()
        found = self._ordinary[1]
        if found is None:
            message = f"it fails in ordinary use: {ordinary.command()}"
            return (Finding(SKIPPED, message, NOTE),)
        return tuple(uses.find(check.use, found, check.implementation.external))

    def _growth(self, check: Check) -> tuple[Finding, ...]:
        problem = self._suite.growth
        peaks = []
        for sized in (problem, problem.twice_as_long(), problem.twice_as_long().twice_as_long()):
            with pinned():
                single = Single(self._reference, self._function, sized, check)
                inputs = single.inputs(torch.nan, contiguous=True)
            call = partial(single.call, inputs, single.incoming)
            try:
                if single.device.type == "cuda":
                    # Memory that compiling holds on to is not the method's.
                    call()
                # Kernels allocate nothing, and interpreted they take long.
                with idle() if check.implementation.interpreted else nullcontext():
                    peaks.append(peak_memory(call, single.device))
            except Exception as error:
                return (error_finding(error),)
        if not grows_as_square(peaks, max(problem.tokens())):
            return ()
        message = (
            f"{', '.join(f'{peak / 1024:.0f}' for peak in peaks)} KB at {problem}, twice and four times the tokens"
        )
        return (Finding(MEMORY, message, WARNING if check.implementation.external else FAILURE),)
