"""A program's values next to its simulation's, for any operator: shared by the traces of operators with several
kernels.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tilewise.ops._device.records import Taps
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash.simulate import Named
from tilewise.ops.nsa.simulate import Results
from tilewise.trace.record import Recording
from tilewise.trace.request import Traced, arrays, split_step
from tilewise.trace.values import Lines, MissingNameError, Naming, Values, named_values

# Inputs as they are, or in fp64.
Cast = Callable[[torch.Tensor], torch.Tensor]
Simulation = Callable[[Cast], Iterator[Named]]
# A recorded value in the simulation's form, from its name without the step, its step and itself.
Fit = Callable[[str, int | None, np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Kernel:
    """A traced kernel: its name, which part of the operator it is, its variables, their order in a step, and what a
    step is called.
    """

    name: str
    part: str
    naming: Naming
    turn: str

    @property
    def order(self) -> tuple[str, ...]:
        """The order in which values of a step depend on each other: as they are named, the first assignment of a
        variable before the last.
        """
        return tuple(found for name in self.naming.step for found in (self.naming.first.get(name), name) if found)


class Tap:
    """A buffer for the taps of one launch on q and v, for the tiles' rows and the most steps of a program."""

    def __init__(
        self, q: torch.Tensor, v: torch.Tensor, block_m: int, block_n: int, program: int, slots: int, steps: int
    ) -> None:
        channels = max(tile_widths(q.shape[-1], v.shape[-1], q.element_size()))
        elements = max(block_m, block_n) * max(channels, block_m, block_n)
        self.buffer = torch.full((steps, slots, elements), torch.nan, dtype=torch.float32, device=q.device)
        self.argument = Taps(self.buffer, program, slots, elements)

    def value(self, step: int, slot: int, *shape: int) -> np.ndarray:
        """What a slot holds, of this shape as the kernel has it."""
        return self.buffer[step, slot][: int(np.prod(shape))].reshape(shape).double().cpu().numpy()


def recorded(recording: Recording, kernel: Kernel) -> tuple[Values, Lines]:
    """What the kernel's program assigned, and where."""
    try:
        return named_values(recording.of_kernel(kernel.name), kernel.naming)
    except MissingNameError:
        # The program made no step: the step count shows that.
        return {}, {}


def as_it_is(_name: str, _step: int | None, x: np.ndarray) -> np.ndarray:
    """Where the simulation has all rows of a tile."""
    return x


def beside(
    kernel: Kernel,
    place: str,
    found: tuple[Values, Lines],
    run: Simulation,
    fit: Fit,
    stored: Values,
    makers: Mapping[str, str],
) -> Traced:
    """The values `found` in a program next to its simulation's; `stored` are the results in memory."""
    simulation, exact = arrays(run(lambda x: x)), arrays(run(lambda x: x.double()))
    values, lines = found
    kept = {
        name: cropped(fit(*split_step(name), x), simulation[name].shape)
        for name, x in values.items()
        if name in simulation
    }
    counts = [sum(split_step(name)[0] == kernel.naming.anchor for name in names) for names in (values, simulation)]
    walked, steps = ({"steps": np.array([count], np.float64)} for count in counts)
    return Traced(
        kernel.name,
        kernel.part,
        place,
        walked | kept | stored,
        steps | simulation,
        steps | exact,
        counts[1],
        kernel.order,
        lines,
        turn=kernel.turn,
        makers=makers,
    )


def cropped(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Without a tile's padding; a column of weights becomes a vector."""
    x = x[:, 0] if x.ndim == 2 and len(shape) == 1 else x
    return x[tuple(slice(0, size) for size in shape)]


def array(x: torch.Tensor) -> np.ndarray:
    """In fp64."""
    return x.double().cpu().numpy()


def padded(x: torch.Tensor, rows: int) -> np.ndarray:
    """Padded with zeros, as a tile is."""
    return np.pad(array(x), ((0, rows - x.shape[0]), (0, 0)))


def only_present(present: torch.Tensor) -> Fit:
    """Of merged rows those that exist, and 0 for an entry that no token has: its memory was never written."""
    there = present.cpu().numpy()

    def fit(name: str, step: int | None, x: np.ndarray) -> np.ndarray:
        x = x[: len(there)]
        return x if step is None or not name.endswith("_part") else np.where(there[:, step, None], x, 0.0)

    return fit


def put_together(results: Sequence[Results], first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by token, then index head, then query head, of each head's results: [R, S, ...] and [R, S]."""
    tokens = results[0].present.shape[0]
    parts = zip(*(found.rows() for found in results), strict=True)
    x, present = (torch.stack([part.unflatten(0, (tokens, -1)) for part in found], 1).flatten(0, 2) for found in parts)
    return x[first : first + rows], present[first : first + rows]


def row_place(tokens: int, heads: int, number: int, most: int) -> tuple[int, int, str]:
    """First row, number of rows and place of a program that merges `most` rows: of all heads, token by token."""
    first = number * most
    rows = min(most, tokens * heads - first)
    return first, rows, f"program {number}, tokens {first // heads} to {(first + rows - 1) // heads}, rows of all heads"
