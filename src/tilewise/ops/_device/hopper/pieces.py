"""Products with tiles in pieces: matrices side by side in shared memory, each of a power of two channels, as tensors
must be. 192 channels are three pieces of 64, so that no product is spent on padding; other widths are one piece.

Sums over channels go on from piece to piece. What has the channels for columns is one accumulator for each piece, in a
tuple.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tilewise.ops._device.hopper.ring import as_matrix


@gluon.jit
def piece(tiles, i):
    """Piece `i` of tiles as a matrix, as products take it."""
    return as_matrix(tiles.index(i), tiles.shape[-2], tiles.shape[-1])


@gluon.jit
def matrices(tiles, i_tile, D: gl.constexpr):
    """The pieces of a tile of D channels."""
    PIECES: gl.constexpr = D // tiles.shape[-1]
    found = ()
    for i in gl.static_range(PIECES):
        found = found + (piece(tiles, i_tile * PIECES + i),)  # noqa: RUF005
    return found


@gluon.jit
def multiply_rows(b_left, tiles, i_tile, zero):
    """The product of a tile's pieces and a transposed tile, over all channels, in flight."""
    PIECES: gl.constexpr = len(b_left)
    running = zero
    for i in gl.static_range(PIECES):
        b_right = piece(tiles, i_tile * PIECES + i)
        # [L, D] @ [D, R] -> [L, R]
        running = warpgroup_mma(b_left[i], b_right.permute((1, 0)), running, use_acc=i > 0, is_async=True)
    return running


@gluon.constexpr_function
def sums_layout(tiles):
    """Layout of accumulators with the channels of a piece of these tiles."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tiles.shape[-1], 16])


@gluon.jit
def zero_pieces(ROWS: gl.constexpr, tiles, D: gl.constexpr):
    """Accumulators of ROWS rows and D channels."""
    WIDTH: gl.constexpr = tiles.shape[-1]
    LAYOUT: gl.constexpr = sums_layout(tiles)
    acc = ()
    for _ in gl.static_range(D // WIDTH):
        acc = acc + (gl.zeros([ROWS, WIDTH], gl.float32, LAYOUT),)  # noqa: RUF005
    return acc


@gluon.jit
def add_product(acc, b_left, tiles, i_tile):
    """Accumulators with the product of a matrix and a tile added, in flight."""
    PIECES: gl.constexpr = len(acc)
    running = ()
    for i in gl.static_range(PIECES):
        b_right = piece(tiles, i_tile * PIECES + i)
        # [L, N] @ [N, D] -> [L, D]
        running = running + (warpgroup_mma(b_left, b_right, acc[i], is_async=True),)  # noqa: RUF005
    return running


@gluon.jit
def wait_pieces(OUTSTANDING: gl.constexpr, running):
    """Wait for accumulators, and leave as many products running as come after them."""
    done = warpgroup_mma_wait(OUTSTANDING, deps=running)
    if len(running) == 1:
        # Of one result there is no tuple.
        done = (done,)
    return done


@gluon.jit
def scale_rows(acc, scale):
    """Accumulators with each row scaled."""
    scaled = ()
    for i in gl.static_range(len(acc)):
        by_row = gl.convert_layout(scale, gl.SliceLayout(1, acc[i].type.layout))
        scaled = scaled + (acc[i] * gl.expand_dims(by_row, 1),)  # noqa: RUF005
    return scaled
