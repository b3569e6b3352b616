"""Times flash attention over short sequences and few heads against what a user would pick instead, as CUDA graphs,
which leave the host out: forwards, and steps of a forward and a backward.

python benchmarks/flash_short.py --json benchmarks/results/flash-short-h200.json

Peers and their kernels' cache are as in benchmarks/flash.py.
"""

import functools
import itertools
from collections.abc import Callable

import torch
from flash import ALL, PEERS, Shape, case_name
from harness import Run, where_to_save

from tilewise.bench.contender import Call, CannotRunError
from tilewise.bench.dense import Dense
from tilewise.bench.timing import Clock, graph_milliseconds

LENGTHS, HEADS, WIDTHS = (128, 256, 512), (4, 16), (64, 128)


def step(call: Call, do: torch.Tensor) -> None:
    """Forward and backward."""
    (o,) = call.run()
    torch.autograd.grad(o, call.leaves, do.view_as(o))


def graphs(clock: Clock, shape: Shape, causal: bool) -> dict[str, dict[str, float]]:
    """Milliseconds of each kind by name.

    Each with leaves of its own: autograd ties a leaf to the stream that it first met, and a graph is recorded on
    another.
    """
    dense = Dense(right=0 if causal else -1)
    found: dict[str, dict[str, float]] = {"forward": {}, "step": {}}
    for (name, build), kind in itertools.product(ALL.items(), found):
        q, k, v = shape.draw()
        try:
            call = build(q, k, v, dense)
            run: Callable[[], object] = call.run if kind == "forward" else functools.partial(step, call, q)
            found[kind][name] = round(graph_milliseconds(clock, run), 5)
        except (AssertionError, CannotRunError, RuntimeError, ValueError) as error:
            if name not in PEERS or isinstance(error, torch.OutOfMemoryError):
                raise
    return found


def main() -> None:
    """Print a table, and save it as JSON on request."""
    run = Run("flash_short", where_to_save(__doc__), dtype="bf16")
    clock = Clock(torch.device("cuda"))
    for tokens, heads, channels, causal in itertools.product(LENGTHS, HEADS, WIDTHS, (False, True)):
        shape = Shape(1, tokens, heads, channels)
        run.begin(case_name(shape, causal))
        for kind, times in graphs(clock, shape, causal).items():
            best = min((times[name] for name in PEERS if name in times), default=None)
            run.add(
                {
                    "case": f"{case_name(shape, causal)}, {kind}",
                    **shape._asdict(),
                    "causal": causal,
                    "kind": kind,
                    "graph_milliseconds": times,
                    "to_the_best_other": None if best is None else round(times["tilewise"] / best, 3),
                }
            )
    run.print_table()


if __name__ == "__main__":
    main()
