"""Times flash attention in fp16, with a softcap and under a window against the plain causal one, by the pairs of a
query and a key that are left.

python benchmarks/flash_options.py --json benchmarks/results/flash-options-h200.json
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from flash import Shape
from harness import Run, where_to_save

import tilewise
from tilewise.bench.contender import as_leaf
from tilewise.bench.dense import window_pairs
from tilewise.bench.timing import Clock, take_turns

SHAPES = (Shape(1, 16384, 16, 128), Shape(1, 16384, 32, 64))
PLAIN = "plain"
WINDOW = 1024
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "fp16": {},
    "softcap": {"softcap": 30.0},
    "window": {"window_size": (WINDOW, 0)},
}


def calls(shape: Shape) -> dict[str, dict[str, Callable[[], object]]]:
    """Of each direction by option."""
    found: dict[str, dict[str, Callable[[], object]]] = {"forward": {}, "backward": {}}
    for name, options in OPTIONS.items():
        leaves = [as_leaf(x.half() if name == "fp16" else x) for x in shape.draw()]
        attend = functools.partial(tilewise.flash_attention, *leaves, causal=True, **options)
        o = attend()
        found["forward"][name] = attend
        found["backward"][name] = functools.partial(
            torch.autograd.grad, o, leaves, torch.randn_like(o), retain_graph=True
        )
    return found


def shares(shape: Shape) -> dict[str, float]:
    """Of the plain one's pairs, those that each option has."""
    q = k = torch.empty(shape.batch, shape.tokens, shape.heads, 0)
    whole = window_pairs(q, k, (), -1, 0)
    return {name: window_pairs(q, k, (), WINDOW if name == "window" else -1, 0) / whole for name in OPTIONS}


def main() -> None:
    """Print a table, and save it as JSON on request."""
    run = Run("flash_options", where_to_save(__doc__))
    clock = Clock(torch.device("cuda"))
    for shape, direction in itertools.product(SHAPES, ("forward", "backward")):
        run.begin(f"{shape.name}, {direction}")
        times = {name: found.median for name, found in take_turns(clock, calls(shape)[direction]).items()}
        share = shares(shape)
        run.add(
            {
                "case": f"{shape.name}, causal, {direction}",
                **shape._asdict(),
                "direction": direction,
                "milliseconds": {name: round(value, 4) for name, value in times.items()},
                # 1: as fast as the plain one by the pairs that are left.
                "speedup": {name: round(times[PLAIN] * share[name] / times[name], 3) for name in OPTIONS},
            }
        )
    run.print_table()


if __name__ == "__main__":
    main()
