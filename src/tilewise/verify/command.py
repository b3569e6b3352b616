"""`tilewise verify`: plans the checks, shows how far they are and what fails, and writes reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from tilewise import doctor, workbench
from tilewise.doctor import environment
from tilewise.verify.api import in_order, run_checks, score, search_failures
from tilewise.verify.plan import left_out, plan, planted
from tilewise.verify.result import NOTE, Check, Report, Result, Settings
from tilewise.verify.suite import Suite
from tilewise.verify.text import (
    as_json,
    check_line,
    mutant_line,
    result_lines,
    share_text,
    table_lines,
    verdict_lines,
    worst_of,
)
from tilewise.verify.time_limits import Budget
from tilewise.verify.uses import USES
from tilewise.workbench.operator import Operator, UsageError

STYLES = {"✓": "green", "✗": "red", "PASS": "green", "FAIL": "red"}


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operators: Sequence[str]
    impl: str | None
    configs: Sequence[str]
    dtypes: Sequence[str]
    settings: Settings
    search: int
    mutants: bool
    everything: bool
    # Minutes.
    budget: float
    uses: Sequence[str]
    # Over so many processes; 0: in one.
    parallel: int
    json: Path | None
    html: Path | None
    fail_fast: bool
    # 0: what fails or warns; 1: a line a check; 2: the figures of every tensor too.
    verbosity: int
    # The command line as typed, for the reports.
    command: str


def run_request(request: Request, console: Console) -> bool:
    """Run it; returns whether all passed. A UsageError says what is wrong with the request."""
    operators = _operators(request)
    for path in (request.json, request.html):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(
                f"{path}: expected the name of a"
                f" file{'' if path.is_dir() else f', but there is no folder {path.parent}'}"
            )
    what = request.impl, request.configs, request.dtypes, request.settings, request.everything, request.uses
    if request.parallel and request.search:
        raise UsageError("--parallel runs cases that are there, and --search draws others: give one of them")
    plans = [(operator, plan(operator, *what, request.parallel)) for operator in operators]
    report = Report()
    progress = _Progress(console, request, plans)
    for operator in operators if request.parallel and not request.configs else ():
        if count := left_out(operator, request.everything):
            reason = "are no self-attention, which alone runs over ranks"
            console.print(f"{operator.name}: {count} cases left out: they {reason}", highlight=False)
    try:
        progress.start()
        for lines in _run(request, plans, report):
            for line in lines:
                _print(console, line)
            progress.show(report)
    except KeyboardInterrupt:
        progress.stop()
        count, failed = sum(len(checks) for _, checks in plans), len(report.failures)
        outcome = f"{failed} failed" if failed else "none failed"
        console.print(f"interrupted: {len(report.results)} of {count} checks, {outcome}", highlight=False)
        raise
    finally:
        progress.stop()
    for line in (*table_lines(report.results), *verdict_lines(report)):
        _print(console, line)
    findings = doctor.as_json() if request.json or request.html else []
    if request.json:
        request.json.write_text(as_json(report, environment(), findings, request.command) + "\n", encoding="utf-8")
    if request.html:
        from tilewise.report.verify import render_html

        request.html.write_text(render_html(report, environment(), request.command, findings), encoding="utf-8")
    return report.passed


def list_cases(operators: Sequence[str], console: Console) -> None:
    """What can be asked for by name."""
    console.print("[bold]ways of using each of them[/] (--use)", highlight=False)
    for name, use in USES.items():
        console.print(f"  {name:<16} {use.about}", highlight=False)
    for operator in [workbench.find(name) for name in operators or workbench.names("suite")]:
        suite = _suite(operator)
        console.print(f"[bold]{operator.name}[/]: {operator.summary}", highlight=False)
        for case in suite.cases:
            console.print(f"  {case.name:<16} {case.about}  [dim]{case.problem}[/]", highlight=False)
        for where, mutants in (
            ("", planted(operator)),
            (" over ranks", operator.load("over_ranks").mutants if operator.has("over_ranks") else ()),
        ):
            if mutants:
                names = ", ".join(mutant.name for mutant in mutants)
                console.print(f"  {len(mutants)} planted bugs{where}: {names}", highlight=False)


def _run(request: Request, plans: Sequence[tuple[Operator, list[Check]]], report: Report) -> Iterator[list[str]]:
    """Lines of each result as it comes; fills the report."""
    budget = Budget(request.budget)

    def lines(result: Result) -> list[str]:
        said = any(finding.severity != NOTE for finding in result.findings)
        if not result.skipped and (request.verbosity > 1 or said or not result.passed):
            return result_lines(result, request.verbosity > 1)
        return [check_line(result)] if request.verbosity else []

    planned = [check for _, checks in plans for check in checks]
    for result in run_checks(planned, budget):
        report.results.append(result)
        yield lines(result)
        if request.fail_fast and not (result.passed or result.skipped):
            return
    report.results = in_order(report.results, planned)
    for operator, _ in plans:
        if request.search:
            what = request.impl, request.search, request.dtypes, request.settings
            found = search_failures(operator, *what, budget)
            if not any(result.skipped for result in found):
                report.searched[operator.name] = request.search
            for result in found:
                report.results.append(result)
                yield lines(result)
                if request.fail_fast:
                    return
        if request.mutants:
            for mutant in score(operator, request.configs, request.dtypes, request.settings, budget, request.parallel):
                report.mutants.append(mutant)
                yield [] if mutant.skipped else [mutant_line(mutant)]


def _operators(request: Request) -> list[Operator]:
    part = "over_ranks" if request.parallel else "suite"
    return [workbench.find(name) for name in request.operators or workbench.names(part)]


def _suite(operator: Operator) -> Suite:
    return operator.load("suite")


class _Progress(Progress):
    """One line an operator on a terminal: checks done, and how close the worst comes to what is allowed."""

    def __init__(self, console: Console, request: Request, plans: Sequence[tuple[Operator, list[Check]]]) -> None:
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}"),
        )
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._tasks_of: dict[str, TaskID] = {}
        for operator, checks in plans:
            self._tasks_of[operator.name] = self.add_task(operator.name, total=len(checks), unit="checks")
        bugs = sum(len(planted(operator, request.parallel)) for operator, _ in plans) if request.mutants else 0
        self._bugs = self.add_task("planted bugs", total=bugs, unit="caught") if bugs else None

    def show(self, report: Report) -> None:
        """Bring the lines up to date."""
        for operator, task in self._tasks_of.items():
            done = [result for result in report.results if result.check.operator == operator]
            worst = worst_of(done)
            unit = f"checks, worst {share_text(worst.worst.share)} of allowed" if worst and worst.worst else "checks"
            self.update(task, completed=len(done), unit=unit)
        if self._bugs is not None:
            self.update(self._bugs, completed=len(report.mutants))


def _print(console: Console, line: str) -> None:
    """The whole line at once: while a bar is shown, pieces of one would be wiped out with it."""
    text = Text(line)
    word = next((word for word in STYLES if line.lstrip().startswith(word)), "")
    text.stylize(STYLES.get(word, ""), line.index(word), line.index(word) + len(word))
    console.print(text, highlight=False, soft_wrap=True)
