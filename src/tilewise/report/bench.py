"""The page of a benchmark: summary, plot, a table a case, and what it was made with."""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewise.bench.plot import draw
from tilewise.bench.result import Report, Row, as_ratio, ratios_of
from tilewise.bench.text import case_lines, summary_lines
from tilewise.report import render, to_mention


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
