"""What the first mismatch tells: which line of a kernel computes the value, and what it looks like instead.

Finds the first mismatch of a kernel and the simulation; the tolerance is the rounding that the precision allows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewise.trace.request import Traced, split_step
from tilewise.trace.values import Values

EPS32 = float(np.finfo(np.float32).eps)
# The kernel's error may be a few times the simulation's in the same precision; and products are summed in another
# order.
FACTOR = 4.0
ROUNDINGS = 64.0


@dataclass(frozen=True)
class Row:
    """One value of one step: the largest difference, the tolerance, and the worst element with both values."""

    name: str
    difference: float
    allowed: float
    worst: tuple[int, ...]
    kernel: float
    simulation: float
    # Of all elements, those beyond the tolerance.
    bad: int
    elements: int

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.bad == 0


def judge(traced: Traced, low_precision: float) -> list[Row]:
    """A row for each value that the kernel and the simulation both have, but for its `unjudged` elements.

    `low_precision` is the rounding of the inputs' dtype.
    """
    return [_row(traced, name, low_precision) for name in traced.simulation if name in traced.kernel]


def _row(traced: Traced, name: str, low_precision: float) -> Row:
    sides = traced.kernel[name], traced.simulation[name], traced.exact[name]
    kernel, simulation, exact = (np.asarray(x, np.float64) for x in sides)
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
    difference = np.where(traced.unjudged.get(name, False), 0.0, difference)
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
    """The first row that rounding does not explain: before the loop, then step by step in the order of dependence, then
    after it.
    """
    by_name = {row.name: row for row in rows}
    stepped = {f"{name}_{step}" for name in check_order for step in range(steps)}
    start = [row for row in rows if row.name not in stepped and not row.name.endswith("_final") and row.name != "LSE"]
    middle = [by_name[f"{name}_{step}"] for step in range(steps) for name in check_order if f"{name}_{step}" in by_name]
    end = [row for row in rows if row not in start and row not in middle]
    return next((row for row in [*start, *middle, *end] if not row.agrees), None)


# As close as 16 bits come: a guess is about the formula, not about rounding.
CLOSE = 2**-7
# What computes each value, in words that help to find the line.
MAKERS = {
    "Q": "the load of Q: its pointers, strides or mask",
    "K": "the load of K: its pointers, strides or mask",
    "V": "the load of V: its pointers, strides or mask",
    "dO": "the load of dO: its pointers, strides or mask",
    "S": "the product of Q and K, the cap or the mask",
    "M": "the running maximum",
    "P": "the exponential",
    "L": "the running sum",
    "O_scale": "the rescale of O",
    "O": "the product of P and V, or what it is added to",
    "LSE": "the logarithm at the end",
    "LSE2": "the LSE that the backward starts from",
    "delta": "delta = rowsum(o · do) - dlse",
    "dP": "the product of dO and V",
    "dS": "dS = P · (dP - delta)",
    "dQ": "the product of dS and K, or its scale at the end",
    "dK": "the product of dS and Q, or its scale at the end",
    "dV": "the product of P and dO",
}


def explain(row: Row, traced: Traced) -> list[str]:
    """Sentences, the surest first."""
    # What is masked elsewhere is no mask that is missing here.
    kernel = traced.kernel | {
        name: np.where(unjudged, -np.inf, traced.kernel[name]) for name, unjudged in traced.unjudged.items()
    }
    simulation, makers = traced.simulation, traced.makers
    base, step = split_step(row.name)
    name = base.removesuffix("_final")
    guess = _guess(row.name, name, step or 0, kernel, simulation)
    # The mask is recognised by its effect, wherever a kernel applies it.
    known = {**MAKERS, **makers}
    maker = (
        ""
        if guess.startswith("the mask")
        else f"{name} comes from {known.get(name, 'what follows the values that agree')}"
    )
    return [sentence for sentence in (guess, maker) if sentence]


def _guess(full: str, name: str, step: int, kernel: Values, simulation: Values) -> str:
    ours, theirs = kernel[full].astype(np.float64), simulation[full].astype(np.float64)
    if not ours.any():
        return f"{full} is all zero"
    if name == "S":
        mask = _mask(ours, theirs)
        if mask:
            return mask
    if name in ("P", "dS"):
        mask = _zeroed(ours, theirs)
        if mask:
            return mask
    if name in ("Q", "K", "V", "dO"):
        shift = _shifted(ours, theirs)
        if shift:
            return f"{full} {shift}"
    if name == "M" and step and _close(ours, _row_maximum(kernel, simulation, step)):
        return "M holds this block's maximum alone: the running maximum is not kept"
    if name == "L" and step:
        p, before = kernel.get(f"P_{step}"), kernel.get(f"L_{step - 1}")
        if p is not None and before is not None and before.shape == ours.shape and _close(ours, before + p.sum(1)):
            return "L is the sum so far plus this block's, without the rescale of the sum so far"
        if p is not None and _close(ours, p.sum(1)):
            return "L holds this block's sum alone"
    if name == "O_scale" and step and f"O_{step - 1}" in kernel and _close(ours, kernel[f"O_{step - 1}"]):
        return (
            f"everything is right until block {step - 1}, then O is off by a factor of exp(M_{step - 1} - M_{step}):"
            " the rescale of O is missing"
        )
    if name == "O" and step and _close(ours, _without_rescale(kernel, step)):
        return (
            f"everything is right until O_{step - 1}, to which this block's part is added as it is: the rescale of O is"
            " missing"
        )
    if full in ("dK_final", "dV_final"):
        other = "dV_final" if full == "dK_final" else "dK_final"
        if other in simulation and simulation[other].shape == ours.shape and _close(ours, simulation[other]):
            return f"{full} holds what {other} should: dK and dV are exchanged"
    p, dp = kernel.get(f"P_{step}"), kernel.get(f"dP_{step}")
    if name == "dS" and p is not None and dp is not None and _close(ours, p * dp):
        return "dS is P · dP: delta is not subtracted"
    return _factor(full, ours, theirs)


def _close(a: np.ndarray, b: np.ndarray | None) -> bool:
    if b is None or a.shape != b.shape:
        return False
    finite = np.isfinite(a) & np.isfinite(b)
    scale = np.abs(b[finite]).max(initial=0.0)
    return bool(
        finite.any()
        and (np.isfinite(a) == np.isfinite(b)).all()
        and np.abs(a[finite] - b[finite]).max() <= CLOSE * scale
    )


def _row_maximum(kernel: Values, simulation: Values, step: int) -> np.ndarray | None:
    """This step's maximum by row, in M's units as the simulation has them."""
    m, s = simulation.get(f"M_{step}"), simulation.get(f"S_{step}")
    first_m, first_s = simulation.get("M_0"), simulation.get("S_0")
    if m is None or s is None or first_m is None or first_s is None:
        return None
    rows = np.isfinite(first_m) & (np.abs(first_s.max(1)) > 0)
    return s.max(1) * float(np.median(first_m[rows] / first_s.max(1)[rows])) if rows.any() else None


def _without_rescale(kernel: Values, step: int) -> np.ndarray | None:
    """The previous output plus this step's product, for kernels that rescale and add in one statement."""
    before, p, v = (kernel.get(f"{name}_{number}") for name, number in (("O", step - 1), ("P", step), ("V", step)))
    if before is None or p is None or v is None or (p.shape[0], v.shape[1]) != before.shape:
        return None
    return before + p @ v


def _mask(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Where the kernel sees what it should not, or does not see what it should."""
    extra = np.isfinite(ours) & ~np.isfinite(theirs)
    lost = ~np.isfinite(ours) & np.isfinite(theirs)
    if not extra.any() and not lost.any():
        return ""
    which, verb = (extra, "sees") if extra.any() else (lost, "does not see")
    row, column = (int(i) for i in np.argwhere(which)[0])
    return f"the mask: row {row} {verb} key {column} of this block, {int(which.sum())} pairs in all"


def _zeroed(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The same for a kernel that writes 0 where masked, where nothing else is wrong."""
    extra, lost = (theirs == 0) & (ours != 0), (theirs != 0) & (ours == 0)
    which, verb = (extra, "sees") if extra.any() else (lost, "does not see")
    if not which.any() or not _close(np.where(which, theirs, ours), theirs):
        return ""
    row, column = (int(i) for i in np.argwhere(which)[0])
    return f"the mask: row {row} {verb} key {column} of this tile, {int(which.sum())} pairs in all"


def _shifted(ours: np.ndarray, theirs: np.ndarray) -> str:
    for offset in (1, -1):
        if ours.shape[0] > 2 and _close(
            ours[1:] if offset == 1 else ours[:-1], theirs[:-1] if offset == 1 else theirs[1:]
        ):
            return f"is shifted by {offset} row"
    return ""


def _factor(full: str, ours: np.ndarray, theirs: np.ndarray) -> str:
    both = (
        np.isfinite(ours)
        & np.isfinite(theirs)
        & (np.abs(theirs) > 1e-6 * np.abs(theirs[np.isfinite(theirs)]).max(initial=0.0))
    )
    if not both.any():
        return ""
    factor = float(np.median(ours[both] / theirs[both]))
    if abs(factor - 1) > 2 * CLOSE and factor != 0 and _close(ours / factor, theirs):
        return f"{full} is {factor:.4g} times what it should be"
    return ""
