"""Gluon kernels over parts of buffers, and over memory that two views share."""

from gluon_kernels import COLUMNS, ROWS, allocate
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.ops._device.hopper.ring import thread_barrier, tma_load, tma_store

HALF = gl.constexpr(32)
SIDE = gl.constexpr(64)


def descriptor_of(x, rows=ROWS, columns=COLUMNS):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns], layout)


@gluon.jit
def halves_kernel(half, whole, out, HOW: gl.constexpr):
    """The halves of a buffer, each fetched with a barrier of its own; right or wrong by HOW."""
    tile = gl.allocate_shared_memory(half.dtype, [SIDE, SIDE], half.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    upper, lower = tile.slice(0, HALF), tile.slice(HALF, HALF)
    mbarrier.expect(bars.index(0), half.block_type.nbytes)
    tma_load(half, [0, 0], bars.index(0), upper)
    if HOW != "half is empty":
        mbarrier.expect(bars.index(1), half.block_type.nbytes)
        tma_load(half, [HALF, 0], bars.index(1), lower)
    mbarrier.wait(bars.index(0), 0)
    if HOW == "reads the other half":
        lower.store(lower.load(layout))
    elif HOW == "stores to its half":
        # The other half is still on its way: no fault.
        upper.store(upper.load(layout) * 2)
        fence_async_shared()
    elif HOW == "forgets the fence of its half":
        upper.store(upper.load(layout) * 2)
    if HOW != "half is empty":
        mbarrier.wait(bars.index(1), 0)
    thread_barrier()
    if HOW == "overwrites the other half":
        # The first half is still being read.
        tma_store(out, [0, 0], upper)
        mbarrier.expect(bars.index(1), half.block_type.nbytes)
        tma_load(half, [HALF, 0], bars.index(1), lower)
        mbarrier.wait(bars.index(1), 1)
        tma_store(out, [HALF, 0], lower)
    elif HOW == "overwrites its half":
        tma_store(out, [0, 0], upper)
        mbarrier.expect(bars.index(0), half.block_type.nbytes)
        tma_load(half, [0, 0], bars.index(0), upper)
        mbarrier.wait(bars.index(0), 1)
    elif HOW == "copies the half without a store":
        upper.store(upper.load(layout) * 2)
        tma_store(out, [HALF, 0], lower)
    else:
        tma_store(whole, [0, 0], tile)
    tma.store_wait(0)


@gluon.jit
def columns_kernel(a, whole, HOW: gl.constexpr):
    """A product reads the right half of a buffer's columns, through a permuted view, while threads store elsewhere."""
    tiles, bars = allocate(a, 1)
    mbarrier.expect(bars.index(0), 2 * a.block_type.nbytes)
    tma_load(a, [0, 0], bars.index(0), tiles.index(0))
    tma_load(a, [0, 0], bars.index(0), tiles.index(1))
    mbarrier.wait(bars.index(0), 0)
    right = tiles.index(1).slice(HALF, HALF, 1).permute((1, 0))
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    acc = gl.zeros([SIDE, SIDE], gl.float32, acc_layout)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    zeros = gl.zeros([SIDE, HALF], gl.float16, layout)
    running = warpgroup_mma(tiles.index(0).slice(0, HALF, 1), right, acc, is_async=True)
    if HOW == "left":
        tiles.index(1).slice(0, HALF, 1).store(zeros)
    elif HOW == "right":
        tiles.index(1).slice(HALF, HALF, 1).store(zeros)
    acc = warpgroup_mma_wait(0, deps=(running,))
    tiles.index(0).store(acc.to(gl.float16))
    fence_async_shared()
    thread_barrier()
    tma_store(whole, [0, 0], tiles.index(0))
    tma.store_wait(0)


@gluon.jit
def reinterpreted_kernel(half, out, HOW: gl.constexpr):
    """The same bytes as 16 and as 32 bits, in two layouts."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], half.layout)
    words = tile._reinterpret(gl.int32, [HALF * SIDE], flat)
    bars = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.expect(bars.index(0), half.block_type.nbytes)
    tma_load(half, [0, 0], bars.index(0), tile.slice(HALF, HALF))
    if HOW != "early":
        mbarrier.wait(bars.index(0), 0)
    # The copy's bytes are the second half of the words.
    part = words.slice(HALF * HALF, HALF * HALF) if HOW != "first" else words.slice(0, HALF * HALF)
    i = gl.arange(0, HALF * HALF, layout)
    if HOW == "first":
        part.store(i)
        mbarrier.wait(bars.index(0), 0)
    gl.store(out + i, part.load(layout))


@gluon.jit
def places_kernel(x, out, HOW: gl.constexpr):
    """Elements looked up in shared memory, and put there, by indices along an axis: out is x with its rows reversed,
    and then with its columns.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, 32, gl.SliceLayout(0, layout))[None, :]
    places = rows * 32 + columns
    memory = gl.allocate_shared_memory(gl.int32, [16, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    memory.store(gl.load(x + places))
    turned = memory.gather((16 if HOW == "outside" else 15) - rows + columns * 0, axis=0)
    gl.store(out + places, turned)
    memory.scatter(turned, 31 - columns + rows * 0, axis=1)
    gl.store(out + 512 + places, memory.load(layout))
