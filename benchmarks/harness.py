"""What the scripts here share: the command line, and the document that a run is saved as.

Times are taken by tilewise.bench.timing, documents are those of tilewise.bench.result, and table.py prints them.
"""

import argparse
import importlib.util
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from table import lines

TIMER = Path(__file__).resolve().parents[1] / "src" / "tilewise" / "bench" / "timing.py"
# How often `medians` runs a call before it counts, and then.
SLOW_WARM_UP, SLOW_RUNS = 2, 5


def where_to_save(about: str | None) -> Path | None:
    """What the command line says of --json; ends the program where there is no GPU."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    path: Path | None = parser.parse_args().json
    need_gpu()
    return path


def need_gpu() -> None:
    """Ends the program where there is none."""
    import torch

    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA GPU")


def pin_timer() -> None:
    """From now on `tilewise.bench.timing` is this checkout's: under --compare `tilewise` is another version, and both
    must be timed alike.
    """
    spec = importlib.util.spec_from_file_location("tilewise.bench.timing", TIMER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)


def medians(clock: Any, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of calls that may take seconds, the calls taking turns: fewer runs than those of `take_turns`."""
    for call in calls.values():
        clock.run([call], SLOW_WARM_UP)
    turns = [{name: clock.run([call], 1)[0] for name, call in calls.items()} for _ in range(SLOW_RUNS)]
    return {name: round(statistics.median(turn[name] for turn in turns), 3) for name in calls}


class Run:
    """A run's document. What was measured is saved at once, whatever comes after it."""

    def __init__(
        self, benchmark: str, path: Path | None, words: str = "", environment: Any = None, **about: Any
    ) -> None:
        from tilewise.bench.result import script_document
        from tilewise.doctor import environment as current

        command = f"python benchmarks/{benchmark}.py {words}".strip()
        self.document = script_document(benchmark, command, {**current(), **(environment or {})}, about)
        self._path, self._began = path, time.monotonic()

    def begin(self, what: str) -> None:
        """Say what is measured next, and how long it has taken so far: some of it compiles for minutes."""
        print(f"{time.monotonic() - self._began:5.0f} s  {what}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """One more row."""
        self.document["rows"].append(row)
        self.save()

    def save(self) -> None:
        """As JSON, where that was asked for."""
        if self._path:
            from tilewise.bench.result import as_text

            self._path.write_text(as_text(self.document) + "\n", encoding="utf-8")

    def print_table(self) -> None:
        """As table.py prints the saved document."""
        print("\n".join(lines(self.document)))
