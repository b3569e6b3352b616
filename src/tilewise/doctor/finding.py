"""What doctor says of one thing."""

import importlib.metadata
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "problem"]
MISSING = "not installed"


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, whether it is a problem, and what to do about it."""

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def version_of(package: str) -> str:
    """The version of a package that can be imported; one that was only copied beside others has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"
