"""Fits the rates that `tilewise parallel-plan` predicts times with to measured kernels.

python benchmarks/rates.py > src/tilewise/parallel/rates.json

Flash attention takes its FLOPs over a rate for each number of channels, and a time for each query, head and channel;
native sparse attention its FLOPs over two rates, for what is quadratic in the length and for what is linear. Fitted by
least squares of relative errors to every causal and full case of two runs, and to the whole operator at every length.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tilewise.parallel.assignment import assign
from tilewise.parallel.balance import seen
from tilewise.parallel.estimate import DIRECTIONS, Sparse, sparse_keys, sparse_work, work
from tilewise.parallel.traffic import Direction, Layer

RESULTS = Path(__file__).parent / "results"
FLASH, BENCH, NSA = "flash-h200.json", "bench-flash-h200.json", "nsa-h200.json"
SHORT = {"forward": "fwd", "backward": "bwd"}


def load(name: str) -> dict[str, Any]:
    """A saved result."""
    found: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return found


def significant(x: float) -> float:
    """Four digits: more would differ between machines."""
    return float(f"{x:.4g}")


def flash_cases(direction: Direction) -> Iterator[tuple[int, float, float, float]]:
    """Channels, FLOPs, queries · heads · channels, and milliseconds."""
    for row in load(FLASH)["rows"]:
        if row.get("direction") == direction:
            keys = row["batch"] * pairs(row["tokens"], row["causal"])
            layer = Layer(row["heads"], row["heads"], row["channels"], row["channels"])
            size = row["batch"] * row["tokens"] * row["heads"] * row["channels"]
            yield row["channels"], float(work(keys, layer, direction)), size, row["milliseconds"]["tilewise"]
    for row in load(BENCH)["rows"]:
        if (row["implementation"], row["mode"]) == ("tilewise", SHORT[direction]):
            given = dict(pair.split("=") for pair in row["problem"].split(",") if "=" in pair)
            heads, dim = int(given["H"]), int(given["D"])
            yield dim, row["operations"], row["total_tokens"] * heads * dim, row["times"]["median"]


def pairs(tokens: int, causal: bool) -> torch.Tensor:
    """Of a query and a key that it sees."""
    bounds = torch.tensor([0, tokens])
    return seen(assign(bounds, 1, "contiguous"), bounds, -1, 0 if causal else -1).sum()


def nsa_cases(direction: Direction) -> Iterator[tuple[float, float, float]]:
    """FLOPs of both kinds, and milliseconds."""
    for row in load(NSA)["rows"]:
        if row["kind"] == "whole":
            bounds = torch.tensor([0, row["tokens"]])
            keys = sparse_keys(assign(bounds, 1, "contiguous"), bounds, Sparse())
            found = sparse_work(keys, Layer(row["heads"], row["key_heads"], 128, 128), direction)
            yield *(float(x) for x in found), row["milliseconds"][direction]


def solve(features: Sequence[Sequence[float]], times: Sequence[float]) -> tuple[list[float], list[float]]:
    """Milliseconds of each feature, rounded, and the relative errors that they leave."""
    measured = np.array(times)
    scaled = np.array(features) / measured[:, None]
    # Columns are of very unlike sizes.
    sizes = scaled.max(0)
    found = np.linalg.lstsq(scaled / sizes, np.ones_like(measured), rcond=None)[0] / sizes
    if (found <= 0).any():
        raise ValueError(f"the fit gives times that are not positive: {found}")
    return found.tolist(), abs(scaled @ found - 1).tolist()


def fitted() -> dict[str, Any]:
    """The table."""
    flash: dict[str, Any] = {}
    nsa: dict[str, Any] = {}
    errors: dict[str, list[float]] = {"flash": [], "nsa": []}
    for direction in DIRECTIONS:
        dims, flops, sizes, times = zip(*flash_cases(direction), strict=True)
        names = sorted(set(dims))
        features = [
            [flop * (dim == name) for name in names] + [size]
            for dim, flop, size in zip(dims, flops, sizes, strict=True)
        ]
        (*costs, one), left = solve(features, times)
        tflops = {str(name): significant(1e-9 / cost) for name, cost in zip(names, costs, strict=True)}
        flash[direction] = {"tflops": tflops, "picoseconds": significant(one * 1e9)}
        errors["flash"] += left
        *kinds, times = zip(*nsa_cases(direction), strict=True)
        costs, left = solve(list(zip(*kinds, strict=True)), times)
        rates = [significant(1e-9 / cost) for cost in costs]
        nsa[direction] = {"tflops": dict(zip(("compressed", "near"), rates, strict=True))}
        errors["nsa"] += left
    for name, table in (("flash", flash), ("nsa", nsa)):
        found = errors[name]
        mean, largest = (round(x, 3) for x in (sum(found) / len(found), max(found)))
        table["error"] = {"cases": len(found), "mean": mean, "largest": largest}
    return {"device": load(FLASH)["environment"]["device"], "dtype": "bf16", "flash": flash, "nsa": nsa}


if __name__ == "__main__":
    print(json.dumps(fitted(), indent=1))
