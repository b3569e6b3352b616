"""Attention over a cache, for any GPU that Triton supports: append, attend by splits of the keys, merge.

Tile plan. A tile of queries packs TOKENS tokens with HEADS of the query heads that share a KV head: K and V are read
once for all of them. An entry's keys are cut into splits by its own numbers alone (`split_keys`); a program owns one
tile and one split and keeps Q on chip, while K and V tiles of BLOCK_N rows stream through. Where an entry has one split
its output is written at once, else each split's in fp32 with its LSE, and the merge adds them up in order.
Operations: 2 · BLOCK_M · BLOCK_N · (D + Dv) a step. Bytes from memory: K and V once for each tile of queries, from the
L2 cache for all but the first; of a split also its rows' output in fp32, written and read, at most a sixteenth of K and
V (`configs.KEYS_A_ROW`). On chip: stages · BLOCK_N · (D + Dv) elements of shared memory, BLOCK_M · (Dv + BLOCK_N) fp32
in registers.

Lengths, padding and pages are read on the device: a program behind its entry's end stops at once, and what lies out of
range counts as absent.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra import cuda

from tilewise.ops._device.records import Rows, Window
from tilewise.ops._device.rows import load_rows, locate_slot, sequence_bounds
from tilewise.ops._device.scores import add_sink, cap_scores, keep, key_range, online_softmax_step, softmax_finish

# Sizes that change from call to call: one kernel serves all of them, whether 1, multiples of 16 or neither.
SIZES = (
    "n_batch", "n_slots", "n_splits", "n_heads", "n_queries", "n_keys", "n_pages", "added", 
    "n_rows", "n_new", "first",
)  # fmt: skip


class Cache(NamedTuple):
    """Which keys exist: offsets of packed ones, lengths and left padding of entries, pages; each a pointer or None."""

    cu: Any
    lengths: Any
    leftpad: Any
    table: Any


class Parts(NamedTuple):
    """Results of the splits, in fp32: outputs [rows, DV] and LSEs [rows]; None where there is one split. A row's splits
    lie Tq * heads apart, in a region that its entry owns: so many rows an entry, and so many a query of all entries.
    """

    o: Any
    lse: Any
    by_entry: Any
    by_query: Any


class Shape(NamedTuple):
    """Constants: channels, also padded to tiles; rows of tiles, and the tokens and query heads that they pack; query
    heads of a KV head, chunks of them, rows of a page (None: dense), whether every key tile is masked, the sign of
    the scale, the precision of products.
    """

    D: Any
    DV: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BLOCK_M: Any
    BLOCK_N: Any
    TOKENS: Any
    HEADS: Any
    GROUP: Any
    CHUNKS: Any
    PAGE: Any
    MASKED: Any
    SIGN: Any
    PRECISION: Any


class Rule(NamedTuple):
    """Constants of how keys are split. GIVEN: into so many parts. None: for at most TOKENS queries, into as many as
    make WORK tiles of 16 rows of all KV_HEADS, or ENOUGH of them where splits would be shorter than LONG; each of at
    least LEAST keys for up to 16 rows of a KV head, and of KEYS_A_ROW for each row of more.
    """

    GIVEN: Any
    TOKENS: Any
    KV_HEADS: Any
    WORK: Any
    ENOUGH: Any
    LONG: Any
    LEAST: Any
    KEYS_A_ROW: Any


class Splits(NamedTuple):
    """An entry's splits: the first one's first key, keys in each, how many there are."""

    low: Any
    chunk: Any
    count: Any


class Entry(NamedTuple):
    """An entry's keys: in packed ones the first row of all; the first that exists, and their end."""

    start: Any
    first: Any
    end: Any


class Keys(NamedTuple):
    """Keys or values of one head of one entry: its rows, those before `first` and what lies in pages out of range
    left out.
    """

    rows: Any
    first: Any
    p_table: Any
    n_pages: Any


@triton.jit
def locate_keys(cache, i_b, n_keys, added):
    """The keys of entry `i_b`, within n_keys whatever memory says."""
    start = i_b * 0
    end = tl.minimum(added, n_keys)
    if cache.cu is not None:
        start, end = sequence_bounds(cache.cu, i_b, n_keys)
    if cache.lengths is not None:
        used = tl.minimum(tl.maximum(tl.load(cache.lengths + i_b), 0), n_keys).to(tl.int32)
        end = used + tl.minimum(added, n_keys - used)
    first = end * 0
    if cache.leftpad is not None:
        first = tl.minimum(tl.maximum(tl.load(cache.leftpad + i_b), 0), end).to(tl.int32)
    return Entry(start, first, end)


@triton.jit
def split_keys(n_queries, keys, left, SHAPE: tl.constexpr, RULE: tl.constexpr):
    """How the keys that an entry's queries see are split: by its own numbers alone, so that results do not depend on
    the batch.
    """
    BLOCK_N: tl.constexpr = SHAPE.BLOCK_N
    low = keys.first
    if left is not None:
        low = tl.minimum(tl.maximum(low, keys.end - n_queries - left), keys.end)
    low = low // BLOCK_N * BLOCK_N
    # Of more queries, which are not split, as many would overflow below.
    rows = tl.minimum(n_queries, RULE.TOKENS) * SHAPE.GROUP
    n_seen = keys.end - low
    if RULE.GIVEN is not None:
        most = rows * 0 + RULE.GIVEN
        least = rows * 0 + BLOCK_N
    else:
        tiles = RULE.KV_HEADS * tl.maximum(tl.cdiv(rows, 16), 1)
        most = tl.where(n_queries <= RULE.TOKENS, tl.maximum(RULE.WORK // tiles, 1), 1)
        least = tl.where(rows <= 16, RULE.LEAST, rows * RULE.KEYS_A_ROW)
        least = tl.maximum(least, tl.minimum(tl.cdiv(n_seen, tl.maximum(RULE.ENOUGH // tiles, 1)), RULE.LONG))
    chunk = tl.cdiv(tl.maximum(tl.cdiv(n_seen, most), least), BLOCK_N) * BLOCK_N
    return Splits(low, chunk, tl.maximum(tl.cdiv(n_seen, chunk), 1))


@triton.jit
def page_of(keys, i_n, PAGE: tl.constexpr):
    """The page that key `i_n` lies in; -1 where there is none, or its number is out of range."""
    page = tl.load(keys.p_table + i_n // PAGE, mask=i_n < keys.rows.n_rows, other=-1)
    return tl.where((page >= 0) & (page < keys.n_pages), page, -1).to(tl.int32)


@triton.jit
def load_keys(keys, i_n, D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr):
    """Rows `i_n .. i_n + BLOCK_N` of keys or values as [BLOCK_N, BLOCK_D], 0 where there is none; and which exist."""
    o_n = i_n + tl.arange(0, BLOCK_N)
    m_n = (o_n >= keys.first) & (o_n < keys.rows.n_rows)
    strides = keys.rows.strides
    p_head = keys.rows.x + tl.cast(keys.rows.i_h, tl.int64) * strides.head
    if PAGE is None:
        p_head += (
            tl.cast(keys.rows.i_b, tl.int64) * strides.batch
            + (keys.rows.start + tl.cast(i_n, tl.int64)) * strides.token
        )
        p_rows = p_head + tl.arange(0, BLOCK_N).to(tl.int64) * strides.token
    elif PAGE % BLOCK_N == 0 or BLOCK_N % PAGE == 0:
        # The tile lies in one page, or is some whole ones: a number each, which costs less than one for each row.
        o_page = page_of(keys, i_n, PAGE)
        for P in tl.static_range(1, BLOCK_N // PAGE):
            o_page = tl.where(tl.arange(0, BLOCK_N) // PAGE < P, o_page, page_of(keys, i_n + P * PAGE, PAGE))
        m_n = m_n & (o_page >= 0)
        row = tl.cast(i_n % PAGE, tl.int64) + tl.arange(0, BLOCK_N) % PAGE
        p_rows = p_head + (o_page.to(tl.int64) * strides.batch + row * strides.token)
    else:
        o_page = page_of(keys, o_n, PAGE)
        m_n = m_n & (o_page >= 0)
        p_rows = p_head + (o_page.to(tl.int64) * strides.batch + (o_n % PAGE).to(tl.int64) * strides.token)
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_n[:, None]
    if D != BLOCK_D:
        m_x = m_x & (o_d < D)[None, :]
    return tl.load(p_rows[:, None] + o_d[None, :], mask=m_x, other=0.0), m_n


@triton.jit
def flash_decode_step(
    b_q, acc, m, l, o_t, k_keys, v_keys, i_n, window, scales, SHAPE: tl.constexpr, MASKED: tl.constexpr
):
    """One key tile: scores, online softmax, sum with the values."""
    # [N, D]
    if MASKED:
        b_k, m_n = load_keys(k_keys, i_n, SHAPE.D, SHAPE.BLOCK_N, SHAPE.BLOCK_D, SHAPE.PAGE)
    else:
        b_k = load_rows(k_keys.rows, i_n, SHAPE.D, SHAPE.BLOCK_N, SHAPE.BLOCK_D, False, True)
    # [M, D] @ [D, N] -> [M, N]
    b_s = cap_scores(tl.dot(b_q, tl.trans(b_k), input_precision=SHAPE.PRECISION), scales.score_scale)
    if MASKED:
        o_n = i_n + tl.arange(0, SHAPE.BLOCK_N)
        m_keep = keep(o_t[:, None], o_n[None, :], k_keys.rows.n_rows, window) & m_n[None, :]
        b_s = tl.where(m_keep, b_s, float("-inf"))
    b_p, m, l, rescale = online_softmax_step(b_s, m, l, scales.scale_log2, MASKED)
    # [N, DV]
    if MASKED:
        b_v, _ = load_keys(v_keys, i_n, SHAPE.DV, SHAPE.BLOCK_N, SHAPE.BLOCK_DV, SHAPE.PAGE)
    else:
        b_v = load_rows(v_keys.rows, i_n, SHAPE.DV, SHAPE.BLOCK_N, SHAPE.BLOCK_DV, False, True)
    # [M, N] @ [N, DV] -> [M, DV]
    acc = tl.dot(b_p.to(b_v.dtype), b_v, acc * rescale[:, None], input_precision=SHAPE.PRECISION)
    return acc, m, l


@triton.jit(do_not_specialize=SIZES)
def flash_decode_kernel(
    q, k, v, o, lse, parts, cache, cu_q, sinks, n_batch, n_slots, n_heads, n_queries, n_keys, n_pages, added, limits,
    scales, SHAPE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    # Grid: chunks of a group x KV heads x query tiles of all entries x splits, in one axis.
    # Owns: one split of the keys for TOKENS queries with HEADS of a KV head's query heads.
    # Loops over: the key tiles of the split that its window reaches.
    # Writes: its rows of o and lse; where its entry has several splits, of their parts.
    i_h = tl.program_id(0) % (n_heads // SHAPE.HEADS)
    i_slot = tl.program_id(0) // (n_heads // SHAPE.HEADS) % n_slots
    i_split = tl.program_id(0) // (n_heads // SHAPE.HEADS) // n_slots
    if cu_q is None and limits.right is not None:
        # Under a causal mask the last tile is the longest.
        i_slot = n_slots - 1 - i_slot
    i_b, i_tile, start, Tq = locate_slot(i_slot, cu_q, n_batch, n_queries, SHAPE.TOKENS)
    i_t = i_tile * SHAPE.TOKENS
    keys = locate_keys(cache, i_b, n_keys, added)
    splits = split_keys(Tq, keys, limits.left, SHAPE, RULE)
    if (i_t < Tq) & (i_split < splits.count):
        i_bq = i_b
        start_q = start
        if cu_q is None:
            start_q = 0
        else:
            i_bq = 0
        # Row r is token r // HEADS with head r % HEADS of the chunk.
        o_r = tl.arange(0, SHAPE.BLOCK_M)
        o_t = i_t + o_r // SHAPE.HEADS
        o_h = (i_h * SHAPE.HEADS + o_r % SHAPE.HEADS).to(tl.int64)
        m_r = (o_r < SHAPE.TOKENS * SHAPE.HEADS) & (o_t < Tq)
        o_token = (start_q + o_t).to(tl.int64)
        # [M, D]
        p_q = q.x + (tl.cast(i_bq, tl.int64) * q.strides.batch + o_token * q.strides.token + o_h * q.strides.head)
        o_d = tl.arange(0, SHAPE.BLOCK_D)
        b_q = tl.load(p_q[:, None] + o_d[None, :], mask=m_r[:, None] & (o_d < SHAPE.D)[None, :], other=0.0)
        if SHAPE.SIGN != 1:
            # The row maximum is taken before scaling, which needs a positive scale: its sign (or 0) goes into q.
            b_q = (b_q * SHAPE.SIGN).to(b_q.dtype)
        m = tl.full([SHAPE.BLOCK_M], float("-inf"), tl.float32)
        l = tl.full([SHAPE.BLOCK_M], 0.0, tl.float32)
        acc = tl.full([SHAPE.BLOCK_M, SHAPE.BLOCK_DV], 0.0, tl.float32)
        p_table = cache.table
        if SHAPE.PAGE is not None:
            p_table += tl.cast(i_b, tl.int64) * (n_keys // SHAPE.PAGE)
        i_hk = i_h // SHAPE.CHUNKS
        k_keys = Keys(Rows(k.x, k.strides, i_b, i_hk, keys.start, keys.end), keys.first, p_table, n_pages)
        v_keys = Keys(Rows(v.x, v.strides, i_b, i_hk, keys.start, keys.end), keys.first, p_table, n_pages)
        window = Window(limits.left, limits.right, keys.end - Tq)
        runs = key_range(i_t, keys.end, window, SHAPE.TOKENS, SHAPE.BLOCK_N)
        low = splits.low + i_split * splits.chunk
        high = low + splits.chunk
        # Tiles that hold left padding are masked.
        padded = (keys.first + SHAPE.BLOCK_N - 1) // SHAPE.BLOCK_N * SHAPE.BLOCK_N
        for RUN in tl.static_range(3):
            # One loop has one pipeline to fill: where masks cost little, all tiles are masked.
            if RUN == 0 or not SHAPE.MASKED:
                i_low = tl.maximum(runs[RUN], low)
                i_high = runs[RUN + 1]
                if SHAPE.MASKED:
                    i_high = runs.high
                elif RUN == 0:
                    i_high = tl.maximum(i_high, tl.minimum(padded, runs.high))
                else:
                    i_low = tl.maximum(i_low, padded)
                for i_n in range(i_low, tl.minimum(i_high, high), SHAPE.BLOCK_N):
                    acc, m, l = flash_decode_step(
                        b_q, acc, m, l, o_t, k_keys, v_keys, i_n, window, scales, SHAPE, RUN != 1 or SHAPE.MASKED
                    )
        if sinks is not None:
            # One more logit, without a value, in the first split alone.
            b_sink = tl.load(sinks + o_h, mask=m_r & (i_split == 0), other=float("-inf"))
            m, l, rescale = add_sink(m, l, b_sink)
            acc = acc * rescale[:, None]
        b_o, b_lse = softmax_finish(acc, m, l, sinks is not None)
        o_dv = tl.arange(0, SHAPE.BLOCK_DV)
        m_o = m_r[:, None] & (o_dv < SHAPE.DV)[None, :]
        if splits.count == 1:
            p_o = o.x + (tl.cast(i_bq, tl.int64) * o.strides.batch + o_token * o.strides.token + o_h * o.strides.head)
            tl.store(p_o[:, None] + o_dv[None, :], b_o.to(o.x.dtype.element_ty), mask=m_o)
            tl.store(lse + ((tl.cast(i_bq, tl.int64) * n_heads + o_h) * n_queries + o_token), b_lse, mask=m_r)
        elif parts.o is not None:
            region = tl.cast(i_b, tl.int64) * parts.by_entry + tl.cast(start_q, tl.int64) * parts.by_query
            o_part = region + (tl.cast(i_split, tl.int64) * n_heads + o_h) * Tq + o_t
            tl.store(parts.o + (o_part[:, None] * SHAPE.DV + o_dv[None, :]), b_o, mask=m_o)
            tl.store(parts.lse + o_part, b_lse, mask=m_r)


@triton.jit(do_not_specialize=SIZES)
def flash_decode_merge_kernel(
    parts, o, lse, cache, cu_q, n_batch, n_heads, n_queries, n_keys, added, limits,
    SHAPE: tl.constexpr, RULE: tl.constexpr, BLOCK_S: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    # Grid: query heads x queries.
    # Owns: one row of o.
    # Loops over: its entry's splits, BLOCK_S at a time, in order.
    # Writes: its row of o and lse; nothing where there is one split, which has written them.
    i_h = tl.program_id(0) % n_heads
    i_b, i_t, start, Tq = locate_slot(tl.program_id(0) // n_heads, cu_q, n_batch, n_queries, 1)
    # Lengths were there before the splits began.
    keys = locate_keys(cache, i_b, n_keys, added)
    splits = split_keys(Tq, keys, limits.left, SHAPE, RULE)
    if EARLY:
        # It is launched while the last splits still run.
        cuda.gdc_wait()
    if (i_t < Tq) & (splits.count > 1):
        i_bq = i_b
        start_q = start
        if cu_q is None:
            start_q = 0
        else:
            i_bq = 0
        region = tl.cast(i_b, tl.int64) * parts.by_entry + tl.cast(start_q, tl.int64) * parts.by_query
        o_s = tl.arange(0, BLOCK_S)
        o_dv = tl.arange(0, SHAPE.BLOCK_DV)
        m = tl.full([], float("-inf"), tl.float32)
        l = tl.full([], 0.0, tl.float32)
        acc = tl.full([SHAPE.BLOCK_DV], 0.0, tl.float32)
        for i_s in range(0, splits.count, BLOCK_S):
            m_s = i_s + o_s < splits.count
            o_part = region + ((i_s + o_s).to(tl.int64) * n_heads + i_h) * Tq + i_t
            b_lse = tl.load(parts.lse + o_part, mask=m_s, other=float("-inf"))
            # [S, DV]
            p_o = parts.o + (o_part[:, None] * SHAPE.DV + o_dv[None, :])
            b_o = tl.load(p_o, mask=m_s[:, None] & (o_dv < SHAPE.DV)[None, :], other=0.0)
            b_m = tl.maximum(m, tl.max(b_lse, 0))
            shift = tl.where(b_m == float("-inf"), 0.0, b_m)
            rescale = tl.exp2((m - shift) * 1.4426950408889634)
            b_w = tl.exp2((b_lse - shift) * 1.4426950408889634)
            l = l * rescale + tl.sum(b_w, 0)
            acc = acc * rescale + tl.sum(b_w[:, None] * b_o, 0)
            m = b_m
        seen = l != 0.0
        l = tl.where(seen, l, 1.0)
        o_token = tl.cast(start_q + i_t, tl.int64)
        o_h = tl.cast(i_h, tl.int64)
        p_o = o.x + (tl.cast(i_bq, tl.int64) * o.strides.batch + o_token * o.strides.token + o_h * o.strides.head)
        tl.store(p_o + o_dv, (acc / l).to(o.x.dtype.element_ty), mask=o_dv < SHAPE.DV)
        b_lse = tl.where(seen, m + tl.log2(l) * 0.6931471805599453, float("-inf"))
        tl.store(lse + ((tl.cast(i_bq, tl.int64) * n_heads + o_h) * n_queries + o_token), b_lse)


@triton.jit(do_not_specialize=SIZES)
def flash_prefill_offsets_kernel(cu_q, cu_k, cache, n_batch, n_queries, n_keys, added):
    # Grid: entries.
    # Owns: one entry.
    # Loops over: nothing.
    # Writes: where its queries and keys begin and end among all rows of q and of the cache: every second sequence has
    #         no queries, and the rows that are no keys.
    i_b = tl.program_id(0)
    keys = locate_keys(cache, i_b, n_keys, added)
    tl.store(cu_q + 2 * i_b, i_b * n_queries)
    tl.store(cu_q + 2 * i_b + 1, (i_b + 1) * n_queries)
    tl.store(cu_k + 2 * i_b, i_b * n_keys + keys.first)
    tl.store(cu_k + 2 * i_b + 1, i_b * n_keys + keys.end)
    if i_b == n_batch - 1:
        tl.store(cu_q + 2 * n_batch, n_batch * n_queries)
        tl.store(cu_k + 2 * n_batch, n_batch * n_keys)


@triton.jit
def append_rows(cache, new, p_row, m_row, b_new, o_h, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Copy rows of `new`, at offsets `b_new`, to offsets `p_row` of the cache."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_row[:, None] & (o_d < D)[None, :]
    # [R, D]
    b_x = tl.load(new.x + (b_new[:, None] + o_d[None, :]), mask=m_x, other=0.0)
    tl.store(cache.x + ((p_row + o_h * cache.strides.head)[:, None] + o_d[None, :]), b_x, mask=m_x)


@triton.jit(do_not_specialize=SIZES)
def flash_decode_append_kernel(
    k, v, k_cache, v_cache, lengths, table, n_rows, n_new, n_heads, n_keys, n_pages, first, WIDTHS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    # Grid: tiles of BLOCK_R rows of the new keys, all entries, tokens and KV heads.
    # Owns: its rows of k and v.
    # Loops over: nothing.
    # Writes: these rows of the caches, but for what lies past an entry's room or in a page out of range.
    o_r = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_r = o_r < n_rows
    o_h = o_r % n_heads
    o_t = o_r // n_heads % n_new
    o_b = o_r // n_heads // n_new
    o_n = first + o_t
    if lengths is not None:
        o_n += tl.load(lengths + o_b, mask=m_r, other=0).to(tl.int64)
    m_r = m_r & (o_n >= 0) & (o_n < n_keys)
    o_page = o_b
    o_row = o_n
    if PAGE is not None:
        o_page = tl.load(table + (o_b * (n_keys // PAGE) + o_n // PAGE), mask=m_r, other=-1).to(tl.int64)
        o_row = o_n % PAGE
        m_r = m_r & (o_page >= 0) & (o_page < n_pages)
    b_k = o_b * k.strides.batch + o_t * k.strides.token + o_h * k.strides.head
    b_v = o_b * v.strides.batch + o_t * v.strides.token + o_h * v.strides.head
    p_k = o_page * k_cache.strides.batch + o_row * k_cache.strides.token
    p_v = o_page * v_cache.strides.batch + o_row * v_cache.strides.token
    append_rows(k_cache, k, p_k, m_r, b_k, o_h, WIDTHS.D, WIDTHS.BLOCK_D)
    append_rows(v_cache, v, p_v, m_r, b_v, o_h, WIDTHS.DV, WIDTHS.BLOCK_DV)
