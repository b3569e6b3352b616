"""What the Gluon kernels for Hopper share: names that changed from Triton 3.6 to 3.9, tiles of rows through TMA, rings
of buffers, barriers.

A tile is `rows` tokens of one head, all channels. Rows past the end of a sequence, and channels past the last, read as
0 and are never written: the tensor memory accelerator (TMA) sees to it, of packed sequences too, whose next neighbour's
rows it never touches (`tilewise.ops._host.hopper` makes the descriptors and says how). So no kernel has to clear what
lies outside.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

# Left the old, right the new names: the old one of the store raises in 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Waits for all threads of the warps that run this function, not for those of other partitions.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# Rows that a descriptor of packed tensors has room for, whatever the tensor: the end of every sequence is brought to
# this row.
RAGGED_ROWS = gl.constexpr(1 << 30)


@gluon.jit
def load_tile(desc, buffer, barrier, i_b, i_h, start, n_rows, row, PACKED: gl.constexpr):
    """Start to read rows `row ..` of head `i_h` into `buffer`; `barrier` counts the bytes as they arrive.

    Dense: of batch entry `i_b`. Packed: of the sequence of `n_rows` tokens from token `start` on.
    """
    if PACKED:
        tma_load(desc, [RAGGED_ROWS, start + n_rows, i_h, RAGGED_ROWS - n_rows + row, 0], barrier, buffer)
    else:
        tma_load(desc, [i_b, i_h, row, 0], barrier, buffer)


@gluon.jit
def store_tile(desc, buffer, i_b, i_h, start, n_rows, row, PACKED: gl.constexpr):
    """Start to write `buffer` to rows `row ..`, as `load_tile` reads them: rows past the end stay as they are.

    Before it come `fence_async_shared` and `thread_barrier`, for one thread starts the copy of what all have written.
    """
    if PACKED:
        tma_store(desc, [RAGGED_ROWS, start + n_rows, i_h, RAGGED_ROWS - n_rows + row, 0], buffer)
    else:
        tma_store(desc, [i_b, i_h, row, 0], buffer)


@gluon.jit
def allocate_tiles(desc, COUNT: gl.constexpr):
    """Shared memory for COUNT tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.jit
def as_matrix(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One tile as `[ROWS, COLUMNS]`, as products take it: a descriptor's tile has axes of 1 before those."""
    return buffer.reshape([ROWS, COLUMNS])


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each of which changes its phase after so many arrivals (and all bytes that it was told to
    expect).
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def allocate_notes(COUNT: gl.constexpr):
    """Shared memory for COUNT whole numbers, by which one warp tells others what there is to do."""
    return gl.allocate_shared_memory(gl.int32, [COUNT, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def write_note(notes, i, value):
    """Note a number, in a partition of one warp."""
    notes.index(i).store(gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def read_note(notes, i, WARPS: gl.constexpr):
    """The same number, in a partition of WARPS warps."""
    return gl.max(notes.index(i).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The next buffer of a ring, and the phase of its barriers: it changes each time round.

    Whoever waits until a buffer is full waits for `phase`, whoever waits until it is free for `phase ^ 1`, which a new
    barrier passes at once.
    """
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
