"""The report of a run as one HTML page: no scripts, nothing fetched, readable wherever it is opened."""

import base64
from collections.abc import Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined

from tilewise.bench.plot import draw
from tilewise.bench.result import Report, as_ratio, ratios_of
from tilewise.bench.text import case_lines, summary_lines


def render_html(
    report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str
) -> str:
    """The page: summary, plot, a table for each case and mode, and what it was made with."""
    loader = Environment(
        loader=PackageLoader("tilewise.bench"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    groups = list(report.groups())
    cases = [
        [group for group in groups if group[0].case == name]
        for name in dict.fromkeys(group[0].case for group in groups)
    ]
    return loader.get_template("report.html.j2").render(
        report=report,
        as_ratio=as_ratio,
        cases=[
            (case, [ratios_of(group, report.subject) for group in case], list(case_lines(report, case)))
            for case in cases
        ],
        summary=list(summary_lines(report)),
        plot=base64.b64encode(draw(report, "png")).decode(),
        environment=environment,
        findings=[finding for finding in doctor if finding["level"] != "ok"],
        command=command,
    )
