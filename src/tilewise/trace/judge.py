"""Where a kernel's values and the simulation's first part, judged by the rounding that the precision allows."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.trace.values import Values

EPS32 = float(np.finfo(np.float32).eps)
# The kernel may err as the simulation does in the same precision, some times over; and sums of products come in another
# order.
FACTOR = 4.0
ROUNDINGS = 64.0


@dataclass(frozen=True)
class Row:
    """One value of one step: the largest difference, what is allowed, and the worst element with both values."""

    name: str
    difference: float
    allowed: float
    worst: tuple[int, ...]
    kernel: float
    simulation: float
    # Of all elements, those beyond what is allowed.
    bad: int
    elements: int

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.bad == 0


def judge(kernel: Values, simulation: Values, exact: Values, order: Sequence[str], low_precision: float) -> list[Row]:
    """A row for each name of `order` that both have.

    `exact` is the simulation in fp64; `low_precision` is the rounding of the inputs' dtype.
    """
    return [
        _row(name, kernel[name], simulation[name], exact[name], low_precision)
        for name in order
        if name in kernel and name in simulation
    ]


def _row(name: str, kernel: np.ndarray, simulation: np.ndarray, exact: np.ndarray, low_precision: float) -> Row:
    kernel, simulation, exact = (np.asarray(x, np.float64) for x in (kernel, simulation, exact))
    finite = np.isfinite(simulation) & np.isfinite(exact)
    largest = np.abs(simulation[finite]).max(initial=0.0)
    # Loads are exact; everything after the first product rounds.
    own = np.abs(simulation[finite] - exact[finite]).max(initial=0.0)
    allowed = (
        FACTOR * own
        + ROUNDINGS * EPS32 * largest
        + (low_precision * largest if name.split("_")[0] in ("dQ", "dK", "dV", "O") else 0.0)
    )
    with np.errstate(invalid="ignore"):
        difference = np.where(kernel == simulation, 0.0, np.abs(kernel - simulation))
    difference = np.where(np.isnan(difference), np.inf, difference)
    at = tuple(int(i) for i in np.unravel_index(int(difference.argmax()), difference.shape)) if difference.size else ()
    bad = int((difference > allowed).sum())
    worst = float(difference.max(initial=0.0))
    return Row(
        name,
        worst,
        float(allowed),
        at,
        float(kernel[at]) if at else 0.0,
        float(simulation[at]) if at else 0.0,
        bad,
        difference.size,
    )


def first_divergence(rows: Sequence[Row], steps: int, check_order: Sequence[str]) -> Row | None:
    """The first row that rounding does not explain: before the loop, step by step in the order in which values depend
    on each other, then after.
    """
    by_name = {row.name: row for row in rows}
    stepped = {f"{name}_{step}" for name in check_order for step in range(steps)}
    start = [row for row in rows if row.name not in stepped and not row.name.endswith("_final") and row.name != "LSE"]
    middle = [by_name[f"{name}_{step}"] for step in range(steps) for name in check_order if f"{name}_{step}" in by_name]
    end = [row for row in rows if row not in start and row not in middle]
    return next((row for row in [*start, *middle, *end] if not row.agrees), None)
