"""What is to be compiled, as the command passes it to the worker processes; and the results."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewise.inspect.facts import Facts, fits, occupancy
from tilewise.workbench.operator import UsageError


@dataclass(frozen=True)
class Wanted:
    """Operators; one implementation in place of ours, called for `case`; one configuration by number, else the
    defaults, and `every` one else.

    `wide` are architectures on which problems of 64 channels are left out; `only` names the problems that run on
    others. An empty `direction` means both. `mix` requests the instruction mix, `sass` the SASS itself.
    """

    operators: tuple[str, ...]
    impl: str | None = None
    case: str = "small"
    config: int | None = None
    every: bool = True
    wide: tuple[int, ...] = ()
    only: tuple[tuple[int, tuple[str, ...]], ...] = ()
    direction: str = ""
    dtype: str = "bf16"
    mix: bool = True
    sass: bool = False


@dataclass(frozen=True)
class Row:
    """One kernel of one problem or configuration on one architecture: what it uses, or why it does not compile, or has
    no instruction mix.
    """

    architecture: int
    operator: str
    label: str
    direction: str
    kernel: str
    facts: Facts | None
    error: str = ""
    sass: str = ""

    @property
    def place(self) -> str:
        """Where the kernel belongs, in one line."""
        return f"{self.operator} {self.label}: {self.kernel}"

    def as_json(self) -> dict[str, Any]:
        """All of it, and what follows for the card."""
        document = dataclasses.asdict(self)
        if self.facts:
            document["occupancy"] = occupancy(self.facts)._asdict()
            document["fits"] = fits(self.facts)
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Row":
        """What `as_json` wrote."""
        names = {field.name for field in dataclasses.fields(cls)}
        values = {name: value for name, value in document.items() if name in names}
        return cls(**values | {"facts": Facts(**values["facts"]) if values["facts"] else None})


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
