"""What tokens name, grouped by blocks of keys (lists) or by tiles of queries (unions): launches of the
index kernels.
"""

from typing import Literal, NamedTuple

import torch

from tilewise.ops._device.blocks import Lists, ListSizes, Unions
from tilewise.ops._host.launching import Launch
from tilewise.ops._host.packing import pieces
from tilewise.ops._host.slot import compute
from tilewise.ops._host.template import emit
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.selected.kernels.index import (
    nsa_index_count_kernel,
    nsa_index_lists_kernel,
    nsa_index_place_kernel,
    nsa_index_tiles_kernel,
    nsa_index_union_kernel,
)
from tilewise.ops.nsa.selected.problem import Named

# The two loop orders as the device names them: by keys (lists) and by queries (unions).
LISTS, UNION = 0, 1


class Chunk(NamedTuple):
    """A run of tiles of tokens."""

    first_tile: int
    tiles: int


def chunks(named: Named, bytes_a_token: int) -> list[Chunk]:
    """All tiles, in runs whose results by entry (`bytes_a_token`) and counts stay within what configs allow."""
    tiles = named.tile_slots(named.tile_tokens)
    fits = min(
        configs.PARTIAL_BYTES // max(1, bytes_a_token * named.tile_tokens),
        configs.COUNT_BYTES // max(1, 4 * named.lists),
    )
    most = max(1, fits)
    return [Chunk(first, count) for first, count in pieces(tiles, most)]


class MadeLists(NamedTuple):
    """The entries of a chunk by block; and of each list the segments before it that are not a list's first, of each
    entry its rank among its tile's entries of the same block (-1 where it names none), of each token of the chunk its
    number.
    """

    lists: Lists
    extras: torch.Tensor
    ranks: torch.Tensor
    tokens: torch.Tensor
    most_segments: int


def make_lists(named: Named, chunk: Chunk, segment: int, flag: torch.Tensor | None, wanted: int) -> MadeLists:
    """The lists of one chunk.

    Where `flag` is not `wanted` the kernels return at once and what is returned holds nothing.
    """
    indices, geometry = named.indices, named.geometry()
    entries = chunk.tiles * named.tile_tokens * named.heads * named.slots
    slots = named.tile_slots(named.block_size)

    def whole(*shape: int) -> torch.Tensor:
        return indices.new_empty(shape, dtype=torch.int32)

    most_segments = min(named.lists, entries) + entries // segment
    counts = indices.new_zeros((named.lists, chunk.tiles), dtype=torch.int32)
    # Not rows of one tensor: each begins at a multiple of 16 bytes then, whatever the number of lists, and a kernel is
    # compiled for that.
    totals, firsts, ends, extras = (whole(named.lists) for _ in range(4))
    ranks, perm, segments = whole(entries), whole(entries), whole(most_segments, 4)
    tokens = whole(chunk.tiles * named.tile_tokens)
    common = {"flag": flag, "WANTED": wanted}
    where = {
        "first_tile": chunk.first_tile,
        "n_tiles": chunk.tiles,
        "n_slots": slots,
        "NAMING": named.naming(named.tile_tokens),
    }
    kept = {"list_sizes": ListSizes(totals, firsts, ends, extras), "n_lists": named.lists}
    programs = chunk.tiles * named.heads
    counting = {"ranks": ranks, "counts": counts, "tokens": tokens, "ONCE": named.once, "num_warps": 4}
    placing = {"ranks": ranks, "counts": counts, "perm": perm, "segments": segments, "SEGMENT": segment, "num_warps": 4}
    adding = {"counts": counts, "totals": totals, "n_tiles": chunk.tiles, "BLOCK": 1024}
    emit(
        indices,
        Launch(nsa_index_count_kernel, programs, geometry | common | where | counting),
        Launch(nsa_index_tiles_kernel, named.lists, common | adding),
        Launch(nsa_index_lists_kernel, 1, common | kept | {"SEGMENT": segment, "BLOCK": 1024}),
        Launch(nsa_index_place_kernel, max(programs, named.lists), geometry | common | where | kept | placing),
    )
    return MadeLists(Lists(perm, segments, ends), extras, ranks, tokens, most_segments)


def make_unions(named: Named, tokens: int) -> Unions:
    """The unions of tiles of `tokens` tokens."""
    tiles = named.tile_slots(tokens)
    programs, entries = tiles * named.heads, tokens * named.slots_p
    blocks, bits = named.indices.new_empty((2, programs, entries), dtype=torch.int32)
    sizes = named.indices.new_empty((programs, 2), dtype=torch.int32)
    unions = Unions(blocks, bits, sizes)
    arguments = {"unions": unions, "n_tiles": tiles, "num_warps": 1 if entries <= 128 else 4}
    arguments |= named.geometry() | {"NAMING": named.naming(tokens)}
    emit(named.indices, Launch(nsa_index_union_kernel, programs, arguments))
    return unions


def faster_order(unions: Unions, direction: Literal["fwd", "dq"], slots: int, group: int) -> torch.Tensor:
    """UNION or LISTS, int32 on the device: the host does not wait for it."""
    return compute(_choose_order, unions.sizes, direction, slots, group, shape=(), dtype=torch.int32)


def _choose_order(sizes: torch.Tensor, direction: Literal["fwd", "dq"], slots: int, group: int) -> torch.Tensor:
    chosen: torch.Tensor = configs.in_query_order(direction, sizes[:, 0].sum(), sizes.shape[0], slots, group)
    return chosen.to(torch.int32)
