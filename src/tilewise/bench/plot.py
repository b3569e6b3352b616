"""Speed over length: a panel for each mode and kind of problem, a line for each implementation."""

import io
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from tilewise.bench.result import Report, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which can be told apart in every kind of colour blindness; markers and dashes tell them apart
# in grey too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")


def save_plot(report: Report, path: Path) -> bool:
    """As a picture in the format that the name ends in; returns whether there was anything to draw."""
    picture = draw(report, path.suffix.removeprefix("."))
    if picture:
        path.write_bytes(picture)
    return bool(picture)


def draw(report: Report, format: str) -> bytes:
    """The picture, empty where nothing was timed."""
    figure = plot(report)
    if figure is None:
        return b""
    picture = io.BytesIO()
    figure.savefig(picture, format=format, dpi=120)
    return picture.getvalue()


def plot(report: Report) -> "Figure | None":
    """None where nothing was timed.

    A sparse operator does less work than dense ones: there speed is tokens a second, else TFLOP/s.
    """
    from matplotlib.figure import Figure

    timed = [row for row in report.rows if row.times and speed(report, row) > 0]
    if not timed:
        return None
    lengths: dict[str, set[int]] = {}
    for row in timed:
        lengths.setdefault(row.kind, set()).add(row.tokens)
    # A kind of one length makes no line: it is left to the tables, unless there is no other.
    kinds = [kind for kind, found in lengths.items() if len(found) > 1] or list(lengths)
    modes = list(dict.fromkeys(row.mode for row in timed))
    names = list(dict.fromkeys(row.implementation for row in report.rows))
    figure = Figure(figsize=(5.2 * len(modes), 3.6 * len(kinds)), layout="constrained")
    axes = figure.subplots(len(kinds), len(modes), squeeze=False)
    for line, one in enumerate(kinds):
        for column, mode in enumerate(modes):
            panel = axes[line][column]
            for i, name in enumerate(names):
                rows = [row for row in timed if (row.kind, row.mode, row.implementation) == (one, mode, name)]
                # Of batches of the same length, the largest.
                points = {
                    row.tokens: speed(report, row)
                    for row in sorted(rows, key=lambda row: (row.tokens, row.total_tokens))
                }
                if points:
                    style = {
                        "color": COLOURS[i % len(COLOURS)],
                        "marker": MARKERS[i % len(MARKERS)],
                        "linestyle": DASHES[i % len(DASHES)],
                    }
                    panel.plot(list(points), list(points.values()), label=name, **style)
            panel.set_xscale("log", base=2)
            panel.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
            panel.yaxis.set_minor_formatter(lambda value, _place: f"{value:g}" if f"{value:e}"[0] in "235" else "")
            panel.set_title(f"{report.operator} {mode}, {report.dtype}\n{textwrap.fill(one, 60)}", fontsize=9)
            panel.set_xlabel("tokens of the longest sequence")
            panel.set_ylabel("million tokens a second" if report.dense else "TFLOP/s")
            panel.grid(visible=True, alpha=0.3)
            panel.legend(fontsize=8)
    return figure


def speed(report: Report, row: Row) -> float:
    """What the plot shows of a row."""
    assert row.times is not None
    return row.total_tokens / row.times.median / 1e3 if report.dense else row.tflops
