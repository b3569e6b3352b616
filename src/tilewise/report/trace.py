"""The page of a trace: every value of every step next to the simulation's, as pictures."""

import math
import struct
import zlib
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from tilewise.report import STEP_COLOURS, STEPS, render, steps_legend
from tilewise.trace.explain import Row, first_divergence, judge
from tilewise.trace.request import Request, Traced

# A map has at most this many cells per side, and is about this many pixels long: whole pixels per cell, so that all
# cells look alike.
MOST_CELLS, SIDE = 64, 128
# A vector is drawn as a column of this width.
COLUMN = 20
# Steps of the value scale on either side of zero.
LEVELS = 16
Colour = tuple[int, int, int]
# Blue and orange are distinct in every common colour blindness; zero is close to the page's background, in either
# scheme.
VALUE_STOPS = {
    "light": (("#0a3f80", "#6fa8dc", "#eef0f2"), ("#eef0f2", "#eb9a4f", "#853300")),
    "dark": (("#b5daff", "#3f7cbd", "#262b30"), ("#262b30", "#bd661d", "#ffd7a3")),
}


def render_html(
    programs: Sequence[tuple[Traced, Sequence[str]]],
    request: Mapping[str, str],
    low_precision: float,
    other: str = "simulation",
) -> str:
    """The page for traced programs with the lines that the command prints of each; `other` is what the kernel is
    compared with.
    """
    shown = [_program(number, traced, lines, low_precision, other) for number, (traced, lines) in enumerate(programs)]
    parting = any(program.first for program in shown)
    return render(
        "trace",
        "First mismatch" if parting else "No mismatch",
        not parting,
        programs=shown,
        opens_at=next((program.first for program in shown if program.first), None),
        request=request,
        other=other,
        legend=steps_legend("within what rounding allows"),
        ramps={scheme: [_hex(colour) for colour in _ramp(scheme)] for scheme in VALUE_STOPS},
        most_cells=MOST_CELLS,
    )


def facts(request: Request, about: Mapping[str, str]) -> dict[str, str]:
    """The request in words, with what the operator says of what it works on."""
    everything = {
        "operator": request.operator,
        "direction": request.direction,
        "kernel": f"launched by {request.impl}" if request.impl else "ours",
        "variables": ", ".join(f"{name}={variable}" for name, variable in (request.names or {}).items()),
        "compared with": request.against or "the simulation",
        "configuration": "" if request.kernel_index is None else f"{request.kernel_index} of the operator's table",
        **about,
        "program": str(request.program),
        "head": "" if request.direction == "backward" else str(request.head),
        "rows": "" if request.warp is None else f"of warp {request.warp} of {request.warps}",
        "dtype": request.dtype,
        "inputs": f"random, seed {request.seed}" if request.fill == "random" else f"by rule: {request.fill}",
    }
    return {name: text for name, text in everything.items() if text}


@dataclass(frozen=True)
class Map:
    """A picture in both colour schemes, and what it says in words; `worst` is the left, top, width and height of a mark
    in percent.
    """

    label: str
    light: str
    dark: str
    width: int
    height: int
    lines: tuple[str, ...]
    worst: tuple[float, float, float, float] | None = None


@dataclass(frozen=True)
class Value:
    """One named value: kernel, simulation, difference."""

    name: str
    anchor: str
    agrees: bool
    first: bool
    off: str
    maps: tuple[Map, ...]


@dataclass(frozen=True)
class Stage:
    """What comes before the loop, one block of it, or what comes after."""

    title: str
    values: tuple[Value, ...]


@dataclass(frozen=True)
class Program:
    """One traced program; `first` is the anchor of the first mismatch."""

    title: str
    headline: str
    sentences: tuple[str, ...]
    first: str | None
    stages: tuple[Stage, ...]
    missing: tuple[str, ...]


def _program(number: int, traced: Traced, lines: Sequence[str], low_precision: float, other: str) -> Program:
    rows = judge(traced, low_precision)
    first = first_divergence(rows, traced.steps, traced.order)
    anchors = {row.name: f"value-{number}-{i}" for i, row in enumerate(rows)}
    stages = tuple(
        Stage(title, tuple(_value(row, traced, anchors[row.name], row is first, other) for row in members))
        for title, members in _stages(rows, traced)
    )
    missing = tuple(name for name in traced.simulation if name not in traced.kernel)
    headline, *sentences = (line.strip() for line in lines)
    return Program(
        f"{traced.kernel_name}, {traced.place}",
        headline,
        tuple(sentences),
        anchors[first.name] if first else None,
        stages,
        missing,
    )


def _stages(rows: Sequence[Row], traced: Traced) -> list[tuple[str, list[Row]]]:
    """In the order of first_divergence, so that the first value marked is the first mismatch."""
    by_name = {row.name: row for row in rows}
    blocks = [
        [by_name[f"{name}_{step}"] for name in traced.order if f"{name}_{step}" in by_name]
        for step in range(traced.steps)
    ]
    rest = [row for row in rows if not any(row in block for block in blocks)]
    after = [row for row in rest if row.name.endswith("_final") or row.name == "LSE"]
    before = [row for row in rest if row not in after]
    named = [
        ("Before the loop", before),
        *((f"{traced.turn.capitalize()} {step}", block) for step, block in enumerate(blocks)),
        ("After the loop", after),
    ]
    return [(title, members) for title, members in named if members]


def _value(row: Row, traced: Traced, anchor: str, first: bool, other: str) -> Value:
    kernel, simulation = (np.asarray(values[row.name], np.float64) for values in (traced.kernel, traced.simulation))
    unjudged = traced.unjudged.get(row.name, np.zeros(kernel.shape, bool))
    difference = np.where(unjudged, 0.0, _multiples(kernel, simulation, row.allowed))
    masked = (f"{int(unjudged.sum())} not judged:", "masked in the simulation") if unjudged.any() else ()
    # The simulation sets the scale of both: a kernel's huge value must not make everything else look like zero.
    limit = _largest(simulation) or _largest(kernel) or 1.0
    off = (
        f"difference {_short(row.difference)}, allowed {_short(row.allowed)}"
        if math.isfinite(row.difference)
        else "finite in one of the two alone"
    )
    worst = None if row.agrees else row.worst
    maps = (
        _value_map("kernel", kernel, limit),
        _value_map(other, simulation, limit),
        _map(
            "difference",
            _difference_levels(_reduced(difference)),
            STEP_COLOURS,
            (*_difference_lines(row, difference), *masked),
            kernel.shape,
            worst,
        ),
    )
    return Value(row.name, anchor, row.agrees, first, off, maps)


def _multiples(kernel: np.ndarray, simulation: np.ndarray, allowed: float) -> np.ndarray:
    """Each element's difference over the tolerance, as in `judge`; infinite where one of the two is not finite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        difference = np.where(kernel == simulation, 0.0, np.abs(kernel - simulation))
        # Where the tolerance is 0, every difference is at the end of the scale.
        multiple = difference / allowed if allowed else np.where(difference > 0, 2.0 * STEPS[-1], 0.0)
    return np.where(np.isfinite(difference), multiple, np.inf)


def _reduced(x: np.ndarray) -> np.ndarray:
    """Two dimensions of at most MOST_CELLS: a cell holds the largest magnitude of its elements; NaN and infinity take
    precedence.
    """
    x = x[:, None] if x.ndim == 1 else x
    tall, wide = (-(-size // MOST_CELLS) for size in x.shape)
    x = np.pad(x, ((0, -x.shape[0] % tall), (0, -x.shape[1] % wide)))
    cells = (
        x.reshape(x.shape[0] // tall, tall, x.shape[1] // wide, wide)
        .swapaxes(1, 2)
        .reshape(x.shape[0] // tall, x.shape[1] // wide, -1)
    )
    key = np.where(np.isnan(cells), np.inf, np.abs(cells))
    return np.take_along_axis(cells, key.argmax(-1)[..., None], -1)[..., 0]


def _largest(x: np.ndarray) -> float:
    return float(np.abs(x[np.isfinite(x)]).max(initial=0.0))


def _value_map(label: str, x: np.ndarray, limit: float) -> Map:
    cells = _reduced(x)
    finite = np.isfinite(cells)
    # Zero is kept for what is not finite: it stays transparent, and the page hatches what lies behind.
    levels = np.where(finite, np.rint(np.clip(np.where(finite, cells, 0.0) / limit, -1, 1) * LEVELS) + LEVELS + 1, 0)
    colours = {scheme: tuple(_hex(colour) for colour in _ramp(scheme)) for scheme in VALUE_STOPS}
    return _map(label, levels, colours, _value_lines(x), x.shape)


def _difference_levels(multiples: np.ndarray) -> np.ndarray:
    beyond = sum((multiples > step).astype(np.int64) for step in STEPS)
    return np.where(np.isfinite(multiples), beyond + 1, 0)


def _value_lines(x: np.ndarray) -> tuple[str, ...]:
    finite = x[np.isfinite(x)]
    lines = [f"min {_short(finite.min())}", f"max {_short(finite.max())}"] if finite.size else ["nothing finite"]
    kinds = (("−inf", np.isneginf(x)), ("inf", np.isposinf(x)), ("NaN", np.isnan(x)))
    return (*lines, *(f"{int(found.sum())} × {kind}" for kind, found in kinds if found.any()))


def _difference_lines(row: Row, multiples: np.ndarray) -> tuple[str, ...]:
    finite = multiples[np.isfinite(multiples)] if row.allowed else multiples[:0]
    lines = (f"min {_short(finite.min())} ×", f"max {_short(finite.max())} ×") if finite.size else ()
    if not math.isfinite(row.difference):
        lines = (*lines[:1], "max infinite")
    return lines if row.agrees else (*lines, f"{row.bad} of {row.elements} off")


def _map(
    label: str,
    levels: np.ndarray,
    colours: Mapping[str, Sequence[str]],
    lines: tuple[str, ...],
    shape: tuple[int, ...],
    worst: tuple[int, ...] | None = None,
) -> Map:
    tall, wide = levels.shape
    pixels = max(1, SIDE // max(tall, wide))
    width = COLUMN if len(shape) == 1 else wide * pixels
    mark = None
    if worst is not None:
        row, column = (
            (index // -(-size // MOST_CELLS)) for index, size in zip((*worst, 0)[:2], (*shape, 1)[:2], strict=True)
        )
        mark = (100 * column / wide, 100 * row / tall, 100 / wide, 100 / tall)
    light, dark = (_png(levels.astype(np.uint8), colours[scheme]) for scheme in ("light", "dark"))
    return Map(label, light, dark, width, tall * pixels, (str(list(shape)), *lines), mark)


def _png(levels: np.ndarray, colours: Sequence[str]) -> str:
    """A data URI: level 0 is transparent, level i is the colour i - 1."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    tall, wide = levels.shape
    header = struct.pack(">IIBBBBB", wide, tall, 8, 3, 0, 0, 0)
    palette = bytes(3) + b"".join(bytes.fromhex(colour[1:]) for colour in colours)
    # Each line starts with its filter: none.
    lines = np.pad(levels, ((0, 0), (1, 0))).tobytes()
    body = (
        chunk(b"IHDR", header)
        + chunk(b"PLTE", palette)
        + chunk(b"tRNS", b"\0")
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )
    return "data:image/png;base64," + b64encode(b"\x89PNG\r\n\x1a\n" + body).decode()


@cache
def _ramp(scheme: str) -> tuple[Colour, ...]:
    """The colours of -LEVELS to LEVELS, interpolated linearly between their stops."""
    below, above = ([tuple(bytes.fromhex(stop[1:])) for stop in stops] for stops in VALUE_STOPS[scheme])
    stops = np.array([*below, *above[1:]], np.float64)
    at = np.linspace(0, len(stops) - 1, 2 * LEVELS + 1)
    red, green, blue = (
        np.rint(np.interp(at, range(len(stops)), stops[:, channel])).astype(int) for channel in range(3)
    )
    return tuple((int(r), int(g), int(b)) for r, g, b in zip(red, green, blue, strict=True))


def _hex(colour: Colour) -> str:
    return "#" + bytes(colour).hex()


def _short(x: float) -> str:
    """Three digits at least, with a true minus sign, which is as wide as a digit."""
    return (f"{x:.0f}" if 1e3 <= abs(x) < 1e6 else f"{x:.3g}").replace("-", "−")
