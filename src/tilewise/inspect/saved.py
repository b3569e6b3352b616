"""Rows as JSON, to be compared later. The version changes when a reader would have to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from tilewise.inspect.request import Row
from tilewise.workbench.operator import UsageError

SCHEMA = "tilewise.inspect"
VERSION = 1


def write_rows(path: Path, rows: Sequence[Row], environment: Mapping[str, str], command: str) -> None:
    """All of it, with what it was made with."""
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "command": command,
        "environment": environment,
        "kernels": [row.as_json() for row in rows],
    }
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """What `write_rows` wrote; a UsageError where it is something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path}: expected a file that tilewise inspect --json wrote ({type(error).__name__}: {error})"
        ) from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise UsageError(f"{path}: expected a file that tilewise inspect --json wrote, and its schema is not {SCHEMA}")
    if document.get("version") != VERSION:
        raise UsageError(
            f"{path} has version {document.get('version')} and this tilewise reads version {VERSION}: write it again"
        )
    return [Row.from_json(one) for one in document["kernels"]]
