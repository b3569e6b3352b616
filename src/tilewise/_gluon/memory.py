"""Global memory: which accesses to one place have no order between them, and what atomics pass on."""

from typing import Any, NamedTuple

import torch

from tilewise._gluon.faults import KernelFaultError, Lines, executed
from tilewise._gluon.order import Agent, Clock

TIME_BITS = 32


class Places(NamedTuple):
    """Elements of a storage by their offsets."""

    offsets: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor over the storage."""
        return flat[self.offsets]

    def fill(self, flat: torch.Tensor, value: Any) -> None:
        """Set them."""
        flat[self.offsets] = value

    def size(self) -> int:
        """How many."""
        return self.offsets.numel()


class Window(NamedTuple):
    """Elements of a storage by sizes, strides and the first offset."""

    sizes: list[int]
    strides: list[int]
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor over the storage, as a view."""
        return flat.as_strided(self.sizes, self.strides, self.start)

    def fill(self, flat: torch.Tensor, value: Any) -> None:
        """Set them."""
        self.of(flat).fill_(value)

    def size(self) -> int:
        """How many."""
        return torch.Size(self.sizes).numel()


Region = Places | Window


class Access(NamedTuple):
    """A read of a region, done at that time of an agent or a barrier."""

    agent: int
    time: int
    region: Region
    lines: Lines


class GlobalMemory:
    """The storage of a tensor that a launch was given."""

    def __init__(self, x: torch.Tensor) -> None:
        self.flat = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        # Of each element, who wrote it last and when, and whether that was an atomic; 0 is the host.
        self._stamps: torch.Tensor | None = None
        self._atomic = torch.zeros(0)
        self._lines: dict[int, Lines] = {}
        self._reads: list[Access] = []
        self._released: dict[int, Clock] = {}

    def read(self, region: Region, agent: Agent, done_by: tuple[int, int] | None = None) -> None:
        """Check a read, which is done at `done_by`, or now."""
        lines = executed()
        if self._stamps is not None:
            self._check(self._stamps, region, agent, lines, "read")
        number, time = done_by or (agent.number, agent.time)
        self._reads.append(Access(number, time, region, lines))

    def write(self, region: Region, agent: Agent, done_by: tuple[int, int] | None = None, atomic: bool = False) -> None:
        """Check a write, likewise. Atomics need no order among themselves."""
        lines = executed()
        if self._stamps is None:
            self._stamps = torch.zeros(self.flat.numel(), dtype=torch.int64)
            self._atomic = torch.zeros(self.flat.numel(), dtype=torch.bool)
        self._check(self._stamps, region, agent, lines, "written", skip_atomics=atomic)
        for read in self._reads:
            if not agent.knows(read.agent, read.time) and read.agent != agent.number and self._overlap(region, read):
                message = "one place in global memory is read and then written, in no order"
                raise KernelFaultError("race", message, read.lines, lines)
        number, time = done_by or (agent.number, agent.time)
        stamp = number << TIME_BITS | time
        self._lines[stamp] = lines
        region.fill(self._stamps, stamp)
        region.fill(self._atomic, atomic)

    def _check(
        self, stamps: torch.Tensor, region: Region, agent: Agent, lines: Lines, what: str, skip_atomics: bool = False
    ) -> None:
        found = region.of(stamps)
        if skip_atomics:
            found = torch.where(region.of(self._atomic), 0, found)
        if found.numel() == 0:
            return
        least, most = (int(x) for x in torch.aminmax(found))
        for stamp in (most,) if least == most else found.unique().tolist():
            writer, time = stamp >> TIME_BITS, stamp & (1 << TIME_BITS) - 1
            if stamp and not agent.knows(writer, time):
                message = f"one place in global memory is written and then {what}, in no order"
                raise KernelFaultError("race", message, self._lines[stamp], lines)

    def _overlap(self, region: Region, read: Access) -> bool:
        marked = torch.zeros(self.flat.numel(), dtype=torch.bool)
        region.fill(marked, True)
        return bool(read.region.of(marked).any())

    def acquire(self, offset: int, agent: Agent) -> None:
        """Learn what was released at a place."""
        agent.learn(self._released.get(offset, {}))

    def release(self, offset: int, agent: Agent) -> None:
        """Pass on there what the agent knows."""
        clock = self._released.setdefault(offset, {})
        for known, time in agent.published().items():
            if clock.get(known, 0) < time:
                clock[known] = time
        agent.tick()
