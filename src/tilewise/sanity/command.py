"""`tilewise sanity`: runs every tile configuration, and says how many elements are off."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.sanity import flash
from tilewise.sanity.flash import Entry, Outcome
from tilewise.verify.compare import limits_from_eager
from tilewise.verify.implementation import UsageError

RTOL, ATOL = 1e-3, 1e-5
MOST_LISTED = 8


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
    if request.operator != "flash":
        raise UsageError(f"there are no tile configurations of {request.operator!r}: expected flash")
    table = list(enumerate(flash.entries()))
    if request.kernel is None:
        return table
    if not 0 <= request.kernel < len(table):
        raise UsageError(f"there is no configuration {request.kernel}: expected 0 to {len(table) - 1}, as --list numbers them")
    return [table[request.kernel]]


def list_entries(request: Request) -> list[str]:
    """A line each: operations and bytes of a step, shared memory that the tiles take, and the GPUs whose table has it."""
    lines = []
    for number, entry in chosen(request):
        size = f"{entry.operations / 1e6:>7.2f} MFLOP {entry.step_bytes / 1024:>6.1f} KB a step {entry.shared_memory / 1024:>6.1f} KB shared"
        lines.append(f"{number:>3} {entry.short:<30} {size}  {', '.join(entry.fits())}")
    return lines


def run_sanity(request: Request) -> Iterator[tuple[str, bool]]:
    """A line a configuration (more with `diff`), and whether it is right."""
    from tilewise.ops._host.backend import interpreting

    if not interpreting() and not torch.cuda.is_available():
        raise UsageError("there is no GPU and kernels are not interpreted here: see tilewise doctor")
    device = torch.device("cpu" if interpreting() else "cuda:0")
    for number, entry in chosen(request):
        parts, details, right = [], [], True
        for outcome in flash.run(entry, request.small, request.fill, device):
            bad, largest = _mismatches(outcome)
            count = int(bad.sum())
            right &= count == 0
            parts.append(f"{outcome.name}: {count} of {bad.numel()} mismatched ({100 * count / max(bad.numel(), 1):.2f} %), max {largest:.2e}")
            if request.diff and count:
                details += _where(outcome.name, bad)
        line = f"{'✓' if right else '✗'} {number:>3} {entry.short:<30} {'; '.join(parts)}"
        yield "\n".join([line, *details]), right


def _mismatches(outcome: Outcome) -> tuple[torch.Tensor, float]:
    """True where an element is off: beyond rtol and atol in fp32, beyond what the precision allows in 16 bits. And the greatest difference."""
    actual, truth = outcome.actual.double(), outcome.truth
    diff = torch.where(actual == truth, 0.0, (actual - truth).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if outcome.actual.dtype == torch.float32:
        allowed = ATOL + RTOL * truth.abs()
    else:
        limits = limits_from_eager(truth, outcome.eager, gradient=outcome.name.startswith("d"))
        allowed = torch.full_like(truth, limits.largest)
    return (diff > allowed).cpu(), diff.max().item() if diff.numel() else 0.0


def _where(name: str, bad: torch.Tensor) -> list[str]:
    """Mismatches by row and by channel, the worst first."""
    axes = {"row": 2, "head": 1} if name == "lse" else {"row": 1, "head": 2, "channel": 3}
    lines = []
    for word, axis in axes.items():
        counts = bad.sum(dim=[other for other in range(bad.ndim) if other != axis])
        order = counts.argsort(descending=True, stable=True)[:MOST_LISTED]
        listed = ", ".join(f"{int(i)}: {int(counts[i])}" for i in order if counts[i])
        lines.append(f"      {name} mismatches by {word}: {listed}{' ...' if int((counts > 0).sum()) > MOST_LISTED else ''}")
    return lines
