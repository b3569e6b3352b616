"""Bugs planted in attention over a cache: in its kernels, in what launches them, and in the CPU backend."""

from tilewise.verify.suite import Mutant

_ROWS = "(o_n < keys.rows.n_rows) strides"
_PART = "(tl.cast(i_split, tl.int64) * n_heads + o_h) * Tq + o_t"
_APPEND = (
    "plan_append(inputs.k, inputs.v, k_new, v_new, inputs.lengths, inputs.table, inputs.added) return plan_forward"
)


def _planted(module: str, *bugs: tuple[str, str, str, str]) -> tuple[Mutant, ...]:
    return tuple(Mutant(name, about, module, old, new) for name, about, old, new in bugs)


_LENGTHS = (
    (
        "length-short",
        "an entry lacks its last key",
        "used + tl.minimum(added, n_keys - used)",
        "tl.maximum(used + tl.minimum(added, n_keys - used) - 1, 0)",
    ),
    ("length-long", "an entry has a key too many", "n_keys - used)", "n_keys - used) + 1"),
    ("lengths-ignored", "every slot of a cache holds a key", "tl.load(cache.lengths + i_b)", "n_keys + 0 * i_b"),
    ("lengths-of-the-first", "all have the first entry's length", "cache.lengths + i_b", "cache.lengths + 0 * i_b"),
    ("leftpad-ignored", "left padding is read", "tl.load(cache.leftpad + i_b)", "0 * i_b"),
    ("leftpad-of-the-first", "all have the first entry's padding", "cache.leftpad + i_b", "cache.leftpad + 0 * i_b"),
    ("leftpad-counts", "left padding takes part, as keys of 0", "n_rows, window) & m_n[None, :]", "n_rows, window)"),
    (
        "leftpad-unmasked",
        "a long prefill's tiles with left padding count as whole",
        "tl.maximum(i_high, tl.minimum(padded, runs.high))",
        "i_high",
    ),
    (
        "unused-rows",
        "rows behind the last key are read, up to a page's end",
        _ROWS,
        "(o_n < (keys.rows.n_rows + 15) // 16 * 16)\n    strides",
    ),
)
_PAGES = (
    (
        "first-page",
        "every key lies in the first page",
        "keys.p_table + i_n // PAGE",
        "keys.p_table + 0 * (i_n // PAGE)",
    ),
    (
        "pages-of-the-first",
        "all have the first entry's pages",
        "p_table += tl.cast(i_b,",
        "p_table += tl.cast(0 * i_b,",
    ),
    (
        "second-page-again",
        "a tile's third page is its second",
        "page_of(keys, i_n + P * PAGE, PAGE)",
        "page_of(keys, i_n + PAGE, PAGE)",
    ),
    (
        "page-from-its-start",
        "a tile in a page of several starts at the page's first row",
        "row = tl.cast(i_n % PAGE, tl.int64)",
        "row = tl.cast(0 * i_n, tl.int64)",
    ),
    ("row-of-page", "rows of odd pages are counted by 16", "(o_n % PAGE).to(tl.int64)", "(o_n % 16).to(tl.int64)"),
)
_SPLITS = (
    ("split-short", "a split lacks its last tile", "low + splits.chunk", "low + splits.chunk - SHAPE.BLOCK_N"),
    ("split-long", "a split's first tile counts in the one before too", "low + splits.chunk", "low + splits.chunk + 1"),
    (
        "split-from-the-first-query",
        "splits under a window start where the last query's does",
        "keys.end - n_queries - left)",
        "keys.end - left)",
    ),
    ("one-split", "an entry's first split is all of it", "splits.count == 1", "splits.count >= 1"),
    ("parts-of-one-token", "all tokens of a split write one row", _PART, _PART.replace("o_t", "i_t")),
    (
        "merge-unscaled",
        "splits are merged without their weights",
        "tl.exp2((b_lse - shift) * 1.4426950408889634)",
        'tl.where(b_lse == float("-inf"), 0.0, 1.0)',
    ),
    ("merge-base-2", "splits are merged to base 2", "(b_lse - shift) * 1.4426950408889634", "b_lse - shift"),
    ("merge-last-lost", "the last split is not merged", "i_s + o_s < splits.count", "i_s + o_s < splits.count - 1"),
    ("merge-once", "splits beyond the first 16 are not merged", "(0, splits.count, BLOCK_S)", "(0, 1, BLOCK_S)"),
    (
        "merge-forgotten-rescale",
        "splits merged earlier keep the old maximum",
        "acc * rescale + tl.sum(",
        "acc + tl.sum(",
    ),
    ("lse-of-one-split", "the LSE is that of the heaviest split", "m + tl.log2(l) * 0.6931471805599453", "m"),
)
_TILES = (
    ("group-mixed", "rows of a tile take heads by tokens", "o_r % SHAPE.HEADS)", "o_r // SHAPE.TOKENS % SHAPE.HEADS)"),
    ("kv-head-0", "every query head reads KV head 0", "i_hk = i_h // SHAPE.CHUNKS", "i_hk = i_h * 0"),
    (
        "kv-head-of-chunk",
        "a part of a group reads the KV head of its own number",
        "i_hk = i_h // SHAPE.CHUNKS",
        "i_hk = i_h % (n_heads // SHAPE.GROUP)",
    ),
    ("forgotten-rescale", "earlier sums keep the old maximum", "b_v, acc * rescale[:, None]", "b_v, acc"),
    ("sign-ignored", "a negative scale acts as a positive one", "(b_q * SHAPE.SIGN)", "b_q"),
    ("window-top-left", "masks are aligned at the first key", "limits.right, keys.end - Tq)", "limits.right, 0)"),
    ("sink-in-every-split", "every split has the sink", "mask=m_r & (i_split == 0)", "mask=m_r"),
    (
        "sink-of-kv-head",
        "query heads take the sink of their KV head's number",
        "sinks + o_h,",
        "sinks + 0 * o_h + i_h,",
    ),
    ("sink-in-base-2", "a sink is turned to base 2", "add_sink(m, l, b_sink)", "add_sink(m, l, b_sink * 1.4427)"),
    (
        "sink-lse-in-base-2",
        "after a sink the maximum is still to base 2",
        "softmax_finish(acc, m, l, sinks is not None)",
        "softmax_finish(acc, m, l)",
    ),
)
_APPENDED = (
    ("append-late", "new keys are written a row late", "o_n = first + o_t", "o_n = first + o_t + 1"),
    (
        "append-at-0",
        "new keys are written at the cache's start",
        "tl.load(lengths + o_b, mask=m_r, other=0)",
        "0 * o_b",
    ),
    ("append-behind-the-first", "all are written behind the first entry", "lengths + o_b,", "lengths + 0 * o_b,"),
    ("append-one-page", "new keys are all written to the first one's page", "+ o_n // PAGE)", "+ (o_n - o_t) // PAGE)"),
    (
        "append-pages-of-the-first",
        "all are written to the first entry's pages",
        "o_b * (n_keys //",
        "0 * o_b * (n_keys //",
    ),
    ("append-one-head", "every head is written over the first", "o_h * cache.strides.head", "o_h * 0"),
    ("append-last-lost", "the last new row is not written", "m_r = o_r < n_rows", "m_r = o_r < n_rows - 1"),
)
_LAUNCH = (
    ("new-unseen", "new keys are written, and not attended to", "inputs.added + k_new.shape[1]", "inputs.added"),
    (
        "append-after",
        "new keys are attended to before they are written",
        f"{_APPEND}(inputs._replace(added=inputs.added + k_new.shape[1]))",
        "made = plan_forward(inputs._replace(added=inputs.added + k_new.shape[1]))\n    plan_append(inputs.k,"
        " inputs.v, k_new, v_new, inputs.lengths, inputs.table, inputs.added)\n    return made",
    ),
    ("softcap-ignored", "scores are not capped", "inputs.scale / inputs.softcap if inputs.softcap else None", "None"),
    ("exp-base-2", "the softmax is to base 2", "or 1.0) * LOG2E", "or 1.0)"),
)
_CPU = (
    ("cpu-first-page", "every key lies in the first page", "x[pages]", "x[pages[:1].expand_as(pages)]"),
    ("cpu-leftpad-ignored", "left padding is read", "first = 0 if leftpad is None else", "first = 0 if True else"),
    ("cpu-lengths-of-the-first", "all have the first entry's length", "int(lengths[b])", "int(lengths[0])"),
    ("cpu-append-late", "new keys are written a row late", "(start + first)[:, None]", "(start + first + 1)[:, None]"),
    (
        "cpu-append-one-page",
        "new keys are all written to the first one's page",
        "table.gather(1, position // page_size)",
        "table.gather(1, position[:, :1].expand_as(position) // page_size)",
    ),
    ("cpu-append-first-value", "new rows all hold the first one's values", "] = v", "] = v[:, :1]"),
)
DECODE = (
    *_planted("flash.decode.kernels", *_LENGTHS, *_PAGES, *_SPLITS, *_TILES, *_APPENDED),
    *_planted("flash.decode.launch", *_LAUNCH),
    *_planted("flash.decode.cpu", *_CPU),
    Mutant("sees-next", "a query sees the next key", "_device.scores", "(off + right))", "(off + right + 1))"),
    Mutant(
        "window-short", "the window's oldest key is lost", "_device.scores", "o_n >= o_m + (off", "o_n > o_m + (off"
    ),
)
# Within rounding: nothing but the same sequence elsewhere shows them.
_SPLIT = "splits = split_keys(Tq, keys, limits.left, SHAPE, RULE)"
INVARIANCE = tuple(
    Mutant(name, about, "flash.decode.kernels", old, new, use="invariance")
    for name, about, old, new in (
        (
            "splits-of-the-longest",
            "every entry is split as the batch's longest",
            _SPLIT,
            "end = keys.end\n    for i in range(n_batch):\n        end = tl.maximum(end, locate_keys(cache, i, n_keys,"
            " added).end)\n    splits = split_keys(Tq, Entry(keys.start, keys.first, end), limits.left, SHAPE, RULE)",
        ),
        (
            "splits-of-the-room",
            "an entry is split as one that fills its cache",
            _SPLIT,
            "splits = split_keys(Tq, Entry(keys.start, keys.first, n_keys), limits.left, SHAPE, RULE)",
        ),
    )
)
# In what leads a prefill over a dense cache to the forward kernel for Hopper.
_KEYS, _PREFILL = "i_b * n_keys + keys.", "flash.decode.prefill"
HOPPER = tuple(
    Mutant(name, about, module, old, new, capability=(9, 0))
    for name, about, module, old, new in (
        ("prefill-padding", "left padding is read", "flash.decode.kernels", f"{_KEYS}first", "i_b * n_keys"),
        ("prefill-short", "an entry lacks its last key", "flash.decode.kernels", f"{_KEYS}end", f"{_KEYS}end - 1"),
        ("prefill-room", "every slot holds a key", "flash.decode.kernels", f"{_KEYS}end", "(i_b + 1) * n_keys"),
        (
            "prefill-query-lost",
            "an entry's last query is not computed",
            "flash.decode.kernels",
            "(i_b + 1) * n_queries",
            "(i_b + 1) * n_queries - 1",
        ),
        (
            "prefill-lse-mixed",
            "LSEs of entries are mixed",
            _PREFILL,
            "lse.unflatten(1, (batch, -1)).transpose(0, 1)",
            "lse.unflatten(1, (-1, batch)).permute(2, 0, 1)",
        ),
        ("prefill-scale", "scores lack their scale", _PREFILL, "inputs.right, inputs.scale,", "inputs.right, 1.0,"),
        (
            "prefill-unlimited",
            "a window is ignored",
            _PREFILL,
            "cu_k, inputs.left, inputs.right",
            "cu_k, None, inputs.right",
        ),
    )
)
