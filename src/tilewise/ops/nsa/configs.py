"""Tile shapes of the NSA kernels, as data, and the pure functions that pick them; the rule that chooses between loop
orders.

Measured on an H200 (`hopper`); the other families are chosen by compiling for them.
"""

from typing import Any, Literal, NamedTuple

from tilewise.ops._host.symbol import cached
from tilewise.ops.flash.configs import Family, family

Kernel = Literal["lists_fwd", "lists_bwd", "union_fwd", "union_dq", "scores"]

# Bytes of results by entry that one chunk of tokens may leave in memory, and of counts by block and tile.
PARTIAL_BYTES = 2048 << 20
COUNT_BYTES = 256 << 20
# Bytes of scores that one chunk of tokens may leave in memory.
SCORE_BYTES = 512 << 20
# Entries that a tile of tokens sorts: for the lists, and at most for a union.
LIST_ENTRIES = 256
UNION_ENTRIES = 512
# Long lists are split for balance: rows of queries that one program in key order takes, and the least and the most
# entries that may come to.
SEGMENT_ROWS = {"forward": 4096, "backward": 6144, "dkdv": 16384}
SEGMENT_ENTRIES = {"forward": (256, 1024), "backward": (256, 1024), "dkdv": (256, 2048)}
# Bytes of one tile of keys, by family, in 16 bits (half in fp32, whose products hold more tiles): a longer block of
# keys is cut into parts that fit.
KEY_TILE_BYTES: dict[Family, int] = {"hopper": 32 << 10, "blackwell": 32 << 10, "medium": 32 << 10, "small": 16 << 10}

# Bytes that the windows of one block may take where they are more than a tile of the table.
WINDOW_TILE_BYTES: dict[Family, int] = {
    "hopper": 64 << 10,
    "blackwell": 64 << 10,
    "medium": 64 << 10,
    "small": 32 << 10,
}


class Config(NamedTuple):
    """Rows a tile (for scores: tokens), warps, stages, tensor descriptors, registers a thread may take, and keys a tile
    (scores only).

    `ieee` multiplies fp32 without tensor cores, slowly: three TF32 products hold more tiles than a 99 KB card has room
    for.
    """

    block_m: int
    num_warps: int
    num_stages: int
    tma: bool = False
    registers: int | None = None
    block_n: int = 64
    ieee: bool = False


WIDTHS = (128, 256)
# (bytes an element, kernel) -> for each of WIDTHS the tiles.
TABLE: dict[tuple[int, Kernel], tuple[Config, Config]] = {
    (2, "lists_fwd"): (Config(64, 4, 3, registers=168), Config(64, 8, 2)),
    (2, "lists_bwd"): (Config(64, 4, 2), Config(64, 8, 1)),
    (2, "union_fwd"): (Config(64, 4, 3, tma=True), Config(64, 8, 2)),
    (2, "union_dq"): (Config(64, 4, 2, tma=True), Config(64, 8, 1)),
    (2, "scores"): (Config(64, 4, 3, tma=True, block_n=128), Config(64, 8, 2, block_n=64)),
    (4, "lists_fwd"): (Config(32, 4, 1), Config(16, 4, 1)),
    (4, "lists_bwd"): (Config(32, 4, 1), Config(16, 4, 1)),
    (4, "union_fwd"): (Config(32, 4, 1), Config(16, 4, 1)),
    (4, "union_dq"): (Config(32, 4, 1), Config(16, 4, 1)),
    (4, "scores"): (Config(32, 4, 1, block_n=32), Config(16, 4, 1, block_n=32)),
}


@cached
def choose(kernel: Kernel, width: int, element_size: int, architecture: int) -> Config:
    """The tiles for tensors of at most `width` channels on an architecture (compute capability as one number, 90 for an
    H100).
    """
    config = TABLE[element_size, kernel][0 if width <= WIDTHS[0] else 1]
    group = family(architecture)
    if group in ("hopper", "blackwell"):
        return config
    if kernel == "lists_bwd" and width > WIDTHS[0]:
        if element_size == 2:
            # 64 rows take 176 KB, more than any of these cards has. An A100 has room for a whole block of keys, whose
            # sums 4 warps would spill.
            return config._replace(block_m=32, num_warps=8 if group == "medium" else 4)
        if group == "small":
            return config._replace(num_warps=8, ieee=True)
    # Older cards have no tensor descriptors, and hold fewer stages.
    return config._replace(tma=False, registers=None, num_stages=min(config.num_stages, 2))


def segment_entries(work: Literal["forward", "backward", "dkdv"], group: int) -> int:
    """Entries of one list that one program takes, in the forward, the backward, and the backward that leaves dQ to the
    query order.
    """
    least, most = SEGMENT_ENTRIES[work]
    return min(max(SEGMENT_ROWS[work] // group, least), most)


def rows_a_token(width: int, element_size: int, architecture: int) -> int:
    """The most query heads of a group that every kernel's tile can hold side by side."""
    kernels: tuple[Kernel, ...] = ("lists_fwd", "lists_bwd", "union_fwd", "union_dq")
    return min(choose(kernel, width, element_size, architecture).block_m for kernel in kernels)


def parts_of_block(block_size: int, width: int, element_size: int, architecture: int) -> int:
    """Into how many parts a block of keys is cut so that a tile of it fits; 0 where no part of at least
    16 keys does.
    """
    limit = KEY_TILE_BYTES[family(architecture)] * 2 // element_size
    for parts in range(1, block_size + 1):
        if block_size % parts == 0:
            keys = block_size // parts
            rows = 1 << max(4, (keys - 1).bit_length())
            # No tile is smaller than 16 keys, so that must fit.
            if rows == 16 or rows * width * element_size <= limit:
                return parts if parts == 1 or keys >= 16 else 0
    return 0


def in_query_order(
    direction: Literal["fwd", "dq"], union: Any, tiles: int, slots: int, group: int, block_size: int
) -> Any:
    """Whether the query order is the faster one: `union` blocks in `tiles` unions of tokens that name `slots` blocks
    each. Numbers or tensors.

    With a union of U blocks on average: below 2.6 · slots (groups of 8 heads or more) or 3.8 · slots, and for dQ, where
    the key order has the scores already, below 2 · slots. The query order reads whole blocks, the key order's rows cost
    the same for blocks of any size: of more than 64 keys 0.6 of that in the forward. On an H200, 64 / 4 heads, D 128,
    16 blocks, a token took 0.025 + 0.0050 · U µs in the query order and 0.230 in the key order with blocks of 64, and
    0.054 + 0.0111 · U and 0.325 with blocks of 128.
    """
    factor = 2.0 if direction == "dq" else 2.6 if group >= 8 else 3.8
    if direction == "fwd" and block_size > 64:
        factor *= 0.6
    return union < factor * slots * tiles
