"""`tilewise bench`: verifies, times in turns, shows tables as they come, and writes reports."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise import doctor
from tilewise.bench import ceiling, operators
from tilewise.bench.compare import changes, load, other_device, parse_tolerance
from tilewise.bench.contender import contenders, own_implementation
from tilewise.bench.json_report import as_json
from tilewise.bench.result import MODES, Report, Verified
from tilewise.bench.run import Bench
from tilewise.bench.text import case_lines, change_lines, summary_lines, table
from tilewise.bench.timing import Clock
from tilewise.bench.verified import verify_case
from tilewise.environment import environment
from tilewise.registry import Operator
from tilewise.verify.api import find_operator
from tilewise.verify.implementation import UsageError
from tilewise.verify.suite import Case, Suite
from tilewise.verify.worker import one_process

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """What the command line asked for; None where it left the choice to us."""

    operator: str
    impls: Sequence[str]
    baselines: Sequence[str]
    configs: Sequence[str]
    shapes: Sequence[str]
    modes: Sequence[str]
    dtype: str | None
    warmup: int
    iterations: int | None
    json: Path | None
    plot: Path | None
    html: Path | None
    compare: Path | None
    tolerance: str = "5%"
    unverified: bool = False
    save: bool = True
    # The words themselves, for the reports.
    command: str = ""


def run_request(request: Request, console: Console) -> bool:
    """Run it; returns whether nothing was refused and nothing is slower than in the run compared with."""
    operator, timed = find_operator(request.operator), operators.find(request.operator)
    own = own_implementation(operator)
    dtype = request.dtype or ("bf16" if own.device == "cuda" else "fp32")
    _check(request, dtype)
    tolerance = parse_tolerance(request.tolerance)
    earlier = load(request.compare) if request.compare else None
    cases = find_cases(operator, timed, request, own.device)
    device = torch.device(own.device)
    everyone = contenders(operator, timed, request.impls, request.baselines, DTYPES[dtype], own)
    clock = Clock(device)
    bench = Bench(operator, timed, everyone, request.modes, DTYPES[dtype], device, request.warmup, request.iterations, clock)
    about = {contender.name: contender.about for contender in everyone}
    peak = ceiling.measure(device, DTYPES[dtype], clock)
    with ceiling.busy(device):
        made_with = environment()
    report = Report(operator.name, dtype, everyone[0].name, timed.sparse, request.unverified, peak, about)
    with _progress(console) as progress, one_process() as check:
        task = progress.add_task("", total=2 * len(cases) * len(everyone))
        for case in cases:
            verified: dict[str, Verified] = {}
            for contender in everyone:
                if contender.implementation is not None and not request.unverified:
                    gradients = any(mode != "fwd" for mode in request.modes)
                    verified[contender.name] = verify_case(check, operator, contender.implementation, case.problem, dtype, gradients)
                progress.advance(task)
            refused = {name for name, one in verified.items() if not one.passed}
            rows = list(bench.time_case(case, verified, refused, lambda: progress.advance(task)))
            report.rows += rows
            groups = [group for group in report.groups() if group[0].case == case.name]
            _say(console, f"{case.name}: {case.about or case.problem}")
            console.print(table(report, groups))
            for line in case_lines(report, groups):
                _say(console, line)
    for line in summary_lines(report):
        _say(console, line)
    _save(request, report, made_with, console)
    passed = not report.refused
    if earlier is not None:
        found = changes(report, earlier)
        _say(console, other_device(made_with, earlier))
        for line in change_lines(found, tolerance):
            _say(console, line)
        passed = passed and not any(change.regressed(tolerance) for change in found)
    return passed


def find_cases(operator: Operator, timed: operators.Operator, request: Request, device: str) -> list[Case]:
    """Those asked for: by the benchmark's names, by verify's, or written out; by default the standard set of this kind of device."""
    suite: Suite = operator.load("suite")
    known = {case.name: case for case in (*timed.gpu_cases, *timed.cpu_cases, *timed.cases(device))}
    found = []
    try:
        for text in (*request.configs, *request.shapes):
            found.append(known[text] if text in known else suite.find(text))
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}; or one of the benchmark's own: {', '.join(known)}") from None
    return found or list(timed.cases(device))


def list_cases(name: str, console: Console) -> None:
    """What can be asked for by name: cases and baselines."""
    timed = operators.find(name)
    for device, cases in (("GPU", timed.gpu_cases), ("CPU", timed.cpu_cases)):
        for case in cases:
            console.print(f"{device}  {case.name:<20} {case.about}  [dim]{case.problem}[/]", highlight=False)
    for baseline in timed.baselines:
        console.print(f"baseline  {baseline.name:<16} {baseline.about}", highlight=False)


def _check(request: Request, dtype: str) -> None:
    unknown = [mode for mode in request.modes if mode not in MODES]
    if unknown or not request.modes:
        raise UsageError(f"--mode {','.join(request.modes)}: expected some of {','.join(MODES)}")
    if dtype not in DTYPES:
        raise UsageError(f"there is no dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    for path in (request.json, request.html, request.plot):
        if path and (path.is_dir() or not path.parent.is_dir()):
            raise UsageError(f"{path}: expected the name of a file{'' if path.is_dir() else f', but there is no folder {path.parent}'}")


def _save(request: Request, report: Report, made_with: dict[str, str], console: Console) -> None:
    findings = doctor.as_json()
    path = request.json or (Path(f"bench-{report.operator}-{_word(made_with['device'])}.json") if request.save else None)
    if path:
        path.write_text(as_json(report, made_with, findings, request.command) + "\n", encoding="utf-8")
        _say(console, f"saved {path}")
    if request.plot:
        from tilewise.bench.plot import save_plot

        save_plot(report, request.plot)
    if request.html:
        from tilewise.bench.html import render_html

        request.html.write_text(render_html(report, made_with, findings, request.command), encoding="utf-8")


def _say(console: Console, line: str) -> None:
    if line:
        console.print(line, markup=False, highlight=False)


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
