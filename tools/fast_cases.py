"""Chooses the cases that `make test` runs: few that still catch every planted bug twice.

python tools/fast_cases.py [OPERATOR ...]    # rewrites tests/data/fast_cases.json

Cases are chosen greedily, the most that is new in the least time first, until every option, layout and edge that a case
has is there once and every bug is caught by two cases of different shapes, by one where only one shape catches it.
Every planted bug runs in bf16, interpreted, through the cases that the options need anyway; those that fewer than two
shapes catch run through all. A test marked slow holds the file to it.
"""

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tilewise import workbench
from tilewise.verify.result import HANG, INTERNAL, Check, Implementation, Result, Settings
from tilewise.verify.suite import Case, Suite
from tilewise.verify.worker import Job, run_jobs
from tilewise.workbench.operator import Operator

FILE = Path(__file__).parents[1] / "tests/data/fast_cases.json"
INTERPRETED, CPU = Implementation("triton", "cpu", interpreted=True), Implementation("cpu", "cpu")
# How many cases of different shapes are to catch a bug.
TWICE = 2
# Named cases other than `small` are long: interpreted, one takes minutes.
LONG = ("medium", "large", "xl", "xxl")


def shape(case: Case) -> tuple[Any, ...]:
    """The shapes of its inputs: cases that differ in values, layout or options alone have the same."""

    def no_values(_name: str, sizes: tuple[int, ...], _size: float) -> torch.Tensor:
        return torch.zeros(()).expand(sizes)

    return tuple((name, tuple(x.shape)) for name, x in case.problem.tensors(no_values).items())


def features(case: Case) -> Iterator[str]:
    """Its options, layout and edges: what must be there once, whatever it catches."""
    for field in dataclasses.fields(case.problem):
        value = getattr(case.problem, field.name)
        if isinstance(value, bool | str):
            yield f"{field.name}={value}"
        elif isinstance(value, tuple):
            yield from (f"{field.name} {found}" for found in ("empty",) if 0 in value)
            yield from (f"{field.name} {found}" for found in ("several",) if len(value) > 1)
        elif value != field.default:
            yield f"{field.name} set" if value else f"{field.name}=0"


def is_wrong(result: Result) -> bool:
    """Whether the result is wrong: one that took too long tells nothing of a busy machine's case."""
    if INTERNAL in result.statuses:
        raise RuntimeError(f"verify itself failed on {result.check}: {result.findings[0].message}")
    return not result.passed and result.statuses != (HANG,)


def checks_for(operator: Operator, bug: str, cases: list[str]) -> tuple[Check, ...]:
    """These cases on the backend that a bug is planted in."""
    backend = next(mutant.backend for mutant in operator.load("suite").mutants if mutant.name == bug)
    runs = CPU if backend == "cpu" else INTERPRETED
    return tuple(Check(operator.name, runs, case, "bf16", Settings()) for case in cases)


def catches(operator: Operator, bugs: list[str], cases: list[Case]) -> dict[str, list[str]]:
    """By planted bug the cases that catch it."""
    if not cases or not bugs:
        return {}
    names = [case.name for case in cases]
    found = run_jobs([Job(checks_for(operator, bug, names), bug) for bug in bugs])
    return {
        bug: [result.check.case for result in results if is_wrong(result)]
        for bug, results in zip(bugs, found, strict=True)
    }


def seconds(operator: Operator, cases: list[Case]) -> dict[str, float]:
    """By case what its check takes."""
    checks = [Check(operator.name, INTERPRETED, case.name, "bf16", Settings()) for case in cases]
    return {results[0].check.case: results[0].seconds for results in run_jobs([Job((check,)) for check in checks])}


def choose(cases: list[Case], caught: dict[str, list[str]], cost: dict[str, float]) -> list[str]:
    """A small set of cases, in the order of the suite."""
    shapes = {case.name: shape(case) for case in cases}
    has = {case.name: set(features(case)) for case in cases}

    def met(chosen: list[str]) -> int:
        """How many catches, at most two a bug, and features they have."""
        by_bug = (len({shapes[name] for name in names if name in chosen}) for names in caught.values())
        return sum(min(TWICE, count) for count in by_bug) + len(set().union(*(has[name] for name in chosen)))

    chosen: list[str] = []
    goal = met([case.name for case in cases])
    while met(chosen) < goal:
        now = met(chosen)
        chosen.append(
            max(
                (case.name for case in cases if case.name not in chosen),
                key=lambda name: (met([*chosen, name]) - now) / cost[name],
            )
        )
    # What was chosen early may be covered by later ones: the dearest are tried first.
    for name in sorted(chosen, key=lambda name: -cost[name]):
        others = [other for other in chosen if other != name]
        if met(others) == goal:
            chosen = others
    return [case.name for case in cases if case.name in chosen]


def fast_cases(operator: Operator) -> dict[str, Any]:
    """The chosen cases, and by planted bug at most two of them that catch it, of different shapes."""
    suite: Suite = operator.load("suite")
    cases = list(suite.standard("cpu", interpreted=True))
    others = [case for case in suite.cases if case not in cases and case.name not in LONG]
    shapes = {case.name: shape(case) for case in [*cases, *others]}
    cost = seconds(operator, cases)
    # Cases that have every feature are needed whatever they catch. Most bugs go no further.
    needed = choose(cases, {}, cost)
    rounds = (
        [case for case in cases if case.name in needed],
        [case for case in cases if case.name not in needed],
        others,
    )
    # Cases do not show those of another use.
    caught: dict[str, list[str]] = {bug.name: [] for bug in suite.planted(None) if not bug.use}
    for tried in rounds:
        rare = [bug for bug, names in caught.items() if len({shapes[name] for name in names}) < TWICE]
        for bug, names in catches(operator, rare, tried).items():
            caught[bug] += names
    added = [case for case in others if any(case.name in names for names in caught.values())]
    cases += added
    chosen = choose(cases, caught, cost | seconds(operator, added))
    by_bug = {
        bug: list({shapes[name]: name for name in reversed(names) if name in chosen}.values())[::-1][:TWICE]
        for bug, names in caught.items()
    }
    return {"cases": chosen, "caught_by": by_bug}


def main(*names: str) -> None:
    """Rewrite the file's entries of these operators, of all without names."""
    # For the processes that run checks: they import Triton.
    os.environ["TRITON_INTERPRET"] = "1"
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in names or workbench.names("suite"):
        found[name] = fast_cases(workbench.find(name))
        once = [bug for bug, cases in found[name]["caught_by"].items() if len(cases) < TWICE]
        print(f"{name}: {len(found[name]['cases'])} cases; caught once: {', '.join(once) or 'none'}", flush=True)
        FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
