"""What tokens name, grouped by blocks of keys (lists) or by tiles of queries (unions): launches of the
index kernels.
"""

from typing import NamedTuple

import torch

from tilewise.ops._host.launching import Launch, power_of_2
from tilewise.ops._host.packing import batch_size, pieces, tile_slots
from tilewise.ops._host.slot import compute
from tilewise.ops._host.template import emit
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.kernels_index import (
    nsa_index_count_kernel,
    nsa_index_lists_kernel,
    nsa_index_place_kernel,
    nsa_index_tiles_kernel,
    nsa_index_union_kernel,
)


class Named(NamedTuple):
    """Which blocks tokens name: contiguous int32 indices [.., T, H, S] of blocks of `block_size` keys, and `own` slots
    for the token's own stretch.

    `once` counts a block that a token names twice once.
    """

    indices: torch.Tensor
    cu: torch.Tensor | None
    block_size: int
    own: int
    once: bool

    @property
    def heads(self) -> int:
        """Index heads."""
        return self.indices.shape[-2]

    @property
    def slots(self) -> int:
        """Entries of one token and head."""
        return self.indices.shape[-1] + self.own

    @property
    def slots_p(self) -> int:
        """As tiles hold them."""
        return power_of_2(max(self.slots, 1))

    @property
    def tile_tokens(self) -> int:
        """Tokens whose entries are sorted together for the lists."""
        return max(1, configs.LIST_ENTRIES // self.slots_p)

    def tile_slots(self, tokens: int) -> int:
        """Tiles of so many tokens, of all sequences together."""
        sequences = 1 if self.cu is not None else self.indices.shape[0]
        return tile_slots(self.indices.shape[-3], tokens, self.cu) * sequences

    @property
    def lists(self) -> int:
        """One for each block and head."""
        return self.heads * self.tile_slots(self.block_size)

    def geometry(self) -> dict[str, object]:
        """The arguments that every index kernel takes."""
        return {
            "indices": self.indices,
            "cu": self.cu,
            "n_batch": batch_size(self.indices, self.cu),
            "n_tokens": self.indices.shape[-3],
            "n_heads": self.heads,
            "BLOCK_SIZE": self.block_size,
            "S": self.indices.shape[-1],
            "SLOTS_P": self.slots_p,
        }


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


class Lists(NamedTuple):
    """The entries of a chunk by block: `perm` holds them list by list; `segments` are pieces of lists,
    one a program.
    """

    perm: torch.Tensor
    segments: torch.Tensor
    ends: torch.Tensor
    extras: torch.Tensor
    ranks: torch.Tensor
    tokens: torch.Tensor
    most_segments: int


def make_lists(named: Named, chunk: Chunk, segment: int, flag: torch.Tensor | None, wanted: int) -> Lists:
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
        "OWN": named.own,
        "TOKENS": named.tile_tokens,
    }
    kept = {"totals": totals, "firsts": firsts, "ends": ends, "extras": extras, "n_lists": named.lists}
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
    return Lists(perm, segments, ends, extras, ranks, tokens, most_segments)


class Unions(NamedTuple):
    """The blocks of each tile of `tokens` tokens, from the last down, with a bit for each token; how many there are,
    and need a mask.
    """

    blocks: torch.Tensor
    bits: torch.Tensor
    sizes: torch.Tensor
    tokens: int


def make_unions(named: Named, tokens: int) -> Unions:
    """The unions of tiles of `tokens` tokens."""
    tiles = named.tile_slots(tokens)
    programs, entries = tiles * named.heads, tokens * named.slots_p
    blocks, bits = named.indices.new_empty((2, programs, entries), dtype=torch.int32)
    sizes = named.indices.new_empty((programs, 2), dtype=torch.int32)
    arguments = {
        "blocks": blocks,
        "bits": bits,
        "sizes": sizes,
        "n_tiles": tiles,
        "TOKENS": tokens,
        "num_warps": 1 if entries <= 128 else 4,
    }
    emit(named.indices, Launch(nsa_index_union_kernel, programs, named.geometry() | arguments))
    return Unions(blocks, bits, sizes, tokens)


def _only_blocks(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """A number that is no block must not become one when it is cut to 32 bits, or multiplied."""
    return torch.where((indices >= 0) & (indices < blocks), indices, -1).to(torch.int32)


def only_blocks(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """In 32 bits, with -1 in place of a number that is none of so many blocks."""
    return compute(_only_blocks, indices, blocks, shape=indices.shape, dtype=torch.int32)


def _cut_blocks(indices: torch.Tensor, parts: int) -> torch.Tensor:
    within = torch.arange(parts, dtype=torch.int32, device=indices.device)
    return torch.where(indices[..., None] >= 0, indices[..., None] * parts + within, -1).flatten(-2)


def cut_blocks(indices: torch.Tensor, parts: int) -> torch.Tensor:
    """Each block's parts in place of it, one after another."""
    return compute(
        _cut_blocks, indices, parts, shape=(*indices.shape[:-1], indices.shape[-1] * parts), dtype=torch.int32
    )


def repeat(x: torch.Tensor, times: int, axis: int) -> torch.Tensor:
    """Each along an axis so often, one after another."""
    shape = list(x.shape)
    shape[axis] *= times
    return compute(torch.repeat_interleave, x, times, axis, shape=shape, dtype=x.dtype)
