"""Small Gluon kernels: right ones, and one for each fault that a GPU hides."""

import torch
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

ROWS, COLUMNS = 64, 64
SIDE = gl.constexpr(64)


LAYOUT = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], gl.float16)


def descriptor(x):
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [ROWS, COLUMNS], LAYOUT)


@gluon.jit
def scale_kernel(x, y, n, factor, BLOCK: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout)
    gl.store(y + i, gl.load(x + i, mask=i < n, other=0.0) * factor, mask=i < n)


@gluon.jit
def allocate(desc, COUNT: gl.constexpr):
    """Two buffers of a descriptor's tiles, and barriers of COUNT arrivals."""
    tiles = gl.allocate_shared_memory(desc.dtype, [2, SIDE, SIDE], desc.layout)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=COUNT)
    return tiles, bars


@gluon.jit
def product_kernel(a, b, c, AWAITED: gl.constexpr, USED: gl.constexpr, FENCED: gl.constexpr, JOINED: gl.constexpr):
    """c = a @ b, of one tile each; wrong where something is left out."""
    tiles, bars = allocate(a, 1)
    mbarrier.expect(bars.index(0), a.block_type.nbytes + b.block_type.nbytes)
    tma_load(a, [0, 0], bars.index(0), tiles.index(0))
    tma_load(b, [0, 0], bars.index(0), tiles.index(1))
    if AWAITED:
        mbarrier.wait(bars.index(0), 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    acc = gl.zeros([SIDE, SIDE], gl.float32, layout)
    running = warpgroup_mma(tiles.index(0), tiles.index(1), acc, is_async=True)
    acc = warpgroup_mma_wait(0 if USED else 1, deps=(running,))
    tiles.index(0).store(acc.to(gl.float16))
    if FENCED:
        fence_async_shared()
    if JOINED:
        thread_barrier()
    tma_store(c, [0, 0], tiles.index(0))
    tma.store_wait(0)


@gluon.jit
def produce(a, tiles, full, empty, steps, EARLY: gl.constexpr, BYTES: gl.constexpr):
    for i in range(steps):
        if not EARLY:
            mbarrier.wait(empty.index(0), (i & 1) ^ 1)
        mbarrier.expect(full.index(0), a.block_type.nbytes * BYTES)
        tma_load(a, [i * 64, 0], full.index(0), tiles.index(0))


@gluon.jit
def consume(
    out, tiles, full, empty, steps, JOINED: gl.constexpr, RELEASES: gl.constexpr, PHASE: gl.constexpr
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    total = gl.zeros([SIDE, SIDE], gl.float32, layout)
    for i in range(steps):
        mbarrier.wait(full.index(0), (i & 1) ^ PHASE)
        total += tiles.index(0).load(layout).to(gl.float32)
        if JOINED:
            thread_barrier()
        for _ in gl.static_range(RELEASES):
            mbarrier.arrive(empty.index(0), count=1)
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    gl.store(out + gl.expand_dims(rows * SIDE, 1) + gl.expand_dims(columns, 0), total)


@gluon.jit
def sum_kernel(
    a, out, steps, EARLY: gl.constexpr, BYTES: gl.constexpr, JOINED: gl.constexpr, RELEASES: gl.constexpr,
    PHASE: gl.constexpr,
):  # fmt: skip
    """The sum of a's tiles of 64 rows, fetched by one warp and added by a warpgroup, through one buffer."""
    tiles, full = allocate(a, 1)
    empty = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(empty.index(0), count=1)
    gl.warp_specialize(
        [
            (consume, (out, tiles, full, empty, steps, JOINED, RELEASES, PHASE)),
            (produce, (a, tiles, full, empty, steps, EARLY, BYTES)),
        ],
        [1],
        [24],
    )


@gluon.jit
def turns_kernel(total, turn, ORDER: gl.constexpr):
    """Every CTA adds its number and one to what the ones before it have written, in turn."""
    number = gl.program_id(0)
    seen = gl.atomic_add(turn, 0, sem=ORDER, scope="gpu")
    while seen < number:
        seen = gl.atomic_add(turn, 0, sem=ORDER, scope="gpu")
    gl.store(total, gl.load(total) * 2 + number + 1)
    gl.atomic_add(turn, 1, sem="release", scope="gpu")


@gluon.jit
def odd_kernel(x, HOW: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    other: gl.constexpr = gl.BlockedLayout([2], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    if HOW == "layouts":
        gl.store(x + i, i + gl.arange(0, 128, other))
    elif HOW == "bounds":
        gl.store(x + i + 1, i)
    elif HOW == "assembly":
        gl.store(x + i, gl.inline_asm_elementwise("mov.u32 $0, $1;", "=r,r", [i], gl.int32, True, 1))
    elif HOW == "memory":
        gl.allocate_shared_memory(gl.float32, [4, 128, 128], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    elif HOW == "buffer":
        gl.store(
            x + i,
            gl.allocate_shared_memory(gl.int32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0])).index(2).load(layout),
        )
    elif HOW == "overflow":
        gl.store(x, gl.load(x + 1) * 2 + 7 // gl.load(x + 2))


def tiles(count=1):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count * ROWS, COLUMNS, generator=generator).half()


@gluon.jit
def store_twice(buffer, bar):
    """Arrives for phase 0, and only then stores what phase 1 tells of."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    mbarrier.arrive(bar.index(0), count=1)
    buffer.index(0).store(gl.full([128], 7, gl.int32, layout))
    thread_barrier()
    mbarrier.arrive(bar.index(0), count=1)


@gluon.jit
def load_after(x, buffer, bar, PHASE: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(bar.index(0), 0)
    if PHASE == 1:
        mbarrier.wait(bar.index(0), 1)
    gl.store(x + gl.arange(0, 128, layout), buffer.index(0).load(layout))


@gluon.jit
def phases_kernel(x, PHASE: gl.constexpr):
    """What another partition stores before its second arrival, read after a wait for that one, or for the first."""
    buffer = gl.allocate_shared_memory(gl.int32, [1, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    gl.warp_specialize([(load_after, (x, buffer, bar, PHASE)), (store_twice, (buffer, bar))], [1], [24])


@gluon.jit
def read_after(x, turn, count):
    """Wait until others have counted as far, and read what they have left."""
    while gl.atomic_add(turn, 0, sem="acquire") < count:
        pass
    gl.store(x + 1, gl.load(x))


@gluon.jit
def added_kernel(x, turn, HOW: gl.constexpr):
    """CTA 0 writes and releases; the next adds after that; the last does what is asked for."""
    number = gl.program_id(0)
    if number == 0:
        if HOW != "two adders":
            gl.store(x, 5)
        else:
            gl.atomic_add(x, 5, sem="relaxed")
        gl.atomic_add(turn, 1, sem="relaxed" if HOW == "two adders" else "release")
    elif number == 1:
        while gl.atomic_add(turn, 0, sem="acquire") < 1:
            pass
        gl.atomic_add(x, 2, sem="relaxed")
        gl.atomic_add(turn, 1, sem="release")
    elif HOW == "adds":
        gl.atomic_add(x, 1, sem="relaxed")
    else:
        read_after(x, turn, 2)


@gluon.jit
def copies_kernel(a, c, turn, x):
    """A tile is copied to memory; after the wait for the read of shared memory another CTA is told."""
    tiles, bars = allocate(a, 1)
    if gl.program_id(0) == 0:
        mbarrier.expect(bars.index(0), a.block_type.nbytes)
        tma_load(a, [0, 0], bars.index(0), tiles.index(0))
        mbarrier.wait(bars.index(0), 0)
        tma_store(c, [0, 0], tiles.index(0))
        tma.store_wait(0)
        gl.atomic_add(turn, 1, sem="release")
    else:
        read_after(x, turn, 1)


@gluon.jit
def loops_kernel(x, HOW: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    i = gl.arange(0, 128, layout)
    if HOW == "falling":
        for n in range(4):
            gl.atomic_max(x, -n)
    elif HOW == "wide":
        for n in range(3):
            gl.store(x + n, (n.to(gl.int64) << 33 >> 32).to(gl.int32))
    elif HOW == "tickets":
        gl.store(x + 1 + i, gl.atomic_add(x + i * 0, 1), mask=i < 100)
    elif HOW == "waits":
        while gl.load(x) == 0:
            pass


@gluon.jit
def unawaited_kernel(a):
    """Starts a copy that nothing waits for."""
    tiles, bars = allocate(a, 1)
    mbarrier.expect(bars.index(0), a.block_type.nbytes)
    tma_load(a, [0, 0], bars.index(0), tiles.index(0))


@gluon.jit
def tile_at_kernel(a, row, column, STORES: gl.constexpr):
    """Loads a tile, and stores it at the same place or does not."""
    tiles, bars = allocate(a, 1)
    mbarrier.expect(bars.index(0), a.block_type.nbytes)
    tma_load(a, [0 if STORES else row, 0 if STORES else column], bars.index(0), tiles.index(0))
    mbarrier.wait(bars.index(0), 0)
    if STORES:
        tma_store(a, [row, column], tiles.index(0))
        tma.store_wait(0)
