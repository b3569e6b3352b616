"""The HTML pages of verify, trace and bench: one renderer and one style.

A page is one file without scripts that fetches nothing, so that it reads the same wherever it is opened. Each tool has
a module here that prepares what its page shows, and a template that extends base.html.j2.

The page of a benchmark: summary, plot, one table per case, and what it was made with.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from jinja2 import Environment, PackageLoader, StrictUndefined

from tilewise.bench.result import Report, Row, as_ratio, ratios_of
from tilewise.bench.text import case_lines, draw, summary_lines

# The steps of the colour scale of errors, as multiples of the limit: two per decade, the same in every map, so that
# maps can be compared.
STEPS = (1, 3, 10, 30, 100, 300, 1000)
# Neutral within the limit, then inferno, which keeps its order in colour blindness and in grey: the further beyond the
# limit, the further from the page's own brightness.
STEP_COLOURS = {
    "light": ("#e9eeeb", "#f6d746", "#fca50a", "#f37819", "#d0433f", "#a92e5e", "#7c1d6d", "#2d0b59"),
    "dark": ("#2a3330", "#7f1e6c", "#a82e5f", "#cc4248", "#e9662d", "#f98e09", "#f7c932", "#fcffa4"),
}


def render(tool: str, headline: str, good: bool | None, **fields: object) -> str:
    """The page of a tool. `headline` opens it and its title; the panel around it is green where that is `good`, red
    where it is not, and neutral where there is no verdict.
    """
    tone = {True: "good", False: "bad", None: ""}[good]
    return _environment().get_template(f"{tool}.html.j2").render(tool=tool, headline=headline, tone=tone, **fields)


def steps_legend(within: str) -> list[tuple[str, str]]:
    """By class, what each colour of the scale means; `within` describes what is within the limit."""
    texts = [within, *(f"{low} to {high}" for low, high in pairwise(STEPS)), f"over {STEPS[-1]}"]
    return [(f"s{step}", text) for step, text in enumerate(texts)]


def to_mention(doctor: Sequence[Mapping[str, str]]) -> list[Mapping[str, str]]:
    """Those of doctor's findings that are worth showing on a page."""
    return [finding for finding in doctor if finding["level"] != "ok"]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("tilewise.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": number, "value": value, "share": share}
    environment.globals["step_colours"] = STEP_COLOURS
    return environment


def number(x: float, computed: bool = True) -> str:
    """A statistic; a dash where none was `computed`."""
    if not computed:
        return "–"
    return "0" if x == 0 else f"{x:.2e}" if math.isfinite(x) else value(x)


def value(x: float) -> str:
    """A tensor's element."""
    return "NaN" if math.isnan(x) else f"{x:.6g}"


def share(part: int, whole: int) -> str:
    """In percent: 100 only if it is all."""
    percent = 100 * part / whole if whole else 0.0
    return f"{percent:.3g}%" if percent < 99.95 or part == whole else ">99.9%"


def render_html(
    report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str
) -> str:
    """The page for `report`, with the `environment` it was made in, what `doctor` found worth saying and the `command`
    that made it.
    """
    return render(
        "bench",
        f"{report.operator}, {report.dtype}, on {environment['device']}",
        None,
        report=report,
        cases=[_case(report, name) for name in dict.fromkeys(row.case for row in report.rows)],
        summary=list(summary_lines(report)),
        plot=base64.b64encode(draw(report, "png")).decode(),
        environment=environment,
        machine=to_mention(doctor),
        command=command,
    )


@dataclass(frozen=True)
class Case:
    """A case in all modes: what was timed, each with its ratio to the subject, and the lines below the table."""

    name: str
    problem: str
    rows: tuple[tuple[Row, str], ...]
    lines: tuple[str, ...]


def _case(report: Report, name: str) -> Case:
    groups = [group for group in report.groups() if group[0].case == name]
    rows = []
    for group in groups:
        ratios = ratios_of(group, report.subject)
        for row in group:
            if row.times:
                ratio = ratios.get(row.implementation)
                rows.append((row, "" if ratio is None else as_ratio(ratio)))
    return Case(name, groups[0][0].problem, tuple(rows), tuple(case_lines(report, groups)))
