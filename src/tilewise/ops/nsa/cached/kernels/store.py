"""What new tokens leave in an NSACache: their rows, the windows that they complete, and at last the lengths.

Until the lengths are committed every kernel finds a sequence's new tokens behind them: nothing else says where a step
stands, so the host needs no length, and a step that raises before the end leaves the cache as it was.
Bytes: new rows once; of a window that ends, its rows once, those before the new tokens from the cache. They are added
up in order, as the means of native_sparse_attention are, so that these are the same bits, whatever the steps.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops._device.cached import SIZES, locate_rows, new_tokens
from tilewise.ops._device.windows import whole_windows


class Kept(NamedTuple):
    """Where one head of one sequence's keys or values lie: new ones from position `start` on, and those before."""

    new: Any
    p_new: Any
    cache: Any
    p_head: Any


@triton.jit
def store_new(kept, o_i, o_entry, o_row, m_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy new rows `o_i` to rows `o_row` of entries of the cache."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_row[:, None] & (o_d < D)[None, :]
    p_new = kept.p_new + o_i.to(tl.int64) * kept.new.strides.token
    p_row = kept.p_head + o_entry * kept.cache.strides.batch + o_row * kept.cache.strides.token
    # [R, D]
    b_x = tl.load(p_new[:, None] + o_d[None, :], mask=m_x, other=0.0)
    tl.store(p_row[:, None] + o_d[None, :], b_x, mask=m_x)


@triton.jit
def add_row(acc, kept, i_n, i_entry, i_row, m_row, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The row at position `i_n` added in fp32, where there is one: from `start` on it is new."""
    o_d = tl.arange(0, BLOCK_D)
    p_new = kept.p_new + tl.cast(i_n - start, tl.int64) * kept.new.strides.token
    p_row = kept.p_head + i_entry * kept.cache.strides.batch + i_row * kept.cache.strides.token
    # [D]
    return acc + tl.load(tl.where(i_n >= start, p_new, p_row) + o_d, mask=m_row & (o_d < D), other=0.0).to(tl.float32)


@triton.jit
def store_mean(x, i_b, i_c, i_h, acc, SIZE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """A window's mean from the sum of its rows, to its row of x."""
    o_d = tl.arange(0, BLOCK_D)
    p_x = (
        x.x
        + tl.cast(i_b, tl.int64) * x.strides.batch
        + tl.cast(i_c, tl.int64) * x.strides.token
        + tl.cast(i_h, tl.int64) * x.strides.head
    )
    tl.store(p_x + o_d, (acc / SIZE).to(x.x.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_write_kernel(
    k, v, k_cache, v_cache, k_cmp, v_cmp, sequences, n_new, n_tiles, n_heads, room, n_pages, width,
    WIDTHS: tl.constexpr, WINDOWS: tl.constexpr, PAGE: tl.constexpr, BLOCK_R: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of new tokens x KV heads x sequences.
    # Owns: BLOCK_R new tokens of one KV head.
    # Loops over: the windows that end among them, and their tokens in order, AT_ONCE on their way at a time.
    # Writes: its rows of the caches, but for those without room or a page; the means of these windows, unless k_cmp is
    # None.
    i_h = tl.program_id(0) % n_heads
    i_tile = tl.program_id(0) // n_heads % n_tiles
    i_b = tl.program_id(0) // n_heads // n_tiles
    start, end = new_tokens(sequences, i_b, n_new, room)
    i_r = i_tile * BLOCK_R
    i_hl = tl.cast(i_h, tl.int64)
    i_bl = tl.cast(i_b, tl.int64)
    p_k = k.x + (i_bl * k.strides.batch + i_hl * k.strides.head)
    p_v = v.x + (i_bl * v.strides.batch + i_hl * v.strides.head)
    keys = Kept(k, p_k, k_cache, k_cache.x + i_hl * k_cache.strides.head)
    values = Kept(v, p_v, v_cache, v_cache.x + i_hl * v_cache.strides.head)
    o_i = i_r + tl.arange(0, BLOCK_R)
    o_entry, o_row, m_r = locate_rows(sequences, i_b, start + o_i, start + o_i < end, n_pages, width, PAGE)
    store_new(keys, o_i, o_entry, o_row, m_r, WIDTHS.D, WIDTHS.BLOCK_D)
    store_new(values, o_i, o_entry, o_row, m_r, WIDTHS.DV, WIDTHS.BLOCK_DV)
    if k_cmp is not None:
        low = whole_windows(tl.minimum(start + i_r, end), WINDOWS.SIZE, WINDOWS.STRIDE)
        high = whole_windows(tl.minimum(start + i_r + BLOCK_R, end), WINDOWS.SIZE, WINDOWS.STRIDE)
        for i_c in range(low, high):
            acc_k = tl.full([WIDTHS.BLOCK_D], 0.0, tl.float32)
            acc_v = tl.full([WIDTHS.BLOCK_DV], 0.0, tl.float32)
            for i_w in range(0, WINDOWS.SIZE, AT_ONCE):
                for I in tl.static_range(AT_ONCE):
                    i_n = i_c * WINDOWS.STRIDE + i_w + I
                    m_w = i_w + I < WINDOWS.SIZE
                    i_entry, i_row, m_old = locate_rows(sequences, i_b, i_n, m_w & (i_n < start), n_pages, width, PAGE)
                    m_w = m_w & (m_old | (i_n >= start))
                    acc_k = add_row(acc_k, keys, i_n, i_entry, i_row, m_w, start, WIDTHS.D, WIDTHS.BLOCK_D)
                    acc_v = add_row(acc_v, values, i_n, i_entry, i_row, m_w, start, WIDTHS.DV, WIDTHS.BLOCK_DV)
            store_mean(k_cmp, i_b, i_c, i_h, acc_k, WINDOWS.SIZE, WIDTHS.D, WIDTHS.BLOCK_D)
            store_mean(v_cmp, i_b, i_c, i_h, acc_v, WINDOWS.SIZE, WIDTHS.DV, WIDTHS.BLOCK_DV)


@triton.jit
def copy_row(x, i_i, cache, i_b, i_c, i_h, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Row `i_i` of a sequence's compressed windows, to its row `i_c` of the cache."""
    o_d = tl.arange(0, BLOCK_D)
    i_bl = tl.cast(i_b, tl.int64)
    i_hl = tl.cast(i_h, tl.int64)
    p_x = x.x + (i_bl * x.strides.batch + tl.cast(i_i, tl.int64) * x.strides.token + i_hl * x.strides.head)
    p_row = i_bl * cache.strides.batch + tl.cast(i_c, tl.int64) * cache.strides.token + i_hl * cache.strides.head
    b_x = tl.load(p_x + o_d, mask=o_d < D, other=0.0)
    tl.store(cache.x + p_row + o_d, b_x.to(cache.x.dtype.element_ty), mask=o_d < D)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_windows_kernel(
    k, v, k_cmp, v_cmp, sequences, n_new, n_made, n_heads, room, WIDTHS: tl.constexpr, WINDOWS: tl.constexpr
):
    # Grid: KV heads x windows that may have been made of a sequence x sequences.
    # Owns: one window of one KV head.
    # Loops over: nothing.
    # Writes: its compressed key and value, where the window has become whole.
    i_h = tl.program_id(0) % n_heads
    i_i = tl.program_id(0) // n_heads % n_made
    i_b = tl.program_id(0) // n_heads // n_made
    start, end = new_tokens(sequences, i_b, n_new, room)
    i_c = whole_windows(start, WINDOWS.SIZE, WINDOWS.STRIDE) + i_i
    if i_c < whole_windows(end, WINDOWS.SIZE, WINDOWS.STRIDE):
        copy_row(k, i_i, k_cmp, i_b, i_c, i_h, WIDTHS.D, WIDTHS.BLOCK_D)
        copy_row(v, i_i, v_cmp, i_b, i_c, i_h, WIDTHS.DV, WIDTHS.BLOCK_DV)


@triton.jit(do_not_specialize=SIZES)
def nsa_cached_commit_kernel(
    sequences, flags, n_new, room, n_pages, width, PAGE: tl.constexpr, FULL: tl.constexpr, ASTRAY: tl.constexpr,
    BLOCK_P: tl.constexpr,
):  # fmt: skip
    # Grid: sequences.
    # Owns: one sequence.
    # Loops over: the pages of its new tokens, BLOCK_P at a time.
    # Writes: its length with the new tokens, and its flag.
    i_b = tl.program_id(0)
    start, end = new_tokens(sequences, i_b, n_new, room)
    count = n_new
    if sequences.counts is not None:
        count = tl.minimum(tl.maximum(tl.load(sequences.counts + i_b), 0), n_new).to(tl.int32)
    flag = tl.load(flags + i_b) | tl.where(end - start < count, FULL, 0)
    if PAGE is not None:
        p_table = sequences.table + tl.cast(i_b, tl.int64) * width
        for i_p in range(start // PAGE, (end + PAGE - 1) // PAGE, BLOCK_P):
            o_p = i_p + tl.arange(0, BLOCK_P)
            o_page = tl.load(p_table + o_p, mask=o_p < (end + PAGE - 1) // PAGE, other=0)
            astray = (o_page < 0) | (o_page >= n_pages)
            # With count 0 the range may hold the page behind the last token.
            flag |= tl.where((tl.max(astray.to(tl.int32), 0) > 0) & (start < end), ASTRAY, 0)
    tl.store(flags + i_b, flag)
    tl.store(sequences.lengths + i_b, end.to(tl.int64))
