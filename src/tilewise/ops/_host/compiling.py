"""Compiling side by side: all kernels that a call will need, at the first one that is missing.

Helpers are threads: Triton holds Python's lock for about a fifth of a compilation, and a helper process would first
import Triton and hash its library, 2 to 3 s. Processes that start at once, the ranks of a job, share the work by lock
files in Triton's cache.
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
from tilewise.ops._host.launch import Launch

with contextlib.suppress(ImportError):
    # Triton imports it inside the first compilation: here, so that no call imports anything. It needs Gluon; where that
    # is broken, the backends without kernels work.
    from triton.compiler import code_generator as code_generator
try:
    import fcntl
except ImportError:
    fcntl = None  # type: ignore[assignment]

# Beside Triton's own folders in its cache.
LOCKS = "tilewise-locks"
# Seconds that a process waits for another one's kernel before it compiles the kernel itself.
MOST_WAITED = 120.0
# Seconds between two looks at the locks of others.
PAUSE = 0.02


class _Expected:
    """What a call will launch, asked for at most once: a second kernel that is missing is compiled alone."""

    def __init__(self, launches: Callable[[], Sequence[Launch]]) -> None:
        self._launches: Callable[[], Sequence[Launch]] | None = launches

    def take(self) -> Sequence[Launch]:
        launches, self._launches = self._launches, None
        return launches() if launches else ()


# Of the call that this context is in.
_expected: contextvars.ContextVar[_Expected | None] = contextvars.ContextVar("tilewise_expected", default=None)


@contextlib.contextmanager
def expecting(launches: Callable[[], Sequence[Launch]]) -> Iterator[None]:
    """Inside, the first kernel that is missing has all of `launches()` compiled beside it.

    An outer one, which knows of more, stays in force.
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
    """What the call that this context is in will launch; nothing where that is not known, or was asked for before."""
    known = _expected.get()
    return () if known is None else known.take()


def lock_name(*key: Any) -> str:
    """Of a kernel's lock file, by what tells it from others in all processes alike."""
    return hashlib.sha256(repr(key).encode()).hexdigest()


class _Lock:
    """A kernel's lock file, held by the process that compiles it.

    Where the cache has no room for one, or locks do not work, nothing is locked.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._file: int | None = None

    def take(self) -> bool:
        """False where somebody else holds it."""
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
    """A kernel to compile, and the name of its lock. The length of its source tells how long that takes, roughly."""

    name: str
    compile: Callable[[], object]
    length: int = 0
    # When it was first found to be another process's.
    waiting_since: float | None = None


class _Queue:
    """Tasks that several threads work through: first those that no other process is at."""

    def __init__(self, tasks: Sequence[Task], done: Callable[[Task, Exception | None], None]) -> None:
        # The longest first: begun last, it would keep all waiting.
        self._tasks = deque(sorted(tasks, key=lambda task: -task.length))
        self._done = done
        self.stopped = False

    def work(self) -> None:
        """Until nothing is left."""
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
                # Triton looks into its cache first: another process may just have been here.
                task.compile()
            except Exception as raised:
                error = raised
            finally:
                lock.give_back()
            self._done(task, error)


def _nothing(_task: Task, _error: Exception | None) -> None:
    # Whoever launches the kernel compiles it again, and raises.
    pass


def compile_all(tasks: Sequence[Task], done: Callable[[Task, Exception | None], None] = _nothing) -> None:
    """Compile, at most `jobs()` at a time; `done` is told of each. With one job no thread is started."""
    count = min(jobs(), len(tasks))
    queue = _Queue(tasks, done)
    if count <= 1:
        queue.work()
        return
    # Once, and not in each thread: it reads several hundred MB.
    cache.triton_key()
    threads = [threading.Thread(target=queue.work, name=f"tilewise-compile-{i}") for i in range(count)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        # After an interrupt what is begun is finished, and nothing else begun.
        queue.stopped = True
