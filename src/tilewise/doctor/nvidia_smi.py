"""What nvidia-smi tells of the GPUs. Nothing where it is missing, hangs, or says what cannot be read."""

import re
import shutil
import subprocess
from collections.abc import Sequence

SECONDS = 5.0
# Why clocks are below what was asked for, as bits of `clocks_event_reasons.active`; idle and chosen clocks are none of
# these.
THROTTLES = {
    0x04: "the power cap",
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power supply",
}
STATE = (
    "index",
    "driver_version",
    "memory.used",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "ecc.mode.current",
    "mig.mode.current",
)


def states() -> list[dict[str, str]]:
    """The fields of STATE by name for each GPU, units left out; what a GPU does not tell is in brackets, as
    in `[N/A]`.
    """
    return [dict(zip(STATE, row, strict=True)) for row in _query("gpu", STATE)]


def throttles() -> list[str]:
    """For each GPU why its clocks are held down just now: "" where they are not."""
    # Older drivers know it by another name.
    rows = _query("gpu", ("clocks_event_reasons.active",)) or _query("gpu", ("clocks_throttle_reasons.active",))
    reasons = [int(row[0], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", row[0]) else 0 for row in rows]
    return [" and ".join(name for bit, name in THROTTLES.items() if bits & bit) for bits in reasons]


def processes() -> list[str]:
    """The numbers of processes that compute on any GPU."""
    return [row[0] for row in _query("compute-apps", ("pid",)) if row[0].isdigit()]


def number(text: str) -> float | None:
    """A field as a number, None where it is none."""
    try:
        return float(text)
    except ValueError:
        return None


def _query(what: str, fields: Sequence[str]) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    # A message in place of an answer has other columns.
    return rows if result.returncode == 0 and all(len(row) == len(fields) for row in rows) else []
