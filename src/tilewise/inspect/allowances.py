"""Limits for the default configurations: bytes that a kernel may spill, by architecture, and a few more;
`allowances.json` has them.

Only `tilewise inspect --check --update` writes that file.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tilewise import workbench
from tilewise.inspect.facts import CARDS, fits
from tilewise.inspect.request import Row

FILE = Path(__file__).with_name("allowances.json")
# One card for each family of tiles, and all consumer cards.
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
# The rules for Hopper and for the smallest card are about 64 and 128 channels; on the others the wider problems, which
# need more of everything, are enough.
WIDE = (80, 100)
# Every operator must run on a card with this little shared memory.
SMALLEST = 86
# Cards that use the tiles of sm_86: to keep the check short, only the problems that need most. A nightly test covers
# all configurations of all cards.
ONLY = (
    (89, ("D 128 causal", "compressed D 128")),
    (120, ("D 128 causal", "compressed D 128", "around D 128", "selected D 128")),
)


@dataclass(frozen=True)
class Allowances:
    """Bytes spilled, stored and loaded, by architecture and kernel, and how many of the spill instructions are in
    loops; 0 if a kernel is not listed.

    For Hopper: kernels that may multiply without wgmma, or with serialised wgmma. `ptxas` are the assembler versions
    that the numbers come from: others spill differently.
    """

    ptxas: dict[str, str] = field(default_factory=dict)
    spilled: dict[str, dict[str, int]] = field(default_factory=dict)
    spilled_in_loops: dict[str, dict[str, int]] = field(default_factory=dict)
    without_wgmma: list[str] = field(default_factory=list)
    serialised: list[str] = field(default_factory=list)


def operators() -> tuple[str, ...]:
    """Those that together launch every kernel."""
    return tuple(name for name in workbench.names("launches") if not workbench.find(name).part_of)


def read_allowances() -> Allowances:
    """As they are committed."""
    return Allowances(**json.loads(FILE.read_text(encoding="utf-8")))


def write_allowances(allowances: Allowances) -> None:
    """The explicit update."""
    document: dict[str, Any] = vars(allowances)
    FILE.write_text(json.dumps(document, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def measured(rows: Sequence[Row]) -> Allowances:
    """The kernels' current numbers, as allowances."""
    found = Allowances()
    for row in rows:
        if row.facts is None:
            continue
        architecture = f"sm_{row.architecture}"
        found.ptxas[architecture] = row.facts.ptxas
        if _spilled(row):
            kernels = found.spilled.setdefault(architecture, {})
            # A kernel may run in both directions.
            kernels[row.place] = max(kernels.get(row.place, 0), _spilled(row))
        if _spilled_in_loops(row):
            kernels = found.spilled_in_loops.setdefault(architecture, {})
            kernels[row.place] = max(kernels.get(row.place, 0), _spilled_in_loops(row))
        if _wants_wgmma(row) and not row.facts.wgmma:
            found.without_wgmma.append(row.place)
        if _wants_wgmma(row) and row.facts.wgmma_serialised:
            found.serialised.append(row.place)
    return found


def _spilled(row: Row) -> int:
    assert row.facts is not None
    return row.facts.spill_stores + row.facts.spill_loads


def _spilled_in_loops(row: Row) -> int:
    """For portable kernels. Hopper's own are one persistent loop over work items: spills at the end of an item would
    count as well.
    """
    assert row.facts is not None
    return 0 if "hopper" in row.kernel else row.facts.spills_in_loops or 0


def _wants_wgmma(row: Row) -> bool:
    return row.architecture == 90 and row.facts is not None and row.facts.multiplies


def violations(rows: Sequence[Row], allowed: Allowances) -> list[str]:
    """One line for each kernel that breaks a rule."""
    lines: list[str] = []
    for row in rows:
        lines += [f"sm_{row.architecture} {row.place}: {what}" for what in _broken(row, allowed)]
    small = [row for row in rows if row.architecture == SMALLEST]
    for operator in dict.fromkeys(row.operator for row in small):
        labels = dict.fromkeys(row.label for row in small if row.operator == operator)
        if not any(
            all(row.facts and fits(row.facts) for row in small if (row.operator, row.label) == (operator, label))
            for label in labels
        ):
            lines.append(
                f"sm_{SMALLEST} {operator}: no configuration fits {CARDS[SMALLEST].shared_memory:,} bytes of shared"
                " memory"
            )
    return lines


def _broken(row: Row, allowed: Allowances) -> list[str]:
    if row.facts is None:
        return [f"does not compile: {row.error}"]
    found: list[str] = []
    limit = allowed.spilled.get(f"sm_{row.architecture}", {}).get(row.place, 0)
    if _spilled(row) > limit:
        found.append(
            f"spills {_spilled(row)} bytes ({row.facts.spill_stores} stored, {row.facts.spill_loads} loaded), allowed"
            f" are {limit}"
        )
    limit = allowed.spilled_in_loops.get(f"sm_{row.architecture}", {}).get(row.place, 0)
    if _spilled_in_loops(row) > limit:
        found.append(f"spills in a loop ({_spilled_in_loops(row)} instructions), allowed are {limit}")
    if _spilled(row) and row.facts.spills_in_loops is None:
        found.append("spills, and its SASS cannot be read: it may be in a loop")
    if not fits(row.facts):
        found.append(
            f"takes {row.facts.shared_memory:,} bytes of shared memory, and a block may have"
            f" {CARDS[row.architecture].shared_memory:,}"
        )
    if _wants_wgmma(row) and not row.facts.wgmma and row.place not in allowed.without_wgmma:
        found.append("multiplies without wgmma")
    if _wants_wgmma(row) and row.facts.wgmma_serialised and row.place not in allowed.serialised:
        found.append("its wgmma are serialised")
    return found
