"""A report as JSON.

`report.schema.json` beside this file says what every field is; its version changes when a reader would have to.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.bench.ceiling import Ceiling
from tilewise.bench.result import Report, Row, Verified, geometric_mean, overtakes, ratios_of
from tilewise.bench.timing import Times

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
