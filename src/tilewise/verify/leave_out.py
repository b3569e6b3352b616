"""`tilewise verify OP --leave-out`: every statement that synchronises left out in turn, in simulated Gluon kernels.

What is found so is needed, and its lack would be seen; what gets away is needless, or a fault of its kind would be
missed.
"""

import linecache
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from tilewise import interpreter, workbench
from tilewise.ops._host import backend
from tilewise.verify.result import HOPPER, Check, Implementation, Settings
from tilewise.verify.suite import Suite
from tilewise.workbench.operator import Operator, UsageError

Lines = tuple[Any, ...]


class Request(NamedTuple):
    """What the command line asked for."""

    operator: str
    impl: str | None
    configs: Sequence[str]
    dtype: str
    gradients: bool


# How a comment above a statement, or above a call that leads there, begins that says why another makes it needless.
REDUNDANT = "# Redundant: "


class Statement(NamedTuple):
    """A statement that synchronises: its lines, what it is, and how it was found out; empty where it got away."""

    lines: Lines
    what: str
    found: str = ""

    @property
    def redundant(self) -> bool:
        """Whether a comment of the kernel's says so."""
        return any(_comment(line).startswith(REDUNDANT) for line in self.lines)

    def __str__(self) -> str:
        line, *callers = self.lines
        text = linecache.getline(line.file, line.number).strip()
        return f"{line}{''.join(f' < {one}' for one in callers)}: {text}"


def _comment(line: Any) -> str:
    """The comment above a line; empty where there is none."""
    number, found = line.number - 1, ""
    while (text := linecache.getline(line.file, number).strip()).startswith("#"):
        number, found = number - 1, text
    return found


def run_request(request: Request, console: Console) -> bool:
    """Run it; returns whether all are found."""
    operator = workbench.find(request.operator)
    checks = _checks(operator, request)
    started = time.perf_counter()
    statements = []
    for statement in leave_out(checks):
        statements.append(statement)
        sign = "[green]✓[/]" if statement.found or statement.redundant else "[red]✗[/]"
        outcome = statement.found or ("redundant, it says" if statement.redundant else f"got away: {statement.what}")
        console.print(f"{sign} {outcome:<28} ", end="", highlight=False)
        console.print(str(statement), highlight=False, markup=False, soft_wrap=True)
    missed = sum(not (statement.found or statement.redundant) for statement in statements)
    seconds = time.perf_counter() - started
    if not statements:
        console.print("[red]FAIL[/]: no Gluon kernel ran", highlight=False)
    elif missed:
        console.print(
            f"[red]FAIL[/]: {missed} of {len(statements)} statements that synchronise can be left out unnoticed, in"
            f" {seconds:.0f} s",
            highlight=False,
        )
    else:
        console.print(
            f"[green]PASS[/]: {sum(bool(one.found) for one in statements)} of {len(statements)} statements that"
            f" synchronise are found when left out, the others are redundant by a comment; in {seconds:.0f} s",
            highlight=False,
        )
    return bool(statements) and not missed


def _checks(operator: Operator, request: Request) -> list[Check]:
    suite: Suite = operator.load("suite")
    if request.impl:
        implementation = Implementation(request.impl, "cpu", external=True)
    elif suite.hopper:
        implementation = Implementation(HOPPER, "cpu", interpreted=True)
    else:
        raise UsageError(f"{operator.name} has no kernels in Gluon: give yours with --impl FILE.py:FUNCTION")
    if not backend.interpreting():
        raise UsageError("--leave-out simulates Gluon kernels on CPU tensors: set TRITON_INTERPRET=1")
    names = request.configs or suite.leave_out or ("small",)
    try:
        found = [suite.find(name).name for name in names]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from None
    settings = Settings(gradients=request.gradients)
    return [Check(operator.name, implementation, name, request.dtype, settings) for name in found]


def leave_out(checks: Sequence[Check]) -> Iterator[Statement]:
    """Each statement that any of the checks comes to, left out of all of them in turn."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(cores, context, initializer=_start) as pool:
        statements: dict[Lines, str] = {}
        for found in pool.map(_statements, checks):
            statements |= {lines: what for lines, what in found.items() if lines not in statements}
        ordered = sorted(statements, key=lambda lines: (Path(lines[0].file).name, *lines))
        tasks = [(tuple(checks), lines, statements[lines]) for lines in ordered]
        yield from pool.map(_leave_out, tasks)


def _start() -> None:
    import torch

    interpreter.use_where_no_gpu()
    torch.set_num_threads(1)


_kept: dict[Check, Any] = {}


def _run(check: Check, study: Any) -> Any:
    """What the check's case gives: an attempt."""
    import torch

    from tilewise._gluon.leaving_out import studying
    from tilewise.verify.implementation import load_function
    from tilewise.verify.single import Single

    operator = workbench.find(check.operator)
    single = _kept.get(check)
    if single is None:
        problem = operator.load("suite").find(check.case).problem
        function = load_function(operator, check.implementation)
        single = _kept[check] = Single(operator.load("reference"), function, problem, check)
    with studying(study):
        return single.run_once(single.inputs(torch.nan), single.incoming)


def _statements(check: Check) -> dict[Lines, str]:
    from tilewise._gluon.leaving_out import Study

    study = Study()
    attempt = _run(check, study)
    if attempt.findings:
        raise UsageError(f"{check.command()} fails as it is: {attempt.findings[0].message}")
    return study.statements


def _leave_out(task: tuple[tuple[Check, ...], Lines, str]) -> Statement:
    from tilewise._gluon.leaving_out import Study
    from tilewise.verify.attempt import differing

    checks, lines, what = task
    for check in checks:
        attempt = _run(check, Study(lines))
        if attempt.findings:
            kind = attempt.findings[0].message.partition(":")[0]
            return Statement(lines, what, kind)
        if differing(_ordinary(check), attempt):
            return Statement(lines, what, "wrong values")
    return Statement(lines, what)


_results: dict[Check, Any] = {}


def _ordinary(check: Check) -> Any:
    from tilewise._gluon.leaving_out import Study

    if check not in _results:
        _results[check] = _run(check, Study())
    return _results[check]
