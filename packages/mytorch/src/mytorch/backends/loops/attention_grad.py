"""The gradients of attention: dQ a tile of queries at a time, dK and dV a tile of keys at a time, so that nothing is
added to from two sides.
"""

import numpy as np

from mytorch.backends.loops.attention import (
    _TOKENS,
    add_products,
    fill,
    finite,
    hide,
    load_turned,
    offsets,
    products,
    store_turned,
)
from mytorch.backends.loops.compiled import prange, private, threaded
from mytorch.backends.loops.functions import exp, like
from mytorch.backends.loops.tiles import VECTOR_BYTES


@private
def by_query_in_lanes(scores, slopes, count, lse, delta):
    """Slopes of weights become slopes of scores; lse and delta by lane."""
    lanes = 2 * VECTOR_BYTES // scores.itemsize
    for r in range(count):
        for lane in range(lanes):
            slopes[r, lane] = exp(scores[r, lane] - lse[lane]) * (slopes[r, lane] - delta[lane])


@private
def by_query_in_rows(scores, slopes, count, lse, delta):
    """The same with lse and delta by row; scores become weights."""
    lanes = 2 * VECTOR_BYTES // scores.itemsize
    for r in range(count):
        shift, mean = finite(lse[r]), delta[r]
        for lane in range(lanes):
            scores[r, lane] = exp(scores[r, lane] - shift)
            slopes[r, lane] = scores[r, lane] * (slopes[r, lane] - mean)


@private
def by_queries_part(part, parts, grad, q, k, v, lse, delta, causal, scale, dq):
    """Every parts-th tile."""
    lanes = 2 * VECTOR_BYTES // q.itemsize
    heads, queries, keys = q.shape[1], q.shape[2], k.shape[2]
    tiles, shift, group = (queries + lanes - 1) // lanes, keys - queries, heads // k.shape[1]
    turned, grad_turned = np.empty((q.shape[3], lanes), q.dtype), np.empty((v.shape[3], lanes), q.dtype)
    scores, slopes = np.empty((_TOKENS, lanes), q.dtype), np.empty((_TOKENS, lanes), q.dtype)
    acc, lse_, delta_ = (
        np.empty((len(offsets(q.shape[3], 1)), lanes), q.dtype),
        np.zeros(lanes, q.dtype),
        np.zeros(lanes, q.dtype),
    )
    scale_ = like(q[0, 0, 0, 0], scale)
    for task in range(part, len(q) * heads * tiles, parts):
        b, h, i = task // tiles // heads, task // tiles % heads, task % tiles * lanes
        load_turned(q, b, i, h, scale_, turned)
        load_turned(grad, b, i, h, like(scale_, 1), grad_turned)
        for lane in range(min(lanes, queries - i)):
            lse_[lane], delta_[lane] = finite(lse[b, h, i + lane]), delta[b, h, i + lane]
        fill(acc, 0)
        for j in range(0, min(keys, i + lanes + shift) if causal else keys, _TOKENS):
            count = products(k, b, j, h // group, turned, scores)
            products(v, b, j, h // group, grad_turned, slopes)
            if causal and j + count - 1 > i + shift:
                hide(scores, count, i, j, shift, True)
            by_query_in_lanes(scores, slopes, count, lse_, delta_)
            add_products(k, b, j, h // group, slopes, count, acc)
        store_turned(acc, scale_, b, i, h, dq)


@threaded
def by_queries(grad, q, k, v, lse, delta, causal, scale, parts, dq):
    """dQ `[B, Tq, H, D]`, of arrays with heads before tokens; lse and delta (the sum of grad times output) are
    `[B, H, Tq]`.
    """
    for part in prange(parts):
        by_queries_part(np.int64(part), parts, grad, q, k, v, lse, delta, causal, scale, dq)


@private
def by_keys_part(part, parts, grad, q, k, v, lse, delta, causal, scale, dk, dv):
    """Every parts-th tile."""
    lanes = 2 * VECTOR_BYTES // q.itemsize
    heads, queries, keys = k.shape[1], q.shape[2], k.shape[2]
    tiles, shift, group = (keys + lanes - 1) // lanes, keys - queries, q.shape[1] // heads
    k_turned, v_turned = np.empty((k.shape[3], lanes), q.dtype), np.empty((v.shape[3], lanes), q.dtype)
    scores, slopes = np.empty((_TOKENS, lanes), q.dtype), np.empty((_TOKENS, lanes), q.dtype)
    acc_k, acc_v = (
        np.empty((len(offsets(k.shape[3], 1)), lanes), q.dtype),
        np.empty((len(offsets(v.shape[3], 1)), lanes), q.dtype),
    )
    scale_ = like(q[0, 0, 0, 0], scale)
    for task in range(part, len(k) * heads * tiles, parts):
        b, h, j = task // tiles // heads, task // tiles % heads, task % tiles * lanes
        load_turned(k, b, j, h, scale_, k_turned)
        load_turned(v, b, j, h, like(scale_, 1), v_turned)
        fill(acc_k, 0)
        fill(acc_v, 0)
        for head in range(h * group, (h + 1) * group):
            for i in range(max(0, j - shift) // _TOKENS * _TOKENS if causal else 0, queries, _TOKENS):
                count = products(q, b, i, head, k_turned, scores)
                products(grad, b, i, head, v_turned, slopes)
                if causal and j + lanes - 1 > i + shift:
                    hide(scores, count, i, j, shift, False)
                by_query_in_rows(scores, slopes, count, lse[b, head, i:], delta[b, head, i:])
                add_products(grad, b, i, head, scores, count, acc_v)
                add_products(q, b, i, head, slopes, count, acc_k)
        store_turned(acc_k, scale_, b, j, h, dk)
        store_turned(acc_v, like(scale_, 1), b, j, h, dv)


@threaded
def by_keys(grad, q, k, v, lse, delta, causal, scale, parts, dk, dv):
    """dK and dV: each key's sum over all the queries of all the heads it serves."""
    for part in prange(parts):
        by_keys_part(np.int64(part), parts, grad, q, k, v, lse, delta, causal, scale, dk, dv)
