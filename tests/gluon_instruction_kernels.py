"""Kernels of one instruction each."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from tilewise.ops._device.hopper.ring import thread_barrier, tma_load, tma_store

COUNT, SIDE = gl.constexpr(128), gl.constexpr(64)
ROW = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
OTHER_ROW = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
TURNED = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def unary_kernel(x, out, NAME: gl.constexpr):
    i = gl.arange(0, COUNT, ROW)
    v = gl.load(x + i)
    if NAME == "neg":
        v = -v
    elif NAME == "abs":
        v = gl.abs(v)
    elif NAME == "invert":
        v = ~v
    elif NAME == "exp":
        v = gl.exp(v)
    elif NAME == "exp2":
        v = gl.exp2(v)
    elif NAME == "log":
        v = gl.log(v)
    elif NAME == "log2":
        v = gl.log2(v)
    elif NAME == "sqrt":
        v = gl.sqrt(v)
    elif NAME == "rsqrt":
        v = gl.rsqrt(v)
    elif NAME == "sin":
        v = gl.sin(v)
    elif NAME == "cos":
        v = gl.cos(v)
    elif NAME == "erf":
        v = gl.erf(v)
    elif NAME == "floor":
        v = gl.floor(v)
    else:
        gl.static_assert(NAME == "ceil")
        v = gl.ceil(v)
    gl.store(out + i, v)


@gluon.jit
def binary_kernel(x, y, out, NAME: gl.constexpr):
    i = gl.arange(0, COUNT, ROW)
    a, b = gl.load(x + i), gl.load(y + i)
    if NAME == "add":
        c = a + b
    elif NAME == "sub":
        c = a - b
    elif NAME == "mul":
        c = a * b
    elif NAME == "truediv":
        c = a / b
    elif NAME == "floordiv":
        c = a // b
    elif NAME == "mod":
        c = a % b
    elif NAME == "and":
        c = a & b
    elif NAME == "or":
        c = a | b
    elif NAME == "xor":
        c = a ^ b
    elif NAME == "lshift":
        c = a << b
    elif NAME == "rshift":
        c = a >> b
    elif NAME == "cdiv":
        c = gl.cdiv(gl.abs(a) >> 1, 7)
    elif NAME == "maximum":
        c = gl.maximum(a, b)
    elif NAME == "minimum":
        c = gl.minimum(a, b)
    elif NAME == "fma":
        c = gl.fma(a, b, a)
    elif NAME == "lt":
        c = a < b
    elif NAME == "le":
        c = a <= b
    elif NAME == "gt":
        c = a > b
    elif NAME == "ge":
        c = a >= b
    elif NAME == "eq":
        c = a == b
    elif NAME == "ne":
        c = a != b
    else:
        gl.static_assert(NAME == "where")
        c = gl.where(a < b, i, -1)
    gl.store(out + i, c)


@gluon.jit
def cast_kernel(x, out, HOW: gl.constexpr):
    i = gl.arange(0, COUNT, ROW)
    gl.store(out + i, gl.cast(gl.load(x + i), out.dtype.element_ty, bitcast=HOW == "bitcast"))


@gluon.jit
def tile_offsets(LAYOUT: gl.constexpr):
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))
    return gl.expand_dims(rows * SIDE, 1) + gl.expand_dims(columns, 0)


@gluon.jit
def reduce_kernel(x, out, NAME: gl.constexpr, AXIS: gl.constexpr):
    v = gl.load(x + tile_offsets(TILE))
    if AXIS == 2:
        if NAME == "sum":
            r = gl.sum(v)
        elif NAME == "max":
            r = gl.max(v)
        else:
            r = gl.min(v)
        gl.store(out, r.to(gl.float32))
    else:
        if NAME == "sum":
            r = gl.sum(v, axis=AXIS)
        elif NAME == "max":
            r = gl.max(v, axis=AXIS)
        else:
            r = gl.min(v, axis=AXIS)
        gl.store(out + gl.arange(0, SIDE, gl.SliceLayout(AXIS, TILE)), r.to(gl.float32))


@gluon.jit
def shapes_kernel(x, out, NAME: gl.constexpr):
    """What changes no number but its place, or makes numbers of nothing."""
    i = gl.arange(0, COUNT, ROW)
    v = gl.load(x + i)
    if NAME == "convert_layout":
        w = gl.convert_layout(v, OTHER_ROW)
        gl.store(out + gl.arange(0, COUNT, OTHER_ROW), w)
    elif NAME == "zeros_like":
        gl.store(out + i, gl.zeros_like(v))
    elif NAME == "full_like":
        gl.store(out + i, gl.full_like(v, 5))
    elif NAME == "full":
        gl.store(out + i, gl.full([COUNT], 6, gl.int32, ROW) + gl.zeros([COUNT], gl.int32, ROW))
    elif NAME == "arange":
        gl.store(out + i, gl.arange(3, 3 + COUNT, ROW))
    elif NAME == "to_tensor":
        gl.store(out + i, v + gl.to_tensor(3))
    elif NAME == "expand_dims":
        rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
        columns = gl.arange(0, 8, gl.SliceLayout(0, TILE))
        offsets = gl.expand_dims(rows * 8, 1) + columns[None, :]
        gl.store(out + offsets, gl.load(x + offsets) + rows[:, None])
    elif NAME == "reshape":
        w = gl.convert_layout(gl.reshape(v, [16, 8]), TILE)
        rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
        columns = gl.arange(0, 8, gl.SliceLayout(0, TILE))
        gl.store(out + columns[None, :] * 16 + rows[:, None], w)
    else:
        gl.static_assert(NAME == "permute")
        rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
        columns = gl.arange(0, 8, gl.SliceLayout(0, TILE))
        w = gl.permute(gl.load(x + rows[:, None] * 8 + columns[None, :]), [1, 0])
        rows = gl.arange(0, 8, gl.SliceLayout(1, TURNED))
        columns = gl.arange(0, 16, gl.SliceLayout(0, TURNED))
        gl.store(out + rows[:, None] * 16 + columns[None, :], gl.convert_layout(w, TURNED))


@gluon.jit
def memory_kernel(x, out, NAME: gl.constexpr):
    i = gl.arange(0, COUNT, ROW)
    if NAME == "load":
        gl.store(out + i, gl.load(x + (COUNT - 1 - i)))
    elif NAME == "load masked":
        # What the mask leaves out is anything: it is not stored.
        gl.store(out + i, gl.load(x + i, mask=i < 100), mask=i < 50)
    elif NAME == "load other":
        gl.store(out + i, gl.load(x + i, mask=i % 3 == 0, other=9))
    elif NAME == "store masked":
        gl.store(out + i, gl.load(x + i), mask=(i > 10) & (i < 90))
    elif NAME == "int64 offsets":
        gl.store(out + i.to(gl.int64) * 1, gl.load(x + i))
    else:
        gl.static_assert(NAME == "scalars")
        gl.store(out, gl.load(x + 7) * 2 + gl.load(x + 8) // 3)
        gl.store(out + 1, gl.load(x + 9) % 7, mask=gl.load(x + 1) == 1)


@gluon.jit
def grid_kernel(out):
    i, j, k = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    place = out + ((i * gl.num_programs(1) + j) * gl.num_programs(2) + k) * 8
    gl.store(place, i)
    gl.store(place + 1, j)
    gl.store(place + 2, k)
    gl.store(place + 3, gl.num_programs(0))
    gl.store(place + 4, gl.num_programs(1))
    gl.store(place + 5, gl.num_programs(2))
    gl.store(place + 6, gl.num_warps())
    gl.store(place + 7, gl.num_ctas())


@gluon.jit
def atomics_kernel(x, out, NAME: gl.constexpr):
    """On x: four times its old numbers and its new ones are the result. Of 4 a product is exact."""
    i = gl.arange(0, COUNT, ROW)
    v = gl.load(out + i) - 77
    if NAME == "add":
        old = gl.atomic_add(x + i, v + 3)
    elif NAME == "max":
        old = gl.atomic_max(x + i, v + 10)
    elif NAME == "min":
        old = gl.atomic_min(x + i, v - 10)
    elif NAME == "and":
        old = gl.atomic_and(x + i, v + 12)
    elif NAME == "or":
        old = gl.atomic_or(x + i, v + 12)
    elif NAME == "xor":
        old = gl.atomic_xor(x + i, v + 12)
    elif NAME == "xchg":
        old = gl.atomic_xchg(x + i, i)
    elif NAME == "cas":
        old = gl.atomic_cas(x + i, v + 1, v + 5)
    elif NAME == "masked":
        old = gl.atomic_add(x + i, v + 1, mask=i < 60)
        old = gl.where(i < 60, old, 0)
    else:
        gl.static_assert(NAME == "scalar")
        old = gl.atomic_add(x, 4) + v * 0
    # All are done before any place is read again.
    thread_barrier()
    gl.store(out + i, old * 4 + gl.load(x + i))


@gluon.jit
def shared_kernel(x, out, NAME: gl.constexpr):
    i = gl.arange(0, COUNT, ROW)
    v = gl.load(x + i)
    if NAME == "initial":
        buffer = gl.allocate_shared_memory(gl.int32, [COUNT], LINE, v)
        gl.store(out + gl.arange(0, COUNT, OTHER_ROW), buffer.load(OTHER_ROW))
    else:
        buffer = gl.allocate_shared_memory(gl.int32, [2, COUNT], LINE)
        buffer.index(0).store(v)
        buffer.index(1).store(v + 1)
        thread_barrier()
        if NAME == "index":
            gl.store(out + i, buffer.index(0).load(ROW) * 1000 + buffer.index(1).load(ROW))
        elif NAME == "slice":
            half = gl.arange(0, 64, ROW)
            gl.store(out + half, buffer.index(1).slice(64, 64).load(ROW))
        elif NAME == "permute":
            tile = gl.allocate_shared_memory(gl.int32, [16, 8], PLAIN)
            tile.store(gl.convert_layout(gl.reshape(v, [16, 8]), TILE))
            thread_barrier()
            rows = gl.arange(0, 8, gl.SliceLayout(1, TURNED))
            columns = gl.arange(0, 16, gl.SliceLayout(0, TURNED))
            gl.store(out + rows[:, None] * 16 + columns[None, :], tile.permute([1, 0]).load(TURNED))
        else:
            gl.static_assert(NAME == "reshape")
            rows = gl.arange(0, 16, gl.SliceLayout(1, TILE))
            columns = gl.arange(0, 8, gl.SliceLayout(0, TILE))
            gl.store(out + columns[None, :] * 16 + rows[:, None], buffer.index(0).reshape([16, 8]).load(TILE))


@gluon.jit
def tma_kernel(x, out, row, column, NAME: gl.constexpr):
    """A tile from x to out, what lies outside as 0 and not written; with "pred" the first copy never starts."""
    buffer = gl.allocate_shared_memory(x.dtype, [1, SIDE, SIDE], x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    if NAME == "pred":
        mbarrier.expect(bar.index(0), x.block_type.nbytes, pred=row == 1)
        tma_load(x, [row + 8, column], bar.index(0), buffer.index(0), pred=row == 1)
        mbarrier.wait(bar.index(0), 0, pred=row == 1)
        mbarrier.arrive(bar.index(0), count=1, pred=row == 1)
    mbarrier.expect(bar.index(0), x.block_type.nbytes)
    tma_load(x, [row, column], bar.index(0), buffer.index(0))
    mbarrier.wait(bar.index(0), 0)
    tma_store(out, [gl.maximum(row, 0), gl.maximum(column, 0)], buffer.index(0))
    tma.store_wait(0)
    mbarrier.invalidate(bar.index(0))


@gluon.jit
def described_kernel(x, out, LAYOUT: gl.constexpr):
    """The same, of descriptors that the kernel makes."""
    block: gl.constexpr = [SIDE, SIDE]
    source = tma.make_tensor_descriptor(x, [100, 72], [72, 1], block, LAYOUT)
    target = tma.make_tensor_descriptor(out, [100, 72], [72, 1], block, LAYOUT)
    tma_kernel(source, target, 64, 8, "both")


@gluon.jit
def product_kernel(a, b, out, NAME: gl.constexpr):
    tiles = gl.allocate_shared_memory(a.dtype, [2, SIDE, SIDE], a.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), a.block_type.nbytes + b.block_type.nbytes)
    tma_load(a, [0, 0], bar.index(0), tiles.index(0))
    tma_load(b, [0, 0], bar.index(0), tiles.index(1))
    mbarrier.wait(bar.index(0), 0)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIDE, 16])
    acc = gl.full([SIDE, SIDE], 3.0, gl.float32, layout)
    if NAME == "registers":
        operand = tiles.index(0).load(gl.DotOperandLayout(0, layout, 2))
        running = warpgroup_mma(operand, tiles.index(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(running,))
    elif NAME == "transposed":
        running = warpgroup_mma(
            tiles.index(0).permute([1, 0]), tiles.index(1).permute([1, 0]), acc, use_acc=False, is_async=True
        )
        acc = warpgroup_mma_wait(0, deps=(running,))
    elif NAME == "added":
        running = warpgroup_mma_init(acc)
        for i in range(3):
            running = warpgroup_mma(tiles.index(0), tiles.index(1), running, use_acc=i > 0, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(running,))
    elif NAME == "sync":
        acc = warpgroup_mma(tiles.index(0), tiles.index(1), acc)
    else:
        gl.static_assert(NAME == "shared")
        running = warpgroup_mma(tiles.index(0), tiles.index(1), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(running,))
    gl.store(out + tile_offsets(layout), acc)


@gluon.jit
def fences_kernel(x, out):
    """From registers through shared memory to global memory by the copy engine."""
    buffer = gl.allocate_shared_memory(out.dtype, [1, SIDE, SIDE], out.layout)
    buffer.index(0).store(gl.load(x + tile_offsets(TILE)))
    fence_async_shared()
    thread_barrier()
    tma_store(out, [0, 0], buffer.index(0))
    tma.store_wait(0)


@gluon.jit
def passes_on(x, buffer, bars):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    i = gl.arange(0, COUNT, layout)
    for step in range(4):
        mbarrier.wait(bars.index(1), (step & 1) ^ 1)
        buffer.index(0).store(gl.load(x + i) + step)
        thread_barrier()
        mbarrier.arrive(bars.index(0), count=1)


@gluon.jit
def adds_up(out, buffer, bars):
    i = gl.arange(0, COUNT, ROW)
    total = gl.zeros([COUNT], gl.int32, ROW)
    for step in range(4):
        mbarrier.wait(bars.index(0), step & 1)
        total += buffer.index(0).load(ROW)
        thread_barrier()
        mbarrier.arrive(bars.index(1), count=1)
    gl.store(out + i, total)


@gluon.jit
def specialized_kernel(x, out, NAME: gl.constexpr):
    """Four tiles from one warp to four others, through one buffer and two barriers."""
    buffer = gl.allocate_shared_memory(gl.int32, [1, COUNT], LINE)
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(bars.index(i), count=1)
    gl.warp_specialize([(adds_up, (out, buffer, bars)), (passes_on, (x, buffer, bars))], [1], [24])
