"""A report as tables and lines.

Speed over length: a panel for each mode and kind of problem, a line for each implementation.
"""

import importlib.util
import io
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from tilewise.bench.result import Change, Report, Row, as_ratio, geometric_mean, overtakes, ratios_of, verdict
from tilewise.workbench.operator import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


# Few and narrow, for a terminal of 80 columns; reports hold the rest.
COLUMNS = ("mode", "implementation", "median", "± ms", "TFLOP/s", "peak", "GB/s", "peak", "MB", "×")


def table(report: Report, groups: Sequence[Sequence[Row]]) -> Table:
    """One case, a group of rows for each mode: times in ms, rates with their shares of the machine's peak, memory at
    its peak.

    × is the subject's speedup over this implementation.
    """
    found = Table(*COLUMNS, box=None, pad_edge=False)
    for column in found.columns[2:]:
        column.justify = "right"
        column.no_wrap = True
    for group in groups:
        ratios = ratios_of(group, report.subject)
        for i, row in enumerate(group):
            ratio = as_ratio(ratios[row.implementation]) if row.implementation in ratios else ""
            found.add_row(row.mode if i == 0 else "", row.implementation, *_figures(report, row), ratio)
    return found


def _figures(report: Report, row: Row) -> list[str]:
    if row.times is None:
        return ["—"] * 7
    return [
        *(f"{value:.3f}" for value in (row.times.median, row.times.std)),
        f"{row.tflops:.3f}" if row.tflops < 1 else f"{row.tflops:.1f}",
        f"{row.tflops / report.ceiling.tflops:.0%}",
        f"{row.gbps:.1f}",
        f"{row.gbps / report.ceiling.gbps:.0%}",
        f"{row.peak_allocated / 1e6:.1f}",
    ]


def case_lines(report: Report, groups: Sequence[Sequence[Row]]) -> Iterator[str]:
    """What a case's table leaves out: what was not timed and why, what was verified in the case's place, and a verdict
    for each mode.
    """
    rows = [row for group in groups for row in group]
    for name, reason in dict.fromkeys((row.implementation, row.reason) for row in rows if row.times is None):
        yield f"  {name} was not timed: {reason}"
    for name, checked in dict.fromkeys((row.implementation, row.verified) for row in rows if row.times):
        if checked and not checked.same:
            yield f"  {name} was verified on {checked.problem}: the fp64 truth of the case itself would not fit"
    if report.unverified:
        yield "  NOT VERIFIED: results may be wrong"
    for group in groups:
        found = verdict(group, report.subject)
        if found:
            yield f"  {group[0].mode}: {found}"


def summary_lines(report: Report) -> Iterator[str]:
    """Over all cases: the ceilings, the ratios, and where a sparse operator overtakes dense attention."""
    ceiling = report.ceiling
    product, copy = (
        f"{ceiling.tflops:.3g} TFLOP/s (a matrix product, {ceiling.dtype})",
        f"{ceiling.gbps:.4g} GB/s (a copy)",
    )
    yield f"peak of this machine, measured in this run: {product}, {copy}"
    for mode, by_name in report.ratios().items():
        for name, ratios in by_name.items():
            spread = (
                f"best {as_ratio(max(ratios))}, worst {as_ratio(min(ratios))}, {len(ratios)} cases"
                if len(ratios) > 1
                else "one case"
            )
            yield f"{mode}: {report.subject} runs at {as_ratio(geometric_mean(ratios))} × {name} ({spread})"
            for kind, length in overtakes(report, mode, name).items() if name in report.dense else ():
                where = f"from {length:.0f} tokens on" if length else "at no length that was timed"
                yield f"{mode}: {report.subject} is ahead of {name} {where} ({kind})"


def change_lines(changes: Sequence[Change], tolerance: float) -> Iterator[str]:
    """What a comparison with an earlier run says."""
    if not changes:
        yield "FAIL: the earlier run timed none of these cases and modes"
        return
    for change in changes:
        mark = "✗" if change.regressed(tolerance) else "✓"
        yield (
            f"{mark} {change.case} {change.mode} {change.implementation}: {change.before:.3f} -> {change.after:.3f} ms"
            f" ({change.growth:+.1%})"
        )
    slower = sum(change.regressed(tolerance) for change in changes)
    yield f"{f'FAIL: {slower}' if slower else 'PASS: none'} of {len(changes)} slower by more than {tolerance:.1%}"


# Okabe and Ito's colours, distinct in every kind of colour blindness; markers and dashes keep them distinct in grey
# too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES = ("-", "--", "-.", ":")


PICTURES = (".png", ".svg", ".pdf")


def check_place(path: Path) -> None:
    """That a file can be written there."""
    if path.is_dir() or not path.parent.is_dir():
        raise UsageError(
            f"{path}: expected the name of a file{'' if path.is_dir() else f', but there is no folder {path.parent}'}"
        )


def check_picture(path: Path) -> None:
    """That a plot can be drawn there."""
    if path.suffix not in PICTURES:
        raise UsageError(f"--plot {path}: expected a name that ends in one of {', '.join(PICTURES)}")
    check_installed("matplotlib", path)
    check_place(path)


def check_installed(package: str, path: Path) -> None:
    """What a file is made with."""
    if importlib.util.find_spec(package) is None:
        raise UsageError(f"{path} is made with {package}, which is not installed: pip install {package}")


def save_plot(report: Report, path: Path) -> bool:
    """As a picture in the format of the file's suffix; returns whether there was anything to draw."""
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

    A sparse operator does less work than dense ones: there speed is in tokens per second, else in TFLOP/s.
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
    """The plotted value of a row."""
    assert row.times is not None
    return row.total_tokens / row.times.median / 1e3 if report.dense else row.tflops
