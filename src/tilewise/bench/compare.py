"""A run beside an earlier one."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.bench.json_report import SCHEMA, VERSION
from tilewise.bench.result import Report
from tilewise.workbench.operator import UsageError


class Change(NamedTuple):
    """Median milliseconds of the same implementation, case and mode, then and now."""

    case: str
    mode: str
    implementation: str
    before: float
    after: float

    @property
    def growth(self) -> float:
        """Of the time: 0.1 is a tenth slower."""
        return self.after / self.before - 1

    def regressed(self, tolerance: float) -> bool:
        """Whether it is slower by more than that."""
        return self.growth > tolerance


def parse_tolerance(text: str) -> float:
    """`5%` or `0.05`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"--tolerance {text}: expected a share such as 5% or 0.05")
    return value


def load(path: Path) -> dict[str, Any]:
    """A saved run; a UsageError where the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--compare {path}: expected a file that `tilewise bench` saved: {error}") from None
    if (
        not isinstance(document, dict)
        or (document.get("schema"), document.get("version")) != (SCHEMA, VERSION)
        or "rows" not in document
    ):
        raise UsageError(
            f"--compare {path}: expected a file that `tilewise bench` saved, with schema {SCHEMA!r} and version"
            f" {VERSION}"
        )
    return document


def check_same(operator: str, dtype: str, earlier: dict[str, Any]) -> None:
    """A UsageError where the earlier run is of something else."""
    if (earlier["operator"], earlier["dtype"]) != (operator, dtype):
        raise UsageError(
            f"--compare: that is a run of {earlier['operator']} in {earlier['dtype']}, this one of {operator} in"
            f" {dtype}"
        )


def changes(report: Report, earlier: dict[str, Any]) -> list[Change]:
    """The subject's rows that the earlier run timed, on the same problem; `after` is infinite where this
    run did not.
    """
    before = {
        (row["problem"], row["mode"], row["implementation"]): row["times"]["median"]
        for row in earlier["rows"]
        if row["times"] is not None
    }
    return [
        Change(row.case, row.mode, row.implementation, before[key], row.times.median if row.times else math.inf)
        for row in report.rows
        if row.implementation == report.subject and (key := (row.problem, row.mode, row.implementation)) in before
    ]


def other_device(environment: dict[str, str], earlier: dict[str, Any]) -> str:
    """What is to be said where the two runs are of different machines; empty where they are not."""
    then, now = earlier["environment"].get("device"), environment["device"]
    return "" if then == now else f"the earlier run was on {then}, this one on {now}: their times do not compare"
