"""One call of attention over a cache; how its rows are packed into tiles, tile shapes as data, and how keys are split.

All of it depends on an entry's own numbers alone: neither on the batch nor on the cache's room nor on the GPU's SMs.
"""

from typing import NamedTuple

import torch

from tilewise.ops._host.symbol import cached
from tilewise.ops.flash.configs import WIDTHS, Family, family

# Beyond this many queries keys are not split, unless that is asked for.
SPLIT_TOKENS = 64
# Of all KV heads, tiles of 16 rows times splits that an entry's queries make: two for each SM of a large GPU, where as
# many run at a time, so that one long sequence keeps it busy.
WORK = 264
# Half as many keep it busy too, where splits are then not longer than LONG_KEYS, and the merge has less to add up: a
# batch of 16 with 32,768 keys and one token took 0.98 of the time with splits of 2,048 keys in place of 1,024, and one
# sequence no more.
ENOUGH, LONG_KEYS = 128, 2048
# Keys of a split, at least: of up to FEWEST_ROWS rows of a KV head, for which tiles and splits are then the same; of
# more, for each row. Writing and reading rows in fp32 then moves at most a sixteenth, and a thirty-second, of the bytes
# of K and V in 16 bits. For batches of 64 and 128 rows an entry, 32 keys a row took 1.05 to 1.42 times as long.
LEAST_KEYS = 512
KEYS_A_ROW = 64
# Splits that the merge adds up at a time.
MERGED = 16
# Rows of new keys that a program copies.
APPENDED = 16
# Limits of a window beyond this reach every key, more splits than this are one a tile, and both would overflow in sums.
FARTHEST = 2**30


class Inputs(NamedTuple):
    """One call's tensors and numbers: k and v are caches `[B, T_max, Hk, ·]`, or pools `[pages, page_size, Hk, ·]`
    with a table, or packed with cu_k; entry b has lengths[b] + `added` keys, without lengths `added`; window limits
    None or >= 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor | None
    lengths: torch.Tensor | None
    leftpad: torch.Tensor | None
    table: torch.Tensor | None
    sinks: torch.Tensor | None
    added: int
    left: int | None
    right: int | None
    scale: float
    softcap: float
    num_splits: int
    cu_k: torch.Tensor | None = None

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.q.shape[-2] // self.k.shape[-2]

    @property
    def room(self) -> int:
        """The most keys that an entry may have."""
        return room_of(self.k, self.table)


def room_of(cache: torch.Tensor, table: torch.Tensor | None) -> int:
    """Keys of an entry that a cache, or a page table, has room for."""
    return cache.shape[-3] if table is None else table.shape[1] * cache.shape[-3]


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    lengths: torch.Tensor | None,
    leftpad: torch.Tensor | None,
    table: torch.Tensor | None,
    sinks: torch.Tensor | None,
    added: int,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
    num_splits: int,
) -> Inputs:
    """Inputs from the public arguments."""
    right = 0 if causal else right
    # The last query stands at the last key: the first has so many after it. Of packed queries only their sum is known.
    right_cuts = right >= 0 and (cu_q is not None or right < q.shape[-3] - 1)
    return Inputs(
        q,
        k,
        v,
        cu_q,
        lengths,
        leftpad,
        table,
        sinks,
        added,
        min(left, FARTHEST) if left >= 0 else None,
        min(right, FARTHEST) if right_cuts else None,
        scale,
        softcap,
        num_splits,
    )


class Config(NamedTuple):
    """Rows of queries and keys per tile, warps, pipeline stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# (family, bytes an element) -> for each of flash attention's WIDTHS the most rows of queries per tile, keys, warps and
# stages.
_FP32 = ((64, 32, 4, 3), (64, 32, 4, 3), (32, 32, 4, 2), (16, 16, 4, 2))
TABLE: dict[tuple[Family, int], tuple[tuple[int, int, int, int], ...]] = {
    ("hopper", 2): ((128, 128, 4, 4), (128, 128, 4, 3), (128, 64, 4, 3), (64, 32, 8, 3)),
    ("blackwell", 2): ((128, 128, 4, 4), (128, 128, 4, 3), (128, 64, 4, 3), (64, 32, 8, 3)),
    ("medium", 2): ((128, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 2), (64, 32, 8, 2)),
    ("small", 2): ((128, 64, 4, 3), (128, 64, 4, 3), (128, 32, 4, 3), (64, 32, 8, 2)),
    ("hopper", 4): _FP32,
    ("blackwell", 4): _FP32,
    ("medium", 4): _FP32,
    ("small", 4): _FP32,
}
# Rows that a matrix product has at least.
FEWEST_ROWS = 16
# Rows of the tiles of packed queries, whose entries' lengths the host does not know.
PACKED_ROWS = 64


@cached
def choose(rows: int | None, channels: int, value_channels: int, element_size: int, architecture: int) -> Config:
    """The tiles for entries with so many query rows a KV head (None: packed), on an architecture (90 for an H100)."""
    widest = max(channels, value_channels)
    at = next(i for i, limit in enumerate(WIDTHS) if widest <= limit)
    row = TABLE[family(architecture), element_size][at]
    wanted = PACKED_ROWS if rows is None else 1 << (max(rows, FEWEST_ROWS) - 1).bit_length()
    config = tiles(row, min(wanted, row[0]))
    if (channels | value_channels) % 16 != 0:
        # Rows that Triton cannot know to be aligned are loaded element by element, through registers.
        config = config._replace(block_n=min(config.block_n, 64))
    return config


def tiles(row: tuple[int, int, int, int], block_m: int) -> Config:
    """The tiles of so many rows that a row of the table has."""
    _, block_n, num_warps, num_stages = row
    return Config(block_m, block_n, 8 if block_m == 128 else num_warps, num_stages)


@cached
def heads_of_a_tile(group: int, block_m: int) -> int:
    """How many of a group's query heads a tile packs: the most that fit and divide the group."""
    return next(heads for heads in range(min(group, block_m), 0, -1) if group % heads == 0)


def most_splits(queries: int, group: int, kv_heads: int, room: int, given: int, block_n: int) -> int:
    """The most splits that an entry of `queries` tokens can have with `room` for its keys: as the kernels' rule."""
    if given:
        return max(1, min(given, -(-room // block_n)))
    if queries > SPLIT_TOKENS:
        return 1
    rows = queries * group
    tiles = kv_heads * max(1, -(-rows // 16))
    most, enough = max(1, WORK // tiles), max(1, ENOUGH // tiles)
    least = LEAST_KEYS if rows <= FEWEST_ROWS else rows * KEYS_A_ROW
    # Fewer keys may have more splits.
    return max(1, min(most, -(-room // least), max(enough, -(-room // max(least, LONG_KEYS)))))
