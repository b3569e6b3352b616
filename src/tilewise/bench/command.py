"""`tilewise bench`: verifies, times in turns, shows tables as they come, and writes reports."""

import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise import doctor, workbench
from tilewise.bench.contender import contenders, own_implementation, verify_case
from tilewise.bench.result import (
    MODES,
    Report,
    Verified,
    as_json,
    changes,
    check_same,
    load,
    other_device,
    parse_tolerance,
)
from tilewise.bench.run import Bench, busy, measure_ceiling
from tilewise.bench.text import (
    case_lines,
    change_lines,
    check_installed,
    check_picture,
    check_place,
    summary_lines,
    table,
)
from tilewise.bench.timing import Clock
from tilewise.doctor import environment
from tilewise.verify.suite import Case, Suite
from tilewise.verify.worker import one_process
from tilewise.workbench.operator import Benchmark, Operator, UsageError

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Request:
    """What the command line asked for; None for what it left to us."""

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
    # The command line as typed, for the reports.
    command: str = ""


def run_request(request: Request, console: Console) -> bool:
    """Run it; returns whether the subject was timed on everything, nothing failed verify, and nothing is slower than in
    the earlier run.
    """
    operator = workbench.find(request.operator, "bench")
    timed: Benchmark = operator.load("bench")
    own = own_implementation(operator)
    dtype, device = request.dtype or ("bf16" if own.device == "cuda" else "fp32"), torch.device(own.device)
    _check(request, dtype)
    tolerance = parse_tolerance(request.tolerance)
    earlier = _earlier(request.compare, operator.name, dtype) if request.compare else None
    cases = find_cases(operator, timed, request, own.device)
    everyone = contenders(operator, timed, request.impls, request.baselines, DTYPES[dtype], own)
    differentiable = operator.load("suite").problem.differentiable
    modes = [mode for mode in MODES if mode in request.modes and (differentiable or mode == "fwd")]
    if not modes:
        raise UsageError(f"{operator.name} has no backward: expected --mode fwd")
    clock = Clock(device)
    # Before this run puts anything on the GPU.
    findings = doctor.as_json()
    peak = measure_ceiling(device, DTYPES[dtype], clock)
    with busy(device):
        made_with = environment() | ({} if own.device == "cuda" else {"device": f"{platform.machine()} CPU"})
    about, dense = {one.name: one.about for one in everyone}, [one.name for one in everyone if one.dense]
    report = Report(operator.name, dtype, everyone[0].name, dense, request.unverified, peak, about)
    bench = Bench(operator, timed, everyone, modes, DTYPES[dtype], device, request.warmup, request.iterations, clock)
    with _progress(console) as progress:
        judged = [] if request.unverified else [one for one in everyone if one.implementation]
        task = progress.add_task("", total=len(cases) * (len(judged) + len(everyone)))
        verified: dict[str, dict[str, Verified]] = {case.name: {} for case in cases}
        for contender in judged:
            assert contender.implementation is not None
            # The process ends, and frees its memory, before anything is timed.
            with one_process() as check:
                for case in cases:
                    found = verify_case(
                        check, operator, contender.implementation, case.problem, dtype, modes != ["fwd"]
                    )
                    verified[case.name][contender.name] = found
                    progress.advance(task)
        for case in cases:
            report.rows += bench.time_case(case, verified[case.name])
            progress.advance(task, len(everyone))
            groups = [group for group in report.groups() if group[0].case == case.name]
            _say(console, f"{case.name}: {case.about or case.problem}")
            console.print(table(report, groups))
            for line in case_lines(report, groups):
                _say(console, line)
    for line in summary_lines(report):
        _say(console, line)
    _save(request, report, made_with, findings, console)
    if earlier is None:
        return report.complete
    compared = changes(report, earlier)
    _say(console, other_device(made_with, earlier))
    for line in change_lines(compared, tolerance):
        _say(console, line)
    return report.complete and bool(compared) and not any(change.regressed(tolerance) for change in compared)


def _earlier(path: Path, operator: str, dtype: str) -> dict[str, Any]:
    """The run to compare with; a UsageError if it is not of this operator and dtype."""
    try:
        document = load(path)
    except UsageError as error:
        raise UsageError(f"--compare {error}") from None
    check_same(operator, dtype, document)
    return document


def find_cases(operator: Operator, timed: Benchmark, request: Request, device: str) -> list[Case]:
    """The requested cases: by the benchmark's names, by verify's, or written out; by default the standard set of this
    kind of device.
    """
    suite: Suite = operator.load("suite")
    known = {case.name: case for case in (*timed.gpu_cases, *timed.cpu_cases, *timed.cases(device))}
    found = []
    try:
        for text in dict.fromkeys((*request.configs, *request.shapes)):
            found.append(known[text] if text in known else suite.find(text))
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}; or one of the benchmark's own: {', '.join(known)}") from None
    return found or list(timed.cases(device))


def list_cases(name: str, console: Console) -> None:
    """What can be asked for by name: cases and baselines."""
    timed: Benchmark = workbench.find(name, "bench").load("bench")
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
    if request.plot:
        check_picture(request.plot)
    if request.html:
        for package in ("matplotlib", "jinja2"):
            check_installed(package, request.html)
    for path in (request.json, request.html):
        if path:
            check_place(path)


def _save(
    request: Request, report: Report, made_with: dict[str, str], findings: list[dict[str, str]], console: Console
) -> None:
    path = request.json or (
        Path(f"bench-{report.operator}-{_word(made_with['device'])}.json") if request.save else None
    )
    if path:
        path.write_text(as_json(report, made_with, findings, request.command) + "\n", encoding="utf-8")
        _say(console, f"saved {path}")
    if request.plot:
        from tilewise.bench.text import save_plot

        if not save_plot(report, request.plot):
            _say(console, f"nothing was timed: {request.plot} is not written")
    if request.html:
        from tilewise.report import render_html

        request.html.write_text(render_html(report, made_with, findings, request.command), encoding="utf-8")


def _say(console: Console, line: str) -> None:
    if line:
        console.print(line, markup=False, highlight=False)


def _word(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _progress(console: Console) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
