"""`tilewise inspect`: compiles, and prints what the kernels use, what changed, or what breaks the rules."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise import workbench
from tilewise.doctor.bug_report import environment
from tilewise.inspect import allowances
from tilewise.inspect.facts import CARDS
from tilewise.inspect.pool import Pool
from tilewise.inspect.request import Row, Wanted, read_rows, write_rows
from tilewise.inspect.text import diff_lines, print_rows
from tilewise.verify.run import DTYPES
from tilewise.workbench.operator import UsageError


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operator: str | None
    impl: str | None = None
    architectures: str | None = None
    config: str | None = None
    direction: str | None = None
    dtype: str = "bf16"
    sass: bool = False
    diff: str | None = None
    json: Path | None = None
    check: bool = False
    update: bool = False
    # The command line as typed, for the report.
    command: str = ""


def run_inspect(request: Request, console: Console) -> bool:
    """Run it; returns False where a check fails. A UsageError says what is wrong with the request."""
    _check(request)
    if request.check:
        return _hold_to_allowances(request, console)
    assert request.operator is not None
    rows = _rows(request, request.operator, console)
    if request.diff:
        others = _others(request, request.diff, console)
        # What was saved is older than what is compiled now.
        swap = _is_file(request.diff) and not _is_file(request.operator)
        for line in diff_lines(others, rows) if swap else diff_lines(rows, others):
            console.print(line, markup=False, highlight=False)
    else:
        print_rows(rows, console)
    if request.sass:
        for row in rows:
            console.print(f"\nsm_{row.architecture} {row.place}\n{row.sass}", markup=False, highlight=False)
    if request.json:
        write_rows(request.json, rows, environment() | {"kernels": "compiled"}, request.command)
    return True


def _check(request: Request) -> None:
    if request.update and not request.check:
        raise UsageError("--update rewrites the allowances that --check reads: give both")
    if request.check:
        given = [request.operator, request.impl, request.architectures, request.config, request.direction, request.diff]
        if any(value is not None for value in given) or request.sass or request.dtype != "bf16":
            raise UsageError(
                "--check compiles the default configurations of all operators: it takes --update and --json, nothing"
                " else"
            )
    elif request.operator is None:
        names = ", ".join(workbench.names("launches"))
        raise UsageError(f"name an operator, one of {names}; or a file that --json wrote; or --check")
    if request.direction not in (None, "forward", "backward"):
        raise UsageError(f"there is no direction {request.direction!r}: expected forward or backward")
    if request.dtype not in DTYPES:
        raise UsageError(f"there is no dtype {request.dtype!r}: expected one of {', '.join(DTYPES)}")
    if request.json and (request.json.is_dir() or not request.json.parent.is_dir()):
        raise UsageError(f"{request.json}: expected the name of a file in a folder that there is")
    if request.config and not request.impl and not request.config.isdecimal():
        raise UsageError(
            f"--config {request.config}: expected the number of a configuration, as tilewise verify OP --every-config"
            " --list has them"
        )
    if request.diff and not _is_file(request.diff):
        _check_other(request, request.diff)
    if (
        request.operator
        and _is_file(request.operator)
        and (request.impl or request.config or request.sass or request.json)
    ):
        raise UsageError(
            f"{request.operator} is compiled already: --impl, --config, --sass and --json go with the name of an"
            " operator"
        )


def _check_other(request: Request, word: str) -> None:
    if request.operator and _is_file(request.operator):
        raise UsageError(f"--diff {word}: {request.operator} is a saved file, so expected another one")
    if ":" not in word and (request.impl or not request.config or not word.isdecimal()):
        raise UsageError(
            f"--diff {word}: expected FILE.py:FUNCTION or a file that --json wrote, or beside --config I the number of"
            " another one"
        )


def _is_file(word: str) -> bool:
    return word.endswith(".json")


def _architectures(text: str | None) -> list[int]:
    names = [name.strip() for name in text.split(",")] if text else [f"sm_{number}" for number in CARDS]
    known = {f"sm_{number}": number for number in CARDS}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no architecture {name!r}: expected some of {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)]


def _rows(request: Request, operator: str, console: Console) -> list[Row]:
    """What the command's arguments name: a file, or an operator and what of it."""
    if _is_file(operator):
        return _kept(request, read_rows(Path(operator)))
    name = workbench.find(operator, "launches").name
    wanted = Wanted((name,), request.impl, direction=request.direction or "", dtype=request.dtype, sass=request.sass)
    if request.config and request.impl:
        wanted = replace(wanted, case=request.config)
    elif request.config:
        wanted = replace(wanted, config=int(request.config))
    return _compile(wanted, _architectures(request.architectures), console)


def _others(request: Request, word: str, console: Console) -> list[Row]:
    """What --diff names: a file, a configuration by number, or an implementation."""
    if _is_file(word):
        return _kept(request, read_rows(Path(word)))
    assert request.operator is not None
    if ":" in word:
        return _rows(
            replace(request, impl=word, config=request.config if request.impl else None), request.operator, console
        )
    return _rows(replace(request, config=word), request.operator, console)


def _kept(request: Request, rows: Sequence[Row]) -> list[Row]:
    """The saved rows that the command's arguments select."""
    architectures = _architectures(request.architectures)
    return [row for row in rows if row.architecture in architectures and request.direction in (None, row.direction)]


def _compile(wanted: Wanted, architectures: Sequence[int], console: Console) -> list[Row]:
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("kernels"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)
        rows = Pool(wanted, architectures, lambda done, total: progress.update(task, completed=done, total=total)).run()
    if not rows:
        raise UsageError("there is no such kernel: leave out --direction, or choose another configuration")
    return rows


def _hold_to_allowances(request: Request, console: Console) -> bool:
    rows = _compile(
        Wanted(allowances.operators(), every=False, wide=allowances.WIDE, only=allowances.ONLY, mix=False),
        allowances.ARCHITECTURES,
        console,
    )
    if request.json:
        write_rows(request.json, rows, environment() | {"kernels": "compiled"}, request.command)
    if request.update:
        allowances.write_allowances(allowances.measured(rows))
        console.print(f"written: {allowances.FILE}", markup=False, highlight=False)
    allowed, now = allowances.read_allowances(), allowances.measured(rows)
    lines = allowances.violations(rows, allowed)
    for line in lines:
        console.print(f"✗ {line}", markup=False, highlight=False)
    if allowed.ptxas != now.ptxas:
        console.print(
            f"the allowances are of ptxas {allowed.ptxas}; here it is {now.ptxas}", markup=False, highlight=False
        )
    verdict = (
        f"FAIL: {len(lines)} findings in {len(rows)} kernels"
        if lines
        else f"PASS: all {len(rows)} kernels keep to the allowances"
    )
    console.print(verdict, highlight=False)
    return not lines
