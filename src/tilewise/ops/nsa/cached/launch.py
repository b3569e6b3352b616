"""Decoding over an NSACache: what its steps launch. Plain tensors in and out; no autograd."""

from typing import Any, NamedTuple

import torch

from tilewise.ops._device.blocks import Widths
from tilewise.ops._device.cached import Blocks, Parts, Rule, Sequences, Shape, Windows
from tilewise.ops._device.choice import Choice
from tilewise.ops._device.records import Strided, Strides
from tilewise.ops._host import backend
from tilewise.ops._host.launching import Launch, padded_channels, power_of_2, strided, tile_widths
from tilewise.ops._host.program import Operation, emit
from tilewise.ops._host.symbol import plain
from tilewise.ops.flash.decode import configs as dense
from tilewise.ops.flash.decode.launch import LOG2E
from tilewise.ops.nsa.cached.kernels.attend import (
    nsa_cached_attend_kernel,
    nsa_cached_choose_kernel,
    nsa_cached_importance_kernel,
    nsa_cached_scores_kernel,
)
from tilewise.ops.nsa.cached.kernels.combine import nsa_cached_combine_kernel
from tilewise.ops.nsa.cached.kernels.store import (
    nsa_cached_commit_kernel,
    nsa_cached_windows_kernel,
    nsa_cached_write_kernel,
)
from tilewise.ops.nsa.cached.stored import ASTRAY, FULL, Stored
from tilewise.ops.nsa.choose.launch import LEAST_BLOCKS
from tilewise.ops.nsa.problem import Sizes, window_count

# New tokens that a program stores; rows of a window that it waits for at a time; pages that one looks at.
WRITTEN = 16
AT_ONCE = 16
PAGES = 1024
# Windows of a split, at least: its output in fp32 then moves a sixteenth of the bytes of its keys and values, and one
# long sequence with 4 KV heads still fills a large GPU.
LEAST_WINDOWS = 256
# Selected or near keys of a part.
CHUNK = 128
# Blocks, query heads and splits that a program weighs at a time; parts that one merges.
WEIGHED, WEIGHED_HEADS, WEIGHED_SPLITS = 64, 16, 32
MERGED = 16
# Blocks that are chosen from at a time, at most: those of a million tokens, for what does not fit is read again for
# every bit of a score; and how many one warp holds.
MOST_BLOCKS, HELD_BLOCKS = 16384, 512
# Bytes that scores and parts of the tokens of one launch may take: more new tokens are processed in chunks.
MOST_BYTES = 256 << 20

Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


class Layout(NamedTuple):
    """Parts of one token: splits of its windows, parts of its selected keys and of its window."""

    splits: int
    selected: int
    near: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.splits + self.selected + self.near


def _sequences(stored: Stored, counts: torch.Tensor | None) -> Sequences:
    return Sequences(stored.lengths, counts, stored.table)


def _windows(sizes: Sizes) -> Windows:
    return Windows(sizes.compress_size, sizes.compress_stride, sizes.block_size // sizes.compress_stride)


def _table_width(stored: Stored) -> int:
    return 0 if stored.table is None else stored.table.stride(0)


def _paging(stored: Stored) -> dict[str, int | None]:
    return {"n_pages": stored.k.shape[0], "width": _table_width(stored), "PAGE": plain(stored.page)}


def _widths(stored: Stored) -> Widths:
    channels, values = plain((stored.k.shape[-1], stored.v.shape[-1]))
    return Widths(channels, values, padded_channels(channels), padded_channels(values))


def plan_write(
    stored: Stored, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None, sizes: Sizes, means: bool
) -> None:
    """Store new tokens behind those there are, and with `means` the means of the windows that they complete."""
    batch, new, heads, _ = k.shape
    sizes = plain(sizes)
    tiles = -(-new // WRITTEN)
    arguments = {
        "k": strided(k),
        "v": strided(v),
        "k_cache": strided(stored.k),
        "v_cache": strided(stored.v),
        "k_cmp": strided(stored.k_cmp) if means else None,
        "v_cmp": strided(stored.v_cmp) if means else None,
        "sequences": _sequences(stored, counts),
        "n_new": new,
        "n_tiles": tiles,
        "n_heads": heads,
        "room": stored.room,
        "WIDTHS": _widths(stored),
        "WINDOWS": _windows(sizes),
        "BLOCK_R": WRITTEN,
        "AT_ONCE": min(power_of_2(sizes.compress_size), AT_ONCE),
        "num_warps": 1,
        "enable_fp_fusion": True,
    }
    emit(k, Launch(nsa_cached_write_kernel, tiles * heads * batch, arguments | _paging(stored)))


def plan_store_windows(
    stored: Stored, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None, sizes: Sizes, new: int
) -> None:
    """Store compressed keys and values of the windows that `new` tokens may complete, [B, C', Hk, ·], where they do."""
    batch, made, heads, _ = k.shape
    arguments = {
        "k": strided(k),
        "v": strided(v),
        "k_cmp": strided(stored.k_cmp),
        "v_cmp": strided(stored.v_cmp),
        "sequences": _sequences(stored, counts),
        "n_new": new,
        "n_made": made,
        "n_heads": heads,
        "room": stored.room,
        "WIDTHS": _widths(stored),
        "WINDOWS": _windows(plain(sizes)),
        "num_warps": 1,
    }
    emit(k, Launch(nsa_cached_windows_kernel, batch * made * heads, arguments))


def plan_commit(stored: Stored, counts: torch.Tensor | None, new: int) -> None:
    """Count the new tokens in, and flag what could not be stored."""
    arguments = {
        "sequences": _sequences(stored, counts),
        "flags": stored.flags,
        "n_new": new,
        "room": stored.room,
        "FULL": FULL,
        "ASTRAY": ASTRAY,
        "BLOCK_P": PAGES,
        "num_warps": 1,
    }
    emit(stored.k, Launch(nsa_cached_commit_kernel, stored.lengths.shape[0], arguments | _paging(stored)))


def _shape(stored: Stored, group: int) -> tuple[Shape, dense.Config]:
    """The constants of a step's kernels: the tiles that dense decoding takes, with one token in each."""
    channels, values = plain((stored.k.shape[-1], stored.v.shape[-1]))
    size = stored.k.element_size()
    config = dense.choose(group, channels, values, size, backend.architecture(stored.k.device))
    heads = dense.heads_of_a_tile(group, config.block_m)
    block_d, block_dv = tile_widths(channels, values, size)
    shape = Shape(
        D=channels,
        DV=values,
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        HEADS=heads,
        GROUP=group,
        CHUNKS=group // heads,
        CHUNK=CHUNK,
        PAGE=plain(stored.page),
        PRECISION="tf32x3" if stored.k.dtype == torch.float32 else "ieee",
    )
    return shape, config


def _rule(kv_heads: int, group: int, block_n: int) -> Rule:
    return Rule(max(1, dense.WORK // (kv_heads * -(-group // 16))), LEAST_WINDOWS, block_n)


def layout(stored: Stored, gates: Gates, heads: int, sizes: Sizes, window: int) -> Layout:
    """The most parts that a token can have in a cache of this room."""
    g_cmp, g_slc, g_swa = gates
    kv_heads, room = stored.k.shape[-2], stored.room
    rule = _rule(kv_heads, heads // kv_heads, 1)
    windows = window_count(room, sizes.compress_size, sizes.compress_stride)
    splits = min(rule.MOST, -(-windows // LEAST_WINDOWS))
    blocks = min(sizes.block_count, -(-room // sizes.block_size))
    return Layout(
        0 if g_cmp is None and g_slc is None else splits,
        0 if g_slc is None else -(-blocks * sizes.block_size // CHUNK),
        0 if g_swa is None else -(-min(window, room) // CHUNK),
    )


def chunk_of(stored: Stored, gates: Gates, q: torch.Tensor, sizes: Sizes, window: int) -> int:
    """New tokens of each sequence that one launch may take."""
    batch, new, heads, _ = q.shape
    windows = stored.k_cmp.shape[1] if gates[1] is not None else 0
    a_row = 4 * (windows + layout(stored, gates, heads, sizes, window).total * (stored.v.shape[-1] + 1))
    return min(new, max(1, MOST_BYTES // (batch * heads * a_row + 1)))


def plan_attend(
    stored: Stored,
    q: torch.Tensor,
    gates: Gates,
    counts: torch.Tensor | None,
    o: torch.Tensor,
    indices: torch.Tensor | None,
    sizes: Sizes,
    window: int,
    scale: float,
    first: int,
    piece: int,
) -> None:
    """From new tokens `first` to `first + piece` of each sequence, which are written: their rows of o [B, n, Hq, Dv],
    and of indices [B, n, Hk, block_count].
    """
    batch, new, heads, _ = q.shape
    sizes, heads, kv_heads = plain(sizes), plain(heads), plain(stored.k.shape[-2])
    g_cmp, g_slc, g_swa = gates
    group = heads // kv_heads
    shape, config = _shape(stored, group)
    rule = _rule(kv_heads, group, config.block_n)
    parts_of = layout(stored, gates, heads, sizes, window)
    windows, tokens = stored.k_cmp.shape[1], batch * piece
    rows = tokens * parts_of.total * heads
    parts = Parts(
        q.new_empty((rows, shape.DV), dtype=torch.float32),
        q.new_empty((rows,), dtype=torch.float32),
    )
    scores = q.new_empty((tokens * windows * heads,), dtype=torch.float32) if g_slc is not None else None
    shared = {
        "sequences": _sequences(stored, counts),
        "n_new": new,
        "n_piece": piece,
        "first": first,
        "n_heads": heads,
        "room": stored.room,
        "enable_fp_fusion": True,
    }
    splitting = {"n_parts": parts_of.total, "SHAPE": shape, "RULE": rule, "WINDOWS": _windows(sizes)}
    products = {
        "q": strided(q),
        "parts": parts,
        "n_rows": tokens,
        "scale_log2": scale * LOG2E,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    tiles = tokens * heads // shape.HEADS
    if parts_of.splits:
        scoring = {
            "k_cmp": strided(stored.k_cmp),
            "v_cmp": None if g_cmp is None else strided(stored.v_cmp),
            "scores": scores,
            "n_windows": windows,
        }
        arguments = shared | splitting | products | scoring
        emit(q, Launch(nsa_cached_scores_kernel, tiles * parts_of.splits, arguments))
    if indices is not None:
        weighing = shared | splitting | {"scores": scores, "parts_lse": parts.lse, "n_windows": windows}
        _emit_choice(q, weighing, group, sizes, stored.room, indices, tokens * kv_heads)
    if parts_of.selected + parts_of.near:
        attending = {
            "k": strided(stored.k),
            "v": strided(stored.v),
            "chosen": indices,
            "n_splits": parts_of.splits,
            "n_parts": parts_of.total,
            "n_pages": stored.k.shape[0],
            "width": _table_width(stored),
            "window": min(window, stored.room),
            "SHAPE": shape,
            "BLOCKS": Blocks(sizes.block_size, sizes.block_count, plain(parts_of.selected)),
        }
        arguments = shared | products | attending
        emit(q, Launch(nsa_cached_attend_kernel, tiles * (parts_of.selected + parts_of.near), arguments))
    combining = {
        "parts": parts,
        "o": o,
        "g_cmp": _gate(g_cmp),
        "g_slc": _gate(g_slc),
        "g_swa": _gate(g_swa),
        "n_splits": parts_of.splits,
        "SELECTED": plain(parts_of.selected),
        "BLOCK_S": MERGED,
    }
    emit(q, Launch(nsa_cached_combine_kernel, tokens * heads, shared | splitting | combining))


def _gate(gate: torch.Tensor | None) -> Strided | None:
    return None if gate is None else Strided(gate, Strides(*gate.stride()))


def _emit_choice(
    q: torch.Tensor, weighing: dict[str, Any], group: int, sizes: Sizes, room: int, indices: torch.Tensor, rows: int
) -> None:
    """What each block weighs, of `rows` tokens and KV heads, and the best of them."""
    n_blocks = -(-room // sizes.block_size)
    tiles, block = -(-n_blocks // WEIGHED), min(max(plain(power_of_2(n_blocks)), LEAST_BLOCKS), MOST_BLOCKS)
    importance = q.new_empty((rows * n_blocks,), dtype=torch.float32)
    weighing = weighing | {
        "importance": importance,
        "n_blocks": n_blocks,
        "n_tiles": tiles,
        "BLOCK_J": WEIGHED,
        "BLOCK_G": min(power_of_2(group), WEIGHED_HEADS),
        "BLOCK_S": WEIGHED_SPLITS,
    }
    choice = Choice(
        BLOCK_SIZE=sizes.block_size,
        COUNT=sizes.block_count,
        COUNT_P=power_of_2(sizes.block_count),
        INIT=sizes.init_blocks,
        LOCAL=sizes.local_blocks,
        PLANES=1,
        BLOCK=block,
        WHOLE=n_blocks <= block,
    )
    names = ("sequences", "n_new", "n_piece", "first", "room", "n_blocks", "enable_fp_fusion")
    choosing = {name: weighing[name] for name in names} | {
        "importance": importance,
        "indices": indices,
        "n_heads": indices.shape[2],
        "CHOICE": choice,
        "num_warps": min(max(block // HELD_BLOCKS, 1), 16),
    }
    emit(
        q,
        Launch(nsa_cached_importance_kernel, rows * tiles, weighing),
        Launch(nsa_cached_choose_kernel, rows, choosing),
    )


write, store_windows = Operation(plan_write), Operation(plan_store_windows)
commit, attend = Operation(plan_commit), Operation(plan_attend)
