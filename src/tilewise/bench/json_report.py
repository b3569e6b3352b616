"""A report as JSON. `report.schema.json` beside this file says what every field is; its version changes when a reader would have to."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.bench.result import Report, geometric_mean, overtakes, ratios_of

SCHEMA = "tilewise.bench"
VERSION = 1


def as_json(report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str) -> str:
    """The report as JSON text: times in milliseconds, rates by the median."""
    rows = []
    for group in report.groups():
        ratios = ratios_of(group, report.subject)
        rows += [dataclasses.asdict(row) | {"tflops": row.tflops, "gbps": row.gbps, "ratio": ratios.get(row.implementation)} for row in group]
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
        "summary": [_summary(report, mode, name, ratios) for mode, by_name in report.ratios().items() for name, ratios in by_name.items()],
    }
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


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
