"""A report as JSON.

`report.schema.json` beside this file says what every field is; its version changes when a reader would have to.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tilewise.verify.result import Report

SCHEMA = "tilewise.verify"
VERSION = 1


def as_json(report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str) -> str:
    """The report as JSON text. Numbers that JSON does not have become the strings "nan", "inf" and "-inf"."""
    results = [
        {
            **_plain(result),
            "case": result.check.case,
            "implementation": str(result.check.implementation),
            "passed": result.passed,
            "statuses": result.statuses,
            "command": result.check.command(),
        }
        for result in report.results
    ]
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "passed": report.passed,
        "command": command,
        "environment": environment,
        "doctor": doctor,
        "results": results,
        "mutants": [{**_plain(mutant), "caught": mutant.caught} for mutant in report.mutants],
        "searched": report.searched,
    }
    return json.dumps(_finite(document), indent=1, ensure_ascii=False, allow_nan=False)


def _plain(value: Any) -> dict[str, Any]:
    plain = dataclasses.asdict(value)
    check = plain.pop("check", None)
    if check:
        plain = {
            "operator": check["operator"],
            "dtype": check["dtype"],
            "device": check["implementation"].device,
            "settings": check["settings"],
        } | plain
    plain["findings"] = [finding._asdict() for finding in plain["findings"]] if "findings" in plain else None
    return {key: x for key, x in plain.items() if key != "findings" or x is not None}


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value
