"""The CTAs of a cluster as agents: each knows for itself what comes before what."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.order import Agent, Clock, become, current


class Member(Agent):
    """A CTA's share of a partition. All CTAs' run in the partition's one thread, statement by statement in turn."""

    def __init__(self, partition: Agent, cta: Any, clock: Clock) -> None:
        super().__init__(partition.machine, clock, partition.warps)
        self.cta = cta
        self._partition = partition
        # Until what time the CTA's mbarrier.init have been followed by a fence for the cluster.
        self.published = 0
        # Between an arrival at the cluster's barrier and the wait, what the others will learn there.
        self.told: Clock | None = None

    def pause(self) -> None:
        self._partition.pause()

    def block(self, until: Callable[[], bool], why: Callable[[], str], subject: Any, spins: bool = False) -> None:
        self._partition.block(until, why, subject, spins)

    def publish(self) -> None:
        """A fence: the cluster sees the barriers that have been initialised, after any cluster barrier."""
        self.published = self.time
        self.tick()

    def arrive(self, relaxed: bool) -> None:
        """At the cluster's barrier. A relaxed arrival tells nothing but of barriers, and of those by a fence alone."""
        if self.told is not None:
            raise KernelFaultError("cluster barrier", "cluster.arrive, and no cluster.wait since the last", executed())
        if not relaxed:
            self.meet()
        self.told = {self.cta.inits: self.published} | ({} if relaxed else self.clock)
        self.tick()


@contextlib.contextmanager
def acting(member: Member) -> Iterator[None]:
    """Inside, this thread runs that CTA, and then its partition again."""
    before = current()
    become(member)
    try:
        yield
    finally:
        become(before)


def pass_barrier(members: list[Member]) -> None:
    """The end of a wait at the cluster's barrier: all know what all told."""
    told = [member.told for member in members if member.told is not None]
    if not told:
        raise KernelFaultError("cluster barrier", "cluster.wait without a cluster.arrive before", executed())
    for member in members:
        for clock in told:
            member.learn(clock)
        member.told = None
