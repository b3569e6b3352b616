"""What the benchmarks share: times of calls taken in turns, CUDA graphs, where they were taken, and the
command line.
"""

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import triton

import tilewise

ROUNDS = 3
# A call longer than this is timed once.
LONG_MS = 50.0


def milliseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of each call, the calls taking turns; long dense ones take one."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS):
        for name, call in calls.items():
            if turn and times[name][0] > LONG_MS:
                continue
            times[name].append(triton.testing.do_bench(call, warmup=5, rep=25, return_mode="median"))
    return {name: round(statistics.median(values), 3) for name, values in times.items()}


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph, after some steps that compile its kernels.

    Warm-up and capture share a stream, for autograd ties a leaf to the stream that it met first.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()

    def replay(_kept: object = step) -> None:
        # The graph reads the step's tensors, and does not keep them.
        graph.replay()

    return replay


def environment(command: str) -> dict[str, str]:
    """Where the figures come from, and the command that repeats them."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "python": platform.python_version(),
        "tilewise": tilewise.__version__,
        "command": command,
    }


def where_to_save(about: str | None) -> Path | None:
    """What the command line says of --json; ends the program where there is no GPU."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    path: Path | None = parser.parse_args().json
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")
    return path


def save(result: Mapping[str, object], path: Path | None) -> None:
    """As JSON, where that was asked for."""
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n")
