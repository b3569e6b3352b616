"""Kernels of a few operations that depend on layouts, which the caller chooses: what Triton's compiler takes, and what
it refuses. `tests/gluon_layouts.py` has the cases.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.ring import thread_barrier, tma_load, tma_store

# Names that Triton 3.9 has changed.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
NONE = gl.constexpr(("none",))
# From Triton 3.9 on without the underscore.
RENAMED = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def step(v, STEP: gl.constexpr):
    """One operation on a tile, or on a view of shared memory."""
    NAME: gl.constexpr = STEP[0]
    if NAME == "none":
        r = v
    elif NAME == "index":
        r = v.index(STEP[1])
    elif NAME == "slice":
        r = v.slice(STEP[1], STEP[2], STEP[3])
    elif NAME == "permute":
        r = v.permute(STEP[1])
    elif NAME == "reshape":
        r = v.reshape(STEP[1])
    elif NAME == "reinterpret":
        if RENAMED:  # noqa: SIM108
            r = v.reinterpret(STEP[1], STEP[2], STEP[3])
        else:
            r = v._reinterpret(STEP[1], STEP[2], STEP[3])
    elif NAME == "load":
        r = v.load(STEP[1])
    elif NAME == "convert":
        r = gl.convert_layout(v, STEP[1])
    elif NAME == "trivial":
        r = gl.convert_layout(v, STEP[1], assert_trivial=True)
    elif NAME == "expand":
        r = gl.expand_dims(v, STEP[1])
    elif NAME == "sum":
        r = gl.sum(v, STEP[1])
    elif NAME == "split":
        left, right = gl.split(v)
        r = left + right
    elif NAME == "join":
        r = gl.join(v, v)
    elif NAME == "broadcast":
        r = v.broadcast_to(STEP[1])
    elif NAME == "gather":
        r = gl.gather(v, gl.full(STEP[1], 0, gl.int32, STEP[2]), 0)
    elif NAME == "add":
        r = v + gl.full(STEP[1], 1, v.dtype, STEP[2])
    else:
        gl.static_assert(NAME == "store")
        gl.allocate_shared_memory(STEP[1], STEP[2], STEP[3]).store(v)
        r = v
    return r


@gluon.jit
def put(x, tile):
    gl.store(x + gl.full(tile.shape, 0, gl.int32, tile.type.layout), tile.to(x.dtype.element_ty))


@gluon.jit
def shared_kernel(
    x, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, FIRST: gl.constexpr = NONE,
    SECOND: gl.constexpr = NONE, THIRD: gl.constexpr = NONE,
):  # fmt: skip
    """Shared memory, and steps from there; the last one loads it."""
    put(x, step(step(step(gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT), FIRST), SECOND), THIRD))


@gluon.jit
def tile_kernel(
    x, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, FIRST: gl.constexpr = NONE,
    SECOND: gl.constexpr = NONE, THIRD: gl.constexpr = NONE,
):  # fmt: skip
    """A tile, and steps from there."""
    tile = gl.load(x + gl.full(SHAPE, 0, gl.int32, LAYOUT)).to(DTYPE)
    put(x, step(step(step(tile, FIRST), SECOND), THIRD))


@gluon.jit
def zeros_in_memory(ROWS: gl.constexpr, COLUMNS: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    warps: gl.constexpr = gl.num_warps()
    zeros = gl.zeros([ROWS, COLUMNS], DTYPE, gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0]))
    memory = gl.allocate_shared_memory(DTYPE, [ROWS, COLUMNS], LAYOUT)
    memory.store(zeros)
    return memory


@gluon.jit
def loaded(x, SHAPE: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    return gl.load(x + gl.full(SHAPE, 0, gl.int32, LAYOUT)).to(gl.float32).to(DTYPE)


@gluon.jit
def warpgroup_kernel(
    x, M: gl.constexpr, N: gl.constexpr, K: gl.constexpr, A: gl.constexpr, B: gl.constexpr, ACC: gl.constexpr,
    DTYPE: gl.constexpr, ADDED: gl.constexpr, TRANSPOSED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """A product of warpgroups; where B is transposed it lies in memory as [N, K]."""
    # Conditions of the kernel.
    if REGISTERS:  # noqa: SIM108
        a = loaded(x, [M, K], DTYPE, A)
    else:
        a = zeros_in_memory(M, K, DTYPE, A)
    if TRANSPOSED:  # noqa: SIM108
        b = zeros_in_memory(N, K, DTYPE, B).permute([1, 0])
    else:
        b = zeros_in_memory(K, N, DTYPE, B)
    fence_async_shared()
    thread_barrier()
    put(x, warpgroup_mma_wait(0, deps=(warpgroup_mma(a, b, gl.zeros([M, N], ADDED, ACC), is_async=True),)))


@gluon.jit
def dot_kernel(
    x, K: gl.constexpr, A: gl.constexpr, B: gl.constexpr, ACC: gl.constexpr, DTYPE: gl.constexpr, ADDED: gl.constexpr,
    MATRIX: gl.constexpr,
):  # fmt: skip
    """A product by warps, or without matrix units."""
    a, b = loaded(x, [64, K], DTYPE, A), loaded(x, [K, 64], DTYPE, B)
    acc = gl.zeros([64, 64], ADDED, ACC)
    if MATRIX:
        put(x, mma_v2(a, b, acc))
    else:
        put(x, gl.dot_fma(a, b, acc))


@gluon.jit
def copy_kernel(
    x, BLOCK: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, SHAPE: gl.constexpr, SHARED: gl.constexpr,
    BARRIERS: gl.constexpr,
):  # fmt: skip
    """A tile is fetched by TMA and stored back."""
    rank: gl.constexpr = len(BLOCK)
    if rank == 1:
        desc = tma.make_tensor_descriptor(x, [512], [1], BLOCK, LAYOUT)
        place = [0]
    elif rank == 2:
        desc = tma.make_tensor_descriptor(x, [256, 256], [256, 1], BLOCK, LAYOUT)
        place = [0, 0]
    else:
        desc = tma.make_tensor_descriptor(x, [4, 64, 256], [16384, 256, 1], BLOCK, LAYOUT)
        place = [0, 0, 0]
    tile = gl.allocate_shared_memory(DTYPE, SHAPE, SHARED)
    barrier = gl.allocate_shared_memory(gl.int64, [BARRIERS], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    mbarrier.expect(barrier, desc.block_type.nbytes)
    tma_load(desc, place, barrier, tile)
    mbarrier.wait(barrier, 0)
    tma_store(desc, place, tile)
    tma.store_wait(0)
    mbarrier.invalidate(barrier)


@gluon.jit
def threads_copy_kernel(x, SHAPE: gl.constexpr, LAYOUT: gl.constexpr, DTYPE: gl.constexpr, SHARED: gl.constexpr):
    """A tile is fetched by threads (cp.async)."""
    if len(SHAPE) == 1:
        places = gl.arange(0, SHAPE[0], LAYOUT)
    else:
        rows = gl.arange(0, SHAPE[0], gl.SliceLayout(1, LAYOUT))
        places = rows[:, None] * SHAPE[1] + gl.arange(0, SHAPE[1], gl.SliceLayout(0, LAYOUT))[None, :]
    tile = gl.allocate_shared_memory(DTYPE, SHAPE, SHARED)
    load_async(tile, x + places)
    async_copy.commit_group()
    async_copy.wait_group(0)


@gluon.jit
def pointers_kernel(x, LAYOUT: gl.constexpr):
    """Tiles of pointers are given another layout and shape, as others are: x is doubled."""
    places = x + gl.arange(0, 16)[:, None] * 64 + gl.arange(0, 64)[None, :]
    upper = gl.set_auto_layout(places, LAYOUT)
    gl.store(upper, gl.load(upper) * 2)
    rows = gl.expand_dims(x + 1024 + gl.arange(0, 16, gl.SliceLayout(1, LAYOUT)) * 64, 1)
    columns = rows.broadcast_to([16, 64]) + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    lower = gl.permute(columns, [1, 0])
    gl.store(lower, gl.load(lower) * 2)
