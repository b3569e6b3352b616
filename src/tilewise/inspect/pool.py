"""Compiles on all cores, in processes of one architecture each: Triton settles on one assembler per process."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewise.inspect.facts import Row, Wanted
from tilewise.workbench.operator import UsageError


class _Architecture:
    """The kernels of one architecture: known once a worker has listed them, then handed out one by one."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.workers = 0
        self.next = 0
        self.found: list[Row] | None = None
        self.rows: dict[int, Row] = {}

    @property
    def open(self) -> bool:
        """Whether there is, or may be, a kernel that no worker has taken."""
        return self.found is None or self.next < len(self.found)


class _Worker:
    """One worker process that compiles."""

    def __init__(self, wanted: Wanted, architecture: int) -> None:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        # The worker can import what this process can, from wherever either is started.
        environment["PYTHONPATH"] = os.pathsep.join(str(Path(place).resolve()) for place in sys.path)
        # It lives as long as the process.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tilewise.inspect.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self.first = self._ask(json.dumps({**dataclasses.asdict(wanted), "architecture": architecture}))

    def _ask(self, line: str) -> dict[str, Any] | None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return None
        answer = self._process.stdout.readline()
        return json.loads(answer) if answer else None

    def row(self, index: int) -> Row | None:
        """One kernel; None if the worker died compiling it."""
        answer = self._ask(str(index))
        return None if answer is None else Row.from_json(answer)

    def last_words(self) -> str:
        """Of a worker that died."""
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return (
            f"the compiling process ended with code {self._process.wait()}: {lines[-1] if lines else 'it said nothing'}"
        )

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()
        self._errors.close()


class Pool:
    """All requested kernels, on several architectures; `advanced` is called with how many kernels are done and how many
    there are so far.
    """

    def __init__(
        self, wanted: Wanted, architectures: Sequence[int], advanced: Callable[[int, int], None] = lambda *_: None
    ) -> None:
        self._wanted = wanted
        self._architectures = [_Architecture(number) for number in architectures]
        self._advanced = advanced
        self._lock = threading.Lock()
        self._failure: Exception | None = None

    def run(self) -> list[Row]:
        """Every kernel, in order. A UsageError is one that a worker raised."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(len(os.sched_getaffinity(0)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure:
            raise self._failure
        return [one.rows[i] for one in self._architectures for i in sorted(one.rows)]

    def _work(self) -> None:
        while True:
            with self._lock:
                waiting = [one for one in self._architectures if one.open]
                if not waiting or self._failure:
                    return
                architecture = min(waiting, key=lambda one: one.workers)
                architecture.workers += 1
            try:
                self._serve(architecture)
            except Exception as error:
                self._failure = error
            finally:
                with self._lock:
                    architecture.workers -= 1

    def _serve(self, architecture: _Architecture) -> None:
        """Compile for one architecture until nothing is left, or the worker dies."""
        worker = _Worker(self._wanted, architecture.number)
        try:
            if worker.first is None:
                raise RuntimeError(worker.last_words())
            if "usage" in worker.first:
                raise UsageError(str(worker.first["usage"]))
            with self._lock:
                if architecture.found is None:
                    architecture.found = [Row.from_json(one) for one in worker.first["found"]]
                found = architecture.found
            while not self._failure:
                with self._lock:
                    index = architecture.next
                    if index >= len(found):
                        return
                    architecture.next += 1
                row = worker.row(index)
                with self._lock:
                    architecture.rows[index] = row or dataclasses.replace(found[index], error=worker.last_words())
                    self._advanced(
                        sum(len(one.rows) for one in self._architectures),
                        sum(len(one.found) for one in self._architectures if one.found is not None),
                    )
                if row is None:
                    return
        finally:
            worker.close()
