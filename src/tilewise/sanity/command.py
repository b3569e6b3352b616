"""`tilewise sanity`: runs every tile configuration, and says how many elements are off."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.sanity import operators
from tilewise.sanity.operators import Entry
from tilewise.workbench.operator import UsageError


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operator: str
    kernel: int | None = None
    small: bool = False
    diff: bool = False
    fill: str = "random"


def chosen(request: Request) -> list[tuple[int, Entry]]:
    """Configurations by number; a UsageError where there is none of that name or number."""
    table = list(enumerate(operators.find(request.operator).entries()))
    if request.kernel is None:
        return table
    if not 0 <= request.kernel < len(table):
        raise UsageError(
            f"there is no configuration {request.kernel}: expected 0 to {len(table) - 1}, as --list numbers them"
        )
    return [table[request.kernel]]


def list_entries(request: Request) -> list[str]:
    """A line each: operations and bytes of a step, shared memory that the tiles take, and the GPUs whose
    table has it.
    """
    lines = []
    entries = chosen(request)
    for number, entry in entries:
        size = (
            f"{entry.operations / 1e6:>7.2f} MFLOP {entry.step_bytes / 1024:>6.1f} KB a step"
            f" {entry.shared_memory / 1024:>6.1f} KB shared"
        )
        lines.append(f"{_label(number, entry, entries)} {size}  {', '.join(entry.fits())}")
    return lines


def _label(number: int, entry: Entry, entries: list[tuple[int, Entry]]) -> str:
    """Number and name, as wide as the longest."""
    return f"{number:>3} {entry.short:<{max(len(other.short) for _, other in entries)}}"


def run_sanity(request: Request) -> Iterator[tuple[str, bool]]:
    """A line a configuration (more with `diff`), and whether it is right."""
    from tilewise.ops._host.backend import interpreting

    entries = chosen(request)
    if not interpreting() and not torch.cuda.is_available():
        raise UsageError("there is no GPU and kernels are not interpreted here: see tilewise doctor")
    device = torch.device("cpu" if interpreting() else "cuda:0")
    for number, entry in entries:
        outcomes = operators.find(request.operator).run(entry, request.small, request.fill, device)
        right = all(outcome.right for outcome in outcomes)
        details = [line for outcome in outcomes for line in outcome.where()] if request.diff else []
        line = (
            f"{'✓' if right else '✗'} {_label(number, entry, entries)}"
            f" {'; '.join(outcome.text for outcome in outcomes)}"
        )
        yield "\n".join([line, *details]), right
