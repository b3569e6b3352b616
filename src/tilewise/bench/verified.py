"""Whether what is to be timed is right, on the same case."""

import dataclasses
from collections.abc import Callable

from tilewise.bench.result import Verified
from tilewise.verify.problem import Problem
from tilewise.verify.result import Check, Implementation, Result, Settings
from tilewise.workbench.operator import Operator

# Scores of all heads that the fp64 truth may have: a gigabyte a copy on a GPU, of which it takes several.
MOST_SCORES = {"cuda": 1 << 27, "cpu": 1 << 24}


def verify_case(
    run: Callable[[Check], Result],
    operator: Operator,
    implementation: Implementation,
    problem: Problem,
    dtype: str,
    gradients: bool,
) -> Verified:
    """What verify says of an implementation on a problem, or on a shorter one of its kind where the truth would not
    fit.
    """
    checked = problem
    while _scores(checked) > MOST_SCORES[implementation.device]:
        checked = shorter(checked)
    check = Check(operator.name, implementation, written(checked), dtype, Settings(gradients=gradients))
    result = run(check)
    failed = [c.name for c in result.comparisons if not c.passed]
    words = [
        ", ".join(result.statuses),
        f"({', '.join(failed)})" if failed else "",
        *(finding.message for finding in result.findings),
    ]
    why = "" if result.passed else " ".join(word for word in words if word)
    return Verified(check.case, checked == problem, result.passed, why, "" if result.passed else check.command())


def written(problem: Problem) -> str:
    """The problem as --config takes it, also where all of it is defaults."""
    return str(problem) or f"D={vars(problem)['D']}"


def _scores(problem: Problem) -> int:
    sizes = vars(problem)
    batch = 1 if sizes.get("lengths") else sizes.get("B", 1)
    return int(batch * sizes["H"] * sum(tokens * tokens for tokens in problem.tokens()))


def shorter(problem: Problem) -> Problem:
    """Half the batch, where there is one; else half the heads, down to two of keys; else half the tokens of every
    sequence.
    """
    sizes = vars(problem)
    heads = ("H", "Hk") if sizes.get("Hk") else ("H",)
    if sizes.get("B", 1) > 1 and not sizes.get("lengths"):
        return _halved(problem, "B")
    if all(sizes[name] % 2 == 0 for name in heads) and sizes[heads[-1]] > 2:
        return _halved(problem, *heads)
    return _halved(problem, *(("lengths", "lengths_k", "targets") if sizes.get("lengths") else ("T", "Tk")))


def _halved(problem: Problem, *names: str) -> Problem:
    sizes = {name: vars(problem)[name] for name in names if vars(problem).get(name)}
    return dataclasses.replace(
        problem, **{name: tuple(n // 2 for n in x) if isinstance(x, tuple) else x // 2 for name, x in sizes.items()}
    )
