"""Clusters: programs of several CTAs, which execute a kernel's statements side by side.

A statement that computes does so on whole tiles. One that touches memory or synchronises is done by each CTA, as an
agent of its own, on its part of every tile: what it knows of other CTAs' accesses, barriers must have told it.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise._gluon import spread
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.language import LANGUAGE
from tilewise._gluon.leaving_out import synchronises
from tilewise._gluon.members import acting, pass_barrier
from tilewise._gluon.order import current
from tilewise._gluon.shared import Descriptor
from tilewise._gluon.split import local, split_of
from tilewise._gluon.spread import (
    SpreadBarrier,
    SpreadDescriptor,
    SpreadShared,
    each_cta,
    joined,
    members,
    part_of,
    visit,
)
from tilewise._gluon.values import Tile, common_layout
from tilewise._gluon.watching import show_read

Function = Callable[..., Any]


def _by_all(function: Function, *arguments: Any, **named: Any) -> Any:
    """What every CTA does with the same arguments, and gives the same for."""
    return each_cta(lambda _rank, _agent: function(*arguments, **named))[0]


def _thread_barrier(function: Function, cluster: bool = False) -> None:
    if cluster:
        barrier()
    else:
        _by_all(function)


def _meet_everywhere(relaxed: bool = False) -> None:
    _arrive_at_cluster(relaxed)
    pass_barrier(members())


def _arrive_at_cluster(relaxed: bool = False) -> None:
    if current().specialized:
        message = "a cluster's barrier is for all threads of its CTAs, and comes before or after gl.warp_specialize"
        raise KernelFaultError("cluster barrier", message, executed())
    for agent in members():
        agent.arrive(relaxed)


def _specialize(function: Function, *arguments: Any, **named: Any) -> Any:
    for agent in members():
        agent.meet()
    return function(*arguments, **named)


def _allocate(function: Function, element_ty: Any, shape: Any, layout: Any, value: Any = None) -> Any:
    sizes, ctas = [operator.index(n) for n in shape], len(members())
    if isinstance(layout, mbarrier.MBarrierLayout):
        split = split_of(layout, sizes, ctas)
        if split.shape_per_cta[-1] != 1:
            message = f"barriers {sizes} in {layout}: expected one of a group of CTAs along the last axis"
            raise KernelFaultError("shapes differ", message, executed())
        one = mbarrier.MBarrierLayout()
        own = each_cta(lambda _rank, _agent: function(element_ty, [*sizes[:-1], 1], one))
        return SpreadBarrier(list(own.values()), [split.group(rank)[0] for rank in range(ctas)])
    shape_per_cta = split_of(layout, sizes, ctas).shape_per_cta
    parts = each_cta(lambda _rank, _agent: function(element_ty, shape_per_cta, local(layout)))
    result = SpreadShared(list(parts.values()), sizes, layout)
    if value is not None:
        result.store(value)
    return result


def _init(function: Function, barrier: SpreadBarrier, count: Any) -> None:
    """By the first CTA of each group, for an arrival of each of its CTAs."""
    groups = barrier.groups()
    each_cta(lambda rank, _agent: function(barrier.of(rank), operator.index(count) * groups[rank]), list(groups))


def _wait(function: Function, barrier: SpreadBarrier, *arguments: Any, **named: Any) -> None:
    """By the first CTA of each group."""
    each_cta(lambda rank, _agent: function(barrier.of(rank), *arguments, **named), list(barrier.groups()))


def _arrive(function: Function, barrier: SpreadBarrier, *arguments: Any, from_cta: Any = None, **named: Any) -> None:
    """Each CTA at its group's barrier; or, at the barrier of each, the CTA with those bits of its rank alone."""
    agents = members()
    for target in range(len(agents)):
        source = target if from_cta is None else target & operator.index(from_cta)
        with acting(agents[source]):
            function(barrier.known_to(agents[source], target, agents), *arguments, **named)
            host = barrier.host(target, agents)
            if host is not agents[source]:
                visit(agents[source], host)


def _arrive_alone(function: Function, barrier: SpreadBarrier, *arguments: Any, **named: Any) -> None:
    if spread.INITS_LEFT_TO_KERNELS and len(barrier.groups()) < len(members()):
        message = (
            "an arrival at a barrier of several CTAs: Triton 3.7 has each CTA arrive at its own, and the first wait"
        )
        raise KernelFaultError("operand", message, executed())
    _arrive(function, barrier, *arguments, **named)


def _async_load(
    function: Function,
    desc: Descriptor,
    coord: Any,
    barrier: SpreadBarrier,
    result: SpreadShared,
    pred: Any = True,
    multicast: Any = False,
    cache_policy: Any = None,
) -> None:
    """By each CTA for itself; or, in multicast, by the first of those that have the same part, for all of them."""
    if not pred:
        return
    _check_layouts(desc, result)
    agents, split, tiles = members(), result.split, SpreadDescriptor(desc, len(members()))
    for rank, agent in enumerate(agents):
        source = agents[split.group(rank)[0]] if multicast else agent
        with acting(source):
            function(*tiles.of(rank, coord), barrier.known_to(source, rank, agents), result.parts[rank])
        if source is not agent:
            # It is the receiver that has to wait.
            agent.cta.loads.append(source.cta.loads.pop())


def _check_layouts(desc: Descriptor, shared: SpreadShared) -> None:
    if desc.layout != shared.layout:
        message = f"shared memory in {shared.layout} and a descriptor in {desc.layout}"
        raise KernelFaultError("layouts differ", message, executed())


def _copy_out(function: Function, desc: Descriptor, coord: Any, src: SpreadShared, cache_policy: Any = None) -> None:
    """By the first CTA of those that have the same part."""
    _check_layouts(desc, src)
    tiles = SpreadDescriptor(desc, len(members()))
    each_cta(lambda rank, _agent: function(*tiles.of(rank, coord), src.parts[rank]), src.split.leaders())


def _product(function: Function, a: Any, b: Any, acc: Any, **named: Any) -> Any:
    ctas = len(members())
    splits = [split_of(x.layout, x.shape, ctas) for x in (a, b, acc)]
    for x in (a, b):
        if isinstance(x, SpreadShared):
            show_read(x)
    results = each_cta(
        lambda rank, _agent: function(*(part_of(x, s, rank) for x, s in zip((a, b, acc), splits, strict=True)), **named)
    )
    return joined(list(results.values()), splits[2], acc.layout)


def _access(function: Function, pointer: Any, *values: Any, **named: Any) -> Any:
    """An access to global memory by each CTA: a load."""
    split, layout = _of_access(pointer, values, named)
    results = each_cta(lambda rank, _agent: _one_access(function, split, rank, pointer, values, named))
    return joined(list(results.values()), split, layout)


def _change(function: Function, pointer: Any, *values: Any, **named: Any) -> Any:
    """An access by the first CTA of those that have the same part: a store, or an atomic, of which all learn what that
    one did.
    """
    split, layout = _of_access(pointer, values, named)
    results = each_cta(lambda rank, _agent: _one_access(function, split, rank, pointer, values, named), split.leaders())
    if results[0] is None:
        return None
    agents = members()
    for rank, agent in enumerate(agents):
        first = split.group(rank)[0]
        results[rank] = results[first]
        if rank != first:
            agent.learn(agents[first].clock)
    return joined([results[rank] for rank in range(len(agents))], split, layout)


def _of_access(pointer: Any, values: Any, named: dict[str, Any]) -> Any:
    layout = common_layout([Tile(pointer.offset, pointer.layout), *values, *named.values()])
    return split_of(layout, pointer.shape, len(members())), layout


def _one_access(function: Function, split: Any, rank: int, pointer: Any, values: Any, named: dict[str, Any]) -> Any:
    parts = [part_of(x, split, rank) for x in (pointer, *values)]
    return function(*parts, **{name: part_of(x, split, rank) for name, x in named.items()})


def _convert(function: Function, x: Any, layout: Any, *arguments: Any, **named: Any) -> Tile:
    if x.shape and layout is not None and x.layout is not None:
        ctas = len(members())
        if split_of(x.layout, x.shape, ctas) != split_of(layout, x.shape, ctas):
            _meet_everywhere()
    result: Tile = function(x, layout, *arguments, **named)
    return result


def _reduce(function: Function, x: Any, axis: Any = None, *arguments: Any, **named: Any) -> Any:
    tile = x[0] if isinstance(x, tuple) else x
    if tile.shape:
        counts = split_of(tile.layout, tile.shape, len(members())).counts
        if any(count > 1 for count in (counts if axis is None else (counts[operator.index(axis)],))):
            _meet_everywhere()
    return function(x, axis, *arguments, **named)


# By their names, how a cluster does what one CTA does otherwise.
IN_CLUSTERS: dict[str, Function] = {
    "barrier": _thread_barrier,
    "thread_barrier": _thread_barrier,
    "warp_specialize": _specialize,
    "allocate_shared_memory": _allocate,
    "init": _init,
    "wait": _wait,
    "arrive": _arrive_alone,
    "expect": _arrive,
    "async_load": _async_load,
    "async_copy_global_to_shared": _async_load,
    "async_store": _copy_out,
    "async_copy_shared_to_global": _copy_out,
    **{f"async_atomic_{kind}": _copy_out for kind in ("add", "min", "max", "and", "or", "xor")},
    "store_wait": _by_all,
    "warpgroup_mma": _product,
    "warpgroup_mma_wait": _by_all,
    "fence_async_shared": _by_all,
    "load": _access,
    "store": _change,
    **{f"atomic_{kind}": _change for kind in ("add", "max", "min", "and", "or", "xor", "xchg", "cas")},
    "convert_layout": _convert,
    **dict.fromkeys(("sum", "max", "min", "reduce"), _reduce),
}
# What is the same in a cluster.
UNCHANGED = ("make_tensor_descriptor", "invalidate", "warpgroup_mma_init")


def in_clusters(functions: dict[str, Function], computes: bool = False) -> dict[str, Function]:
    """Functions of the language that also know clusters; where they only compute, by themselves."""
    return {
        name: function
        if name in UNCHANGED or (computes and name not in IN_CLUSTERS)
        else _either(function, IN_CLUSTERS.get(name, functools.partial(_refused, name)))
        for name, function in functions.items()
    }


def _either(alone: Function, in_cluster: Function) -> Function:
    @functools.wraps(alone)
    def call(*arguments: Any, **named: Any) -> Any:
        return in_cluster(alone, *arguments, **named) if current().members else alone(*arguments, **named)

    return call


def _refused(name: str, *_arguments: Any, **_named: Any) -> None:
    raise KernelFaultError("not simulated", f"{name} in a cluster", executed())


@synchronises("cluster barrier")
def arrive(relaxed: bool = False) -> None:
    """At the cluster's barrier, without a wait."""
    if members():
        _arrive_at_cluster(relaxed)


@synchronises("cluster barrier")
def wait(*_arguments: Any) -> None:
    """Until all threads of the cluster have arrived at its barrier."""
    if members():
        pass_barrier(members())
    else:
        current().meet()


@synchronises("cluster barrier")
def barrier(relaxed: bool = False) -> None:
    """Both."""
    if members():
        _meet_everywhere(relaxed)
    else:
        current().meet()


@synchronises("fence of mbarrier.init")
def fence_init_release_cluster() -> None:
    """The cluster will see the barriers that have been initialised, after a barrier of it."""
    for agent in members():
        agent.publish()


_allocate_anywhere = _either(LANGUAGE["allocate_shared_memory"], _allocate)


def allocate_mbarrier(batch: Any = None, two_ctas: Any = False) -> Any:
    """A barrier of every CTA, or of every two, or arrays of so many."""
    ctas = len(members()) or 1
    count = ctas // 2 if two_ctas else ctas
    layout = mbarrier.MBarrierLayout.multicta(ctas, two_ctas)
    return _allocate_anywhere(gl.int64, [count] if batch is None else [batch, count], layout)


CLUSTER: dict[str, Any] = {"arrive": arrive, "wait": wait, "barrier": barrier}
CLUSTER_BARRIERS: dict[str, Any] = {
    "fence_init_release_cluster": fence_init_release_cluster,
    "allocate_mbarrier": allocate_mbarrier,
}
