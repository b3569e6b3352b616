"""A kernel's recorded assignments under the simulation's names."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tilewise._assignments import END, TURN
from tilewise.trace.record import Event

Values = dict[str, np.ndarray]
# Where each value was computed.
Lines = dict[str, str]


class MissingNameError(Exception):
    """A requested variable never occurs; the message lists those that do."""


@dataclass(frozen=True)
class Naming:
    """Which variables of a kernel hold our values: before, in and after its loop over tiles. The first candidate that
    occurs counts.

    In a step the last assignment counts; `first` names what the first one is, where that differs (O_scale for O).
    `anchor` identifies the loop.
    """

    anchor: str
    step: Mapping[str, tuple[str, ...]]
    before: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    after: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    first: Mapping[str, str] = field(default_factory=dict)
    # Tiles that the kernel keeps transposed.
    transposed: frozenset[str] = frozenset()
    # Whether S is known to hold -inf where masked; a kernel may also mask P, or another variable.
    masks_scores: bool = False

    def renamed(self, given: Mapping[str, str]) -> "Naming":
        """With the user's variable names in place of the candidates."""
        known = {**self.before, **self.step, **self.after}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise MissingNameError(f"there is no value {unknown[0]!r}: expected some of {', '.join(known)}")

        def replace(names: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {name: (given[name],) if name in given else candidates for name, candidates in names.items()}

        return dataclasses.replace(
            self, step=replace(self.step), before=replace(self.before), after=replace(self.after)
        )


def named_values(events: Sequence[Event], naming: Naming, required: Sequence[str] = ()) -> tuple[Values, Lines]:
    """Values by our names, `S_0` for S of the first step, and the lines that made them.

    A MissingNameError where the anchor or a `required` one never occurs.
    """
    tiles = [event for event in events if event.value is None or event.value.ndim > 0]
    anchor = next(
        (i for i, event in enumerate(tiles) if event.name in naming.step[naming.anchor] and event.value.ndim >= 2), None
    )
    if anchor is None:
        raise MissingNameError(_missing(naming.anchor, naming.step[naming.anchor], tiles))
    before, steps, after = _split(tiles, anchor)
    # A helper's own variables may have the same names: only the function of the anchor and that of the loop count.
    loop = _loop(tiles, anchor)
    scope = {tiles[anchor].function} | ({loop.function} if loop else set())
    values: Values = {}
    lines: Lines = {}

    def keep(key: str, name: str, event: Event) -> None:
        values[key] = event.value.T if name in naming.transposed else event.value
        lines[key] = f"line {event.line}, in {event.function}"

    for name, candidates in naming.before.items():
        # What a kernel reads from shared memory, it reads in the loop.
        found = _assignments(candidates, before, scope)[-1:] or _assignments(candidates, steps[0], scope)[:1]
        for event in found:
            keep(name, name, event)
    for number, step in enumerate(steps):
        for name, candidates in naming.step.items():
            found = _assignments(candidates, step, scope)
            if found:
                # Passing on a helper's result does not compute it again.
                made = next(
                    event
                    for event in found
                    if event.value is found[-1].value or np.array_equal(event.value, found[-1].value, equal_nan=True)
                )
                keep(f"{name}_{number}", name, made)
                # A kernel that rescales and adds in one statement has no value between the two.
                if name in naming.first and made is not found[0]:
                    keep(f"{naming.first[name]}_{number}", name, found[0])
    for name, candidates in naming.after.items():
        for event in _assignments(candidates, after, scope)[-1:]:
            keep(name, name, event)
    for name in required:
        if not any(key == name or key.startswith(f"{name}_") for key in values):
            candidates = {**naming.before, **naming.step, **naming.after}[name]
            raise MissingNameError(_missing(name, candidates, tiles))
    return values, lines


def _missing(name: str, candidates: Sequence[str], tiles: Sequence[Event]) -> str:
    seen = ", ".join(dict.fromkeys(event.name for event in tiles if event.value is not None))
    return (
        f"no variable {' or '.join(candidates)} for {name} was assigned a tile: name it with --names {name}=...; seen"
        f" were {seen or 'none'}"
    )


def _loop(tiles: Sequence[Event], anchor: int) -> Event | None:
    """The iteration of the innermost loop around the anchor."""
    closed = []
    for event in reversed(tiles[:anchor]):
        if event.name == END:
            closed.append((event.function, event.line))
        if event.name == TURN and (event.function, event.line) not in closed:
            return event
    return None


def _split(tiles: Sequence[Event], anchor: int) -> tuple[list[Event], list[list[Event]], list[Event]]:
    """What comes before the loop, its iterations, and what comes after."""
    loop = _loop(tiles, anchor)
    if loop is None:
        return list(tiles), [list(tiles)], list(tiles)
    before: list[Event] = []
    after: list[Event] = []
    steps: list[list[Event]] = []
    inside = False
    for event in tiles:
        mark = (event.function, event.line) == (loop.function, loop.line)
        if mark and event.name == TURN:
            steps.append([])
            inside = True
            after = []
        elif mark and event.name == END:
            inside = False
        elif inside:
            steps[-1].append(event)
        elif steps:
            after.append(event)
        else:
            before.append(event)
    return before, steps, after


def _assignments(candidates: Sequence[str], events: Sequence[Event], scope: set[str]) -> list[Event]:
    for candidate in candidates:
        found = [event for event in events if event.name == candidate and event.function in scope]
        if found:
            return found
    return []


GROUP = 8


def section(name: str, value: np.ndarray) -> str:
    """A heading, then one line per row, rows in groups of eight."""
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
