"""What tokens name, grouped by blocks of keys (lists) or by tiles of queries (unions): launches of the
index kernels.

One call of attention to named blocks: which blocks tokens name, and the tensors and numbers that go with them.
"""

from typing import Literal, NamedTuple

import torch

from tilewise.ops._device.blocks import Lists, ListSizes, Naming, Unions
from tilewise.ops._device.records import Offsets
from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import Launch, batch_size, pieces, power_of_2, tile_slots, tile_widths
from tilewise.ops._host.program import emit, note
from tilewise.ops._host.symbol import compute
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.selected.kernels.index import (
    nsa_index_count_kernel,
    nsa_index_lists_kernel,
    nsa_index_place_kernel,
    nsa_index_tiles_kernel,
    nsa_index_union_kernel,
)

# Entries are sorted by block and place as one 31-bit number.
MOST_BLOCKS = 2**31 - 1


class Named(NamedTuple):
    """Which blocks tokens name: contiguous int32 indices [.., T, H, S] of blocks of `block_size` keys, and `own` slots
    for the token's own stretch.

    `once` counts a block that a token names twice once. Where queries are a part of their sequences, `n_keys` rows of
    keys have offsets `cu_k` (None: as `cu`), and `first` is as in nsa.launch; n_keys is None where they are whole.
    """

    indices: torch.Tensor
    cu: torch.Tensor | None
    block_size: int
    own: int
    once: bool
    cu_k: torch.Tensor | None = None
    first: torch.Tensor | None = None
    n_keys: int | None = None

    @property
    def offsets(self) -> Offsets:
        """As kernels take them."""
        return Offsets(self.cu, self.cu_k, self.first)

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
        """Slots padded to tiles."""
        return power_of_2(max(self.slots, 1))

    @property
    def tile_tokens(self) -> int:
        """Tokens whose entries are sorted together for the lists."""
        return max(1, configs.LIST_ENTRIES // self.slots_p)

    @property
    def _sequences(self) -> int:
        return 1 if self.cu is not None else self.indices.shape[0]

    def tile_slots(self, tokens: int) -> int:
        """Tiles of this many tokens, of all sequences together."""
        return tile_slots(self.indices.shape[-3], tokens, self.cu) * self._sequences

    @property
    def block_slots(self) -> int:
        """Blocks of keys, of all sequences together."""
        if self.n_keys is None:
            return self.tile_slots(self.block_size)
        offsets = self.cu if self.cu_k is None else self.cu_k
        return tile_slots(self.n_keys, self.block_size, offsets) * self._sequences

    @property
    def lists(self) -> int:
        """One for each block and head."""
        return self.heads * self.block_slots

    def geometry(self) -> dict[str, object]:
        """The arguments that every index kernel takes."""
        return {
            "indices": self.indices,
            "cu": self.offsets,
            "n_batch": batch_size(self.indices, self.cu),
            "n_tokens": self.indices.shape[-3],
            "n_keys": self.n_keys,
            "n_heads": self.heads,
        }

    def naming(self, tokens: int) -> Naming:
        """The constants that they take, for tiles of this many tokens."""
        return Naming(self.block_size, self.indices.shape[-1], self.own, tokens, self.slots_p)


def _only_blocks(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """A number that is no block must not become one when it is truncated to 32 bits, or multiplied."""
    return torch.where((indices >= 0) & (indices < blocks), indices, -1).to(torch.int32).contiguous()


def only_blocks(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """In 32 bits, with -1 in place of a number that is not a block: below 0, or `blocks` or more."""
    return compute(_only_blocks, indices, blocks, shape=indices.shape, dtype=torch.int32)


def _cut_blocks(indices: torch.Tensor, parts: int) -> torch.Tensor:
    within = torch.arange(parts, dtype=torch.int32, device=indices.device)
    return torch.where(indices[..., None] >= 0, indices[..., None] * parts + within, -1).flatten(-2).contiguous()


def cut_blocks(indices: torch.Tensor, parts: int) -> torch.Tensor:
    """Each block replaced by its parts, in order."""
    return compute(
        _cut_blocks, indices, parts, shape=(*indices.shape[:-1], indices.shape[-1] * parts), dtype=torch.int32
    )


def repeat(x: torch.Tensor, times: int, axis: int) -> torch.Tensor:
    """Each element repeated along an axis, as `repeat_interleave`."""
    shape = list(x.shape)
    shape[axis] *= times
    return compute(torch.repeat_interleave, x, times, axis, shape=shape, dtype=x.dtype)


def check_blocks(tokens: int, block_size: int, parts: int, slots: int) -> int:
    """Blocks of this many tokens; a ValueError where they, cut into parts, are more than entries of `slots` a
    token can name.
    """
    blocks = -(-tokens // block_size)
    if blocks * parts >= MOST_BLOCKS // power_of_2(max(slots, configs.UNION_ENTRIES)):
        raise ValueError(
            f"block_size is {block_size} and there are {tokens} tokens: more blocks than the index can number; take"
            " larger blocks"
        )
    return blocks


def _why_key_order_only(plain: bool, group: int, tokens: int, slots: int) -> str:
    """Why the query order cannot serve: `tokens` of a tile that name `slots` blocks each, for a GQA group."""
    if not plain:
        reason = "own blocks or sel_scale"
    elif group == 1:
        reason = "one query head for each KV head"
    else:
        reason = f"{tokens} tokens of a tile with {slots} blocks each"
    return f"{reason}: key order only (lists)"


class Inputs(NamedTuple):
    """One call's tensors and numbers; `causal` limits every named block to the keys up to the token, else only the
    token's own stretch.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    named: Named
    sel_scale: torch.Tensor | None
    causal: bool
    scale: float

    @property
    def width(self) -> int:
        """The wider of the two channel counts, padded to tiles."""
        return max(tile_widths(self.q.shape[-1], self.v.shape[-1], self.q.element_size()))

    @property
    def group(self) -> int:
        """Query heads that share a choice."""
        return self.q.shape[-2] // self.named.heads

    @property
    def block_n(self) -> int:
        """Keys of one tile: a block, padded."""
        return max(16, power_of_2(self.named.block_size))

    def config(self, kernel: configs.Kernel) -> configs.Config:
        """The tiles of one kernel."""
        return configs.choose(kernel, self.width, self.q.element_size(), architecture(self.q.device))

    def union_tokens(self, kernel: configs.Kernel) -> int:
        """Tokens of one union, 0 where the query order cannot serve: a bit a token, entries compared in one tile, and
        more than one head a token.
        """
        group_p = power_of_2(self.group)
        tokens = self.config(kernel).block_m // group_p
        plain = self.named.own == 0 and self.sel_scale is None and self.causal
        if not plain or group_p == 1 or tokens > 32 or tokens * self.named.slots_p > configs.UNION_ENTRIES:
            note(self.q, _why_key_order_only, plain, group_p, tokens, self.named.slots)
            return 0
        return tokens


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
    sel_scale: torch.Tensor | None = None,
    own: bool = False,
    causal: bool = True,
    cu_k: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> Inputs:
    """Inputs as the kernels take them: a long block cut into parts that fit, a large group into separate index
    heads. Queries may be a part of their sequences where `causal`.
    """
    width, size = max(tile_widths(q.shape[-1], v.shape[-1], q.element_size())), q.element_size()
    parts = configs.parts_of_block(block_size, width, size, architecture(q.device))
    if parts == 0:
        raise ValueError(
            f"block_size is {block_size}: so many keys of {width} channels and {size} bytes fit no tile, nor can they"
            " be cut into equal parts of 16 or more that do; take a multiple of 16, or backend='reference'"
        )
    blocks = check_blocks(k.shape[-3], block_size, parts, indices.shape[-1] * parts + parts)
    if indices.dtype != torch.int32 or parts > 1:
        indices = only_blocks(indices, blocks)
    if parts > 1:
        indices = cut_blocks(indices, parts)
        sel_scale = None if sel_scale is None else repeat(sel_scale, parts, -1)
    group, most = q.shape[-2] // indices.shape[-2], configs.rows_a_token(width, size, architecture(q.device))
    if group > most:
        heads = next(n for n in range(1, group + 1) if group % n == 0 and group // n <= most)
        indices = repeat(indices, heads, -2)
        sel_scale = None if sel_scale is None else repeat(sel_scale, heads, -2)
    part = cu_k is not None or first is not None or k.shape[-3] != q.shape[-3]
    named = Named(indices.contiguous(), cu, block_size // parts, parts if own else 0, once=causal)
    if part:
        named = named._replace(cu_k=cu_k, first=first, n_keys=k.shape[-3])
    return Inputs(q, k, v, named, None if sel_scale is None else sel_scale.contiguous(), causal, scale)


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
    slots = named.block_slots

    def whole(*shape: int) -> torch.Tensor:
        return indices.new_empty(shape, dtype=torch.int32)

    most_segments = min(named.lists, entries) + entries // segment
    counts = indices.new_zeros((named.lists, chunk.tiles), dtype=torch.int32)
    # Not rows of one tensor: each begins at a multiple of 16 bytes then, for any number of lists, and a kernel is
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


def faster_order(unions: Unions, direction: Literal["fwd", "dq"], named: Named, group: int) -> torch.Tensor:
    """UNION or LISTS, int32 on the device: the host does not wait for it."""
    return compute(
        _choose_order, unions.sizes, direction, named.slots, group, named.block_size, shape=(), dtype=torch.int32
    )


def _choose_order(
    sizes: torch.Tensor, direction: Literal["fwd", "dq"], slots: int, group: int, block_size: int
) -> torch.Tensor:
    chosen: torch.Tensor = configs.in_query_order(
        direction, sizes[:, 0].sum(), sizes.shape[0], slots, group, block_size
    )
    return chosen.to(torch.int32)
