"""Attention, a tile of queries or of keys at a time: no array has an axis of queries and one of keys but a tile of
scores.

Forward and dQ keep a tile of queries in the lanes of vectors and loop over the keys, dK and dV keep a tile of keys and
loop over the queries. So what softmax does to a row is done lane by lane, and the side that is looped over is read in
place, by offsets.
"""

import math

import numpy as np

from mytorch.backends.loops.compiled import prange, private, threaded
from mytorch.backends.loops.functions import exp, like
from mytorch.backends.loops.tiles import ROWS, VECTOR_BYTES, multiply

# What is looped over comes in tiles of this many tokens.
_TOKENS = 64


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
def load_turned(x, b, start, h, scale, out):
    """Tokens from start on of one head of `x [B, H, T, D]` into `out [D, lanes]`, times a scale; 0 where there are
    none.
    """
    for lane in range(out.shape[1]):
        inside = start + lane < x.shape[2]
        for d in range(x.shape[3]):
            out[d, lane] = x[b, h, start + lane, d] * scale if inside else like(scale, 0)


@private
def store_turned(acc, scale, b, start, h, out):
    """`acc [D, lanes]`, times a scale, into `out [B, T, H, D]`."""
    for lane in range(min(acc.shape[1], out.shape[1] - start)):
        for d in range(out.shape[3]):
            out[b, start + lane, h, d] = acc[d, lane] * scale


@private
def products(x, b, start, h, right, out):
    """`out [tokens, lanes] = x[b, h, start:] @ right [D, lanes]`; returns how many tokens there are, the rows behind
    them mean nothing.
    """
    count, channels = min(_TOKENS, x.shape[2] - start), x.shape[3]
    fill(out, 0)
    multiply(x[b, h, start:].reshape(-1), offsets(count, channels), offsets(channels, 1)[:channels], right, out)
    return count


@private
def add_products(x, b, start, h, weights, count, acc):
    """`acc [D, lanes] += x[b, h, start : start + count]ᵀ @ weights [tokens, lanes]`."""
    channels = x.shape[3]
    multiply(x[b, h, start:].reshape(-1), offsets(channels, 1), offsets(count, channels)[:count], weights, acc)


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


@private
def online_softmax(scores, count, top, total, factor, acc):
    """Scores become weights below the largest so far; what was summed before, in total and acc, is scaled to it by a
    factor.
    """
    # As a constant, it makes the inner loops a few instructions each.
    lanes = 2 * VECTOR_BYTES // scores.itemsize
    for lane in range(lanes):
        factor[lane] = top[lane]
    for r in range(count):
        for lane in range(lanes):
            top[lane] = scores[r, lane] if scores[r, lane] > top[lane] else top[lane]
    for lane in range(lanes):
        # Where nothing was seen before, nothing is there to be scaled.
        seen = exp(finite(factor[lane]) - finite(top[lane]))
        factor[lane] = like(seen, 0) if factor[lane] == -np.inf else seen
        total[lane] *= factor[lane]
    for d in range(len(acc)):
        for lane in range(lanes):
            acc[d, lane] *= factor[lane]
    for lane in range(lanes):
        factor[lane] = finite(top[lane])
    for r in range(count):
        for lane in range(lanes):
            scores[r, lane] = exp(scores[r, lane] - factor[lane])
            total[lane] += scores[r, lane]


@private
def forward_part(part, parts, q, k, v, causal, scale, out, lse):
    """Every parts-th tile of queries: under a causal mask later ones are longer."""
    lanes = 2 * VECTOR_BYTES // q.itemsize
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    tiles, shift, group = (queries + lanes - 1) // lanes, keys - queries, heads // k.shape[1]
    turned, acc = np.empty((q.shape[3], lanes), q.dtype), np.empty((len(offsets(v.shape[3], 1)), lanes), q.dtype)
    scores, rows = np.empty((_TOKENS, lanes), q.dtype), np.empty((3, lanes), q.dtype)
    top, total, factor = rows[0], rows[1], rows[2]
    for task in range(part, len(q) * heads * tiles, parts):
        b, h, i = task // tiles // heads, task // tiles % heads, task % tiles * lanes
        load_turned(q, b, i, h, like(q[0, 0, 0, 0], scale), turned)
        fill(acc, 0)
        fill(rows[:1], -np.inf)
        fill(rows[1:], 0)
        for j in range(0, min(keys, i + lanes + shift) if causal else keys, _TOKENS):
            count = products(k, b, j, h // group, turned, scores)
            if causal and j + count - 1 > i + shift:
                hide(scores, count, i, j, shift, True)
            online_softmax(scores, count, top, total, factor, acc)
            add_products(v, b, j, h // group, scores, count, acc)
        for lane in range(min(lanes, queries - i)):
            lse[b, h, i + lane] = math.log(total[lane]) + finite(top[lane])
            total[lane] = like(total[0], 1) if total[lane] == 0 else total[lane]
            for d in range(v.shape[3]):
                out[b, i + lane, h, d] = acc[d, lane] / total[lane]


@threaded
def forward(q, k, v, causal, scale, parts, out, lse):
    """`out [B, Tq, H, Dv]` and `lse [B, H, Tq]`, of q, k and v with heads before tokens, `[B, H, T, D]`."""
    for part in prange(parts):
        forward_part(np.int64(part), parts, q, k, v, causal, scale, out, lse)
