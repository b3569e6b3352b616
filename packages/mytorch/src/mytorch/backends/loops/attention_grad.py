"""The gradients of attention, a tile of keys at a time: dK and dV of its own, and what it adds to dQ.

A tile of keys stays in the lanes of vectors, the queries are looped over. Scores are computed once for all three
gradients: the tiles of keys are dealt out to a number of chunks, each with a dQ of its own, that follows from the shape
alone, so that no two threads add to the same place and results do not depend on how many there are.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from mytorch.backends.loops.attention import LOG2_E, TOKENS, fill, hide, load_turned, offsets
from mytorch.backends.loops.compiled import prange, private, threaded
from mytorch.backends.loops.functions import emit_exp2, exact, like
from mytorch.backends.loops.tiles import ROW_BYTES, VECTOR_BYTES, VECTORS, multiply, product, splat

# What the chunks' dQ may take in memory, unless four times dQ is more.
_MOST_BYTES = 1 << 26


def chunks(q: np.ndarray, k: np.ndarray, most: int) -> int:
    """Into how many a head's tiles of keys are dealt out, so that there are enough for many threads; of arrays
    `[B, T, H, D]`.
    """
    tiles = -(-k.shape[1] // (ROW_BYTES // k.itemsize))
    return min(tiles, -(-most // (k.shape[0] * k.shape[2])), max(4, _MOST_BYTES // q.nbytes))


@private
def load(x, b, start, h, out):
    """Tokens from start on of one head of `x [B, T, H, D]` into `out [tokens, channels]`; 0 where there are none."""
    for r in range(out.shape[0]):
        for d in range(out.shape[1]):
            inside = start + r < x.shape[1] and d < x.shape[3]
            out[r, d] = x[b, start + r, h, d] if inside else like(x[0, 0, 0, 0], 0)


@private
def store_turned(acc, scale, b, start, h, out):
    """`acc [D, lanes]`, times a scale, into `out [B, T, H, D]`."""
    for lane in range(min(acc.shape[1], out.shape[1] - start)):
        for d in range(out.shape[3]):
            out[b, start + lane, h, d] = acc[d, lane] * scale


@intrinsic
def _slopes_of_scores(typing, scores, slopes, count, lse, delta):
    def generate(context, builder, signature, arguments):
        element = context.get_value_type(scores.dtype)
        size = scores.dtype.bitwidth // 8
        vector = ir.VectorType(element, VECTOR_BYTES // size)
        scores_, slopes_, _, lse_, delta_ = (
            context.make_array(kind)(context, builder, value).data if kind is not count else value
            for kind, value in zip(signature.args, arguments, strict=True)
        )
        with cgutils.for_range(builder, arguments[2]) as loop:
            by_row = (builder.load(builder.gep(x, [loop.index])) for x in (lse_, delta_))
            shift, mean = (splat(builder, x, vector) for x in by_row)
            start = builder.mul(loop.index, ir.Constant(loop.index.type, VECTORS))
            for i in range(VECTORS):
                index = builder.add(start, ir.Constant(start.type, i))
                score, slope = (
                    builder.gep(builder.bitcast(x, vector.as_pointer()), [index]) for x in (scores_, slopes_)
                )
                weight = emit_exp2(builder, builder.fsub(builder.load(score, align=size), shift))
                builder.store(weight, score, align=size)
                product = builder.fmul(weight, builder.fsub(builder.load(slope, align=size), mean))
                builder.store(product, slope, align=size)
        return context.get_dummy_value()

    return types.void(scores, slopes, count, lse, delta), generate


@exact
def slopes_of_scores(scores, slopes, count, lse, delta):
    """Scores become weights, slopes of weights slopes of scores; lse (in units of log 2) and delta by row."""
    _slopes_of_scores(scores, slopes, count, lse, delta)


@private
def backward_part(part, parts, grad, q, k, v, lse, delta, causal, scale, dq, dk, dv):
    """Every parts-th chunk of a head's tiles of keys."""
    lanes = ROW_BYTES // q.itemsize
    heads, queries, keys, chunks = k.shape[2], q.shape[2], k.shape[1], len(dq)
    shift, group = keys - queries, q.shape[1] // heads
    channels, values, keys_in_lanes = offsets(k.shape[3], 1), offsets(v.shape[3], 1), offsets(lanes, 1)
    last = (queries - 1) % TOKENS + 1
    q_rows, q_last = offsets(TOKENS, q.shape[3]), offsets(last, q.shape[3])
    grad_rows, grad_last = offsets(TOKENS, v.shape[3]), offsets(last, v.shape[3])
    score_rows = offsets(TOKENS, lanes)
    k_turned, v_turned = np.empty((k.shape[3], lanes), q.dtype), np.empty((v.shape[3], lanes), q.dtype)
    k_tile = np.empty((lanes, dq.shape[4]), q.dtype)
    scores, slopes = np.zeros((TOKENS, lanes), q.dtype), np.zeros((TOKENS, lanes), q.dtype)
    acc_k, acc_v = np.empty((len(channels), lanes), q.dtype), np.empty((len(values), lanes), q.dtype)
    one = like(q[0, 0, 0, 0], 1)
    for task in range(part, len(k) * heads * chunks, parts):
        b, h, chunk = task // chunks // heads, task // chunks % heads, task % chunks
        for head in range(h * group, (h + 1) * group):
            fill(dq[chunk, b, head], 0)
        for j in range(chunk * lanes, keys, chunks * lanes):
            load_turned(k, b, j, h, like(one, scale * LOG2_E), k_turned)
            load_turned(v, b, j, h, one, v_turned)
            load(k, b, j, h, k_tile)
            fill(acc_k, 0)
            fill(acc_v, 0)
            for head in range(h * group, (h + 1) * group):
                for i in range(max(0, j - shift) // TOKENS * TOKENS if causal else 0, queries, TOKENS):
                    count = min(TOKENS, queries - i)
                    whole = count == TOKENS
                    q_, grad_ = q[b, head, i:].reshape(-1), grad[b, head, i:].reshape(-1)
                    product(q_, q_rows if whole else q_last, channels[: q.shape[3]], k_turned, scores)
                    product(grad_, grad_rows if whole else grad_last, values[: v.shape[3]], v_turned, slopes)
                    if causal and j + lanes - 1 > i + shift:
                        hide(scores, count, i, j, shift, False)
                    slopes_of_scores(scores, slopes, count, lse[b, head, i:], delta[b, head, i:])
                    multiply(grad_, values, grad_rows[:count], scores, acc_v)
                    multiply(q_, channels, q_rows[:count], slopes, acc_k)
                    # Lanes without a key are left out: nothing is known of them.
                    seen = keys_in_lanes[: min(lanes, keys - j)]
                    multiply(slopes.reshape(-1), score_rows, seen, k_tile, dq[chunk, b, head, i : i + TOKENS])
            store_turned(acc_k, like(one, scale), b, j, h, dk)
            store_turned(acc_v, one, b, j, h, dv)


@threaded
def add_up(dq, scale, out):
    """What backward's chunks add to dQ, times the scale, into `out [B, Tq, H, D]`."""
    for task in prange(out.shape[0] * out.shape[2]):
        b, h = np.int64(task) // out.shape[2], np.int64(task) % out.shape[2]
        for i in range(out.shape[1]):
            for d in range(out.shape[3]):
                total = dq[0, b, h, i, d]
                for chunk in range(1, len(dq)):
                    total += dq[chunk, b, h, i, d]
                out[b, i, h, d] = total * like(total, scale)


@threaded
def backward(grad, q, k, v, lse, delta, causal, scale, parts, dq, dk, dv):
    """dK, dV `[B, T, H, D]` and dQ less its scale, `[chunks, B, H, Tq, D]` in whole tiles and vectors, to be added up.

    q and grad have heads before tokens, k and v `[B, T, H, D]`; lse (in units of log 2, 0 for rows that see nothing)
    and delta (the sum of grad times output) are `[B, H, Tq]`.
    """
    for part in prange(parts):
        backward_part(np.int64(part), parts, grad, q, k, v, lse, delta, causal, scale, dq, dk, dv)
