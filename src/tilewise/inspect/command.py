"""`tilewise inspect`: compiles, and prints what the kernels use, what changed, or what breaks the rules.

`--check` holds the default configurations to limits: bytes that a kernel may spill, by architecture, and a few more.
`allowances.json` has them; only `--check --update` writes that file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tilewise import workbench
from tilewise.doctor import environment
from tilewise.inspect.facts import CARDS, Row, Wanted, fits, read_rows, write_rows
from tilewise.inspect.pool import Pool
from tilewise.inspect.text import diff_lines, print_rows
from tilewise.verify.single import DTYPES
from tilewise.workbench.operator import UsageError

FILE = Path(__file__).with_name("allowances.json")
# One card for each family of tiles, and all consumer cards.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# The rules for Hopper and for the smallest card are about 64 and 128 channels; on the others the wider problems, which
# need more of everything, are enough.
WIDE = (80, 100)
# Every operator must run on a card with this little shared memory.
SMALLEST = 86
# Cards that use the tiles of sm_86: to keep the check short, only the problems that need most. A nightly test covers
# all configurations of all cards.
ONLY = (
    (89, ("D 128 causal", "compressed D 128")),
    (120, ("D 128 causal", "compressed D 128", "around D 128", "selected D 128")),
)


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
            f"--diff {word}: expected FILE.py:FUNCTION, a file that --json wrote, or, with --config I, the number of"
            " another configuration"
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
        Wanted(operators(), every=False, wide=WIDE, only=ONLY, mix=False),
        ARCHITECTURES,
        console,
    )
    if request.json:
        write_rows(request.json, rows, environment() | {"kernels": "compiled"}, request.command)
    if request.update:
        write_allowances(measured(rows))
        console.print(f"written: {FILE}", markup=False, highlight=False)
    allowed, now = read_allowances(), measured(rows)
    lines = violations(rows, allowed)
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


@dataclass(frozen=True)
class Allowances:
    """Bytes spilled, stored and loaded, by architecture and kernel, and how many of the spill instructions are in
    loops; 0 if a kernel is not listed.

    For Hopper: kernels that may multiply without wgmma, or with serialised wgmma. `ptxas` are the assembler versions
    that the numbers come from: others spill differently.
    """

    ptxas: dict[str, str] = field(default_factory=dict)
    spilled: dict[str, dict[str, int]] = field(default_factory=dict)
    spilled_in_loops: dict[str, dict[str, int]] = field(default_factory=dict)
    without_wgmma: list[str] = field(default_factory=list)
    serialised: list[str] = field(default_factory=list)


def operators() -> tuple[str, ...]:
    """Those that together launch every kernel."""
    return tuple(name for name in workbench.names("launches") if not workbench.find(name).part_of)


def read_allowances() -> Allowances:
    """As they are committed."""
    return Allowances(**json.loads(FILE.read_text(encoding="utf-8")))


def write_allowances(allowances: Allowances) -> None:
    """The explicit update."""
    document: dict[str, Any] = vars(allowances)
    FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def measured(rows: Sequence[Row]) -> Allowances:
    """The kernels' current numbers, as allowances."""
    found = Allowances()
    for row in rows:
        if row.facts is None:
            continue
        architecture = f"sm_{row.architecture}"
        found.ptxas[architecture] = row.facts.ptxas
        if _spilled(row):
            kernels = found.spilled.setdefault(architecture, {})
            # A kernel may run in both directions.
            kernels[row.place] = max(kernels.get(row.place, 0), _spilled(row))
        if _spilled_in_loops(row):
            kernels = found.spilled_in_loops.setdefault(architecture, {})
            kernels[row.place] = max(kernels.get(row.place, 0), _spilled_in_loops(row))
        if _wants_wgmma(row) and not row.facts.wgmma:
            found.without_wgmma.append(row.place)
        if _wants_wgmma(row) and row.facts.wgmma_serialised:
            found.serialised.append(row.place)
    return found


def _spilled(row: Row) -> int:
    assert row.facts is not None
    return row.facts.spill_stores + row.facts.spill_loads


def _spilled_in_loops(row: Row) -> int:
    """For portable kernels. Hopper's own are one persistent loop over work items: spills at the end of an item would
    count as well.
    """
    assert row.facts is not None
    return 0 if "hopper" in row.kernel else row.facts.spills_in_loops or 0


def _wants_wgmma(row: Row) -> bool:
    return row.architecture == 90 and row.facts is not None and row.facts.multiplies


def violations(rows: Sequence[Row], allowed: Allowances) -> list[str]:
    """One line for each kernel that breaks a rule."""
    lines: list[str] = []
    for row in rows:
        lines += [f"sm_{row.architecture} {row.place}: {what}" for what in _broken(row, allowed)]
    small = [row for row in rows if row.architecture == SMALLEST]
    for operator in dict.fromkeys(row.operator for row in small):
        labels = dict.fromkeys(row.label for row in small if row.operator == operator)
        if not any(
            all(row.facts and fits(row.facts) for row in small if (row.operator, row.label) == (operator, label))
            for label in labels
        ):
            lines.append(
                f"sm_{SMALLEST} {operator}: no configuration fits {CARDS[SMALLEST].shared_memory:,} bytes of shared"
                " memory"
            )
    return lines


def _broken(row: Row, allowed: Allowances) -> list[str]:
    if row.facts is None:
        return [f"does not compile: {row.error}"]
    found: list[str] = []
    limit = allowed.spilled.get(f"sm_{row.architecture}", {}).get(row.place, 0)
    if _spilled(row) > limit:
        found.append(
            f"spills {_spilled(row)} bytes ({row.facts.spill_stores} stored, {row.facts.spill_loads} loaded), allowed"
            f" are {limit}"
        )
    limit = allowed.spilled_in_loops.get(f"sm_{row.architecture}", {}).get(row.place, 0)
    if _spilled_in_loops(row) > limit:
        found.append(f"spills in a loop ({_spilled_in_loops(row)} instructions), allowed are {limit}")
    if _spilled(row) and row.facts.spills_in_loops is None:
        found.append("spills, and its SASS cannot be read: it may be in a loop")
    if not fits(row.facts):
        found.append(
            f"takes {row.facts.shared_memory:,} bytes of shared memory, and a block may have"
            f" {CARDS[row.architecture].shared_memory:,}"
        )
    if _wants_wgmma(row) and not row.facts.wgmma and row.place not in allowed.without_wgmma:
        found.append("multiplies without wgmma")
    if _wants_wgmma(row) and row.facts.wgmma_serialised and row.place not in allowed.serialised:
        found.append("its wgmma are serialised")
    return found
