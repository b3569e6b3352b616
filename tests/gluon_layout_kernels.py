"""Kernels of a few operations that depend on layouts, which the caller chooses: what Triton's compiler takes, and what
it refuses. `tests/gluon_layouts.py` has the cases.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

NONE = gl.constexpr(("none",))
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpreted(v, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return v.reinterpret(DTYPE, SHAPE, LAYOUT)
else:

    @gluon.jit
    def reinterpreted(v, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        return v._reinterpret(DTYPE, SHAPE, LAYOUT)


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
        r = reinterpreted(v, STEP[1], STEP[2], STEP[3])
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
