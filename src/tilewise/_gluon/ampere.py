"""What Ampere has: copies into shared memory that a partition's threads start and do not wait for (cp.async), and its
mbarrier's arrival.
"""

import operator
from collections.abc import Sequence
from typing import Any

import torch

from tilewise._gluon.allocation import element_offsets, flat_place
from tilewise._gluon.compiler import linear_layout
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.hopper import arrive
from tilewise._gluon.language import check_layouts, one_barrier
from tilewise._gluon.leaving_out import synchronises
from tilewise._gluon.order import Barrier, Part, current
from tilewise._gluon.shared import Shared

THREADS_PER_WARP = 32
# The least that a thread copies.
COPIED_BYTES = 4


class Load:
    """A copy by a partition's threads, with a number that whoever waited for it knows. Products and the copy engine do
    not see what it wrote without a fence.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.number = current().machine.next_number()
        self.lines, self.landed, self.awaited = executed(), False, False
        self.writes = [part.check_write(self.number, 1) for part in parts]
        for write in self.writes:
            write.joined = write.flying = True
        self.arrivals: list[Arrival] = []

    def land(self) -> None:
        """What it brings has been written."""
        self.landed = True
        for write in self.writes:
            write.flying = False
        for arrival in self.arrivals:
            arrival.settle()


class Arrival:
    """What an mbarrier waits for: that all copies that a partition had started have landed."""

    def __init__(self, barrier: Barrier, loads: list[Load], count: int) -> None:
        self._barrier, self._loads, self._count, self._lines = barrier, loads, count, executed()
        self._machine, self._done = current().machine, False
        for load in loads:
            load.arrivals.append(self)
            load.awaited = True
        self.settle()

    def settle(self) -> None:
        """Arrive where all have landed."""
        if not self._done and all(load.landed for load in self._loads):
            self._done = True
            numbers = [load.number for load in self._loads]
            self._barrier.arrive_after(numbers, self._count, self._machine, self._lines)


def async_load(
    smem: Shared,
    pointer: Any,
    mask: Any = None,
    cache_modifier: Any = "",
    eviction_policy: Any = "",
    volatile: Any = False,
) -> None:
    """Start to copy a tile into shared memory. What the mask leaves out is 0."""
    agent, memory = current(), pointer.memory
    check_layouts(pointer, mask)
    offset, wanted, region = pointer.region(mask)
    if smem.shape != list(offset.shape):
        message = f"async_load of {list(offset.shape)} to shared memory of {smem.shape}"
        raise KernelFaultError("shapes differ", message, executed())
    if smem.data.dtype is not memory.flat.dtype:
        message = f"async_load of {memory.flat.dtype} to shared memory of {smem.data.dtype}"
        raise KernelFaultError("dtypes differ", message, executed())
    _check_bytes(smem, pointer.layout)
    agent.pause()
    load = Load(smem.parts)
    memory.read(region, agent, (load.number, 1))
    smem.data.fill_(torch.nan if smem.data.is_floating_point() else 0)
    agent.loads[-1].append(load)

    def land() -> None:
        smem.data.zero_()
        found = memory.flat[region.offsets]
        if wanted is None:
            smem.data.copy_(found.view(offset.shape))
        else:
            smem.data[wanted] = found
        load.land()
        agent.machine.changed(agent)

    agent.machine.later(land)


def _check_bytes(smem: Shared, layout: Any) -> None:
    """A thread copies at least 4 bytes that are side by side in shared memory too."""
    if layout is None:
        return
    size, shape = smem.data.element_size(), tuple(smem.kind.whole[-len(smem.shape) :])
    offsets = element_offsets(smem.layout, shape)
    linear = linear_layout(layout, smem.shape)
    own, others = (
        [int(offsets[flat_place(basis, shape)]) for basis in bases]
        for bases in (linear.reg_bases, (*linear.lane_bases, *linear.warp_bases))
    )
    count = 1
    while count * size < COPIED_BYTES and count in own and sum(x & count != 0 for x in (*own, *others)) == 1:
        count *= 2
    if count * size < COPIED_BYTES:
        message = f"a copy of {count * size} bytes by each thread, from a tile in {layout} to {smem.kind}: expected at"
        raise KernelFaultError("refused", f"{message} least {COPIED_BYTES} bytes side by side", executed())


@synchronises("commit of copies")
def commit_group() -> None:
    """The copies since the last commit are one group."""
    current().loads.append([])


@synchronises("wait for copies")
def wait_group(num_outstanding: Any = 0) -> None:
    """Until at most so many of the partition's groups have not landed."""
    agent = current()
    ending = max(0, len(agent.loads) - 1 - operator.index(num_outstanding))
    loads = [load for group in agent.loads[:ending] for load in group]
    agent.block(lambda: all(load.landed for load in loads), lambda: "waits for copies by its threads", agent)
    agent.loads = agent.loads[ending:]
    for load in loads:
        load.awaited = True
        agent.stored += load.writes
        agent.learn({load.number: 1})
    # The compiler has always put a thread barrier there.
    agent.meet()


@synchronises("arrival of copies")
def mbarrier_arrive(mbarrier: Any, increment_count: Any = True) -> None:
    """Each thread arrives when its copies until here have landed. The phase waits for that besides its count; without
    `increment_count` its count has to have a place for every thread.
    """
    agent, barrier = current(), one_barrier(mbarrier)
    agent.pause()
    if barrier.count is None:
        raise KernelFaultError("uninitialised", f"{barrier.name} is used before mbarrier.init", executed())
    count = THREADS_PER_WARP * agent.warps
    if increment_count:
        barrier.missing += count
    loads = [load for group in agent.loads for load in group]
    agent.cta.arriving += loads
    Arrival(barrier, loads, count)


ASYNC_COPY: dict[str, Any] = {
    "async_load": async_load,
    "async_copy_global_to_shared": async_load,
    "commit_group": commit_group,
    "wait_group": wait_group,
    "mbarrier_arrive": mbarrier_arrive,
}
BARRIERS: dict[str, Any] = {"arrive": lambda barrier, *, pred=True: arrive(barrier, pred=pred)}
