"""The page of a verification: verdict, failed checks with their heat maps, all checks, planted bugs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewise.report import STEPS, render, steps_legend, to_mention
from tilewise.verify.bias import biases
from tilewise.verify.compare import Comparison, Failure
from tilewise.verify.diagnose import HeatMap
from tilewise.verify.result import WARNING, Implementation, Report, Result
from tilewise.verify.text import skips

# Up to this many tiles, cells are wide enough to show their number.
WIDE_TILES = 16
# In maps of narrow cells one label covers this many tiles.
LABEL_EVERY = 4
# A page with more cells than this is slow to open; what is not drawn is described in words.
MOST_CELLS = 100_000
# This many failed checks are unfolded; the rest opens with a click.
UNFOLDED = 10


def render_html(
    report: Report, environment: Mapping[str, str], command: str, doctor: Sequence[Mapping[str, str]] = ()
) -> str:
    """The page for `report`, with the `environment` it was made in, the `command` that made it and what `doctor` found
    worth saying.
    """
    shown = _shown(report.results)
    return render(
        "verify",
        "PASS" if report.passed else "FAIL",
        report.passed,
        report=report,
        sentences=_sentences(report),
        warnings=[
            (result.check, finding)
            for result in report.results
            for finding in result.findings
            if finding.severity == WARNING
        ],
        biases=biases(report.results),
        caught=sum(mutant.caught for mutant in report.mutants),
        mutants=sorted(report.mutants, key=lambda mutant: mutant.caught),
        environment=environment,
        machine=to_mention(doctor),
        command=command,
        failures=[one for one in shown if one.anchor],
        groups=_groups(shown),
        unfolded=UNFOLDED,
        legend=[*steps_legend("within the limit"), ("sx", "NaN or infinite")],
        rule=_rule,
    )


@dataclass(frozen=True)
class Cell:
    """One cell of a drawn map: its class, what it says on hovering, and its text where there is room."""

    style: str
    title: str
    text: str


@dataclass(frozen=True)
class Label:
    """A label over `span` columns."""

    text: str
    span: int
    worst: bool


@dataclass(frozen=True)
class Map:
    """A heat map as it is drawn; `rows` is empty where the page has too many cells already."""

    summary: str
    tile: int
    wide: bool
    labels: tuple[Label, ...]
    rows: tuple[tuple[Cell, ...], ...]
    worst: tuple[int, int]


@dataclass(frozen=True)
class Shown:
    """A result, and where it failed the anchor of its section and its heat maps by tensor."""

    result: Result
    anchor: str
    maps: Mapping[str, Map]


@dataclass(frozen=True)
class Group:
    """The results of one implementation of an operator, failures first."""

    operator: str
    implementation: Implementation
    members: tuple[Shown, ...]

    @property
    def failed(self) -> int:
        """How many of them failed."""
        return sum(bool(one.anchor) for one in self.members)

    @property
    def skipped(self) -> int:
        """How many of them were not run."""
        return sum(one.result.skipped for one in self.members)


def _sentences(report: Report) -> list[str]:
    """The verdict in words, with every reason against it."""
    if not report.results and not report.mutants:
        return ["Nothing was checked."]
    sentences = []
    if report.results:
        count, failed = len(report.results), len(report.failures)
        all_passed = "The only check passed." if count == 1 else f"All {count} checks passed."
        passed = f"{count - len(report.skipped)} of {count} checks passed." if report.skipped else all_passed
        sentences.append(f"{failed} of {count} checks failed." if failed else passed)
    if report.mutants:
        planted, caught = len(report.mutants), sum(mutant.caught for mutant in report.mutants)
        away = planted - caught - sum(mutant.skipped for mutant in report.mutants)
        all_caught = "The only planted bug was caught." if planted == 1 else f"All {planted} planted bugs were caught."
        some_caught = all_caught if caught == planted else f"{caught} of {planted} planted bugs were caught."
        sentences.append(f"{away} of {planted} planted bugs got away." if away else some_caught)
    skipped = skips(report)
    return [*sentences, f"{skipped}."] if skipped else sentences


def _shown(results: list[Result]) -> list[Shown]:
    shown: list[Shown] = []
    left = MOST_CELLS
    for number, result in enumerate(results, 1):
        maps = {}
        for comparison in result.comparisons:
            if comparison.failure and (heat := comparison.failure.heat):
                size = sum(len(row) for row in heat.cells)
                maps[comparison.name] = _map(heat, size <= left, _measure(comparison, heat))
                left -= size if size <= left else 0
        shown.append(Shown(result, "" if result.passed or result.skipped else f"check-{number}", maps))
    return shown


def _groups(shown: list[Shown]) -> list[Group]:
    """By operator and implementation; those with failures first, else in the order in which they ran."""
    by_key: dict[tuple[str, Implementation], list[Shown]] = {}
    for one in shown:
        by_key.setdefault((one.result.check.operator, one.result.check.implementation), []).append(one)
    groups = [Group(*key, tuple(sorted(members, key=lambda one: not one.anchor))) for key, members in by_key.items()]
    return sorted(groups, key=lambda group: not group.failed)


def _measure(comparison: Comparison, heat: HeatMap) -> str:
    """What a map is measured against, if that is not the limit of the tensor's table."""
    row, column = heat.worst
    if comparison.max_diff <= comparison.allowed and heat.cells[row][column] > 1:
        return " No element is beyond what is allowed of one: here the limit is that of the mean square."
    return ""


def _map(heat: HeatMap, draw: bool, measure: str) -> Map:
    row, column = heat.worst
    columns = len(heat.cells[0])
    wide = columns <= WIDE_TILES
    every = 1 if wide else LABEL_EVERY
    summary = (
        f"Worst in head {row}, the tile from token {column * heat.tile} on:"
        f" {_multiple(heat.cells[row][column])}.{measure}"
    )
    labels = tuple(
        # What is left of the columns may be too narrow for a label.
        Label(
            str(first * heat.tile) if columns - first >= every else "",
            min(every, columns - first),
            first <= column < first + every,
        )
        for first in range(0, columns, every)
    )
    rows = tuple(
        tuple(
            Cell(
                _style(x) + (" worst" if (i, j) == heat.worst else ""),
                f"head {i}, from token {j * heat.tile}: {_multiple(x)}",
                _short(x) if wide else "",
            )
            for j, x in enumerate(cells)
        )
        for i, cells in enumerate(heat.cells)
    )
    return Map(summary, heat.tile, wide, labels, rows if draw else (), heat.worst)


def _style(multiple: float) -> str:
    """The class of a cell: `s0` within the limit, `s1` and up beyond each step, `sx` where it is not finite."""
    return f"s{sum(multiple > step for step in STEPS)}" if math.isfinite(multiple) else "sx"


def _multiple(x: float) -> str:
    return f"{x:.3g} × the limit" if math.isfinite(x) else "NaN or infinite"


def _short(x: float) -> str:
    """At most four characters; hatching alone shows that a cell is not finite."""
    if not math.isfinite(x):
        return ""
    if x < 0.05:
        return "0"
    if x < 999.5:
        return f"{x:.1f}" if x < 9.95 else f"{x:.0f}"
    mantissa, exponent = f"{x:.0e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def _rule(failure: Failure) -> str:
    return f"{failure.atol:g} + {failure.rtol:g} · |expected|" if failure.rtol else f"the {failure.atol:.2e} allowed"
