"""Compiling in parallel: all kernels that a call will need, as soon as one is missing.

Helpers are threads: Triton holds the GIL for about a fifth of a compilation, and a helper process would first
import Triton and hash its library, 2 to 3 s. Processes that start together, the ranks of a job, share the work through
lock files in Triton's cache.
"""

import contextlib
import contextvars
import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from triton import knobs
from triton.runtime import cache

from tilewise.ops._host.backend import jobs
from tilewise.ops._host.launching import Launch

with contextlib.suppress(ImportError):
    # Triton imports it inside the first compilation: here, so that no call imports anything. It needs Gluon; where that
    # is broken, the backends without kernels work.
    from triton.compiler import code_generator as code_generator
try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# Next to Triton's own folders in its cache.
LOCKS = "tilewise-locks"
# Seconds that a process waits for another one's kernel before it compiles the kernel itself.
MOST_WAITED = 120.0
# Seconds between polls of other processes' locks.
PAUSE = 0.02


class _Expected:
    """What a call will launch, asked for at most once: a second missing kernel is compiled alone."""

    def __init__(self, launches: Callable[[], Sequence[Launch]]) -> None:
        self._launches: Callable[[], Sequence[Launch]] | None = launches

    def take(self) -> Sequence[Launch]:
        launches, self._launches = self._launches, None
        return launches() if launches else ()


# Of this context's current call.
_expected: contextvars.ContextVar[_Expected | None] = contextvars.ContextVar("tilewise_expected", default=None)


@contextlib.contextmanager
def expecting(launches: Callable[[], Sequence[Launch]]) -> Iterator[None]:
    """Inside, the first missing kernel is compiled together with all of `launches()`.

    An outer one, which knows more, stays in effect.
    """
    if _expected.get() is not None:
        yield
        return
    token = _expected.set(_Expected(launches))
    try:
        yield
    finally:
        _expected.reset(token)


def expected() -> Sequence[Launch]:
    """What this context's call will launch; nothing where that is unknown, or was asked for before."""
    known = _expected.get()
    return () if known is None else known.take()


def lock_name(*key: Any) -> str:
    """The name of a kernel's lock file, the same in all processes."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


class _Lock:
    """A kernel's lock file, held by the process that compiles it.

    Where the cache has no room for one, or locks do not work, nothing is locked.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: int | None = None

    def take(self) -> bool:
        """False where another process holds it."""
        if fcntl is None:
            return True
        try:
            folder = os.path.join(knobs.cache.dir, LOCKS)
            os.makedirs(folder, exist_ok=True)
            self._file = os.open(os.path.join(folder, self._name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.give_back()
            return False
        except OSError:
            self.give_back()
        return True

    def give_back(self) -> None:
        """The file stays: were it removed, a third process could lock a new one while a second still waits
        at the old.
        """
        if self._file is not None:
            os.close(self._file)
            self._file = None


@dataclass
class Task:
    """A kernel to compile, and the name of its lock. The length of its source roughly predicts the compile time."""

    name: str
    compile: Callable[[], object]
    length: int = 0
    # When another process was first found compiling it.
    waiting_since: float | None = None


class _Queue:
    """A work queue for several threads: tasks that no other process is compiling come first."""

    def __init__(self, tasks: Sequence[Task], done: Callable[[Task, Exception | None], None]) -> None:
        # Longest first: started last, it would keep all waiting.
        self._tasks = deque(sorted(tasks, key=lambda task: -task.length))
        self._done = done
        self.stopped = False

    def work(self) -> None:
        """Work until the queue is empty."""
        passed = 0
        while not self.stopped:
            try:
                task = self._tasks.popleft()
            except IndexError:
                return
            lock = _Lock(task.name)
            if not lock.take():
                now = time.monotonic()
                task.waiting_since = task.waiting_since or now
                if now - task.waiting_since < MOST_WAITED:
                    self._tasks.append(task)
                    passed += 1
                    if passed >= len(self._tasks):
                        passed = 0
                        time.sleep(PAUSE)
                    continue
            passed = 0
            error = None
            try:
                # Triton checks its cache first: another process may have just compiled it.
                task.compile()
            except Exception as raised:
                error = raised
            finally:
                lock.give_back()
            self._done(task, error)


def _nothing(_task: Task, _error: Exception | None) -> None:
    # The launch compiles it again, and raises.
    pass


def compile_all(tasks: Sequence[Task], done: Callable[[Task, Exception | None], None] = _nothing) -> None:
    """Compile, at most `jobs()` at a time; `done` is called for each. With one job no thread is started."""
    count = min(jobs(), len(tasks))
    queue = _Queue(tasks, done)
    if count <= 1:
        queue.work()
        return
    # Once, not in each thread: it reads several hundred MB.
    cache.triton_key()
    threads = [threading.Thread(target=queue.work, name=f"tilewise-compile-{i}") for i in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        # After an interrupt, running compilations finish and no others start.
        queue.stopped = True
