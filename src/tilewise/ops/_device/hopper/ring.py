"""What the Gluon kernels for Hopper share: tiles of rows through TMA, rings of buffers with their barriers, and a
mailbox in shared memory; and names that changed from Triton 3.6 to 3.9.

A tile is `rows` tokens of one head, all channels: one matrix in shared memory, or several side by side (`pieces`). Rows
past the end of a sequence, and channels past the last, read as 0 and are never written: the tensor memory accelerator
(TMA) does that, for packed sequences too, whose neighbours' rows it never touches (`flash.hopper.launch` makes the
descriptors and says how). So kernels need not zero what lies outside.

A ring is STAGES buffers that one warp fills and other warps empty, in order. Every buffer has two mbarriers, full and
empty (`Barriers`); every warp keeps its own position (`Ring`): which buffer comes next, and in which phase its barriers
are.

The one import of Triton's aggregates, records with methods, from which Gluon kernels build rings and barriers.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate


def aggregate(cls):
    """A class whose annotations are its fields, as a device value; its methods are jitted.

    Values are immutable: a method that changes one returns another. Unlike those of a NamedTuple, constexprs in the
    fields stay constexprs when a value is assigned, returned, or carried from one iteration of a loop to the next.
    """
    names = tuple(cls.__annotations__)

    # Triton 3.9 makes a constructor of the annotations; 3.6 and 3.7 need it written out.
    def construct(self, *values, **named):
        given = dict(zip(names, values, strict=False)) | named
        if len(values) + len(named) != len(names) or set(given) != set(names):
            raise TypeError(f"{cls.__name__} takes {', '.join(names)}: got {len(values)} values and {list(named)}")
        for name in names:
            setattr(self, name, given[name])

    construct.__triton_builtin__ = True
    cls.__init__ = construct
    return _aggregate(cls)


# Left the old, right the new names: the old one of the store raises in 3.9.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# Waits for all threads of the warps that run this function, not for those of other partitions.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier

# Rows that every descriptor of packed tensors has room for: each sequence is shifted to end at
# this row.
RAGGED_ROWS = gl.constexpr(1 << 30)


class HeadRows(NamedTuple):
    """The rows of one head of one sequence, for `load_tile` and `store_tile`.

    Dense: of batch entry `i_b`. Packed: of the sequence of `n_rows` tokens from token `start` on.
    """

    i_b: Any
    i_h: Any
    start: Any
    n_rows: Any


@gluon.jit
def load_tile(desc, tiles, i_tile, barrier, rows, row, D: gl.constexpr, PACKED: gl.constexpr):
    """Start to read D channels of `rows` from `row` on into a tile; `barrier` counts the bytes as they arrive."""
    WIDTH: gl.constexpr = tiles.shape[-1]
    for i in gl.static_range(D // WIDTH):
        buffer = tiles.index(i_tile * (D // WIDTH) + i)
        if PACKED:
            end, o_row = rows.start + rows.n_rows, RAGGED_ROWS - rows.n_rows + row
            tma_load(desc, [RAGGED_ROWS, end, rows.i_h, o_row, i * WIDTH], barrier, buffer)
        else:
            tma_load(desc, [rows.i_b, rows.i_h, row, i * WIDTH], barrier, buffer)


@gluon.jit
def store_tile(desc, tiles, i_tile, rows, row, D: gl.constexpr, PACKED: gl.constexpr):
    """Start to write a tile to `rows` from `row` on: what lies past the end stays as it is.

    Call `fence_async_shared` and `thread_barrier` first: one thread starts the copy of what all have written.
    """
    WIDTH: gl.constexpr = tiles.shape[-1]
    for i in gl.static_range(D // WIDTH):
        buffer = tiles.index(i_tile * (D // WIDTH) + i)
        if PACKED:
            end, o_row = rows.start + rows.n_rows, RAGGED_ROWS - rows.n_rows + row
            tma_store(desc, [RAGGED_ROWS, end, rows.i_h, o_row, i * WIDTH], buffer)
        else:
            tma_store(desc, [rows.i_b, rows.i_h, row, i * WIDTH], buffer)


@gluon.jit
def allocate_tiles(desc, COUNT: gl.constexpr, D: gl.constexpr):
    """Shared memory for COUNT tiles of D channels, whose pieces a descriptor is for."""
    PIECES: gl.constexpr = COUNT * (D // desc.block_type.shape[-1])
    return gl.allocate_shared_memory(desc.dtype, [PIECES] + desc.block_type.shape, desc.layout)  # noqa: RUF005


@gluon.constexpr_function
def tile_bytes(desc, D):
    """Bytes of a tile of D channels, whose pieces a descriptor is for."""
    return desc.block_type.nbytes * (D // desc.block_type.shape[-1])


@gluon.jit
def as_matrix(buffer, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """One tile as `[ROWS, COLUMNS]`, as products take it: a descriptor's tile has axes of 1 before those."""
    return buffer.reshape([ROWS, COLUMNS])


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT mbarriers, each of which flips its phase after ARRIVALS arrivals (and all bytes that it was told to
    expect).
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@aggregate
class Ring:
    """A warp's position in a ring of STAGES buffers: the buffer, and the phase of its barriers, which flips on each
    wrap-around.
    """

    stage: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def advance(self):
        """The next position."""
        last = self.stage == self.STAGES - 1
        return Ring(gl.where(last, 0, self.stage + 1), gl.where(last, self.phase ^ 1, self.phase), self.STAGES)


@gluon.jit
def first_of_ring(STAGES: gl.constexpr):
    """The position at which every warp begins."""
    return Ring(gl.to_tensor(0), gl.to_tensor(0), STAGES)


@gluon.jit
def ring_at(count, STAGES: gl.constexpr):
    """The position after `count` times `advance`."""
    return Ring(count % STAGES, (count // STAGES) & 1, STAGES)


@aggregate
class Barriers:
    """The mbarriers of a ring: of each buffer one for `full`, one for `empty`. A new one lets `wait_empty` pass."""

    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def wait_full(self, ring):
        """Wait until the buffer is filled."""
        mbarrier.wait(self.full.index(ring.stage), ring.phase)

    @gluon.jit
    def wait_empty(self, ring):
        """Wait until all have released the buffer."""
        mbarrier.wait(self.empty.index(ring.stage), ring.phase ^ 1)

    @gluon.jit
    def expect(self, ring, nbytes):
        """The buffer is full once TMA has written this many bytes."""
        mbarrier.expect(self.full.index(ring.stage), nbytes)

    @gluon.jit
    def fill(self, ring):
        """The buffer is full."""
        mbarrier.arrive(self.full.index(ring.stage), count=1)

    @gluon.jit
    def release(self, ring):
        """Release the buffer. One thread arrives for the whole partition, after Triton has synchronised it."""
        mbarrier.arrive(self.empty.index(ring.stage), count=1)


@gluon.jit
def allocate_ring(COUNT: gl.constexpr, READERS: gl.constexpr):
    """The barriers of COUNT buffers, each of which is filled by one warp and released by READERS."""
    return Barriers(allocate_barriers(COUNT, 1), allocate_barriers(COUNT, READERS))


@aggregate
class Mailbox:
    """Shared memory through which one warp tells others what to work on: messages of SIZE int32 numbers.

    FIELDS is a message that holds, in place of each number, its index.
    """

    memory: gl.shared_memory_descriptor
    FIELDS: gl.constexpr
    SIZE: gl.constexpr

    @gluon.jit
    def put(self, slot, FIELD: gl.constexpr, value):
        """Write one number of the message in a slot, in a partition of one warp."""
        number = gl.full([1], value, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
        self.memory.index(slot * self.SIZE + FIELD).store(number)

    @gluon.jit
    def get(self, slot, FIELD: gl.constexpr, WARPS: gl.constexpr):
        """Read it, in a partition of WARPS warps."""
        number = self.memory.index(slot * self.SIZE + FIELD)
        return gl.max(number.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def allocate_mailbox(SLOTS: gl.constexpr, FIELDS: gl.constexpr, SIZE: gl.constexpr):
    """A mailbox with room for SLOTS messages."""
    memory = gl.allocate_shared_memory(gl.int32, [SLOTS * SIZE, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Mailbox(memory, FIELDS, SIZE)
