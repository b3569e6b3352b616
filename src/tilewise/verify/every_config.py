"""`tilewise verify OP --every-config`: runs each tile configuration and checks its results."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from rich.console import Console

from tilewise import workbench
from tilewise.verify.compare import compare_choices, limits_from_eager
from tilewise.verify.suite import make_fill
from tilewise.workbench.operator import Configurations, UsageError

RTOL, ATOL = 1e-3, 1e-5
MOST_LISTED = 8
# Output of q, k and v, and LSE if there is one, in a compute_dtype; other arguments are bound.
Reference = Callable[..., tuple[torch.Tensor, ...]]


class Entry(Protocol):
    """One configuration."""

    @property
    def short(self) -> str:
        """One word."""

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its products."""

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step."""

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count."""

    def fits(self) -> list[str]:
        """GPU families that it is chosen for."""


@dataclass(frozen=True)
class Outcome:
    """One tensor of one configuration, with the fp64 truth and eager torch's result in the same precision."""

    name: str
    actual: torch.Tensor
    truth: torch.Tensor
    eager: torch.Tensor

    @cached_property
    def _difference(self) -> torch.Tensor:
        actual = self.actual.double()
        return torch.where(actual == self.truth, 0.0, (actual - self.truth).abs()).nan_to_num(
            nan=torch.inf, posinf=torch.inf
        )

    @cached_property
    def bad(self) -> torch.Tensor:
        """True where an element mismatches: beyond rtol and atol in fp32, beyond what 16 bits allow otherwise."""
        if self.actual.dtype == torch.float32:
            # Infinite elements have no tolerance beyond ATOL.
            allowed = ATOL + RTOL * self.truth.abs().nan_to_num(posinf=0.0)
        else:
            limits = limits_from_eager(self.truth, self.eager, gradient=self.name.startswith("d"))
            allowed = torch.full_like(self.truth, limits.largest)
        return (self._difference > allowed).cpu()

    @property
    def right(self) -> bool:
        """Whether no element mismatches."""
        return not bool(self.bad.any())

    @property
    def text(self) -> str:
        """How many elements mismatch, and the largest difference."""
        count, largest = int(self.bad.sum()), self._difference.max().item() if self._difference.numel() else 0.0
        return (
            f"{self.name}: {count} of {self.bad.numel()} mismatched ({100 * count / max(self.bad.numel(), 1):.2f} %),"
            f" max {largest:.2e}"
        )

    def where(self) -> list[str]:
        """Mismatches by row, head and channel, the most first; empty if there are none."""
        if self.right:
            return []
        # Packed tensors have no batch axis: axes are counted from the last.
        axes = {"row": -1, "head": -2} if self.name == "lse" else {"row": -3, "head": -2, "channel": -1}
        lines = []
        for word, axis in axes.items():
            counts = self.bad.sum(dim=[other for other in range(-self.bad.ndim, 0) if other != axis])
            order = counts.argsort(descending=True, stable=True)[:MOST_LISTED]
            listed = ", ".join(f"{int(i)}: {int(counts[i])}" for i in order if counts[i])
            lines.append(
                f"      {self.name} mismatches by {word}:"
                f" {listed}{' ...' if int((counts > 0).sum()) > MOST_LISTED else ''}"
            )
        return lines


@dataclass(frozen=True)
class Choice:
    """The blocks that one configuration chose, with their scores in fp64 and eager torch's: judged by score, as
    `compare_choices` has it.
    """

    indices: torch.Tensor
    scores: torch.Tensor
    eager: torch.Tensor

    @cached_property
    def _wrong(self) -> str:
        return compare_choices(self.indices, self.scores, self.eager)

    @property
    def right(self) -> bool:
        """Whether every choice is among the best."""
        return not self._wrong

    @property
    def text(self) -> str:
        """The first error."""
        return f"indices: {self._wrong or f'all {self.indices[..., 0].numel()} choices are the best'}"

    def where(self) -> list[str]:
        """The text says it."""
        return []


def filled(element_size: int, fill_rule: str, device: torch.device, **shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these shapes, 2 or 4 bytes per element."""
    fill = make_fill(fill_rule, 42)
    dtype = torch.bfloat16 if element_size == 2 else torch.float32
    return [fill(name, shape, 1.0).to(device, dtype) for name, shape in shapes.items()]


def output_outcomes(
    actual: Sequence[torch.Tensor], reference: Reference, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> list[Outcome]:
    """o, and lse if there is one, compared with the reference's for q, k and v."""
    truth = reference(q.double(), k.double(), v.double())
    # LSEs are always fp32.
    eager = reference(q, k, v, compute_dtype=q.dtype)[0], *reference(q, k, v, compute_dtype=torch.float32)[1:]
    return [
        Outcome(name, *values) for name, *values in zip(("o", "lse")[: len(truth)], actual, truth, eager, strict=True)
    ]


def gradient_outcomes(
    actual: Sequence[torch.Tensor],
    reference: Reference,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
) -> list[Outcome]:
    """dq, dk and dv compared with the reference's for q, k, v and the output's gradient."""

    def gradients(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        o = reference(*leaves, compute_dtype=dtype)[0]
        return torch.autograd.grad(o, leaves, do.to(dtype))

    return [
        Outcome(*values)
        for values in zip(("dq", "dk", "dv"), actual, gradients(torch.float64), gradients(q.dtype), strict=True)
    ]


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operator: str
    kernel: int | None = None
    small: bool = False
    diff: bool = False
    fill: str = "random"


def chosen(request: Request) -> list[tuple[int, Entry]]:
    """Configurations by number; a UsageError if none has that name or number."""
    configs: Configurations = workbench.find(request.operator, "configs").load("configs")
    table = list(enumerate(configs.entries()))
    if request.kernel is None:
        return table
    if not 0 <= request.kernel < len(table):
        raise UsageError(
            f"there is no configuration {request.kernel}: expected 0 to {len(table) - 1}, as --list numbers them"
        )
    return [table[request.kernel]]


def list_entries(request: Request) -> list[str]:
    """One line each: operations and bytes of a step, shared memory of the tiles, and the GPUs whose table has it."""
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


def run_entries(request: Request) -> Iterator[tuple[str, bool]]:
    """One line per configuration (more with `diff`), and whether it is right."""
    from tilewise.ops._host.backend import interpreting

    entries = chosen(request)
    configs: Configurations = workbench.find(request.operator).load("configs")
    if not interpreting() and not torch.cuda.is_available():
        raise UsageError("there is no GPU and kernels are not interpreted here: see tilewise doctor")
    device = torch.device("cpu" if interpreting() else "cuda:0")
    for number, entry in entries:
        outcomes = configs.run(entry, request.small, request.fill, device)
        right = all(outcome.right for outcome in outcomes)
        details = [line for outcome in outcomes for line in outcome.where()] if request.diff else []
        line = (
            f"{'✓' if right else '✗'} {_label(number, entry, entries)}"
            f" {'; '.join(outcome.text for outcome in outcomes)}"
        )
        yield "\n".join([line, *details]), right


def run_request(request: Request, console: Console) -> bool:
    """Print the result of every configuration, and the verdict; returns whether all are right."""
    wrong = count = 0
    for line, right in run_entries(request):
        console.print(line, markup=False, highlight=False)
        count += 1
        wrong += not right
    console.print(
        f"FAIL: {wrong} of {count} configurations are wrong"
        if wrong
        else f"PASS: all {count} configurations agree with the reference"
    )
    return not wrong
