"""Decoding over an NSACache: new tokens and where they stand, where keys lie, how windows are split."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Sizes that change from call to call: one kernel serves all of them.
SIZES = (
    "n_new", "n_piece", "first", "n_rows", "n_tiles", "n_made", "n_heads", "n_windows", "n_splits", "n_parts",
    "n_blocks", "room", "n_pages", "width", "window",
)  # fmt: skip


class Sequences(NamedTuple):
    """Lengths before the new tokens; how many of those are real, and where pages lie: each a pointer or None."""

    lengths: Any
    counts: Any
    table: Any


class Windows(NamedTuple):
    """Constants of windows: tokens in one, from one to the next, how many begin in a block."""

    SIZE: Any
    STRIDE: Any
    COUNT: Any


class Shape(NamedTuple):
    """Constants: channels, also padded to tiles; rows of tiles; query heads of a tile, of a KV head, and chunks of the
    latter; keys of a part; rows of a page (None: dense); the precision of products.
    """

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    HEADS: Any
    GROUP: Any
    CHUNKS: Any
    CHUNK: Any
    PAGE: Any
    PRECISION: Any


class Rule(NamedTuple):
    """Constants of how windows are split: into at most MOST splits of at least LEAST windows, multiples of TILE."""

    MOST: Any
    LEAST: Any
    TILE: Any


class Blocks(NamedTuple):
    """Constants of the selected blocks: tokens in one, how many there are, the parts that their keys make."""

    SIZE: Any
    COUNT: Any
    PARTS: Any


class Parts(NamedTuple):
    """Results of the parts: fp32 outputs [tokens, parts, query heads, DV] and LSEs [tokens, parts, query heads]."""

    o: Any
    lse: Any


class Token(NamedTuple):
    """A new token: its sequence, which of the new ones it is, its position, and 1 where it is there, else 0."""

    i_b: Any
    i_i: Any
    t: Any
    there: Any


@triton.jit
def new_tokens(sequences, i_b, n_new, room):
    """Position of the first token that comes to a sequence, and the end of those that there is room for."""
    start = tl.minimum(tl.maximum(tl.load(sequences.lengths + i_b), 0), room).to(tl.int32)
    count = n_new
    if sequences.counts is not None:
        count = tl.minimum(tl.maximum(tl.load(sequences.counts + i_b), 0), n_new).to(tl.int32)
    return start, start + tl.minimum(count, room - start)


@triton.jit
def locate_rows(sequences, i_b, o_n, m_n, n_pages, width, PAGE: tl.constexpr):
    """Entry and row of positions `o_n` of a sequence, whose row of the page table has `width` entries, and which
    exist.
    """
    if PAGE is None:
        o_row = tl.cast(o_n, tl.int64)
        o_entry = o_row * 0 + i_b
    else:
        p_page = sequences.table + (tl.cast(i_b, tl.int64) * width + o_n // PAGE)
        o_page = tl.load(p_page, mask=m_n, other=-1)
        m_n = m_n & (o_page >= 0) & (o_page < n_pages)
        o_entry = tl.cast(o_page, tl.int64)
        o_row = tl.cast(o_n % PAGE, tl.int64)
    return o_entry, o_row, m_n


@triton.jit
def locate_token(i_row, sequences, n_new, n_piece, first, room):
    """New token `i_row` of a launch, which has n_piece of each sequence's from `first` on."""
    i_b = i_row // n_piece
    i_i = first + i_row % n_piece
    start, end = new_tokens(sequences, i_b, n_new, room)
    return Token(i_b, i_i, start + i_i, (start + i_i < end).to(tl.int32))


@triton.jit
def split_windows(n_seen, RULE: tl.constexpr):
    """Windows of a split of so many, and how many splits there are: by the token's own number alone."""
    chunk = tl.maximum((n_seen + (RULE.MOST - 1)) // RULE.MOST, RULE.LEAST)
    chunk = (chunk + (RULE.TILE - 1)) // RULE.TILE * RULE.TILE
    return chunk, (n_seen + chunk - 1) // chunk
