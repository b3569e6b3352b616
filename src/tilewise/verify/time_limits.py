"""How long a run of verify may take: which process hangs, how many hangs are waited for, and a budget for all of it."""

import contextlib
import math
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tilewise import workbench
from tilewise.verify import suite
from tilewise.verify.result import HANG, NOTE, SKIPPED, Check, Finding, Implementation, Result
from tilewise.verify.suite import Suite
from tilewise.workbench.operator import GROWTH, UsageError

# Minutes that a whole run may take, where nothing else is said.
BUDGET = 60.0
# After this many hangs the rest of an implementation is skipped.
MOST_HANGS = 2
# Seconds that a check may take once its implementation has hung.
LIMIT_AFTER_A_HANG = 30.0
# Seconds between two looks at a process that owes an answer.
LOOK_EVERY = 0.5
# A process that works in none of so many looks, one after the other, waits for something that does not come.
IDLE_LOOKS = 10
# Of the time between two looks; threads that poll take less.
IDLE_SHARE = 0.05
# Running or waiting for a core, for a disk, or stopped by someone: nothing that a loaded machine does to a process
# looks like waiting.
WORKING = "RDTt"
# How many times its limit a process may take by the clock, however loaded the machine is. Without /proc (macOS) CPU
# seconds are not known, and this alone decides.
CLOCK_FACTOR = 10


class HangError(Exception):
    """A process does not answer; the message says how long it was waited for."""


class Limit(NamedTuple):
    """How long a check may compute before it counts as a hang; and, where that is less than its case has, why."""

    seconds: float
    why: str = ""


class _Thread(NamedTuple):
    state: str
    seconds: float


class Watchdog:
    """Tells a process that hangs from one that is slow or starved.

    It hangs if one thread has computed for `limit` seconds, or if nothing works any more after `limit` seconds by the
    clock. The busiest thread counts, not the sum: sixteen threads that work together are not a hang sixteen times
    sooner, and no thread computes for longer than the clock.
    """

    def __init__(self, pid: int, limit: float) -> None:
        self._pid, self._limit = pid, limit
        self._began = self._looked = time.monotonic()
        self._first = self._last = _threads(pid)
        self._idle_looks = 0

    def look(self) -> None:
        """Called every LOOK_EVERY seconds; raises a HangError when the process is not to be waited for any longer."""
        now, threads = time.monotonic(), _threads(self._pid)
        computed = sum(_since(self._last, threads))
        waiting = threads and not any(thread.state in WORKING for thread in threads.values())
        idle = waiting and computed <= IDLE_SHARE * (now - self._looked)
        self._idle_looks = self._idle_looks + 1 if idle else 0
        self._looked, self._last = now, threads
        clock, busiest = now - self._began, max(_since(self._first, threads), default=0.0)
        if busiest >= self._limit:
            raise HangError(f"no result within {self._limit:.0f} CPU seconds ({clock:.0f} s by the clock)")
        if clock >= self._limit and self._idle_looks >= IDLE_LOOKS:
            raise HangError(f"no result within {clock:.0f} seconds, and it waits: it has stopped computing")
        if clock >= CLOCK_FACTOR * self._limit:
            raise HangError(f"no result within {clock:.0f} seconds by the clock ({busiest:.0f} CPU seconds)")


def _since(earlier: dict[str, _Thread], threads: dict[str, _Thread]) -> list[float]:
    """CPU seconds of each thread since then; those that began later are new."""
    return [thread.seconds - (earlier[i].seconds if i in earlier else 0.0) for i, thread in threads.items()]


def _threads(pid: int) -> dict[str, _Thread]:
    """The threads of a process and of those that it started, such as compilers; none where there is no /proc."""
    found: dict[str, _Thread] = {}
    for task in Path(f"/proc/{pid}/task").glob("*"):
        # A thread may end while it is looked at, and some kernels do not list children.
        with contextlib.suppress(OSError):
            # The name before it, in parentheses, may hold spaces.
            state, *numbers = (task / "stat").read_text().rpartition(")")[2].split()
            # utime and stime, fields 14 and 15 of proc(5).
            found[task.name] = _Thread(state, (int(numbers[10]) + int(numbers[11])) / os.sysconf("SC_CLK_TCK"))
            for child in (task / "children").read_text().split():
                found |= _threads(int(child))
    return found


class Budget:
    """What is left for one run: its minutes, and how many more hangs of each implementation. Its threads share it."""

    def __init__(self, minutes: float = math.inf) -> None:
        if not minutes >= 0:
            raise UsageError(f"budget is {minutes}: expected minutes from 0 on")
        self._minutes = minutes
        self._end = time.monotonic() + 60 * minutes
        self._hangs: Counter[tuple[Implementation, str, str]] = Counter()
        self._lock = threading.Lock()

    def skip(self, check: Check, mutant: str = "") -> Result | None:
        """The result of a check that is not run any more; None for one that is."""
        if self._hangs[_key(check, mutant)] >= MOST_HANGS:
            why = f"{check.implementation} hung {MOST_HANGS} times"
        elif time.monotonic() >= self._end:
            why = f"the budget of {self._minutes:g} minutes is used up (--budget)"
        else:
            return None
        return Result(check, findings=(Finding(SKIPPED, why, NOTE),))

    def limit(self, check: Check, mutant: str = "") -> Limit:
        """How long it may compute."""
        # Read on use, since a test shortens it.
        seconds, why = suite.TIME_LIMIT, ""
        if check.case != GROWTH:
            cases: Suite = workbench.find(check.operator).load("suite")
            seconds = cases.find(check.case).time_limit(check.implementation.device)
        runs = (check.settings.repeat or 1) + len(check.settings.schedules)
        if self._hangs[_key(check, mutant)] and seconds > LIMIT_AFTER_A_HANG:
            why = f"; it has hung before, so its limit was {LIMIT_AFTER_A_HANG * runs:.0f} s, not {seconds * runs:.0f}"
            seconds = LIMIT_AFTER_A_HANG
        return Limit(seconds * runs, why)

    def count(self, result: Result, mutant: str = "") -> None:
        """Note whether it is a hang."""
        if HANG in result.statuses:
            with self._lock:
                self._hangs[_key(result.check, mutant)] += 1


def _key(check: Check, mutant: str) -> tuple[Implementation, str, str]:
    """A function or one of our backends counts as one, whatever it computes; a planted bug counts alone."""
    return check.implementation, check.operator if mutant else "", mutant
