"""verify, as a Python function: what the command line runs, and what other projects call; and which checks a run
consists of.
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tilewise import interpreter, workbench
from tilewise.verify.implementation import check_signature
from tilewise.verify.result import HANG, INTERNAL, SEED, Check, Implementation, MutantResult, Report, Result, Settings
from tilewise.verify.suite import Mutant, Suite
from tilewise.verify.worker import Job, one_process, run_jobs
from tilewise.workbench.operator import GROWTH, Operator, UsageError

DTYPES = ("fp32", "fp16", "bf16")


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
        fill: `random` (by `seed`), `range` or `range-raw`.
        gradients: whether gradients are checked too.
        repeat: how many runs must agree bit for bit.
        rtol, atol: judge by these in place of eager torch's error.
        search: how many further cases to draw.
        mutants: also score the same checks by planted bugs.
        everything: check our own backends in every dtype where there is no GPU too.

    Raises:
        UsageError: with what to do, where the request itself is wrong.
    """
    settings = Settings(seed, fill, gradients, repeat, rtol, atol)
    operator = workbench.find(op)
    if callable(impl):
        report = _verify_here(operator, impl, configs, dtypes, settings, search)
    else:
        interpreter.use_where_no_gpu()
        checks = plan(operator, impl, configs, dtypes, settings, everything)
        report = Report(in_order(run_checks(checks), checks))
        if search:
            report.results += search_failures(operator, impl, search, dtypes, settings)
    if search:
        report.searched[op] = search
    if mutants:
        report.mutants += score(operator, configs, dtypes, settings)
    return report


def run_checks(checks: Sequence[Check]) -> Iterator[Result]:
    """Their results as they come, from separate processes.

    Someone else's function is checked in order, the smallest case first. Of ours an operator's dearest checks go first:
    a long one at the end would leave the other processes idle.
    """
    external = any(check.implementation.external for check in checks)
    for results in run_jobs([Job((check,)) for check in (checks if external else _by_work(checks))]):
        yield from results


def _by_work(checks: Sequence[Check]) -> list[Check]:
    """Operators in order; the checks of one by how many scores they compute, interpreted kernels before others."""
    operators = {name: i for i, name in enumerate(dict.fromkeys(check.operator for check in checks))}

    def rank(check: Check) -> tuple[int, bool, int]:
        suite: Suite = workbench.find(check.operator).load("suite")
        problem = suite.growth if check.case == GROWTH else suite.find(check.case).problem
        return operators[check.operator], not check.implementation.interpreted, -sum(n * n for n in problem.tokens())

    return sorted(checks, key=rank)


def in_order(results: Iterable[Result], checks: Sequence[Check]) -> list[Result]:
    """The results in the order of the plan."""
    places = {check: i for i, check in enumerate(checks)}
    return sorted(results, key=lambda result: places[result.check])


def search_failures(
    operator: Operator, impl: str | None, count: int, dtypes: Sequence[str], settings: Settings
) -> list[Result]:
    """For each implementation the smallest failure among `count` drawn cases, where there is one."""
    failures = []
    for implementation in implementations(impl):
        suite: Suite = operator.load("suite")
        with one_process([case.name for case in suite.cases] if implementation.external else ()) as run:
            found = find_failure(operator, implementation, count, dtypes, settings, run)
        failures += [found] if found else []
    return failures


def score(
    operator: Operator, configs: Sequence[str], dtypes: Sequence[str], settings: Settings
) -> Iterator[MutantResult]:
    """Each planted bug through the same cases and criterion, until a check fails."""
    suite: Suite = operator.load("suite")
    kernels = next((i for i in implementations() if i.name == "triton"), None)
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
    jobs = [Job(checks, mutant.name, until_failure=True) for mutant in mutants]
    again = []
    for mutant, job, results in zip(mutants, jobs, run_jobs(jobs), strict=True):
        if kernels.device == "cuda" and HANG in results[-1].statuses:
            again.append((mutant, job))
        else:
            yield _scored(operator, mutant, results[-1])
    # The others shared this GPU: it counts as a hang only if the bug hangs alone.
    for mutant, job in again:
        (results,) = run_jobs([job])
        yield _scored(operator, mutant, results[-1])


def _scored(operator: Operator, mutant: Mutant, last: Result) -> MutantResult:
    if INTERNAL in last.statuses:
        raise RuntimeError(f"verify itself failed on the planted bug {mutant.name}: {last.findings[0].message}")
    caught = "" if last.passed else f"{last.check.case} {last.check.dtype}"
    return MutantResult(operator.name, mutant.name, mutant.about, caught, ", ".join(last.statuses))


def _verify_here(
    operator: Operator,
    function: Callable[..., Any],
    configs: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    search: int,
) -> Report:
    from tilewise.verify.run import Runner

    name = getattr(function, "__qualname__", type(function).__name__)
    checks = plan(operator, name, configs, dtypes, settings)
    suite: Suite = operator.load("suite")
    named = [suite.find(case) for case in dict.fromkeys(check.case for check in checks) if case != GROWTH]
    check_signature(function, name, suite.cases if search else named)
    runner = Runner(operator, function)
    results = [runner.run(check) for check in checks]
    found = find_failure(operator, checks[0].implementation, search, dtypes, settings, runner.run) if search else None
    return Report(results + ([found] if found else []))


class _FailedError(Exception):
    pass


def find_failure(
    operator: Operator,
    implementation: Implementation,
    count: int,
    dtypes: Sequence[str],
    settings: Settings,
    run: Callable[[Check], Result],
) -> Result | None:
    """Try `count` drawn cases; the smallest failure found, or None."""
    import hypothesis
    from hypothesis import strategies as st

    suite: Suite = operator.load("suite")
    smallest: Result | None = None

    @st.composite
    def checks(draw: Callable[[Any], Any]) -> Check:
        problem = suite.draw(draw)
        # A problem with only defaults is written as an empty string: name its first field.
        text = str(problem) or "B=1"
        return Check(operator.name, implementation, text, draw(st.sampled_from(tuple(dtypes))), settings)

    @hypothesis.seed(settings.seed)
    @hypothesis.settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(hypothesis.HealthCheck),
        print_blob=False,
    )
    @hypothesis.given(checks())
    def trial(check: Check) -> None:
        nonlocal smallest
        result = run(check)
        if not result.passed:
            # The last failure that hypothesis shows is the smallest.
            smallest = result
            raise _FailedError

    # Hypothesis's other files are not left in the user's working directory.
    hypothesis.configuration.set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "tilewise-hypothesis")
    try:
        trial()
    except (_FailedError, hypothesis.errors.Flaky):
        # Flaky: a second run of the same case passed. Failing once is still a finding.
        return smallest
    return None


def implementations(external: str | None = None) -> list[Implementation]:
    """What can be checked here: `external` alone, or every backend (TILEWISE_BACKEND chooses one of them)."""
    import torch

    gpu = torch.cuda.is_available()
    if external:
        return [Implementation(external, "cuda" if gpu else "cpu", external=True)]
    from tilewise.ops._host.backend import interpreting

    found = (
        [Implementation("triton", "cpu" if interpreting() else "cuda", interpreted=interpreting())]
        if interpreting() or gpu
        else []
    )
    found.append(Implementation("cpu", "cpu"))
    wanted = os.environ.get("TILEWISE_BACKEND")
    chosen = [implementation for implementation in found if wanted in (None, "", implementation.name)]
    if not chosen:
        raise UsageError(
            f"TILEWISE_BACKEND is {wanted!r}: expected one that runs here, {' or '.join(i.name for i in found)}"
        )
    return chosen


def planted(operator: Operator) -> tuple[Mutant, ...]:
    """The bugs whose kernels run here."""
    import torch

    from tilewise.ops._host.backend import interpreting

    suite: Suite = operator.load("suite")
    compiled = torch.cuda.is_available() and not interpreting()
    return suite.planted(torch.cuda.get_device_capability() if compiled else None)


def plan(
    operator: Operator,
    external: str | None,
    configs: Sequence[str],
    dtypes: Sequence[str],
    settings: Settings,
    everything: bool = False,
) -> list[Check]:
    """The standard checks of an operator, or those of the cases in `configs`.

    Cases in `configs` are checked in every dtype, and so are the standard ones, except for our own backends without a
    GPU, where each check is slow: there, unless `everything` is asked for, a case runs in one dtype, in turn, and in
    another one on the next backend.
    """
    suite: Suite = operator.load("suite")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if not dtypes:
        raise UsageError(f"no dtype was given: expected some of {','.join(DTYPES)}")
    for name, tolerance in (("rtol", settings.rtol), ("atol", settings.atol)):
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise UsageError(f"{name} is {tolerance}: expected a number from 0 on")
    if unknown:
        raise UsageError(f"there is no dtype {unknown[0]!r}: expected some of {','.join(DTYPES)}")
    try:
        chosen = [config if config == GROWTH else suite.find(config).name for config in configs]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from None
    turns: dict[str, int] = {}
    checks = []
    for implementation in implementations(external):
        standard = suite.standard(implementation.device, implementation.interpreted, everything or bool(external))
        names = chosen or [case.name for case in standard]
        for i, name in enumerate(names):
            # The first, `small`, takes the last dtype: what is probed in one dtype alone is probed in that.
            turns[name] = turns.get(name, i - 2) + 1
            one = implementation.device == "cpu" and not (everything or external or chosen)
            here = [dtypes[turns[name] % len(dtypes)]] if one else dtypes
            checks += [Check(operator.name, implementation, name, dtype, settings) for dtype in here]
        if not chosen:
            checks.append(Check(operator.name, implementation, GROWTH, dtypes[-1], settings))
    return checks
