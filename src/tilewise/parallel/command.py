"""`tilewise parallel-plan`: what a layer would cost on each rank, in a table and a plot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.table import Table

from tilewise.bench.text import COLOURS, MARKERS, check_picture
from tilewise.parallel.assignment import Runs, assign, sums
from tilewise.parallel.balance import balanced, seen
from tilewise.parallel.estimate import Costs, Estimate, flash_estimate, measured_dim, rates, sparse_estimate
from tilewise.parallel.traffic import BEFORE, Layer
from tilewise.workbench.operator import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FIGURES = ("TFLOP\nfwd", "\nbwd", "GB sent\nfwd", "\nbwd", "GB received\nfwd", "\nbwd", "peak\nGB", "ms\nfwd", "\nbwd")
COLUMNS = ("rank", "tokens", *FIGURES)


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    tokens: int | None
    lengths: str | None
    heads: str
    dim: str
    world: int
    method: str
    link: float
    plot: Path | None


def run_request(request: Request, console: Console) -> None:
    """Print it, and draw it on request."""
    layer, lengths = _layer(request), _lengths(request)
    if request.method not in ("all_gather", "ring"):
        raise UsageError(f"--method {request.method}: expected all_gather or ring")
    if request.link <= 0:
        raise UsageError(f"--link-gb-per-s {request.link:g}: expected a rate above 0")
    if request.plot:
        check_picture(request.plot)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    packed = len(lengths) > 1
    runs = assign(bounds, request.world, balanced(bounds, request.world) if packed else "head_tail")
    given = bounds, runs, request.world, layer
    found = {f"flash_attention, {request.method}": flash_estimate(*given, request.method, request.link * 1e9)}
    if request.method == "all_gather":
        found["native_sparse_attention, all_gather"] = sparse_estimate(*given, request.link * 1e9)
    for name, estimate in found.items():
        console.print(f"{name}: one causal layer in bf16, forward and backward", highlight=False)
        console.print(_table(estimate))
        for line in _summary(estimate):
            console.print(line, markup=False, highlight=False)
        console.print()
    if request.method == "ring":
        console.print("native_sparse_attention has no ring\n", highlight=False)
    if packed:
        for line in _assignment(bounds, runs, request.world):
            console.print(line, markup=False, highlight=False)
    for line in _trust(layer, request.link):
        console.print(line, markup=False, highlight=False)
    if request.plot:
        picture(found).savefig(request.plot, dpi=120)


def _numbers(words: str, option: str, example: str) -> list[int]:
    parts = words.split("/")
    if len(parts) > 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise UsageError(f"{option} {words}: expected a whole number or two, such as {example}")
    return [int(part) for part in (parts * 2)[:2]]


def _layer(request: Request) -> Layer:
    heads, kv_heads = _numbers(request.heads, "--heads", "64/4")
    dim, value_dim = _numbers(request.dim, "--dim", "192/128")
    if heads % kv_heads:
        raise UsageError(f"--heads {request.heads}: query heads must be a multiple of KV heads")
    if max(dim, value_dim) > 256:
        raise UsageError(f"--dim {request.dim}: expected 256 channels at most")
    return Layer(heads, kv_heads, dim, value_dim)


def _lengths(request: Request) -> list[int]:
    if (request.tokens is None) == (request.lengths is None):
        raise UsageError("expected --tokens, of one sequence, or --lengths, of packed ones: give one of them")
    if request.tokens is not None:
        return [request.tokens]
    lengths = []
    for word in (request.lengths or "").split(","):
        found = re.fullmatch(r"(\d+)(?:x(\d+))?", word.strip())
        if not found:
            raise UsageError(f"--lengths {request.lengths}: expected lengths such as 131072,4096x30, not {word!r}")
        lengths += [int(found[1])] * int(found[2] or 1)
    return lengths


def _table(estimate: Estimate) -> Table:
    found = Table(*COLUMNS, box=None, pad_edge=False)
    for column in found.columns:
        column.justify, column.no_wrap = "right", True
    both = estimate.forward, estimate.backward
    peak = torch.maximum(*(costs.memory for costs in both))
    figures = [[x.tolist() for x in costs] for costs in both]
    for rank, (tokens, memory) in enumerate(zip(estimate.tokens.tolist(), peak.tolist(), strict=True)):
        flops, sent, received, seconds = (
            [direction[i][rank] * scale for direction in figures]
            for i, scale in ((0, 1e-12), (1, 1e-9), (2, 1e-9), (4, 1e3))
        )
        numbers = [*flops, *sent, *received, memory * 1e-9, *seconds]
        found.add_row(str(rank), str(tokens), *map(_short, numbers))
    return found


def _short(x: float) -> str:
    return f"{x:.0f}" if x >= 1000 else f"{x:.3g}"


def _over_mean(x: torch.Tensor) -> float:
    mean = float(x.double().mean())
    return float(x.max()) / mean if mean else 1.0


def _summary(estimate: Estimate) -> Iterator[str]:
    both = estimate.forward, estimate.backward
    figures = {
        "work": both[0].flops + both[1].flops,
        "tokens": estimate.tokens,
        "memory": torch.maximum(both[0].memory, both[1].memory),
        "time": both[0].seconds + both[1].seconds,
    }
    yield "largest over mean: " + ", ".join(f"{name} {_over_mean(x):.3f}" for name, x in figures.items())
    slowest = [float(costs.seconds.max()) * 1e3 for costs in both]
    yield f"slowest rank: {_short(slowest[0])} ms forward, {_short(slowest[1])} ms backward"


def _assignment(bounds: torch.Tensor, runs: Runs, world: int) -> Iterator[str]:
    """Who has what of packed sequences, and how level the named assignments would be."""
    levels = {"this assignment": runs} | {name: assign(bounds, world, name) for name in ("head_tail", "contiguous")}
    words = (
        f"{name} {_over_mean(sums(seen(of, bounds, *BEFORE), of.ranks, world)):.3f}" for name, of in levels.items()
    )
    yield f"work, largest over mean: {', '.join(words)}"
    held: dict[int, set[int]] = {}
    for sequence, rank in zip(runs.sequences.tolist(), runs.ranks.tolist(), strict=True):
        held.setdefault(sequence, set()).add(rank)
    yield f"cut head-tail: {_ranges([s for s, ranks in held.items() if len(ranks) > 1])}"
    for rank in range(world):
        yield f"whole on rank {rank}: {_ranges([s for s, ranks in held.items() if ranks == {rank}])}"
    yield ""


def _ranges(numbers: list[int]) -> str:
    """Sequences 0-3, 7."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    words = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in found)
    return f"sequences {words}" if found else "none"


def _trust(layer: Layer, link: float) -> Iterator[str]:
    """What the times are made of."""
    table = rates()
    for name, operator in (("flash_attention", table["flash"]), ("native_sparse_attention", table["nsa"])):
        error = operator["error"]
        yield (
            f"times of {name}: fitted to {error['cases']} measured calls on one {table['device']}, off by"
            f" {error['mean']:.1%} on average and {error['largest']:.1%} at most"
        )
    yield f"rates of {measured_dim(layer)} channels (native_sparse_attention: 128); a link of {link:g} GB/s each way"
    yield "peak: inputs, results and what travels; kernels' own workspace is not in it"


def picture(found: dict[str, Estimate]) -> Figure:
    """By rank, forward and backward: work over the mean's, memory, time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(found)), layout="constrained")
    panels = figure.subplots(len(found), 3, squeeze=False)
    for line, (name, estimate) in zip(panels, found.items(), strict=True):
        ranks = range(len(estimate.tokens))
        for i, (label, costs) in enumerate((("forward", estimate.forward), ("backward", estimate.backward))):
            style = {"color": COLOURS[i], "marker": MARKERS[i] if len(ranks) <= 64 else None, "label": label}
            for panel, values in zip(line, _drawn(costs), strict=True):
                panel.plot(ranks, values.tolist(), **style)
        for panel, title in zip(line, ("work over the mean", "GB at the peak", "ms"), strict=True):
            panel.set_title(f"{name}\n{title}", fontsize=9)
            panel.set_xlabel("rank")
            panel.set_ylim(0, 1.15 * panel.dataLim.y1 or 1)
            panel.grid(visible=True, alpha=0.3)
            panel.legend(fontsize=8)
    return figure


def _drawn(costs: Costs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mean = costs.flops.mean()
    return costs.flops / (mean if mean else 1), costs.memory * 1e-9, costs.seconds * 1e3
