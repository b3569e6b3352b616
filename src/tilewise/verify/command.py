"""`tilewise verify`: plans the checks, shows them as they come, and writes reports."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise import doctor, workbench
from tilewise.doctor import environment
from tilewise.verify.api import plan, planted, run_checks, score, search_failures
from tilewise.verify.result import Check, Report, Settings
from tilewise.verify.suite import Suite
from tilewise.verify.text import as_json, mutant_line, result_lines, verdict_lines
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
    json: Path | None
    html: Path | None
    fail_fast: bool
    verbose: bool
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
    plans = [
        (operator, plan(operator, request.impl, request.configs, request.dtypes, request.settings))
        for operator in operators
    ]
    report = Report()
    with _progress(console) as progress:
        total = sum(len(checks) for _, checks in plans) + (
            sum(len(planted(operator)) for operator in operators) if request.mutants else 0
        )
        task = progress.add_task("", total=total)
        for line in _run(request, plans, report):
            _print(console, line)
            progress.update(task, completed=len(report.results) + len(report.mutants))
    for line in verdict_lines(report):
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
    for operator in [workbench.find(name) for name in operators or workbench.names("suite")]:
        suite = _suite(operator)
        console.print(f"[bold]{operator.name}[/]: {operator.summary}", highlight=False)
        for case in suite.cases:
            console.print(f"  {case.name:<16} {case.about}  [dim]{case.problem}[/]", highlight=False)
        mutants = planted(operator)
        if mutants:
            console.print(
                f"  {len(mutants)} planted bugs: {', '.join(mutant.name for mutant in mutants)}", highlight=False
            )


def _run(request: Request, plans: Sequence[tuple[Operator, list[Check]]], report: Report) -> Iterator[str]:
    """Lines as results come; fills the report."""
    for result in run_checks([check for _, checks in plans for check in checks]):
        report.results.append(result)
        yield from result_lines(result, request.verbose)
        if request.fail_fast and not result.passed:
            return
    for operator, _ in plans:
        if request.search:
            report.searched[operator.name] = request.search
            for result in search_failures(operator, request.impl, request.search, request.dtypes, request.settings):
                report.results.append(result)
                yield from result_lines(result, request.verbose)
                if request.fail_fast:
                    return
        if request.mutants:
            for mutant in score(operator, request.configs, request.dtypes, request.settings):
                report.mutants.append(mutant)
                yield mutant_line(mutant)


def _operators(request: Request) -> list[Operator]:
    if request.impl and len(request.operators) != 1:
        raise UsageError(f"--impl implements one operator: name it, one of {', '.join(workbench.names('suite'))}")
    return [workbench.find(name) for name in request.operators or workbench.names("suite")]


def _suite(operator: Operator) -> Suite:
    return operator.load("suite")


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("checks"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _print(console: Console, line: str) -> None:
    word = next((word for word in STYLES if line.lstrip().startswith(word)), "")
    start = line.index(word)
    console.print(line[:start], end="", markup=False, highlight=False)
    console.print(word, end="", style=STYLES.get(word), markup=False, highlight=False)
    console.print(line[start + len(word) :], markup=False, highlight=False)
