"""Global memory: which accesses to one place have no order between them, and what atomics pass on."""

from typing import NamedTuple

import torch

from tilewise._gluon.faults import KernelFaultError, Lines, executed
from tilewise._gluon.order import Agent, Clock


class Extent(NamedTuple):
    """Elements of a storage from a tensor's first one to before the end of its last one: what a kernel may access that
    was given the tensor. Gaps between its rows count as its own.
    """

    first: int
    end: int

    @classmethod
    def of(cls, x: torch.Tensor) -> "Extent":
        """That of a tensor, which has none where it is empty."""
        first = int(x.storage_offset())
        if x.numel() == 0:
            return cls(first, first)
        return cls(first, first + 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)))

    def named(self, memory: "GlobalMemory") -> str:
        """In a message."""
        count = self.end - self.first
        if count == memory.flat.numel():
            return f"a tensor's {count}"
        return f"a tensor's {count}, {self.first} to {self.end - 1} of its storage's {memory.flat.numel()}"


class Places(NamedTuple):
    """Elements of a storage by their offsets."""

    offsets: torch.Tensor

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor over the storage."""
        return flat[self.offsets]

    def fill(self, flat: torch.Tensor, value: int) -> None:
        """Set them."""
        flat[self.offsets] = value

    def bounds(self) -> tuple[int, int]:
        """The first and the last."""
        if self.offsets.numel() == 0:
            return 0, -1
        least, most = torch.aminmax(self.offsets)
        return int(least), int(most)


class Window(NamedTuple):
    """Elements of a storage by sizes, strides and the first offset."""

    sizes: list[int]
    strides: list[int]
    start: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The elements of a tensor over the storage, as a view."""
        return flat.as_strided(self.sizes, self.strides, self.start)

    def fill(self, flat: torch.Tensor, value: int) -> None:
        """Set them."""
        self.of(flat).fill_(value)

    def bounds(self) -> tuple[int, int]:
        """The first and the last."""
        return self.start, self.start + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))


Region = Places | Window


class Access(NamedTuple):
    """An access to a region, done at that time of an agent or a barrier."""

    agent: int
    time: int
    region: Region
    bounds: tuple[int, int]
    lines: Lines


class GlobalMemory:
    """The storage of a tensor that a launch was given."""

    def __init__(self, x: torch.Tensor) -> None:
        self.flat = x.detach().as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
        # Of each element the number of its last write that was no atomic; 0 is the host's.
        self._last: torch.Tensor | None = None
        self._writes: list[Access] = []
        self._reads: list[Access] = []
        self._atomics: list[Access] = []
        self._released: dict[int, Clock] = {}

    def read(self, region: Region, agent: Agent, done_by: tuple[int, int] | None = None) -> None:
        """Check a read, which is done at `done_by`, or now."""
        access = self._access(region, done_by or (agent.number, agent.time))
        self._check_writes(access, agent, "read")
        self._check_log(self._atomics, access, agent, "changed by an atomic and then read")
        self._reads.append(access)

    def write(self, region: Region, agent: Agent, done_by: tuple[int, int] | None = None) -> None:
        """Check a write, likewise."""
        access = self._access(region, done_by or (agent.stores, agent.store_time))
        self._check_writes(access, agent, "written")
        self._check_log(self._atomics, access, agent, "changed by an atomic and then written")
        self._check_log(self._reads, access, agent, "read and then written")
        if self._last is None:
            self._last = torch.zeros(self.flat.numel(), dtype=torch.int32)
        self._writes.append(access)
        region.fill(self._last, len(self._writes))

    def change(self, region: Region, agent: Agent, done_by: tuple[int, int] | None = None) -> None:
        """Check atomics, which need no order among themselves."""
        access = self._access(region, done_by or (agent.stores, agent.store_time))
        self._check_writes(access, agent, "changed by an atomic")
        self._check_log(self._reads, access, agent, "read and then changed by an atomic")
        self._atomics.append(access)

    @staticmethod
    def _access(region: Region, done_by: tuple[int, int]) -> Access:
        return Access(*done_by, region, region.bounds(), executed())

    def _check_writes(self, access: Access, agent: Agent, what: str) -> None:
        if self._last is None:
            return
        found = access.region.of(self._last)
        if found.numel() == 0:
            return
        least, most = (int(x) for x in torch.aminmax(found))
        for number in (most,) if least == most else found.unique().tolist():
            write = self._writes[number - 1]
            if number and not agent.knows(write.agent, write.time):
                message = f"one place in global memory is written and then {what}, in no order"
                raise KernelFaultError("race", message, write.lines, access.lines)

    def _check_log(self, log: list[Access], access: Access, agent: Agent, what: str) -> None:
        first, last = access.bounds
        for other in log:
            # Its own accesses come one after the other.
            if other.agent in (agent.number, agent.stores) or agent.knows(other.agent, other.time):
                continue
            if other.bounds[0] <= last and first <= other.bounds[1] and self._overlap(access.region, other.region):
                message = f"one place in global memory is {what}, in no order"
                raise KernelFaultError("race", message, other.lines, access.lines)

    def _overlap(self, one: Region, other: Region) -> bool:
        marked = torch.zeros(self.flat.numel(), dtype=torch.bool)
        one.fill(marked, 1)
        return bool(other.of(marked).any())

    def acquire(self, offset: int, agent: Agent) -> None:
        """Learn what was released at a place."""
        agent.learn(self._released.get(offset, {}))

    def release(self, offset: int, agent: Agent) -> None:
        """Pass on there what the agent knows."""
        clock = self._released.setdefault(offset, {})
        for known, time in agent.clock.items():
            if clock.get(known, 0) < time:
                clock[known] = time
        agent.tick()
