"""Gluon kernels that reduce tiles into global memory: right ones, and with a statement left out."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise._gluon.reductions import REDUCTIONS
from tilewise.ops._device.hopper.ring import thread_barrier

SIDE = gl.constexpr(16)
# Triton up to 3.7 has no names for them.
REDUCE = {name.removeprefix("async_atomic_"): getattr(tma, name, simulated) for name, simulated in REDUCTIONS.items()}
reduce_add, reduce_min, reduce_max = REDUCE["add"], REDUCE["min"], REDUCE["max"]
reduce_and, reduce_or, reduce_xor = REDUCE["and"], REDUCE["or"], REDUCE["xor"]


def descriptor(x):
    bits = 8 * x.element_size()
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [16, 16], gl.NVMMASharedLayout(0, bits, rank=2))


@gluon.jit
def reduce_tile(KIND: gl.constexpr, desc, coord, tile):
    if KIND == "add":
        reduce_add(desc, coord, tile)
    elif KIND == "min":
        reduce_min(desc, coord, tile)
    elif KIND == "max":
        reduce_max(desc, coord, tile)
    elif KIND == "and":
        reduce_and(desc, coord, tile)
    elif KIND == "or":
        reduce_or(desc, coord, tile)
    else:
        reduce_xor(desc, coord, tile)


@gluon.jit
def reduce_kernel(x, out, KIND: gl.constexpr, FENCED: gl.constexpr):
    """Every CTA reduces its tile of x into out, 8 rows and columns away from its corner."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    rows = gl.arange(0, SIDE, gl.SliceLayout(1, layout))
    columns = gl.arange(0, SIDE, gl.SliceLayout(0, layout))
    places = gl.expand_dims(rows * SIDE, 1) + gl.expand_dims(columns, 0) + gl.program_id(0) * SIDE * SIDE
    tile = gl.allocate_shared_memory(out.dtype, [SIDE, SIDE], out.layout)
    tile.store(gl.load(x + places))
    if FENCED:
        fence_async_shared()
    thread_barrier()
    reduce_tile(KIND, out, [8, 8], tile)
    tma.store_wait(0)


@gluon.jit
def read_back_kernel(out, place, ARRIVED: gl.constexpr):
    """Adds a tile of ones, and reads the first number after the wait for the copy: to memory, or of shared memory."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(out.dtype, [SIDE, SIDE], out.layout)
    tile.store(gl.full([SIDE, SIDE], 1, gl.float32, layout))
    fence_async_shared()
    thread_barrier()
    reduce_add(out, [0, 0], tile)
    tma.store_wait(0, read_only=not ARRIVED)
    gl.store(place + 1, gl.load(place))
