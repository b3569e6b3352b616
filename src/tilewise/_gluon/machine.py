"""Runs launches of Gluon kernels on CPU tensors: CTAs beside each other, their partitions as threads of which one runs
at a time, and copies that land in between.

A partition runs until it must wait. Copies land when nobody can go on, as late as can be; with a seed, who goes on and
when copies land is left to chance. When nobody can go on and nothing is in flight, the kernel hangs.
"""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from tilewise._gluon.faults import KernelFaultError, Lines, Stopped, executed, shown
from tilewise._gluon.language import SHARED_BYTES
from tilewise._gluon.leaving_out import Study
from tilewise._gluon.members import Member
from tilewise._gluon.memory import Extent, GlobalMemory
from tilewise._gluon.order import Agent, Clock, become
from tilewise._gluon.shared import Descriptor, Im2Col
from tilewise._gluon.translate import add_hooks, adopt, refresh, translate
from tilewise._gluon.values import Pointer, Tile
from tilewise._gluon.watching import Watcher

# CTAs that run at a time: the SMs of an H100.
SMS = 132
# With a seed, how often another agent goes on where one may.
SWITCHING = 0.3
# How often a loop that spins goes round where nobody else can go on, before that is a deadlock.
MOST_ROUNDS = 1000


class Cta:
    """A program of the grid: a CTA, or a cluster of several, its peers."""

    def __init__(
        self, index: tuple[int, int, int], grid: tuple[int, int, int], numbers: Iterator[int], ctas: int = 1
    ) -> None:
        self.index, self.grid = index, grid
        self.number = index[0] + grid[0] * (index[1] + grid[1] * index[2])
        axes = 1 if grid[1:] == (1, 1) else 2 if grid[2] == 1 else 3
        self.name = str(index[0] if axes == 1 else index[:axes])
        # What names of its buffers and barriers end with.
        self.label = ""
        self._shared: dict[Lines, int] = {}
        # Copies into shared memory, by the barrier and the phase that count them; and what its partitions knew at
        # their ends.
        self.loads: list[tuple[int, int, Lines]] = []
        # Copies by threads into shared memory that an mbarrier tells of.
        self.arriving: list[Any] = []
        self.known: Clock = {}
        # The number by which other CTAs of a cluster know of its mbarrier.init, and their accesses to its shared
        # memory.
        self.inits = next(numbers)
        self.visits: list[tuple[int, int, Lines]] = []
        self.peers = [Cta(index, grid, numbers) for _ in range(ctas)] if ctas > 1 else []
        for rank, peer in enumerate(self.peers):
            peer.name = f"{self.name}.{rank}"
            peer.label = f" of CTA {peer.name}"

    def allocate(self, lines: Lines, nbytes: int) -> None:
        """Take shared memory, once a statement: in a loop it is the same."""
        self._shared[lines] = nbytes
        total = sum(self._shared.values())
        if total > SHARED_BYTES:
            message = f"{total} bytes are allocated, and an SM of Hopper has {SHARED_BYTES}"
            raise KernelFaultError("too much shared memory", message, lines)

    def check_end(self) -> None:
        """Every copy into shared memory has been waited for, and what other CTAs do there."""
        for peer in self.peers:
            peer.check_end()
        for barrier, phase, lines in self.loads:
            if self.known.get(barrier, 0) < phase:
                message = f"CTA {self.name} ends, and nothing has waited for a copy into its shared memory"
                raise KernelFaultError("not waited for", message, lines)
        for agent, time, lines in self.visits:
            if self.known.get(agent, 0) < time:
                message = f"CTA {self.name} ends while another CTA of the cluster may still use its shared memory"
                raise KernelFaultError("not waited for", message, lines)


class Partition(Agent):
    """A partition of a CTA in a thread of its own. Only the one that the machine lets go runs."""

    def __init__(
        self,
        machine: "Machine",
        cta: Cta,
        role: str,
        call: Callable[[], Any],
        clock: Clock,
        warps: int,
        index: int = 0,
        parents: Sequence[Member] = (),
    ) -> None:
        super().__init__(machine, clock, warps)
        self.machine: Machine = machine
        self.cta, self.role, self.index = cta, role, index
        clocks = [parent.clock for parent in parents] or [clock] * len(cta.peers)
        self.members: list[Member] = [Member(self, *pair) for pair in zip(cta.peers, clocks, strict=True)]
        self.specialized = bool(parents)
        self._call = call
        self.go = threading.Semaphore(0)
        self.until: Callable[[], bool] | None = None
        self.why: Callable[[], str] = str
        self.where: Lines = ()
        self.spins = self.finished = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        become(self)
        self.go.acquire()
        try:
            if not self.machine.stopped:
                # Both are settings of a thread.
                with torch.no_grad(), np.errstate(all="ignore"):
                    self._call()
                for agent in self.agents:
                    self._check_end(agent)
                    known = agent.cta.known
                    agent.cta.known = {
                        one: max(agent.clock.get(one, 0), known.get(one, 0)) for one in {**agent.clock, **known}
                    }
        except Stopped:
            pass
        except BaseException as error:
            self.error = error
        self.finished = True
        self.machine.back.release()

    @property
    def agents(self) -> Sequence[Any]:
        """Those that run in its thread: itself, or the CTAs of a cluster."""
        return self.members or (self,)

    def _check_end(self, agent: Any) -> None:
        if agent.products or agent.copies:
            engine = (*agent.products, *agent.copies)[0]
            what = "products" if agent.products else "copies to global memory"
            message = f"CTA {agent.cta.name}{self.role} ends while {what} still run"
            raise KernelFaultError("not waited for", message, engine.lines)
        for load in itertools.chain(*agent.loads):
            if not load.awaited:
                message = f"CTA {agent.cta.name}{self.role} ends, and nothing has waited for a copy by its threads"
                raise KernelFaultError("not waited for", message, load.lines)

    def join(self) -> None:
        """After it has finished."""
        self._thread.join()

    def block(self, until: Callable[[], bool], why: Callable[[], str], subject: Any, spins: bool = False) -> None:
        if not until():
            self.until, self.why, self.where, self.spins = until, why, executed(), spins
            self.machine.wait_for(self, subject)
            self._switch()

    def pause(self) -> None:
        if self.machine.wants_switch():
            self.machine.ready.append(self)
            self._switch()

    def _switch(self) -> None:
        self.machine.back.release()
        self.go.acquire()
        if self.machine.stopped:
            raise Stopped

    def specialize(self, first: Any, others: Sequence[Any], warps: Sequence[int]) -> Any:
        """Run the first function here, and the others in partitions of their own, to the end of all."""
        if len(others) != len(warps):
            message = f"{len(others)} functions besides the first, and numbers of warps for {len(warps)}"
            raise KernelFaultError("arguments", message, executed())
        for _, arguments in (first, *others):
            if _has_none(arguments):
                raise KernelFaultError("arguments", "a partition takes no None, outside of tuples", executed())
        started = [
            Partition(
                self.machine,
                self.cta,
                f", partition {i} ({function.__name__})",
                lambda function=function, arguments=arguments: function(*arguments),  # type: ignore[misc]
                self.clock,
                count,
                i,
                self.members,
            )
            for i, ((function, arguments), count) in enumerate(zip(others, warps, strict=True), 1)
        ]
        self.machine.start(started)
        for agent in self.agents:
            agent.tick()
        function, arguments = first
        self.specialized = True
        self.role = f", partition 0 ({function.__name__})"
        result = function(*arguments)
        self.block(
            lambda: all(one.finished for one in started), lambda: "waits for the other partitions' end", self.cta
        )
        for one in started:
            # All threads have met there: not before, for whoever reads what it has stored meanwhile.
            for agent, other in zip(self.agents, one.agents, strict=True):
                other.meet()
                agent.learn(other.clock)
        self.specialized = False
        return result


def _has_none(arguments: Any) -> bool:
    return any(x is None for x in arguments)


class Machine:
    """One launch."""

    def __init__(
        self,
        seed: int | None = None,
        study: Study | None = None,
        watcher: Watcher | None = None,
        compiler_barriers: bool = True,
    ) -> None:
        self.study, self.watcher, self.compiler_barriers = study, watcher, compiler_barriers
        # Lines of static_print that have been executed.
        self.printed: set[Lines] = set()
        self._random = None if seed is None else random.Random(seed)
        self._numbers = itertools.count(1)
        self._memories: dict[tuple[int, torch.dtype], GlobalMemory] = {}
        self._partitions: list[Partition] = []
        self._waiting: dict[int, list[Partition]] = {}
        self._flying: deque[Callable[[], None]] = deque()
        self.ready: list[Partition] = []
        # How often those that spin have been woken for nothing.
        self._woken = 0
        self.back = threading.Semaphore(0)
        self.stopped = False

    def next_number(self) -> int:
        """A number that no other agent has."""
        return next(self._numbers)

    def later(self, action: Callable[[], None]) -> None:
        """Something asynchronous that happens at some time."""
        self._flying.append(action)

    def changed(self, subject: Any) -> None:
        """Whoever waits for a change of `subject` looks again."""
        self._woken = 0
        waiting = self._waiting.pop(id(subject), [])
        still: list[Partition] = []
        for one in waiting:
            (self.ready if one.until and one.until() else still).append(one)
        if still:
            self._waiting[id(subject)] = still

    def wait_for(self, partition: Partition, subject: Any) -> None:
        """It looks again when `subject` changes."""
        self._waiting.setdefault(id(subject), []).append(partition)

    def wants_switch(self) -> bool:
        """Whether another agent goes on here."""
        return self._random is not None and self._random.random() < SWITCHING

    def start(self, partitions: Sequence[Partition]) -> None:
        """Partitions that have been made go on in turn."""
        self._partitions += partitions
        self.ready += partitions

    def memory(self, x: torch.Tensor) -> GlobalMemory:
        """The storage of a tensor, the same for all tensors in it."""
        key = x.untyped_storage().data_ptr(), x.dtype
        if key not in self._memories:
            self._memories[key] = GlobalMemory(x)
        return self._memories[key]

    def _given(self, value: Any) -> Any:
        """An argument as the kernel sees it."""
        if isinstance(value, torch.Tensor):
            return Pointer(self.memory(value), Extent.of(value), value.storage_offset())
        if hasattr(value, "block_shape") and hasattr(value, "base"):
            if getattr(value, "padding", "zero") != "zero":
                raise KernelFaultError("not simulated", f"a descriptor's padding by {value.padding}")
            base = self._given(value.base)
            if getattr(value, "round_f32_to_tf32", False):
                raise KernelFaultError("not simulated", "a descriptor that rounds fp32 to tf32")
            if hasattr(value, "pixel_box_lower_corner"):
                return Im2Col(base, value)
            return Descriptor(base, value.shape, value.strides, value.block_shape, value.layout)
        if isinstance(value, bool | int | float):
            return Tile(value)
        if isinstance(value, tuple):
            return (
                type(value)(*map(self._given, value)) if hasattr(value, "_fields") else tuple(map(self._given, value))
            )
        return translate(value)

    def launch(
        self, kernel: Any, grid: Sequence[int], arguments: dict[str, Any], num_warps: int, num_ctas: int = 1
    ) -> None:
        """Run every CTA to its end, or raise what a partition raises."""
        width, height, depth = (*(int(n) for n in grid), 1, 1)[:3]
        values = {
            parameter.name: translate(arguments[parameter.name])
            if parameter.is_constexpr
            else self._given(arguments[parameter.name])
            for parameter in kernel.params
        }
        refresh()
        if self.watcher:
            add_hooks()
            self.watcher.launched(kernel.fn.__name__)
        function = adopt(kernel.fn)
        indices = itertools.product(range(depth), range(height), range(width))
        ctas = deque(Cta((x, y, z), (width, height, depth), self._numbers, num_ctas) for z, y, x in indices)
        running: dict[int, int] = {}
        try:
            while self._partitions or ctas:
                while ctas and len(running) < max(1, SMS // num_ctas):
                    cta = ctas.popleft()
                    running[id(cta)] = 1
                    self.start([Partition(self, cta, "", lambda: function(**values), {}, num_warps)])
                self._step(running)
        finally:
            self.stopped = True
            for partition in self._partitions:
                partition.go.release()
                partition.join()

    def _step(self, running: dict[int, int]) -> None:
        if not self.ready and not self._flying and not self._wake_spinners():
            raise self._deadlock()
        lands = not self.ready
        if self._random and self._flying:
            lands = self._random.randrange(len(self.ready) + len(self._flying)) >= len(self.ready)
            self._flying.rotate(-self._random.randrange(len(self._flying)))
        if lands:
            self._flying.popleft()()
            return
        partition = self.ready.pop(self._random.randrange(len(self.ready)) if self._random else 0)
        partition.go.release()
        self.back.acquire()
        if partition.error:
            raise partition.error
        if partition.finished:
            self._partitions.remove(partition)
            partition.join()
            if not any(one.cta is partition.cta for one in self._partitions):
                running.pop(id(partition.cta), None)
                partition.cta.check_end()
            self.changed(partition.cta)

    def _wake_spinners(self) -> bool:
        """Let loops that seem to wait go round: they may have an end of their own."""
        self._woken += 1
        spinners = [one for waiting in self._waiting.values() for one in waiting if one.spins]
        if not spinners or self._woken > MOST_ROUNDS:
            return False
        for subject, waiting in list(self._waiting.items()):
            self._waiting[subject] = [one for one in waiting if not one.spins]
        self.ready += spinners
        return True

    def _deadlock(self) -> KernelFaultError:
        # Often all CTAs wait alike.
        alike: dict[tuple[str, str, Lines], list[str]] = {}
        for one in self._partitions:
            alike.setdefault((one.role, one.why(), one.where), []).append(one.cta.name)
        waiting = [
            f"CTA{'s' if len(ctas) > 1 else ''} {', '.join(ctas)}{role} {why}\n        {shown(where)}"
            for (role, why, where), ctas in alike.items()
        ]
        fault = KernelFaultError("deadlock", "\n    ".join(("nobody can go on", *waiting)))
        fault.lines = tuple(one.where for one in self._partitions)
        return fault
