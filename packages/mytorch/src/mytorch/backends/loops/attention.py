"""Attention, a tile of scores at a time: no array has an axis of queries and one of keys but such a tile.

The forward keeps a tile of queries in the lanes of vectors and loops over the keys, so that what softmax does to a row
is done lane by lane; the side that is looped over is read in place, by offsets. Scores are in units of log 2, for exp2
takes fewer steps than exp.
"""

import math

import numpy as np

from mytorch.backends.loops.compiled import prange, private, threaded
from mytorch.backends.loops.functions import emit_exp2, exact, exp2, like
from mytorch.backends.loops.tiles import ROW_BYTES, ROWS, fold_rows, multiply, product

# What is looped over comes in tiles of this many tokens.
TOKENS = 64
LOG2_E = math.log2(math.e)


@private
def offsets(count, step):
    """`0, step, 2 * step, ...`, filled up to whole ROWS with the last."""
    found = np.empty((count + ROWS - 1) // ROWS * ROWS, np.int64)
    for i in range(len(found)):
        found[i] = min(i, count - 1) * step
    return found


@private
def fill(x, value):
    """Set all elements of a matrix."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] = value


@private
def load_head(x, b, h, out):
    """One head of `x [B, T, H, D]` into `out [T, D]`: rows far apart would share few cache sets."""
    for t in range(x.shape[1]):
        for d in range(x.shape[3]):
            out[t, d] = x[b, t, h, d]


@private
def load_turned(x, b, start, h, scale, out):
    """Tokens from start on of one head of `x [B, T, H, D]` into `out [D, lanes]`, times a scale; 0 where there are
    none.
    """
    for lane in range(out.shape[1]):
        inside = start + lane < x.shape[1]
        for d in range(x.shape[3]):
            out[d, lane] = x[b, start + lane, h, d] * scale if inside else like(scale, 0)


@private
def hide(scores, count, first_query, first_key, shift, queries_in_lanes):
    """-inf where the key comes after what its query sees: key j is seen by query i where j <= i + shift."""
    for r in range(count):
        for lane in range(scores.shape[1]):
            query, key = (
                (first_query + lane, first_key + r) if queries_in_lanes else (first_query + r, first_key + lane)
            )
            if key > query + shift:
                scores[r, lane] = -np.inf


@private
def finite(x):
    """X, or 0 where it is not finite: a row that sees no key has the maximum -inf."""
    return x if abs(x) < np.inf else like(x, 0)


def _raise_top(builder, score, _, top):
    return score, builder.select(builder.fcmp_ordered(">", score, top), score, top)


def _weigh(builder, score, top, total):
    weight = emit_exp2(builder, builder.fsub(score, top))
    return weight, builder.fadd(total, weight)


def _scale(builder, x, factor, kept):
    return builder.fmul(x, factor), kept


_raise_tops, _weigh_all, _scale_rows = fold_rows(_raise_top), fold_rows(_weigh), fold_rows(_scale)


@exact
def raise_tops(scores, count, nothing, top):
    """The largest of each lane so far."""
    _raise_tops(scores, count, nothing, top)


@exact
def weigh_all(scores, count, top, total):
    """Scores become weights below the largest, and are added up by lane."""
    _weigh_all(scores, count, top, total)


@exact
def scale_rows(x, count, factor, nothing):
    """Rows times a factor by lane."""
    _scale_rows(x, count, factor, nothing)


@private
def online_softmax(scores, count, top, total, factor, acc):
    """Scores become weights below the largest so far; what was summed before, in total and acc, is scaled to it by a
    factor.
    """
    # As a constant, it makes the inner loops a few instructions each.
    lanes = ROW_BYTES // scores.itemsize
    for lane in range(lanes):
        factor[lane] = top[lane]
    raise_tops(scores, count, factor, top)
    for lane in range(lanes):
        # Where nothing was seen before, nothing is there to be scaled.
        seen = exp2(finite(factor[lane]) - finite(top[lane]))
        factor[lane] = like(seen, 0) if factor[lane] == -np.inf else seen
        total[lane] *= factor[lane]
    scale_rows(acc, len(acc), factor, factor)
    for lane in range(lanes):
        factor[lane] = finite(top[lane])
    weigh_all(scores, count, factor, total)


@private
def forward_part(part, parts, q, k, v, causal, scale, out, lse):
    """Every parts-th tile of queries: under a causal mask later ones are longer."""
    lanes = ROW_BYTES // q.itemsize
    queries, heads, keys = q.shape[1], q.shape[2], k.shape[1]
    tiles, shift, group = (queries + lanes - 1) // lanes, keys - queries, heads // k.shape[2]
    channels, values = offsets(k.shape[3], 1)[: k.shape[3]], offsets(v.shape[3], 1)
    k_rows, k_last = offsets(TOKENS, k.shape[3]), offsets((keys - 1) % TOKENS + 1, k.shape[3])
    v_rows = offsets(TOKENS, v.shape[3])
    k_head, v_head, loaded = np.empty((keys, k.shape[3]), k.dtype), np.empty((keys, v.shape[3]), v.dtype), -1
    turned, acc = np.empty((q.shape[3], lanes), q.dtype), np.empty((len(values), lanes), q.dtype)
    scores, kept = np.empty((TOKENS, lanes), q.dtype), np.empty((3, lanes), q.dtype)
    top, total, factor = kept[0], kept[1], kept[2]
    for task in range(part, len(q) * heads * tiles, parts):
        b, h, i = task // tiles // heads, task // tiles % heads, task % tiles * lanes
        if task // tiles // group != loaded:
            loaded = task // tiles // group
            load_head(k, b, h // group, k_head)
            load_head(v, b, h // group, v_head)
        load_turned(q, b, i, h, like(q[0, 0, 0, 0], scale * LOG2_E), turned)
        fill(acc, 0)
        fill(kept[:1], -np.inf)
        fill(kept[1:], 0)
        for j in range(0, min(keys, i + lanes + shift) if causal else keys, TOKENS):
            count = min(TOKENS, keys - j)
            product(k_head[j:].reshape(-1), k_rows if count == TOKENS else k_last, channels, turned, scores)
            if causal and j + count - 1 > i + shift:
                hide(scores, count, i, j, shift, True)
            online_softmax(scores, count, top, total, factor, acc)
            multiply(v_head[j:].reshape(-1), values, v_rows[:count], scores, acc)
        for lane in range(min(lanes, queries - i)):
            lse[b, h, i + lane] = math.log(total[lane]) + finite(top[lane]) / LOG2_E
            total[lane] = like(total[0], 1) if total[lane] == 0 else total[lane]
            for d in range(v.shape[3]):
                out[b, i + lane, h, d] = acc[d, lane] / total[lane]


@threaded
def forward(q, k, v, causal, scale, parts, out, lse):
    """`out [B, Tq, H, Dv]` and `lse [B, H, Tq]`, of q, k and v `[B, T, H, D]`."""
    for part in prange(parts):
        forward_part(np.int64(part), parts, q, k, v, causal, scale, out, lse)
