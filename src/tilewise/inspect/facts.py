"""What one compiled kernel uses, and the GPUs it may run on: what each offers, and how many CTAs of the kernel fit on
an SM.

Also what is to be compiled, as the command passes it to the worker processes, and their answers: rows, in a file too.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.workbench.operator import UsageError


@dataclass(frozen=True)
class Facts:
    """One kernel on one architecture: registers per thread, bytes spilled per thread, bytes of shared memory, columns
    of tensor memory, warps per CTA; whether it multiplies matrices, and by what. `ptxas` is the assembler's version;
    `mix` counts the instructions of its SASS, None if not requested; `spills_in_loops` counts its spills inside loops,
    None if it spills nothing or its SASS cannot be read.
    """

    kernel: str
    architecture: int
    registers: int
    spill_stores: int
    spill_loads: int
    shared_memory: int
    tensor_memory: int
    warps: int
    multiplies: bool
    mma: bool
    wgmma: bool
    wgmma_serialised: bool
    tma: bool
    tcgen05: bool
    ptxas: str
    mix: Mapping[str, int] | None = None
    spills_in_loops: int | None = None


class Card(NamedTuple):
    """What GPUs of one compute capability offer: shared memory per CTA and per SM in bytes, warps and CTAs per SM."""

    examples: str
    shared_memory: int
    shared_memory_all: int
    warps: int
    blocks: int


# From the table of technical specifications by compute capability in NVIDIA's CUDA programming guide.
CARDS = {
    80: Card("A100", 163 << 10, 164 << 10, 64, 32),
    86: Card("RTX 30, A10, A40", 99 << 10, 100 << 10, 48, 16),
    89: Card("RTX 40, L4, L40", 99 << 10, 100 << 10, 48, 24),
    90: Card("H100, H200", 227 << 10, 228 << 10, 64, 32),
    100: Card("B100, B200", 227 << 10, 228 << 10, 64, 32),
    120: Card("RTX 50", 99 << 10, 100 << 10, 48, 24),
}
# For all of them: registers per SM, their allocation unit per warp, split evenly over the SM's four partitions; the
# allocation unit of shared memory in bytes, and what each CTA takes besides its own; columns of tensor memory per SM,
# if it has any.
REGISTERS, REGISTER_UNIT, QUARTERS = 65536, 256, 4
SHARED_UNIT, SHARED_OF_BLOCK = 128, 1024
TENSOR_COLUMNS = 512
WARP = 32


class Occupancy(NamedTuple):
    """CTAs and warps that fit on an SM, and which resource limits one more CTA."""

    blocks: int
    warps: int
    limit: str


def _whole(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def occupancy(facts: Facts) -> Occupancy:
    """The occupancy of an SM by the kernel."""
    card = CARDS[facts.architecture]
    warps_of_quarter = REGISTERS // QUARTERS // _whole(facts.registers * WARP, REGISTER_UNIT)
    limits = {
        "warps": card.warps // facts.warps,
        "blocks": card.blocks,
        "registers": warps_of_quarter * QUARTERS // facts.warps,
        "shared memory": card.shared_memory_all // (_whole(facts.shared_memory, SHARED_UNIT) + SHARED_OF_BLOCK)
        if fits(facts)
        else 0,
    }
    if facts.tensor_memory:
        limits["tensor memory"] = TENSOR_COLUMNS // facts.tensor_memory
    limit = min(limits, key=lambda name: limits[name])
    return Occupancy(limits[limit], limits[limit] * facts.warps, limit)


def fits(facts: Facts) -> bool:
    """Whether a CTA may have this much shared memory."""
    return facts.shared_memory <= CARDS[facts.architecture].shared_memory


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
