"""Runs as JSON: written, read back, and compared with an earlier one.

`tilewise bench` and the scripts in benchmarks/ save the same document: schema and version, the command, where it ran,
and rows. `report.schema.json` beside this file says what every field is; its version changes when a reader would have
to.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.bench.result import Ceiling, Report, Row, Verified, geometric_mean, overtakes, ratios_of
from tilewise.bench.timing import Times
from tilewise.workbench.operator import UsageError

SCHEMA = "tilewise.bench"
VERSION = 1


def as_json(report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str) -> str:
    """The report as JSON text: times in milliseconds, rates by the median."""
    rows = []
    for group in report.groups():
        ratios = ratios_of(group, report.subject)
        rows += [
            dataclasses.asdict(row) | {"tflops": row.tflops, "gbps": row.gbps, "ratio": ratios.get(row.implementation)}
            for row in group
        ]
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "operator": report.operator,
        "dtype": report.dtype,
        "subject": report.subject,
        "implementations": report.about,
        "unverified": report.unverified,
        "command": command,
        "environment": environment,
        "doctor": doctor,
        "ceiling": dataclasses.asdict(report.ceiling),
        "rows": rows,
        "summary": [
            _summary(report, mode, name, ratios)
            for mode, by_name in report.ratios().items()
            for name, ratios in by_name.items()
        ],
    }
    return as_text(document)


def script_document(
    benchmark: str, command: str, environment: Mapping[str, str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What a script in benchmarks/ saves, without rows yet; `about` is what holds for all of them."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "benchmark": benchmark,
        "command": command,
        "environment": dict(environment),
        "about": dict(about),
        "rows": [],
    }


def as_text(document: Mapping[str, Any]) -> str:
    """A document as it is written."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def load(path: Path) -> dict[str, Any]:
    """A saved document; a UsageError where the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a file that `tilewise bench` saved: {error}") from None
    if (
        not isinstance(document, dict)
        or (document.get("schema"), document.get("version")) != (SCHEMA, VERSION)
        or "rows" not in document
    ):
        raise UsageError(
            f"{path}: expected a file that `tilewise bench` saved, with schema {SCHEMA!r} and version {VERSION}"
        )
    return document


def _summary(report: Report, mode: str, name: str, ratios: Sequence[float]) -> dict[str, Any]:
    found = {
        "mode": mode,
        "baseline": name,
        "geometric_mean": geometric_mean(ratios),
        "best": max(ratios),
        "worst": min(ratios),
        "cases": len(ratios),
    }
    return found | ({"overtakes_at": overtakes(report, mode, name)} if name in report.dense else {})


def from_json(document: Mapping[str, Any]) -> Report:
    """The report that a document was made of."""
    names = {field.name for field in dataclasses.fields(Row)}
    rows = []
    for saved in document["rows"]:
        row = Row(**{name: value for name, value in saved.items() if name in names})
        times, verified = saved["times"], saved["verified"]
        rows.append(
            dataclasses.replace(row, times=times and Times(**times), verified=verified and Verified(**verified))
        )
    # Those that the subject may overtake.
    dense = list(dict.fromkeys(line["baseline"] for line in document["summary"] if "overtakes_at" in line))
    same = {name: document[name] for name in ("operator", "dtype", "subject", "unverified")}
    return Report(
        **same, dense=dense, ceiling=Ceiling(**document["ceiling"]), about=document["implementations"], rows=rows
    )


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


def check_same(operator: str, dtype: str, earlier: dict[str, Any]) -> None:
    """A UsageError where the earlier run is of something else."""
    if "operator" not in earlier:
        raise UsageError(f"--compare: that is a run of benchmarks/{earlier['benchmark']}.py, this one of {operator}")
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
