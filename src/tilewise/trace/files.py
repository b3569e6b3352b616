"""Values as text that `diff` lines up, and at full precision."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tilewise.trace.values import Values

GROUP = 8


def section(name: str, value: np.ndarray) -> str:
    """A heading, then one line a row, rows in groups of eight."""
    rows = np.atleast_2d(value) if value.ndim != 1 else value[:, None]
    lines = [f"== {name} {list(value.shape)}"]
    for number, row in enumerate(rows):
        if number % GROUP == 0:
            lines.append(f"-- rows {number} to {min(number + GROUP, len(rows)) - 1}")
        lines.append(" ".join(f"{x:>13.6e}" for x in row))
    return "\n".join(lines)


def as_text(values: Values) -> str:
    """All sections, in order."""
    return "\n\n".join(section(name, value) for name, value in values.items()) + "\n"


def write_traces(folder: Path, traces: Mapping[str, tuple[Values, Values]]) -> None:
    """debug_pt.txt and debug_kernel.txt, the same sections in the same order, and trace.npz with all; traces are
    (simulation, kernel) by part.
    """
    folder.mkdir(parents=True, exist_ok=True)
    texts: list[list[str]] = [[], []]
    everything: dict[str, np.ndarray] = {}
    for part, pair in traces.items():
        shared = [name for name in pair[0] if name in pair[1]]
        for side, values, lines in zip(("simulation", "kernel"), pair, texts, strict=True):
            lines.append(f"#### {part}\n\n" + as_text({name: values[name] for name in shared}))
            everything |= {f"{side}/{part}/{name}": value for name, value in values.items()}
    for name, lines in zip(("debug_pt.txt", "debug_kernel.txt"), texts, strict=True):
        (folder / name).write_text("\n".join(lines), encoding="utf-8")
    np.savez(folder / "trace.npz", **everything)  # type: ignore[arg-type]
