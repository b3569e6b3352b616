"""Checks in processes of their own: one that crashes or hangs is a finding, and is replaced."""

import contextlib
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from tilewise import interpreter, registry
from tilewise.verify.implementation import UsageError, check_signature, load_function
from tilewise.verify.result import CRASH, HANG, Check, Finding, Implementation, Result
from tilewise.verify.suite import GROWTH, TIME_LIMIT, Suite

START_LIMIT = 120.0


class Job(NamedTuple):
    """Checks of one operator and implementation, with or without a planted bug, one after the other; `until_failure` stops at the first failure."""

    checks: tuple[Check, ...]
    mutant: str = ""
    until_failure: bool = False


class _Setup(NamedTuple):
    """What a process is started for."""

    operator: str
    implementation: Implementation
    mutant: str
    threads: int
    # The cases that an external function must be able to take.
    cases: tuple[str, ...]


def run_jobs(jobs: Sequence[Job], workers: int = 0) -> Iterator[list[Result]]:
    """Each job's results, in order. A UsageError tells that the implementation cannot be loaded or called."""
    on_gpu = any(job.checks[0].implementation.device == "cuda" for job in jobs if job.checks)
    cores = os.cpu_count() or 1
    # One process has a GPU for itself, so that memory is there and a crash takes nobody else along.
    workers = workers or (1 if on_gpu else cores)
    slots = _Slots(max(1, cores // workers), {check.case: None for job in jobs for check in job.checks if check.case != GROWTH})
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        yield from pool.map(slots.run, jobs)
    finally:
        slots.close()
        pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def one_process() -> Iterator[Callable[[Check], Result]]:
    """Checks as they come, one after the other in one process, which is kept."""
    slots = _Slots(1, ())
    try:
        yield lambda check: slots.run(Job((check,)))[0]
    finally:
        slots.close()


class _Slots:
    """One process for each thread that runs jobs, kept while jobs ask for the same setup."""

    def __init__(self, threads: int, cases: Iterable[str]) -> None:
        self._threads = threads
        self._cases = tuple(cases)
        self._own = threading.local()
        self._all: list[_Process] = []
        self._closed = False

    def run(self, job: Job) -> list[Result]:
        results: list[Result] = []
        for check in job.checks:
            if self._closed:
                break
            cases = self._cases if check.implementation.external else ()
            setup = _Setup(check.operator, check.implementation, job.mutant, self._threads, cases)
            result = self._process(setup).run(check)
            results.append(result)
            if job.until_failure and not result.passed:
                break
        if job.mutant:
            self._own.process.stop()
        return results

    def close(self) -> None:
        self._closed = True
        for process in self._all:
            process.stop()

    def _process(self, setup: _Setup) -> "_Process":
        current = getattr(self._own, "process", None)
        if current is None or current.setup != setup or not current.alive:
            if current is not None:
                current.stop()
            self._own.process = current = _Process(setup)
            self._all.append(current)
        return current


class _Process:
    def __init__(self, setup: _Setup) -> None:
        self.setup = setup
        methods = multiprocessing.get_all_start_methods()
        context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
        if "forkserver" in methods:
            # The server imports what takes seconds, once; it runs nothing, so that a fork of it is sound.
            context.set_forkserver_preload(["torch", "triton"])
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, setup), daemon=True)
        self._process.start()
        theirs.close()
        if not self._connection.poll(START_LIMIT):
            self.stop()
            raise UsageError(f"{setup.implementation} did not import within {START_LIMIT:.0f} seconds")
        try:
            problem = self._connection.recv()
        except EOFError:
            self._process.join()
            raise UsageError(f"importing {setup.implementation} ended the process: {_how_it_ended(self._process.exitcode)}") from None
        if problem:
            self.stop()
            raise UsageError(problem)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def run(self, check: Check) -> Result:
        limit = TIME_LIMIT if check.case == GROWTH else _suite(check.operator).find(check.case).time_limit
        started = time.perf_counter()
        try:
            self._connection.send(check)
            if self._connection.poll(limit):
                answer = self._connection.recv()
                if isinstance(answer, Result):
                    return answer
                raise RuntimeError(f"verify itself failed on {check.command()}:\n{answer}")
            finding = Finding(HANG, f"no result within {limit:.0f} seconds")
        except (EOFError, ConnectionError):
            self._process.join()
            finding = Finding(CRASH, _how_it_ended(self._process.exitcode))
        self.stop()
        return Result(check, findings=(finding,), seconds=time.perf_counter() - started)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _suite(operator: str) -> Suite:
    return registry.find(operator).load("suite")


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _serve(connection: Connection, setup: _Setup) -> None:
    """The child: load the implementation, say what is wrong with it or nothing, then answer checks."""
    # What an implementation prints is not part of the report.
    os.dup2(2, 1)
    operator = registry.find(setup.operator)
    suite: Suite = operator.load("suite")
    if setup.mutant:
        from tilewise.verify.planting import plant

        plant(next(mutant for mutant in suite.mutants if mutant.name == setup.mutant))
    import torch

    torch.set_num_threads(setup.threads)
    if interpreter.use_where_no_gpu():
        interpreter.repair()
    try:
        function = load_function(operator, setup.implementation)
        check_signature(function, setup.implementation.name, [suite.find(name) for name in setup.cases])
    except UsageError as error:
        connection.send(str(error))
        return
    from tilewise.verify.run import Runner

    connection.send("")
    runner = Runner(operator, function)
    with contextlib.suppress(EOFError):
        while True:
            check = connection.recv()
            try:
                connection.send(runner.run(check))
            except Exception:
                # What an implementation raises is a finding already: this is verify's own failure, and must not pass for a crash of the other.
                connection.send(traceback.format_exc())
