"""Kernels of one instruction each that Triton has from 3.7 on: elements of shared memory by their places, the copies of
a convolution.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewise.ops._device.hopper.ring import thread_barrier, tma_store

ROWS, COLUMNS, COUNT = gl.constexpr(16), gl.constexpr(32), gl.constexpr(512)
LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
TILE = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
PLAIN_LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def offsets_of(N_ROWS: gl.constexpr, N_COLUMNS: gl.constexpr):
    """A tile's rows [N_ROWS, 1] and columns [1, N_COLUMNS]."""
    rows = gl.arange(0, N_ROWS, gl.SliceLayout(1, TILE))
    columns = gl.arange(0, N_COLUMNS, gl.SliceLayout(0, TILE))
    return rows[:, None], columns[None, :]


@gluon.jit
def places_of(AXIS: gl.constexpr, N_ROWS: gl.constexpr, N_COLUMNS: gl.constexpr, PLACE: gl.constexpr):
    """Places along an axis, no two of them the same, in another order for each line along it."""
    rows, columns = offsets_of(N_ROWS, N_COLUMNS)
    places = (rows * 5 + columns * 3 + 2) % N_ROWS if AXIS == 0 else (columns * 5 + rows * 3 + 2) % N_COLUMNS
    return places.to(PLACE)


@gluon.jit
def gather_kernel(x, out, NAME: gl.constexpr, AXIS: gl.constexpr, PLACE: gl.constexpr, MEMORY: gl.constexpr):
    if NAME == "line":
        i = gl.arange(0, COUNT, LINE)
        line = gl.allocate_shared_memory(x.dtype.element_ty, [COUNT], PLAIN_LINE, gl.load(x + i))
        thread_barrier()
        gl.store(out + i, line.gather((i * 37 + 5) % COUNT, 0))
    else:
        rows, columns = offsets_of(ROWS, COLUMNS)
        buffers = gl.allocate_shared_memory(x.dtype.element_ty, [2, ROWS, COLUMNS], MEMORY)
        buffers.index(1).store(gl.load(x + rows * COLUMNS + columns))
        thread_barrier()
        if NAME == "view":
            rows, columns = offsets_of(COLUMNS, 8)
            view = buffers.index(1).slice(8, 8).permute([1, 0])
            gl.store(out + rows * 8 + columns, view.gather(places_of(AXIS, COLUMNS, 8, PLACE), AXIS))
        elif NAME == "few":
            rows, columns = offsets_of(ROWS, 8)
            gl.store(out + rows * 8 + columns, buffers.index(1).gather((rows * 3 + columns * 5) % COLUMNS, AXIS))
        else:
            gl.static_assert(NAME == "whole")
            places = places_of(AXIS, ROWS, COLUMNS, PLACE)
            gl.store(out + rows * COLUMNS + columns, buffers.index(1).gather(places, AXIS))


@gluon.jit
def scatter_kernel(x, out, NAME: gl.constexpr, AXIS: gl.constexpr, PLACE: gl.constexpr, MEMORY: gl.constexpr):
    if NAME == "line":
        i = gl.arange(0, COUNT, LINE)
        v = gl.load(x + i)
        line = gl.allocate_shared_memory(x.dtype.element_ty, [COUNT], PLAIN_LINE)
        line.scatter(v, (i * 37 + 5) % COUNT, 0)
        thread_barrier()
        gl.store(out + i, line.load(LINE))
    else:
        rows, columns = offsets_of(ROWS, COLUMNS)
        v = gl.load(x + rows * COLUMNS + columns)
        buffers = gl.allocate_shared_memory(x.dtype.element_ty, [2, ROWS, COLUMNS], MEMORY)
        tile = buffers.index(1)
        tile.store(v)
        thread_barrier()
        if NAME == "view":
            view_rows, view_columns = offsets_of(COLUMNS, 8)
            places = places_of(AXIS, COLUMNS, 8, PLACE)
            tile.slice(8, 8).permute([1, 0]).scatter(gl.load(x + view_rows * 8 + view_columns), places, AXIS)
        elif NAME == "few":
            few_rows, few_columns = offsets_of(ROWS, 8)
            places = (few_rows * 3 + few_columns * 5) % COLUMNS
            tile.scatter(gl.load(x + few_rows * 8 + few_columns), places, AXIS)
        elif NAME == "broadcast":
            tile.scatter(gl.load(x + rows), (columns * 5 + 2) % COLUMNS, AXIS)
        else:
            gl.static_assert(NAME == "whole")
            tile.scatter(v, places_of(AXIS, ROWS, COLUMNS, PLACE), AXIS)
        thread_barrier()
        gl.store(out + rows * COLUMNS + columns, tile.load(TILE))


@gluon.jit
def im2col_kernel(x, out, COORD: gl.constexpr, OFFSETS: gl.constexpr):
    """The pixels of one tile from x to out."""
    tile = gl.allocate_shared_memory(x.dtype, x.block_shape, x.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bar.index(0), count=1)
    mbarrier.expect(bar.index(0), x.block_type.nbytes)
    tma.async_load_im2col(x, COORD, OFFSETS, bar.index(0), tile)
    mbarrier.wait(bar.index(0), 0)
    tma_store(out, [0, 0], tile)
    tma.store_wait(0)
    mbarrier.invalidate(bar.index(0))
