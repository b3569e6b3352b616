"""What the CTAs of a cluster have a part of each: shared memory, barriers, tiles, descriptors."""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise._gluon.compiler import SharedType, ask
from tilewise._gluon.faults import KernelFaultError, Lines, executed
from tilewise._gluon.language import one_barrier
from tilewise._gluon.members import Member, acting
from tilewise._gluon.order import current
from tilewise._gluon.shared import Descriptor, Shared
from tilewise._gluon.split import Split, local, split_of
from tilewise._gluon.values import Pointer, Tile
from tilewise._gluon.watching import View, show_read

# Triton 3.7 leaves it to the kernel that CTAs know of each other's mbarrier.init. Later ones add a cluster barrier.
INITS_LEFT_TO_KERNELS = hasattr(mbarrier, "sync_cluster_init")
# Triton up to 3.8 leaves it to the kernel that no CTA ends while another still uses its shared memory, likewise.
ENDS_LEFT_TO_KERNELS = hasattr(mbarrier, "fence_init_release_cluster")


def members() -> list[Member]:
    """The CTAs of the cluster that runs here, as agents; none where a CTA runs alone."""
    found: list[Member] = current().members
    return found


def visit(guest: Member, host: Member) -> None:
    """A CTA uses another's shared memory, which must outlive that."""
    if ENDS_LEFT_TO_KERNELS:
        host.cta.visits.append((guest.number, guest.time, executed()))


class SpreadShared(View):
    """A view of shared memory of which every CTA has a part."""

    def __init__(
        self, parts: list[Shared], shape: Sequence[int], layout: Any, of: "SpreadShared | None" = None
    ) -> None:
        super().__init__(of)
        self.parts, self.shape, self.dtype, self.layout = parts, list(shape), parts[0].dtype, layout
        self.split = split_of(layout, shape, len(parts))

    @property
    def rank(self) -> int:
        """How many axes."""
        return len(self.shape)

    @property
    def type(self) -> "SpreadShared":
        """Has dtype, shape and layout."""
        return self

    @property
    def data(self) -> torch.Tensor:
        """All of it."""
        return self.split.join([part.data for part in self.parts])

    def index(self, i: Any) -> "SpreadShared":
        """One buffer."""
        return SpreadShared([part.index(i) for part in self.parts], self.shape[1:], self.layout)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "SpreadShared":
        """Part of an axis that the CTAs do not share."""
        dim, shape = operator.index(dim), list(self.shape)
        if self.split.counts[dim] > 1:
            raise KernelFaultError("not simulated", "a slice along an axis that CTAs of a cluster share", executed())
        shape[dim] = operator.index(length)
        return SpreadShared([part.slice(start, length, dim) for part in self.parts], shape, self.layout)

    def permute(self, order: Any) -> "SpreadShared":
        """Axes in another order."""
        axes = tuple(operator.index(n) for n in order)
        parts = [part.permute(axes) for part in self.parts]
        kind = SharedType(self.dtype, tuple(self.shape), self.layout, tuple(self.shape))
        found = ask("permute of shared memory", kind, axes, ctas=len(parts))
        return SpreadShared(parts, list(found.shape), found.layout, self)

    def load(self, layout: Any = None) -> Tile:
        """By the threads of every CTA, each its part by the layout, from whichever CTAs have that."""
        agents = members()
        # What is to have a layout that Triton finds, each CTA takes from its own.
        own = layout is None or isinstance(layout, gl.AutoLayout)
        wanted = self.split if own else split_of(layout, self.shape, len(agents))
        for rank, agent in enumerate(agents):
            with acting(agent):
                for first in self.split.leaders():
                    other = rank if rank in self.split.group(first) else first
                    if wanted.overlaps(rank, self.split, other):
                        self.parts[other].load(gl.AutoLayout())
                        if other != rank:
                            visit(agent, agents[other])
        show_read(self)
        return Tile(self.data, layout)

    def store(self, value: Any) -> None:
        """By the threads of every CTA, each what its own shared memory holds."""
        tiles = split_of(value.layout, self.shape, len(self.parts))
        for rank, agent in enumerate(members()):
            if not tiles.covers(rank, self.split):
                message = f"a store to another CTA's shared memory: a tile in {value.layout}, to {self.layout}"
                raise KernelFaultError("not simulated", message, executed())
            with acting(agent):
                self.parts[rank].store(part_of(value, self.split, rank))

    def _keep_alive(self) -> None:
        """Nothing is freed before the CTAs end."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise KernelFaultError("not simulated", f"{name} of shared memory of a cluster", executed())


class SpreadBarrier:
    """An mbarrier of every CTA, or of every group of CTAs, which has that of its first."""

    def __init__(self, barriers: list[Any], firsts: list[int]) -> None:
        self._barriers = barriers
        # By a CTA's rank, the first of its group.
        self._firsts = firsts

    def index(self, i: Any) -> "SpreadBarrier":
        """One of an array, in every CTA."""
        return SpreadBarrier([barrier.index(i) for barrier in self._barriers], self._firsts)

    def of(self, rank: int) -> Any:
        """The barrier of a CTA."""
        return self._barriers[self._firsts[rank]]

    def groups(self) -> dict[int, int]:
        """How many CTAs share a barrier, by the first of them."""
        return {first: self._firsts.count(first) for first in self._firsts}

    def host(self, rank: int, agents: list[Member]) -> Member:
        """Who has the barrier of a CTA."""
        return agents[self._firsts[rank]]

    def known_to(self, guest: Member, rank: int, agents: list[Member]) -> Any:
        """The barrier of a CTA; another CTA that uses it must know of its mbarrier.init."""
        barrier, host = self.of(rank), self.host(rank, agents)
        one = one_barrier(barrier)
        known = guest is host or guest.knows(*one.begun) or guest.knows(host.cta.inits, one.begun[1])
        if INITS_LEFT_TO_KERNELS and not known:
            message = f"{one.name} is used by CTA {guest.cta.name}, which does not know of its mbarrier.init"
            raise KernelFaultError("uninitialised", f"{message}: expected mbarrier.sync_cluster_init", executed())
        return barrier


class Products:
    """A product of every CTA, whose results make up a tile."""

    def __init__(self, products: list[Any]) -> None:
        self.of = products

    @property
    def lines(self) -> Lines:
        """Where they are started."""
        lines: Lines = self.of[0].lines
        return lines

    def use(self) -> None:
        """Their results are used."""
        for product in self.of:
            product.use()


def part_of(value: Any, split: Split, rank: int) -> Any:
    """A CTA's part of a tile or of a tile of pointers that is split so; an axis of one element is everybody's."""
    if isinstance(value, SpreadShared):
        return value.parts[rank]
    if not isinstance(value, Tile | Pointer) or not value.shape:
        return value
    part = tuple(
        whole if size == 1 else chunk
        for whole, size, chunk in zip([slice(None)] * len(value.shape), value.shape, split.part(rank), strict=True)
    )
    if isinstance(value, Pointer):
        return Pointer(value.memory, value.extent, value.offset[part], local(value.layout))
    product = value.product.of[rank] if isinstance(value.product, Products) else value.product
    return type(value)(value.data[part], local(value.layout), product=product)


def joined(results: Sequence[Tile], split: Split, layout: Any) -> Tile:
    """The tile that the CTAs' parts make up; a number is everybody's."""
    if not split.shape:
        return results[0]
    products = [result.product for result in results]
    product: Any = Products(products) if all(products) else None
    return type(results[0])(split.join([result.data for result in results]), layout, product=product)


class SpreadDescriptor:
    """A descriptor whose tile every CTA copies a part of."""

    def __init__(self, desc: Descriptor, ctas: int) -> None:
        self.split = split_of(desc.layout, desc.block_shape, ctas)
        self._of = desc.in_tiles(self.split.shape_per_cta, local(desc.layout))

    def of(self, rank: int, coord: Sequence[Any]) -> tuple[Descriptor, list[int]]:
        """A CTA's descriptor and coordinates."""
        offset = self.split.offset(rank)
        return self._of, [operator.index(c) + first for c, first in zip(coord, offset, strict=True)]


def each_cta(action: Callable[[int, Member], Any], ranks: Sequence[int] | None = None) -> dict[int, Any]:
    """Done as each CTA in turn, or as those of some ranks: the results by rank."""
    agents = members()
    results = {}
    for rank in range(len(agents)) if ranks is None else ranks:
        with acting(agents[rank]):
            results[rank] = action(rank, agents[rank])
    return results
