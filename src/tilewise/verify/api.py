"""verify, as a Python function: what the command line runs, and what other projects call."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from tilewise import interpreter, workbench
from tilewise.verify.compare import UNFIT
from tilewise.verify.drawing import INTERPRETED, LONGEST, Draw, for_each
from tilewise.verify.implementation import check_signature
from tilewise.verify.plan import DTYPES, implementations, plan, planted
from tilewise.verify.result import (
    HANG,
    HOPPER,
    INTERNAL,
    SEED,
    Check,
    Implementation,
    MutantResult,
    Report,
    Result,
    Settings,
)
from tilewise.verify.suite import Mutant, Suite
from tilewise.verify.time_limits import BUDGET, Budget
from tilewise.verify.worker import Job, one_process, run_jobs
from tilewise.workbench.operator import GROWTH, Operator, UsageError


def verify(
    op: str,
    impl: str | Callable[..., Any] | None = None,
    *,
    configs: Sequence[str] = (),
    dtypes: Sequence[str] = DTYPES,
    seed: int = SEED,
    fill: str = "random",
    gradients: bool = True,
    repeat: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    search: int = 0,
    mutants: bool = False,
    everything: bool = False,
    budget: float = BUDGET,
    uses: Sequence[str] = (),
    parallel: int = 0,
) -> Report:
    """Check an implementation of an operator against its reference: outputs, gradients, edge cases.

    Args:
        op: the operator's name, as `tilewise verify --list` has it.
        impl: a callable with the operator's public signature without `backend`, run in this process; or
            `FILE.py:FUNCTION` / `package.module:function`, run in separate processes, so that a crash or a hang is a
            finding; or None, for tilewise's own backends.
        configs: names of cases, or problems written out (`T=65,D=16,causal=true`); by default the standard ones.
        dtypes: of fp32, fp16 and bf16.
        seed: of random inputs.
        fill: a law of random values (by `seed`): `random`, `one-signed`, `heavy-tails`, `small-head`, `constant` or
            `zero`; or a rule: `range` or `range-raw`.
        gradients: whether gradients are checked too.
        repeat: how many runs must agree bit for bit.
        rtol, atol: judge by these in place of eager torch's error.
        search: how many further cases to draw.
        mutants: also score the same checks by planted bugs.
        everything: check our own backends in every dtype where there is no GPU too.
        budget: minutes; what has not begun by then is skipped, and the report does not pass.
        uses: nothing but these ways of using it (`tilewise verify --list` has them, `all` is all of them), of `configs`
            or of a small case; without it all of them, of a small case and a drawn one, besides the standard cases.
        parallel: over so many processes, by a ContextPlan on the CPU; of our own backends.

    Raises:
        UsageError: with what to do, where the request itself is wrong.
    """
    settings = Settings(seed, fill, gradients, repeat, rtol, atol)
    operator = workbench.find(op)
    left = Budget(budget)
    if parallel and (callable(impl) or search):
        raise UsageError("parallel runs our own backends' cases: leave out impl and search")
    if callable(impl):
        report = _verify_here(operator, impl, configs, dtypes, settings, search, left, uses)
    else:
        interpreter.use_where_no_gpu()
        checks = plan(operator, impl, configs, dtypes, settings, everything, uses, parallel)
        report = Report(in_order(run_checks(checks, left), checks))
        if search:
            report.results += search_failures(operator, impl, search, dtypes, settings, left)
    # A search that ended early did not draw as many. Other uses are skipped for a reason of their own.
    if search and not any(result.skipped and not result.check.use for result in report.results):
        report.searched[op] = search
    if mutants:
        report.mutants += score(operator, configs, dtypes, settings, left, parallel)
    return report


def run_checks(checks: Sequence[Check], budget: Budget | None = None) -> Iterator[Result]:
    """Their results as they come, from separate processes.

    Someone else's function is checked in order, the smallest case first. Of ours an operator's dearest checks go first:
    a long one at the end would leave the other processes idle.
    """
    budget = budget or Budget()
    if any(check.implementation.ranks for check in checks):
        from tilewise.verify.over_ranks import run_over_ranks

        yield from run_over_ranks(checks, budget)
        return
    external = any(check.implementation.external for check in checks)
    # Uses of one case share its ordinary use, and so a process.
    jobs: dict[tuple[Check, bool], list[Check]] = {}
    for check in checks if external else _by_work(checks):
        jobs.setdefault((replace(check, use=""), bool(check.use)), []).append(check)
    for results in run_jobs([Job(tuple(job)) for job in jobs.values()], budget):
        yield from results


def _by_work(checks: Sequence[Check]) -> list[Check]:
    """Operators in order; the checks of one by how many scores they compute, interpreted kernels before others."""
    operators = {name: i for i, name in enumerate(dict.fromkeys(check.operator for check in checks))}

    def rank(check: Check) -> tuple[int, bool, int]:
        suite: Suite = workbench.find(check.operator).load("suite")
        problem = suite.growth if check.case == GROWTH else suite.find(check.case).problem
        return operators[check.operator], not check.implementation.interpreted, -problem.scores()

    return sorted(checks, key=rank)


def in_order(results: Iterable[Result], checks: Sequence[Check]) -> list[Result]:
    """The results in the order of the plan."""
    places = {check: i for i, check in enumerate(checks)}
    return sorted(results, key=lambda result: places[result.check])


def search_failures(
    operator: Operator,
    impl: str | None,
    count: int,
    dtypes: Sequence[str],
    settings: Settings,
    budget: Budget | None = None,
) -> list[Result]:
    """For each implementation the smallest failure among `count` drawn cases, where there is one; and the first case
    that was skipped, where the search ended before.
    """
    failures = []
    searched = [one for one in implementations(impl) if one.external or one.name != HOPPER]
    if not searched:
        raise UsageError("--search draws problems that kernels for Hopper mostly do not take: choose another backend")
    for implementation in searched:
        suite: Suite = operator.load("suite")
        with one_process([case.name for case in suite.cases] if implementation.external else (), budget) as run:
            failures += find_failure(operator, implementation, count, dtypes, settings, run)
    return failures


def score(
    operator: Operator,
    configs: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    budget: Budget | None = None,
    ranks: int = 0,
) -> Iterator[MutantResult]:
    """Each planted bug through the same cases and criterion, until a check fails."""
    if ranks:
        yield from _score_over_ranks(operator, configs, dtypes, settings, budget or Budget(), ranks)
        return
    suite: Suite = operator.load("suite")
    kernels = next((i for i in implementations() if i.name in ("triton", HOPPER)), None)
    mutants = planted(operator)
    if kernels is None or not mutants:
        raise UsageError(
            f"no bugs can be planted in {operator.name}: they live in kernels, and none of its runs here (see tilewise"
            " doctor)"
        )
    names = list(configs) or [case.name for case in suite.standard(kernels.device, kernels.interpreted)]
    # One dtype after the other: most bugs show in any.
    order = sorted(dtypes, key=lambda dtype: dtype != "bf16")
    checks = tuple(Check(operator.name, kernels, name, dtype, settings) for dtype in order for name in names)
    on_cpu = tuple(replace(check, implementation=i) for i in implementations() if i.name == "cpu" for check in checks)
    # One that shows in one use alone passes all of them.
    uses = plan(operator, None, (), order[:1], settings)
    on_hopper = tuple(
        Check(operator.name, kernels._replace(name=HOPPER), name, dtype, settings)
        for dtype in order[:1]
        for name in configs or suite.hopper
        if name != GROWTH and dtype != "fp32"
    )

    def checks_for(mutant: Mutant) -> tuple[Check, ...]:
        if mutant.capability and kernels.interpreted:
            return on_hopper
        if mutant.backend == "cpu":
            return on_cpu
        if kernels.name == HOPPER:
            return ()
        used = tuple(check for check in uses if check.use == mutant.use and check.implementation == kernels)
        return used if mutant.use and not configs else checks

    # One that no check is for, such as a use of gradients without gradients, has no score.
    mutants = tuple(mutant for mutant in mutants if checks_for(mutant))
    jobs = [Job(checks_for(mutant), mutant.name, until_failure=True) for mutant in mutants]
    again = []
    for mutant, job, results in zip(mutants, jobs, run_jobs(jobs, budget), strict=True):
        if kernels.device == "cuda" and HANG in results[-1].statuses:
            again.append((mutant, job))
        else:
            yield _scored(operator, mutant, results[-1])
    # The others shared this GPU: it counts as a hang only if the bug hangs alone.
    for mutant, job in again:
        (results,) = run_jobs([job], budget)
        yield _scored(operator, mutant, results[-1])


def _score_over_ranks(
    operator: Operator, configs: Sequence[str], dtypes: Sequence[str], settings: Settings, budget: Budget, ranks: int
) -> Iterator[MutantResult]:
    from tilewise.verify.over_ranks import run_over_ranks

    checks = plan(operator, None, configs, dtypes, settings, ranks=ranks)
    # Interpreted kernels take long, and bugs are not in them.
    here = [check for check in checks if check.implementation == checks[-1].implementation]
    for mutant in planted(operator, ranks):
        for result in run_over_ranks(here, budget, mutant):
            if not result.passed:
                break
        yield _scored(operator, mutant, result)


def _scored(operator: Operator, mutant: Mutant, last: Result) -> MutantResult:
    if INTERNAL in last.statuses:
        raise RuntimeError(f"verify itself failed on the planted bug {mutant.name}: {last.findings[0].message}")
    if last.skipped:
        return MutantResult(operator.name, mutant.name, mutant.about, "", last.findings[0].message, skipped=True)
    caught = "" if last.passed else " ".join(filter(None, (last.check.use, last.check.case, last.check.dtype)))
    return MutantResult(operator.name, mutant.name, mutant.about, caught, ", ".join(last.statuses))


def _verify_here(
    operator: Operator,
    function: Callable[..., Any],
    configs: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    search: int,
    budget: Budget,
    uses: Sequence[str],
) -> Report:
    from tilewise.verify.run import Runner

    name = getattr(function, "__qualname__", type(function).__name__)
    checks = plan(operator, name, configs, dtypes, settings, uses=uses)
    suite: Suite = operator.load("suite")
    named = [suite.find(case) for case in dict.fromkeys(check.case for check in checks) if case != GROWTH]
    check_signature(function, name, suite.cases if search else named)
    runner = Runner(operator, function)

    def run(check: Check) -> Result:
        return budget.skip(check) or runner.run(check)

    results = [run(check) for check in checks]
    found = find_failure(operator, checks[0].implementation, search, dtypes, settings, run) if search else []
    return Report(results + found)


class _FailedError(Exception):
    pass


def _says_nothing(result: Result) -> bool:
    """Whether nothing failed but that tensors are unfit, as in a drawn case they may be: their rounding outweighs them.

    What is beyond even the limit that says nothing is wrong all the same.
    """
    return result.statuses == (UNFIT,) and not any(c.failure and c.share > 1 for c in result.comparisons)


def find_failure(
    operator: Operator,
    implementation: Implementation,
    count: int,
    dtypes: Sequence[str],
    settings: Settings,
    run: Callable[[Check], Result],
) -> list[Result]:
    """Try `count` drawn cases: the smallest failure, if there is one, and the first that was skipped, if any was."""
    import hypothesis
    from hypothesis import strategies as st

    suite: Suite = operator.load("suite")
    passed: set[Check] = set()
    smallest: Result | None = None
    skipped: Result | None = None
    longest = INTERPRETED if _is_interpreted(operator, implementation, dtypes, settings, run) else LONGEST

    def check(draw: Draw) -> Check:
        problem = suite.draw(draw, longest)
        # A problem with only defaults is written as an empty string: name its first field.
        text = str(problem) or "B=1"
        dtype = draw(st.sampled_from(tuple(dtypes)))
        drawn = settings
        if settings.fill == "random":
            drawn = replace(settings, fill=draw(st.sampled_from(("random", *suite.laws))))
        return Check(operator.name, implementation, text, dtype, drawn)

    def trial(check: Check) -> None:
        nonlocal smallest, skipped
        # Once one is skipped, so are all others.
        if skipped or check in passed:
            return
        result = run(check)
        if result.skipped:
            skipped = result
        elif result.passed or _says_nothing(result):
            passed.add(check)
        else:
            # The last failure that hypothesis shows is the smallest.
            smallest = result
            raise _FailedError

    # Flaky: a second run of the same case passed, or was skipped. Failing once is still a finding.
    with contextlib.suppress(_FailedError, hypothesis.errors.Flaky):
        for_each(check, trial, settings.seed, count)
    return [result for result in (smallest, skipped) if result]


def _is_interpreted(
    operator: Operator,
    implementation: Implementation,
    dtypes: Sequence[str],
    settings: Settings,
    run: Callable[[Check], Result],
) -> bool:
    """Whether Triton interprets kernels of it: of others' functions a small case tells, whatever its result."""
    if implementation.external and implementation.device == "cpu":
        return run(Check(operator.name, implementation, "small", dtypes[-1], settings)).interpreted
    return implementation.interpreted
