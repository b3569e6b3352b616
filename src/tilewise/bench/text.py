"""A report as tables and lines."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from tilewise.bench.result import Report, Row, as_ratio, geometric_mean, overtakes, ratios_of, verdict
from tilewise.bench.saved import Change

# Few and narrow, for a terminal of 80 columns; reports hold the rest.
COLUMNS = ("mode", "implementation", "median", "± ms", "TFLOP/s", "peak", "GB/s", "peak", "MB", "×")


def table(report: Report, groups: Sequence[Sequence[Row]]) -> Table:
    """One case, a group of rows for each mode: times in ms, rates with their shares of the machine's peak, memory at
    its peak.

    × is how often the subject runs while this implementation runs once.
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
    """What the table of a case does not hold: who was not timed and why, what was verified in the case's place, and a
    verdict for each mode.
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
