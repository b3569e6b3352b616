"""What Hopper has: mbarriers, copies by the tensor memory accelerator (TMA), products of warpgroups, fences."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.language import one_barrier
from tilewise._gluon.leaving_out import synchronises
from tilewise._gluon.memory import Region
from tilewise._gluon.order import Copy, Product, current
from tilewise._gluon.products import check_warpgroup, matrix_product, mma_v2
from tilewise._gluon.shared import Descriptor, Im2Col, Shared
from tilewise._gluon.values import GLUON, Pending, Tile, plain
from tilewise._gluon.watching import show_read

# A descriptor's rows have at least so many.
ROW_BYTES = 16


def init(barrier: Any, count: Any) -> None:
    """Begin with phase 0."""
    one_barrier(barrier).init(operator.index(count))


@synchronises("wait")
def wait(barrier: Any, phase: Any, pred: Any = True, deps: Any = ()) -> None:
    """Until the phase of that parity is done."""
    if not pred:
        return
    barrier, phase, agent = one_barrier(barrier), operator.index(phase), current()
    if barrier.count is None:
        raise KernelFaultError("uninitialised", f"{barrier.name} is waited for before mbarrier.init", executed())
    agent.pause()
    agent.block(lambda: barrier.is_done(phase), lambda: f"waits for phase {phase} of {barrier}", barrier)
    agent.learn(barrier.learnt(agent, phase))


@synchronises("arrival")
def arrive(barrier: Any, *, count: Any = 1, pred: Any = True) -> None:
    """One arrival, or more, for the whole partition."""
    if pred:
        current().pause()
        current().meet_by_compiler()
        one_barrier(barrier).arrive(operator.index(count))


@synchronises("expected bytes")
def expect(barrier: Any, bytes_per_cta: Any = None, pred: Any = True, bytes: Any = None) -> None:
    """One arrival, and bytes that copies must bring."""
    if pred:
        current().pause()
        one_barrier(barrier).arrive(1, operator.index(bytes if bytes_per_cta is None else bytes_per_cta))


def _tile_of(desc: Descriptor, shared: Shared, what: str) -> torch.Tensor:
    """Shared memory as a descriptor's tile: its rows may be counted by more axes, or by fewer."""
    if shared.shape[-1] != desc.block_shape[-1] or math.prod(shared.shape) != math.prod(desc.block_shape):
        message = f"{what}: shared memory of {shared.shape} and a descriptor's tile of {desc.block_shape}"
        raise KernelFaultError("shapes differ", message, executed())
    if shared.dtype != desc.dtype:
        message = f"{what}: shared memory of {shared.dtype} and a descriptor of {desc.dtype}"
        raise KernelFaultError("dtypes differ", message, executed())
    if not isinstance(shared.layout, gl.NVMMASharedLayout) or (
        replace(shared.layout, rank=desc.layout.rank) != desc.layout
    ):
        message = f"{what}: shared memory in {shared.layout} and a descriptor in {desc.layout}"
        raise KernelFaultError("layouts differ", message, executed())
    return shared.data.view(desc.block_shape)


def async_load(
    desc: Descriptor,
    coord: Any,
    barrier: Any,
    result: Shared,
    pred: Any = True,
    multicast: Any = False,
    cache_policy: Any = None,
) -> None:
    """Start to copy a tile into shared memory. What lies outside of the tensor is 0; the barrier counts the bytes. Of
    one CTA there is none for a multicast to reach.
    """
    if pred:
        _copy_in(desc, lambda: desc.window(coord), barrier, result)


def async_load_im2col(
    desc: Im2Col,
    coord: Any,
    offsets: Any,
    barrier: Any,
    result: Shared,
    pred: Any = True,
    multicast: Any = False,
    cache_policy: Any = None,
) -> None:
    """The same of the places that a convolution's window takes."""
    if pred:
        _copy_in(desc, lambda: desc.places(coord, offsets), barrier, result)


def _copy_in(desc: Descriptor, window: Callable[[], tuple[Region | None, Any]], barrier: Any, result: Shared) -> None:
    _tile_of(desc, result, "async_load")
    agent, barrier = current(), one_barrier(barrier)
    agent.pause()
    phase, lines = barrier.done + 1, executed()
    writes = [part.check_write(barrier.number, phase, by_engine=True) for part in result.parts]
    for write in writes:
        write.flying = True
    result.data.fill_(torch.nan if result.data.is_floating_point() else 0)
    region, inside = window()
    if region is not None:
        desc.memory.read(region, agent, (barrier.number, phase))
    machine = agent.machine
    agent.cta.loads.append((barrier.number, phase, lines))

    def land() -> None:
        if barrier.done + 1 != phase:
            message = f"a copy lands after the phase of {barrier.name} that should count it: too few bytes are expected"
            raise KernelFaultError("bytes missing", message, lines)
        for write in writes:
            write.flying = False
        tile = _tile_of(desc, result, "async_load")
        tile.zero_()
        if region is not None:
            tile[inside] = region.of(desc.memory.flat)
        barrier.bytes -= desc.nbytes_per_cta
        barrier.settle(machine)

    machine.later(land)


def async_store(desc: Descriptor, coord: Any, src: Shared, cache_policy: Any = None) -> None:
    """Start to copy a tile to global memory, but for what lies outside of the tensor."""
    copy_out("async_store", desc, coord, src)


def copy_out(
    what: str,
    desc: Descriptor,
    coord: Any,
    src: Shared,
    reduce: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Start to copy a tile to global memory; with `reduce`, to what that makes of the numbers there and the tile's,
    each an atomic.
    """
    _tile_of(desc, src, what)
    agent = current()
    for part in src.parts:
        problem = part.problem_of_read(True)
        if problem:
            raise KernelFaultError(*problem[:2], problem[2], executed())
    region, inside = desc.window(coord, writes=True)
    copy, memory = Copy(src.parts), desc.memory
    if region is not None:
        (memory.change if reduce else memory.write)(region, agent, (copy.number, 1))

    def land() -> None:
        copy.landed = True
        if region is not None:
            there, tile = region.of(memory.flat), _tile_of(desc, src, what)[inside]
            there.copy_(reduce(there, tile) if reduce else tile)
            agent.machine.changed(memory)
        agent.machine.changed(agent)

    agent.copies.append(copy)
    agent.machine.later(land)


@synchronises("wait for copies")
def store_wait(pendings: Any = 0, read_only: Any = True) -> None:
    """Until at most so many of the partition's copies to global memory still read shared memory; or, not `read_only`,
    have not arrived there.
    """
    agent = current()
    ending = agent.copies[: max(0, len(agent.copies) - operator.index(pendings))]
    agent.block(lambda: all(copy.landed for copy in ending), lambda: "waits for its copies to global memory", agent)
    agent.copies = agent.copies[len(ending) :]
    for copy in ending:
        copy.end()
        if not read_only:
            agent.learn({copy.number: 1})
    agent.meet_by_compiler()


def warpgroup_mma(
    a: Any,
    b: Any,
    acc: Any,
    *,
    use_acc: Any = True,
    precision: Any = None,
    max_num_imprecise_acc: Any = None,
    is_async: Any = False,
) -> Any:
    """Start acc + a @ b, in fp32; its result may be used after the wait."""
    check_warpgroup(a, b, acc)
    shared = [x for x in (a, b) if isinstance(x, Shared)]
    product = Product([part for x in shared for part in x.parts], acc.product if use_acc else None)
    for x in shared:
        show_read(x)
    # Computed here, though on a GPU somewhere between here and the wait: what changes between the two is a fault.
    left, right = (plain(v) if isinstance(v, Tile) else v.data for v in (a, b))
    result = matrix_product(left, right, precision, "warpgroup_mma")
    if use_acc:
        result += acc.data
    agent = current()
    agent.products.append(product)
    tile = Pending(result.to(acc.data.dtype), acc.layout, product=product)
    return tile if is_async else _awaited(0, (tile,))


def _awaited(num_outstanding: Any, deps: Any) -> Any:
    agent = current()
    ending = max(0, len(agent.products) - operator.index(num_outstanding))
    for product in agent.products[:ending]:
        product.end()
    agent.products = agent.products[ending:]
    return _as_tiles(deps)


def _as_tiles(deps: Any) -> Any:
    results = tuple(Tile(x.data, x.layout, product=x.product) if isinstance(x, Tile) else x for x in deps)
    return results[0] if len(results) == 1 else results


@synchronises("wait for products", lambda _num_outstanding=0, deps=(): _as_tiles(deps))
def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Any = None) -> Any:
    """Until at most so many of the partition's products are still running; `deps` are the results that may be used."""
    if deps is None:
        raise KernelFaultError("operand", "warpgroup_mma_wait takes deps, the results that it waits for", executed())
    return _awaited(num_outstanding, deps)


@synchronises("fence")
def fence_async_shared(cluster: bool = False) -> None:
    """What threads have stored, the copy engine and products see, once all threads have met."""
    agent = current()
    # What copies by threads brought, and this agent knows of by an mbarrier.
    agent.stored += [write for load in agent.cta.arriving if agent.knows(load.number, 1) for write in load.writes]
    for write in agent.stored:
        write.fenced = True


BARRIERS: dict[str, Any] = {
    "init": init,
    "wait": wait,
    "arrive": arrive,
    "expect": expect,
    "invalidate": lambda _barrier: None,
}


def make_tensor_descriptor(
    base: Any, shape: Any, strides: Any, block_shape: Any, layout: Any, padding_option: Any = "zero"
) -> Descriptor:
    """A descriptor that the kernel makes."""
    if padding_option != "zero":
        raise KernelFaultError("not simulated", f"padding by {padding_option}", executed())
    sizes, bits = [operator.index(n) for n in block_shape], GLUON[base.memory.flat.dtype].primitive_bitwidth
    if not len(sizes) == len(shape) == len(strides) or any(n & (n - 1) for n in sizes):
        message = f"a descriptor of tiles of {sizes}: expected powers of two, for {len(shape)} sizes and strides"
        raise KernelFaultError("refused", message, executed())
    if operator.index(strides[-1]) != 1 or sizes[-1] * bits < ROW_BYTES * 8:
        message = f"a descriptor of rows of {sizes[-1] * bits // 8} bytes, of stride {operator.index(strides[-1])}:"
        raise KernelFaultError("refused", f"{message} expected at least {ROW_BYTES} bytes, of stride 1", executed())
    if not isinstance(layout, gl.NVMMASharedLayout) or layout.transposed or layout.rank != len(sizes):
        message = f"a descriptor in {layout}: expected NVMMASharedLayout of {len(sizes)} axes, not transposed"
        raise KernelFaultError("refused", message, executed())
    return Descriptor(base, shape, strides, block_shape, layout)


COPIES: dict[str, Any] = {
    "make_tensor_descriptor": make_tensor_descriptor,
    "async_load": async_load,
    "async_copy_global_to_shared": async_load,
    "async_load_im2col": async_load_im2col,
    "async_store": async_store,
    "async_copy_shared_to_global": async_store,
    "store_wait": store_wait,
}
HOPPER: dict[str, Any] = {
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_init": lambda x: x,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": fence_async_shared,
    "mma_v2": mma_v2,
}
