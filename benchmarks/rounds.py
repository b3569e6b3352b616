"""Host time of calls: batches without a synchronisation, contenders in turn, and kernels compiled meanwhile.

A session measures one case after another, in this process or in another one with another version of the sources.
"""

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TextIO

Call = Callable[[], object]
WARM_UP = 20
# Both clocks of a batch start with its first call: `host` stops when the last call has returned, `whole` when the
# device is idle.
CLOCKS = ("host", "whole")


class Varied(NamedTuple):
    """Calls that all differ: each of `timed` is made once, after `warm`."""

    warm: Sequence[Call]
    timed: Sequence[Call]


Contender = Call | Varied


class Compared(NamedTuple):
    """Two contenders; at most `asked` times the other's time is asked of ours."""

    ours: str
    other: str
    asked: float | None


@dataclass(frozen=True)
class Case:
    """What is measured beside each other; `build` takes the device's name."""

    name: str
    topic: str
    build: Callable[[str], Mapping[str, Contender]]
    compared: tuple[Compared, ...]
    clock: str = "host"
    calls: int = 200
    rounds: int = 30
    grad: bool = True
    # No kernel may be compiled or loaded after the warm-up.
    compiles_nothing: bool = False


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


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Inside, the garbage collector is off; it runs before, so that rounds start alike."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def time_batch(calls: Sequence[Call], synchronize: Call) -> tuple[float, float]:
    """Microseconds a call, by both clocks."""
    synchronize()
    begin = time.perf_counter()
    for call in calls:
        call()
    returned = time.perf_counter()
    synchronize()
    idle = time.perf_counter()
    return 1e6 * (returned - begin) / len(calls), 1e6 * (idle - begin) / len(calls)


def batch(contender: Contender, turn: int, count: int) -> Sequence[Call]:
    """The calls of one round."""
    if isinstance(contender, Varied):
        return contender.timed[turn * count : (turn + 1) * count]
    return [contender] * count


def rounds_of(case: Case, calls: int, asked: int | None) -> int:
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

    def __init__(self, cases: Mapping[str, Case], device: str) -> None:
        import torch

        self._cases, self._device, self._torch = cases, device, torch

    def open(self, name: str, calls: int) -> None:
        """Build the case's contenders, and warm them up."""
        self._case, self._calls = self._cases[name], calls
        with self._torch.set_grad_enabled(self._case.grad):
            self._contenders = self._case.build(self._device)
            for contender in self._contenders.values():
                warm = contender.warm if isinstance(contender, Varied) else [contender] * WARM_UP
                for call in warm:
                    call()
        self._synchronize()
        self._compiled = {name: Compilations() for name in self._contenders}

    def round(self, turn: int) -> dict[str, Sequence[float]]:
        """One batch of each contender in turn: its times by both clocks."""
        times: dict[str, Sequence[float]] = {}
        with no_collection(), self._torch.set_grad_enabled(self._case.grad):
            for name, contender in self._contenders.items():
                with self._compiled[name].listening():
                    times[name] = time_batch(batch(contender, turn, self._calls), self._synchronize)
        return times

    def close(self) -> dict[str, dict[str, int]]:
        """Kernels compiled and loaded in all rounds, by contender."""
        compiled = {name: one.counts for name, one in self._compiled.items()}
        self._contenders = {}
        gc.collect()
        if self._device == "cuda":
            self._torch.cuda.empty_cache()
        return compiled

    def _synchronize(self) -> None:
        if self._device == "cuda":
            self._torch.cuda.synchronize()


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


def summary(samples: Sequence[Sequence[float]]) -> dict[str, float]:
    """Medians of a contender's rounds by both clocks, and the quartiles of the host's."""
    host, whole = ([one[i] for one in samples] for i in range(len(CLOCKS)))
    low, _, high = statistics.quantiles(host, n=4) if len(host) > 1 else host * 3
    figures = {"host": statistics.median(host), "whole": statistics.median(whole), "host_low": low, "host_high": high}
    return {name: round(value, 2) for name, value in figures.items()}


def measure(case: Case, sessions: Mapping[str, Session], calls: int, rounds: int) -> dict[str, Any]:
    """The case's row: versions take turns inside each round. A version that fails has its error in place of times."""
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
            row["microseconds"][version] = {name: summary(values) for name, values in found.items()}
    row["kernels"] = compiled
    row["compiles_nothing"] = case.compiles_nothing
    return row | ({"errors": errors} if errors else {})
