"""Small Gluon kernels with what Ampere has, and one left out of each thing that they need."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SIDE = gl.constexpr(64)
# Names that Triton 3.9 has changed.
load_async = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def places(SHAPE_M: gl.constexpr, SHAPE_N: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, SHAPE_M, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SHAPE_N, gl.SliceLayout(0, LAYOUT))
    return rows[:, None] * SHAPE_N + columns[None, :]


@gluon.jit
def steps_kernel(x, y, n, steps, PENDING: gl.constexpr, COMMITS: gl.constexpr, REUSES: gl.constexpr):
    """y = 2 x, by tiles of 128 that are fetched one ahead into two buffers; what is beyond n is 0."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffers = gl.allocate_shared_memory(gl.float32, [2, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, 128, layout)
    load_async(buffers.index(0), x + i, i < n)
    async_copy.commit_group()
    for step in range(steps):
        ahead = (step + 1) * 128 + i
        load_async(buffers.index(0 if REUSES else (step + 1) % 2), x + ahead, ahead < n)
        if COMMITS:
            async_copy.commit_group()
        async_copy.wait_group(PENDING)
        gl.store(y + step * 128 + i, buffers.index(step % 2).load(layout) * 2)
    async_copy.wait_group(0)


@gluon.jit
def barrier_kernel(x, y, INCREMENTS: gl.constexpr, ARRIVES: gl.constexpr, FENCED: gl.constexpr):
    """y = x @ x, of a tile that threads copy and an mbarrier tells of."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    tile = gl.allocate_shared_memory(gl.float16, [SIDE, SIDE], gl.NVMMASharedLayout(128, 16, 2))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1 if INCREMENTS else 128)
    load_async(tile, x + places(SIDE, SIDE, blocked))
    if ARRIVES:
        async_copy.mbarrier_arrive(bar, increment_count=INCREMENTS)
    if INCREMENTS:
        mbarrier.arrive(bar, count=1)
    mbarrier.wait(bar, 0)
    if FENCED:
        fence_async_shared()
    acc = gl.zeros([SIDE, SIDE], gl.float32, layout)
    acc = warpgroup_mma_wait(0, deps=(warpgroup_mma(tile, tile, acc, is_async=True),))
    gl.store(y + places(SIDE, SIDE, layout), acc)


@gluon.jit
def warps_product_kernel(a, b, c, WIDTH: gl.constexpr, INDEX: gl.constexpr, PRECISION: gl.constexpr):
    """c = a @ b by warps of Ampere."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    b_a = gl.load(a + places(SIDE, SIDE, blocked))
    b_b = gl.load(b + places(SIDE, SIDE, blocked))
    b_a = gl.convert_layout(b_a, gl.DotOperandLayout(INDEX, layout, WIDTH))
    b_b = gl.convert_layout(b_b, gl.DotOperandLayout(1, layout, WIDTH))
    acc = gl.zeros([SIDE, SIDE], c.dtype.element_ty, layout)
    gl.store(c + places(SIDE, SIDE, layout), mma_v2(b_a, b_b, acc, input_precision=PRECISION))


@gluon.jit
def threads_product_kernel(a, b, c):
    """c = a @ b without matrix units."""
    layout: gl.constexpr = gl.BlockedLayout([2, 2], [4, 8], [4, 1], [1, 0])
    b_a = gl.convert_layout(gl.load(a + places(SIDE, SIDE, layout)), gl.DotOperandLayout(0, layout, 0))
    b_b = gl.convert_layout(gl.load(b + places(SIDE, SIDE, layout)), gl.DotOperandLayout(1, layout, 0))
    acc = gl.zeros([SIDE, SIDE], gl.float32, layout)
    gl.store(c + places(SIDE, SIDE, layout), gl.dot_fma(b_a, b_b, acc))


@gluon.jit
def warpgroup_product_kernel(a, b, c, DTYPE: gl.constexpr, BITS: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """c = a @ bᵀ by a warpgroup, of operands of 8 or 32 bits, b with its columns in rows."""
    blocked: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 256 // BITS])
    shared: gl.constexpr = gl.NVMMASharedLayout(64 if BITS == 8 else 128, BITS, 2)
    b_a = gl.load(a + places(SIDE, SIDE, blocked))
    left = gl.allocate_shared_memory(DTYPE, [SIDE, SIDE], shared, b_a)
    right = gl.allocate_shared_memory(DTYPE, [SIDE, SIDE], shared, gl.load(b + places(SIDE, SIDE, blocked)))
    fence_async_shared()
    acc = gl.zeros([SIDE, SIDE], c.dtype.element_ty, layout)
    if IN_REGISTERS:
        operand = gl.convert_layout(b_a, gl.DotOperandLayout(0, layout, 32 // BITS))
        acc = warpgroup_mma(operand, right.permute((1, 0)), acc)
    else:
        acc = warpgroup_mma(left, right.permute((1, 0)), acc)
    gl.store(c + places(SIDE, SIDE, layout), acc)
