"""Which access comes before which: vector clocks of whoever computes, of barriers, and of atomics that release.

A partition of a CTA is an agent. It counts its own time, and knows of every other agent up to which time that one's
work comes before its own: an arrival at a barrier passes on what the agent knows, a wait takes it over. An access that
the next one does not know of is a fault, whichever came first in this schedule.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from tilewise._gluon.faults import KernelFaultError, Lines, Stopped, executed, shown

Clock = dict[int, int]


# Clocks of so many phases of a barrier are kept: nobody waits for one that is longer ago.
KEPT_PHASES = 16


class Scheduler(Protocol):
    """What an agent needs of the machine that it runs on."""

    study: Any
    watcher: Any
    stopped: bool
    # Whether a thread barrier that Triton's compiler adds counts.
    compiler_barriers: bool

    def next_number(self) -> int:
        """A number that no other agent has."""

    def changed(self, subject: Any) -> None:
        """Whoever waits for a change of `subject` looks again."""

    def later(self, action: Callable[[], None]) -> None:
        """Something asynchronous that happens at some time."""


class Agent:
    """Whose accesses come one after the other: a partition of a CTA."""

    # Where a partition runs for a cluster, its CTAs as agents.
    members: Sequence[Any] = ()

    def __init__(self, machine: Scheduler, clock: Clock, warps: int) -> None:
        self.machine, self.warps = machine, warps
        self.number = machine.next_number()
        self.clock: Clock = dict(clock)
        self.time = 0
        # Stores to global memory have a time of their own: one thread arrives for all, and knows of the others' stores
        # once they have met.
        self.stores, self.store_time = machine.next_number(), 1
        # What its threads have stored to shared memory, until all of them and the copy engine see it.
        self.stored: list[Write] = []
        # Reads by one of its threads that others of its threads may not know of.
        self.loose_reads: list[Read] = []
        self.products: list[Product] = []
        self.copies: list[Copy] = []
        # Its threads' own copies into shared memory (cp.async), by group; the last one is open.
        self.loads: list[list[Any]] = [[]]
        self.polled: Any = None
        self.tick()

    def tick(self) -> None:
        """What follows is later than what others have been told of."""
        self.time += 1
        self.clock[self.number] = self.time

    def learn(self, clock: Clock) -> None:
        """Know what another knows."""
        for agent, time in clock.items():
            if self.clock.get(agent, 0) < time:
                self.clock[agent] = time

    def knows(self, agent: int, time: float) -> bool:
        """Whether what that agent did then comes before what this one does now."""
        return agent == self.stores or self.clock.get(agent, 0) >= time

    def meet(self) -> None:
        """All its threads have come to one line."""
        self._share()
        self.clock[self.stores] = self.store_time
        self.store_time += 1

    def _share(self) -> None:
        for write in self.stored:
            write.joined, write.visible = True, write.fenced
        self.stored = [write for write in self.stored if write.region and not write.visible]
        for read in self.loose_reads:
            read.time = self.time
        self.loose_reads = []

    def meet_by_compiler(self) -> None:
        """Where it would go wrong in shared memory otherwise, Triton has all threads meet: before an arrival, before
        what reads or overwrites there, after a wait for copies. What they have stored to global memory is not looked
        at.
        """
        if self.machine.compiler_barriers:
            self._share()

    def look(self, memory: Any, place: int, patience: int) -> None:
        """It reads a number, in what may be a loop that waits for another: after so many looks at the same, wait for a
        change.
        """
        number = memory.flat[place].item()
        seen, times = self.polled or (None, 0)
        times = times + 1 if seen == (id(memory), place, number) else 0
        self.polled = (id(memory), place, number), times
        if times >= patience:
            self.block(
                lambda: memory.flat[place].item() != number,
                lambda: f"spins on a number in global memory, which is {number}",
                memory,
                spins=True,
            )

    def pause(self) -> None:
        """A place where another agent may go on."""
        raise NotImplementedError

    def block(self, until: Callable[[], bool], why: Callable[[], str], subject: Any, spins: bool = False) -> None:
        """Go on when `until` holds, which may come true when `subject` changes; `why` says what is waited for. What
        only seems to wait, in a loop that `spins`, goes on too where nobody else can.
        """
        raise NotImplementedError


_here = threading.local()


def current() -> Any:
    """The agent that runs in this thread."""
    agent = _here.agent
    if agent.machine.stopped:
        raise Stopped
    return agent


def become(agent: Agent) -> None:
    """This thread runs that agent."""
    _here.agent = agent


class Read:
    """A read of a region of shared memory, which a later write there must know of. With an engine it goes on until that
    one has been waited for.
    """

    def __init__(self, agent: Agent, region: int, lines: Lines, engine: "Engine | None" = None) -> None:
        self.agent, self.region, self.lines, self.engine = agent, region, lines, engine
        self.time = math.inf
        if engine is None:
            self.end()

    def end(self) -> None:
        """Threads that read may be ahead of their partition's others until all meet, and so may the warp of which one
        thread waited for a copy; an arrival comes from that thread. For a product all wait.
        """
        if self.agent.warps > 1 if isinstance(self.engine, Copy) else self.engine is None:
            self.agent.loose_reads.append(self)
        else:
            self.time = self.agent.time

    @property
    def runs(self) -> bool:
        """Whether its engine has not been waited for."""
        return self.engine is not None and not self.engine.ended


class Write:
    """A write to shared memory, and the region of it that has not been overwritten."""

    def __init__(self, agent: int, time: float, region: int, lines: Lines, by_engine: bool) -> None:
        self.agent, self.time, self.region, self.lines = agent, time, region, lines
        # Of threads' stores: followed by a fence; seen by all threads; seen by the copy engine and by products.
        self.fenced = self.joined = self.visible = by_engine
        self.flying = False


class Buffer:
    """A buffer of shared memory: who has written which of its elements last, and the reads since."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.writes: list[Write] = []
        self.reads: list[Read] = []
        # The elements that anything has written, a bit each.
        self.written = 0


class Part(NamedTuple):
    """A region of a buffer: elements, a bit each."""

    buffer: Buffer
    region: int

    def problem_of_read(self, by_engine: bool) -> tuple[str, str, Lines] | None:
        """What is wrong with a read now: its kind, a sentence, and the lines of the write."""
        agent, name = current(), self.buffer.name
        if by_engine and self.region & ~self.buffer.written:
            return "uninitialised", f"{name} is read, and nothing has written it", ()
        for write in self.buffer.writes:
            if not write.region & self.region:
                continue
            if write.flying or not agent.knows(write.agent, write.time):
                return "read too early", f"{name} is read before it is known to be full", write.lines
            if ((by_engine and write.fenced) or not write.joined) and write in agent.stored:
                # Between a partition's own stores and loads the compiler has always put a barrier.
                agent.meet_by_compiler() if by_engine else agent.meet()
            if not (write.visible if by_engine else write.joined):
                missing = "a thread barrier"
                if by_engine:
                    missing = "fence_async_shared" + ("" if agent.machine.compiler_barriers else f" and then {missing}")
                return "missing fence", f"{name} is read without {missing} after its threads' store", write.lines
        return None

    def check_read(self) -> None:
        """A read by threads. What nothing has written is a strange number: kernels read messages of which one field
        counts.
        """
        problem = self.problem_of_read(False)
        if problem:
            raise KernelFaultError(*problem[:2], problem[2], executed())
        self.buffer.reads.append(Read(current(), self.region, executed()))

    def check_write(self, number: int, time: int, by_engine: bool = False) -> Write:
        """A write from now on, which is done at that time of an agent or a barrier."""
        agent, buffer, lines = current(), self.buffer, executed()
        for read in buffer.reads:
            if not read.region & self.region or agent.knows(read.agent.number, read.time):
                continue
            if read.agent is agent and read.engine is None:
                # As between stores and loads.
                agent.meet_by_compiler() if by_engine else agent.meet()
                if agent.knows(agent.number, read.time):
                    continue
            message = f"{buffer.name} is overwritten while it may still be read: the read, then the write"
            fault = KernelFaultError("overwritten", message, read.lines, lines)
            if not isinstance(read.engine, Product) or read.engine.used:
                raise fault
            read.engine.fault = fault
        for write in buffer.writes:
            if write.region & self.region and not agent.knows(write.agent, write.time):
                raise KernelFaultError(
                    "written twice", f"{buffer.name} is written twice, in no order", write.lines, lines
                )
        for write in buffer.writes:
            write.region &= ~self.region
        for read in buffer.reads:
            # One that goes on is not over with its buffer being overwritten.
            if not read.runs:
                read.region &= ~self.region
        buffer.reads = [read for read in buffer.reads if read.region]
        buffer.writes = [write for write in buffer.writes if write.region]
        buffer.writes.append(Write(number, time, self.region, lines, by_engine))
        buffer.written |= self.region
        return buffer.writes[-1]


class Barrier:
    """An mbarrier: how many arrivals and bytes its phase still waits for, how many phases are done, and what whoever
    waited for the last one knows.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.number = current().machine.next_number()
        self.count: int | None = None
        self.missing = self.bytes = self.done = 0
        # The phase that parities count from.
        self._first = 0
        # By how many phases are done, what whoever waited for the last of them knows.
        self._clocks: dict[int, Clock] = {0: {}}
        self._next: Clock = {}
        # When it was initialised, for CTAs of a cluster that use another's.
        self.begun = 0, 0

    def init(self, count: int) -> None:
        """Begin with phase 0 of `count` arrivals."""
        self.count = self.missing = count
        self._first, self.bytes, self._next = self.done, 0, {}
        self.begun = current().number, current().time

    def arrive(self, count: int, nbytes: int = 0) -> None:
        """Count arrivals, and expect bytes."""
        agent = current()
        if self.count is None:
            raise KernelFaultError("uninitialised", f"{self.name} is used before mbarrier.init", executed())
        for known, time in agent.clock.items():
            if self._next.get(known, 0) < time:
                self._next[known] = time
        agent.tick()
        self.bytes += nbytes
        self.missing -= count
        if self.missing < 0:
            message = f"{self.name} has more arrivals in a phase than its count of {self.count}"
            raise KernelFaultError("too many arrivals", message, executed())
        self.settle(agent.machine)

    def arrive_after(self, loads: Iterable[int], count: int, machine: Scheduler, lines: Lines) -> None:
        """Count arrivals of copies of threads (cp.async) that have landed, by their numbers."""
        self._next |= dict.fromkeys(loads, 1)
        self.missing -= count
        if self.missing < 0:
            message = f"{self.name} has more arrivals in a phase than its count of {self.count}"
            raise KernelFaultError("too many arrivals", message, lines)
        self.settle(machine)

    def settle(self, machine: Scheduler) -> None:
        """End the phase where nothing is missing."""
        if self.missing == 0 and self.bytes == 0:
            self.done += 1
            self.missing = self.count or 0
            self._clocks[self.done], self._next = self._next | {self.number: self.done}, {}
            self._clocks.pop(self.done - KEPT_PHASES, None)
            machine.changed(self)

    def is_done(self, parity: int) -> bool:
        """Whether a wait for that parity ends."""
        return (self.done - self._first) & 1 != parity

    def learnt(self, agent: Agent, parity: int) -> Clock:
        """What a wait for that parity tells: of the next phase that fits, however many are done by now."""
        done = max(agent.clock.get(self.number, 0), self._first)
        done += (done - self._first) & 1 == parity
        return self._clocks[max(min(done, self.done), min(self._clocks))]

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.done} phases are done, {self.missing} of {self.count} arrivals and {self.bytes} bytes"
            " are missing to the next"
        )


class Engine:
    """Something asynchronous that reads shared memory: a product or a copy to global memory."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self.agent: Agent = current()
        self.lines, self.ended = executed(), False
        self._reads = [Read(self.agent, part.region, self.lines, self) for part in parts]
        for part, read in zip(parts, self._reads, strict=True):
            part.buffer.reads.append(read)

    def end(self) -> None:
        """It has been waited for."""
        if not self.ended:
            self.ended = True
            for read in self._reads:
                read.end()


class Copy(Engine):
    """A copy from shared to global memory, with the number of whoever writes there."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        self.number, self.landed = self.agent.machine.next_number(), False


class Product(Engine):
    """A product of tiles, from its start to the wait. Kernels start some of anything and never use the result: what is
    wrong with one counts when its result is used.
    """

    def __init__(self, parts: Sequence[Part], before: "Product | None") -> None:
        super().__init__(parts)
        self.before, self.used = before, False
        self.fault: KernelFaultError | None = None
        problem = next(filter(None, (part.problem_of_read(True) for part in parts)), None)
        if problem:
            self.fault = KernelFaultError(*problem[:2], problem[2], self.lines)

    def use(self) -> None:
        """Its result is used, and with it those that it was added to."""
        todo: list[Product] = [self]
        while todo:
            product = todo.pop()
            if not product.ended:
                message = "a product's result is used before its wait: the product, then the use"
                raise KernelFaultError("used too early", message, product.lines, executed())
            if product.fault:
                fault = product.fault
                message = f"{str(fault).partition(': ')[2]}\n    used at {shown(executed())}"
                raise KernelFaultError(fault.kind, message)
            todo += [product.before] if product.before else []
            product.used, product.before = True, None
