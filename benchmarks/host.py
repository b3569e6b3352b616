"""Times calls as called, in one run: the host's time of small ones, and long ones against their CUDA graphs.

python benchmarks/host.py --json benchmarks/results/host-h200.json
python benchmarks/host.py --compare ../before/src     before and after in one run: versions take turns in each round

A batch is 200 calls without a synchronisation between them, with one before it and one after it; the contenders take
turns, the garbage collector is off, and the median of 30 rounds counts. Calls that are long on the GPU are fewer in a
batch, and their time counts until the GPU is idle. `python benchmarks/table.py FILE` prints a saved run again.

A session measures one case after another, in this process or in another one with another version of the sources.
"""

import argparse
import contextlib
import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from harness import Run, need_gpu, pin_timer
from table import missed

if TYPE_CHECKING:
    from host_cases import Case

TOPICS = ("flash", "hstu", "bsa", "nsa", "new-shapes", "cnn")
NOW, BEFORE = "now", "before"


class Compilations:
    """Counts what Triton compiles and what it loads from its cache on disk. A kernel in memory is neither."""

    def __init__(self) -> None:
        self.counts = {"compiled": 0, "loaded": 0}

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        """Triton's listener."""
        self.counts["loaded" if cache_hit else "compiled"] += 1

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, this process's kernels are counted."""
        from triton import knobs

        before, knobs.compilation.listener = knobs.compilation.listener, self
        try:
            yield
        finally:
            knobs.compilation.listener = before


def rounds_of(case: "Case", calls: int, asked: int | None) -> int:
    """As many as were asked for; but a case's calls that all differ are made once each."""
    if not case.compiles_nothing:
        return asked or case.rounds
    return max(1, min(asked or case.rounds, case.calls * case.rounds // calls))


class Session(Protocol):
    """Measures one case at a time."""

    def open(self, name: str, calls: int) -> None:
        """Build the case's contenders, and warm them up."""

    def round(self, turn: int) -> dict[str, Sequence[float]]:
        """One batch of each contender in turn: its times by both clocks."""

    def close(self) -> dict[str, dict[str, int]]:
        """Kernels compiled and loaded in all rounds, by contender."""


class Local:
    """In this process."""

    def __init__(self, cases: Mapping[str, "Case"], device: str) -> None:
        import torch

        from tilewise.bench import timing

        self._cases, self._device, self._torch, self._timing = cases, device, torch, timing
        self._synchronize = timing.synchronizer(device)

    def open(self, name: str, calls: int) -> None:
        """Build the case's contenders, and warm them up."""
        self._case, self._calls = self._cases[name], calls
        with self._torch.set_grad_enabled(self._case.grad):
            self._contenders = self._case.build(self._device)
            for contender in self._contenders.values():
                varied = isinstance(contender, self._timing.Varied)
                warm = contender.warm if varied else [contender] * self._timing.HOST_WARM_UP
                for call in warm:
                    call()
        self._synchronize()
        self._compiled = {name: Compilations() for name in self._contenders}

    def round(self, turn: int) -> dict[str, Sequence[float]]:
        """One batch of each contender in turn: its times by both clocks."""
        times: dict[str, Sequence[float]] = {}
        with self._timing.no_collection(), self._torch.set_grad_enabled(self._case.grad):
            for name, contender in self._contenders.items():
                with self._compiled[name].listening():
                    calls = self._timing.batch(contender, turn, self._calls)
                    times[name] = self._timing.time_batch(calls, self._synchronize)
        return times

    def close(self) -> dict[str, dict[str, int]]:
        """Kernels compiled and loaded in all rounds, by contender."""
        compiled = {name: one.counts for name, one in self._compiled.items()}
        self._contenders = {}
        gc.collect()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()
        return compiled


class Remote:
    """In another process: `command` serves a session."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = subprocess.Popen(command, **pipes, text=True, env={**os.environ, **environment})

    def open(self, name: str, calls: int) -> None:
        """Build the case's contenders, and warm them up."""
        self._ask("open", name, calls)

    def round(self, turn: int) -> dict[str, Sequence[float]]:
        """One batch of each contender in turn: its times by both clocks."""
        return self._ask("round", turn)

    def close(self) -> dict[str, dict[str, int]]:
        """Kernels compiled and loaded in all rounds, by contender."""
        return self._ask("close")

    def end(self) -> None:
        """Let the process end."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([method, arguments]), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the measuring process ended with code {self._process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer["value"]


def serve(session: Session, requests: TextIO, answers: TextIO) -> None:
    """Answer another process's requests, a line of JSON each, until there are no more."""
    for line in requests:
        method, arguments = json.loads(line)
        try:
            answer = {"value": getattr(session, method)(*arguments)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def own_stdout() -> TextIO:
    """What stdout was; from now on what others print there goes to stderr, so that answers stay apart."""
    sys.stdout.flush()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def measure(case: "Case", sessions: Mapping[str, Session], calls: int, rounds: int) -> dict[str, Any]:
    """The case's row: versions take turns inside each round. A version that fails has its error in place of times."""
    from tilewise.bench.timing import summarise_host

    samples: dict[str, dict[str, list[Sequence[float]]]] = {version: {} for version in sessions}
    compiled: dict[str, Any] = {}
    errors: dict[str, str] = {}

    @contextlib.contextmanager
    def noted(version: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            errors[version] = f"{type(error).__name__}: {error}"

    for version, session in sessions.items():
        with noted(version):
            session.open(case.name, calls)
    for turn in range(rounds):
        for version, session in sessions.items():
            if version not in errors:
                with noted(version):
                    for name, times in session.round(turn).items():
                        samples[version].setdefault(name, []).append(times)
    for version, session in sessions.items():
        if version not in errors:
            with noted(version):
                compiled[version] = session.close()
    row: dict[str, Any] = {
        "case": case.name,
        "topic": case.topic,
        "clock": case.clock,
        "calls": calls,
        "rounds": rounds,
    }
    row["compared"] = [one._asdict() for one in case.compared]
    row["microseconds"] = {}
    for version, found in samples.items():
        if version not in errors:
            row["microseconds"][version] = {name: summarise_host(values) for name, values in found.items()}
    row["kernels"] = compiled
    row["compiles_nothing"] = case.compiles_nothing
    return row | ({"errors": errors} if errors else {})


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    parser.add_argument("--only", nargs="+", choices=TOPICS, default=TOPICS, metavar="TOPIC", help=", ".join(TOPICS))
    parser.add_argument("--compare", type=Path, metavar="SRC", help="a src folder of another version, measured as well")
    parser.add_argument("--rounds", type=int, help="in place of each case's own number, which is 30 for most")
    parser.add_argument("--calls", type=int, help="in a batch, in place of each case's own number, 200 for most")
    # How this script starts itself for one version.
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compare and not (given.compare / "tilewise").is_dir():
        parser.error(f"{given.compare} has no folder tilewise: give the src folder of another version")
    return given


def sessions(compare: Path | None) -> dict[str, Session]:
    """This process, or a process for each version."""
    if compare is None:
        from host_cases import cases

        return {NOW: Local(cases(), "cuda")}
    import tilewise

    sources = {NOW: Path(tilewise.__file__).parents[1], BEFORE: compare.resolve()}
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    return {version: Remote(command, {"PYTHONPATH": import_path(source)}) for version, source in sources.items()}


def import_path(source: Path) -> str:
    """PYTHONPATH of the version whose tilewise is in `source`; its mytorch is next to that, or in it in older ones."""
    folders = (source, source.parent / "packages" / "mytorch" / "src", os.environ.get("PYTHONPATH", ""))
    return os.pathsep.join(map(str, folders))


def words(given: argparse.Namespace) -> str:
    """What repeats the run, without this machine's folders."""
    found = ["--only", *given.only] if len(given.only) < len(TOPICS) else []
    for name in ("rounds", "calls"):
        found += [f"--{name}", str(getattr(given, name))] if getattr(given, name) else []
    return " ".join([*found, *(["--compare", "SRC"] if given.compare else [])])


def run(given: argparse.Namespace) -> dict[str, Any]:
    """Measure the cases that were asked for."""
    from host_cases import cases

    wanted = [case for case in cases().values() if case.topic in given.only]
    started = sessions(given.compare)
    result = Run("host", given.json, words(given))
    for number, case in enumerate(wanted, 1):
        result.begin(f"{case.name} ({number} of {len(wanted)})")
        calls = given.calls or case.calls
        row = measure(case, started, calls, rounds_of(case, calls, given.rounds))
        result.add(row)
        for version, error in row.get("errors", {}).items():
            print(f"    {version} failed: {error}", flush=True)
    for session in started.values():
        if isinstance(session, Remote):
            session.end()
    result.print_table()
    return result.document


def main() -> None:
    """Print a table, and save the figures as JSON on request."""
    given = arguments()
    if given.serve:
        answers = own_stdout()
        pin_timer()
        from host_cases import cases

        return serve(Local(cases(), "cuda"), sys.stdin, answers)
    print("host: importing torch", flush=True)
    need_gpu()
    result = run(given)
    late = missed(result)
    print(f"{len(late)} of the figures asked for were missed" + "".join(f"\n  {line}" for line in late))
    return sys.exit(1) if any("errors" in row for row in result["rows"]) else None


if __name__ == "__main__":
    main()
