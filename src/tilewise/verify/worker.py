"""Checks in separate worker processes: one that crashes or hangs is a finding, and is replaced."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

from tilewise import interpreter, workbench
from tilewise.verify.implementation import check_signature, load_function
from tilewise.verify.planting import plant
from tilewise.verify.result import CRASH, HANG, INTERNAL, Check, Finding, Implementation, Result
from tilewise.verify.suite import Suite
from tilewise.verify.time_limits import LOOK_EVERY, Budget, HangError, Limit, Watchdog
from tilewise.workbench.operator import GROWTH, UsageError

START_LIMIT = 120.0
# Each of them imports torch.
MOST_WORKERS = 8
# Free GPU memory needed per process that plants a bug: several times what a context and the largest case take.
GPU_BYTES = 8 << 30
_starting = threading.Lock()


class Job(NamedTuple):
    """Checks of one operator and implementation, with or without a planted bug, one after the other; `until_failure`
    stops at the first failure.
    """

    checks: tuple[Check, ...]
    mutant: str = ""
    until_failure: bool = False


class _Setup(NamedTuple):
    """What a process is started for."""

    threads: int
    # A function of someone else's, with its operator and the cases that it must be able to take.
    external: Implementation | None = None
    operator: str = ""
    cases: tuple[str, ...] = ()
    mutant: str = ""


def run_jobs(jobs: Sequence[Job], budget: Budget | None = None) -> Iterator[list[Result]]:
    """Each job's results, in order. A UsageError says that the implementation cannot be loaded or called."""
    on_gpu = any(job.checks[0].implementation.device == "cuda" for job in jobs if job.checks)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, MOST_WORKERS, _places_on_gpu(jobs) if on_gpu else MOST_WORKERS)
    slots = _Slots(
        max(1, cores // workers),
        {check.case: None for job in jobs for check in job.checks if check.case != GROWTH},
        budget or Budget(),
    )
    pool = ThreadPoolExecutor(max_workers=workers)
    try:
        yield from pool.map(slots.run, jobs)
    finally:
        # A connection is closed only when no thread reads it: else its file descriptor may be reused during the read.
        slots.end()
        pool.shutdown(wait=True, cancel_futures=True)
        slots.close()


def _places_on_gpu(jobs: Sequence[Job]) -> int:
    """How many processes may share a GPU: one, so that it has enough memory and a crash hits no other check.

    Planted bugs, which mostly compile, may share it if each has enough memory.
    """
    if not all(job.mutant for job in jobs):
        return 1
    import torch

    return max(1, torch.cuda.mem_get_info()[0] // GPU_BYTES)


@contextlib.contextmanager
def one_process(cases: Iterable[str] = (), budget: Budget | None = None) -> Iterator[Callable[[Check], Result]]:
    """Checks as they come, one after the other in one process, which is kept; an external function must be able to take
    `cases`.
    """
    slots = _Slots(1, cases, budget or Budget())
    try:
        yield lambda check: slots.run(Job((check,)))[0]
    finally:
        slots.end()
        slots.close()


class _Slots:
    """One process per thread that runs jobs, kept while jobs need the same setup: all of ours do."""

    def __init__(self, threads: int, cases: Iterable[str], budget: Budget) -> None:
        self._threads = threads
        self._budget = budget
        self._cases = tuple(cases)
        self._own = threading.local()
        self._all: list[_Process] = []
        self._ended = False

    def run(self, job: Job) -> list[Result]:
        results: list[Result] = []
        for check in job.checks:
            if self._ended:
                break
            results.append(self._budget.skip(check, job.mutant) or self._run(check, job))
            if job.until_failure and not results[-1].passed:
                break
        if job.mutant and hasattr(self._own, "process"):
            self._own.process.stop()
        return results

    def _run(self, check: Check, job: Job) -> Result:
        setup = _Setup(self._threads, mutant=job.mutant, operator=check.operator if job.mutant else "")
        if check.implementation.external:
            setup = setup._replace(external=check.implementation, operator=check.operator, cases=self._cases)
        result = self._process(setup).run(check, self._budget.limit(check, job.mutant))
        # What stops at a hang and is then tried again, alone on its GPU, has the whole limit again.
        if not job.until_failure:
            self._budget.count(result, job.mutant)
        return result

    def end(self) -> None:
        """Stop all processes and start no others; threads waiting for one see that it has ended."""
        self._ended = True
        for process in self._all:
            process.kill()

    def close(self) -> None:
        """Called after `end`, when no thread waits any more."""
        for process in self._all:
            process.stop()

    def _process(self, setup: _Setup) -> "_Process":
        current = getattr(self._own, "process", None)
        if current is None or current.setup != setup or not current.alive:
            if current is not None:
                current.stop()
            self._own.process = current = _Process(setup)
            self._all.append(current)
            # Ended in the meantime: nothing else would stop it.
            if self._ended:
                current.stop()
            current.wait_until_ready()
        return current


class _Process:
    def __init__(self, setup: _Setup) -> None:
        self.setup = setup
        self._connection, self._process = start_process(_serve, setup)

    def wait_until_ready(self) -> None:
        """Returns when the implementation is loaded; a UsageError says why it cannot be."""
        implementation = self.setup.external or "tilewise"
        try:
            problem = self._receive(START_LIMIT)
        except HangError as error:
            self.stop()
            raise UsageError(f"{implementation} did not import: {error}") from None
        except (EOFError, OSError):
            self._process.join()
            raise UsageError(
                f"importing {implementation} ended the process: {how_it_ended(self._process.exitcode)}"
            ) from None
        if problem:
            self.stop()
            raise UsageError(problem)

    @property
    def alive(self) -> bool:
        return bool(self._process.is_alive())

    def run(self, check: Check, limit: Limit) -> Result:
        started = time.perf_counter()
        try:
            self._connection.send(check)
            answer = self._receive(limit.seconds)
            return answer if isinstance(answer, Result) else Result(check, findings=(Finding(INTERNAL, answer),))
        except HangError as error:
            finding = Finding(HANG, f"{error}{limit.why}")
        except (EOFError, ConnectionError):
            self._process.join()
            finding = Finding(CRASH, how_it_ended(self._process.exitcode))
        self.stop()
        return Result(check, findings=(finding,), seconds=time.perf_counter() - started)

    def _receive(self, limit: float) -> Any:
        """Its next answer; a HangError or an EOFError where none comes."""
        watchdog = Watchdog(self._process.pid, limit)
        while not wait([self._connection, self._process.sentinel], LOOK_EVERY):
            watchdog.look()
        # A process that has ended does not answer, even if one that it started keeps the connection open.
        if not self._connection.poll():
            raise EOFError
        return self._connection.recv()

    def kill(self) -> None:
        self._process.kill()

    def stop(self) -> None:
        self.kill()
        self._process.join()
        self._connection.close()


def start_process(target: Callable[..., None], *arguments: Any) -> tuple[Connection, Any]:
    """A process that calls `target` with a connection and the arguments; the connection to it, and itself."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        # The server imports the slow modules once; it runs nothing, so that forking it is safe.
        context.set_forkserver_preload(["torch", "triton"])
    connection, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    with _starting, _no_main():
        process.start()
    theirs.close()
    return connection, process


@contextlib.contextmanager
def _no_main() -> Iterator[None]:
    """A child re-imports its parent's main module, and a script without a main guard would run itself: here it finds
    none.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _suite(operator: str) -> Suite:
    return workbench.find(operator).load("suite")


def how_it_ended(code: int | None) -> str:
    """A process, by its exit code, in words."""
    if code is not None and code < 0:
        return f"the process died of {signal.Signals(-code).name}"
    return f"the process ended with exit code {code}"


def _serve(connection: Connection, setup: _Setup) -> None:
    """The child: load what is not ours, report an error if there is one, then answer checks."""
    # Ctrl-C reaches every process of the terminal: the command ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What an implementation prints is not part of the report.
    os.dup2(2, 1)
    # Nor is the C++ stack with which torch says, on some CPUs, that it multiplies 16-bit numbers another way.
    warnings.filterwarnings("ignore", ".*failed, switching to", UserWarning)
    if setup.mutant:
        plant(next(mutant for mutant in _suite(setup.operator).mutants if mutant.name == setup.mutant))
    import torch

    torch.set_num_threads(setup.threads)
    # Repaired for the implementation's own kernels too, which may never import an operator of ours.
    interpreter.use_where_no_gpu()
    from tilewise.verify.attempt import gpu_answers
    from tilewise.verify.run import Runner

    runners: dict[tuple[str, Implementation], Runner] = {}

    def runner(name: str, implementation: Implementation) -> Runner:
        operator = workbench.find(name)
        function = load_function(operator, implementation)
        check_signature(function, implementation.name, [_suite(name).find(case) for case in setup.cases])
        return Runner(operator, function)

    try:
        if setup.external:
            runners[setup.operator, setup.external] = runner(setup.operator, setup.external)
    except UsageError as error:
        connection.send(str(error))
        return
    connection.send("")
    with contextlib.suppress(EOFError):
        while True:
            check = connection.recv()
            try:
                key = check.operator, check.implementation
                if key not in runners:
                    runners[key] = runner(*key)
                connection.send(runners[key].run(check))
                if not gpu_answers():
                    return
            except Exception:
                # What an implementation raises is a finding already: this is verify's own failure, and must not count
                # as a crash of the implementation.
                connection.send(traceback.format_exc())
