"""What takes a row at a time: softmax, its logarithm, layer norm, and their gradients. x is `[rows, columns]`, rows are
shared out to threads.
"""

import math

import numpy as np

from mytorch.backends.loops.compiled import bounds, prange, private, threaded
from mytorch.backends.loops.functions import exp, like

_LANES = 64


@private
def largest(x, row, lanes):
    """The largest of a row, NaN left out (it comes back through the sum); one candidate a lane, so that lanes are
    compared at once.
    """
    columns = x.shape[1]
    for i in range(_LANES):
        lanes[i] = -np.inf
    whole = columns // _LANES * _LANES
    for start in range(0, whole, _LANES):
        for i in range(_LANES):
            lanes[i] = x[row, start + i] if x[row, start + i] > lanes[i] else lanes[i]
    found = like(x[0, 0], -np.inf)
    for i in range(_LANES):
        found = max(found, lanes[i])
    for c in range(whole, columns):
        found = x[row, c] if x[row, c] > found else found
    return found


@threaded
def softmax(x, logarithm, parts, out):
    """Exponentials over their sum, or the logarithm of that."""
    columns = x.shape[1]
    for part in prange(parts):
        lanes = np.empty(_LANES, x.dtype)
        start, stop = bounds(part, parts, len(x))
        for row in range(start, stop):
            top = largest(x, row, lanes)
            total = like(top, 0)
            if logarithm:
                # Stored between the two differences: in one expression they would be taken in another order, which
                # loses digits.
                for c in range(columns):
                    out[row, c] = x[row, c] - top
                    total += exp(out[row, c])
                shift = like(top, math.log(total))
                for c in range(columns):
                    out[row, c] -= shift
            else:
                for c in range(columns):
                    out[row, c] = exp(x[row, c] - top)
                    total += out[row, c]
                for c in range(columns):
                    out[row, c] = out[row, c] / total


@threaded
def softmax_grad(grad, y, logarithm, parts, out):
    """From softmax's output, or from its logarithm."""
    columns = y.shape[1]
    for part in prange(parts):
        start, stop = bounds(part, parts, len(y))
        for row in range(start, stop):
            total = like(y[0, 0], 0)
            if logarithm:
                for c in range(columns):
                    total += grad[row, c]
                for c in range(columns):
                    out[row, c] = grad[row, c] - exp(y[row, c]) * total
            else:
                for c in range(columns):
                    total += grad[row, c] * y[row, c]
                for c in range(columns):
                    out[row, c] = y[row, c] * (grad[row, c] - total)


@threaded
def layer_norm(x, weight, bias, eps, parts, out, mean, rstd):
    """Mean 0 and variance 1 in each row, then weight and bias."""
    columns = x.shape[1]
    for part in prange(parts):
        start, stop = bounds(part, parts, len(x))
        for row in range(start, stop):
            total = like(x[0, 0], 0)
            for c in range(columns):
                total += x[row, c]
            centre = like(total, total / columns)
            # The sum's rounding, which would pass for deviation where all are about equal.
            total = like(total, 0)
            for c in range(columns):
                total += x[row, c] - centre
            centre += like(total, total / columns)
            squares = like(total, 0)
            for c in range(columns):
                squares += (x[row, c] - centre) * (x[row, c] - centre)
            factor = like(total, 1 / math.sqrt(squares / columns + eps))
            for c in range(columns):
                out[row, c] = (x[row, c] - centre) * factor * weight[c] + bias[c]
            mean[row], rstd[row] = centre, factor


@threaded
def layer_norm_grad(grad, x, weight, mean, rstd, out, weight_parts, bias_parts):
    """Of x into out; of weight and bias, each part of the rows a sum of its own, `[parts, columns]`."""
    parts, columns = weight_parts.shape
    for part in prange(parts):
        for c in range(columns):
            weight_parts[part, c] = bias_parts[part, c] = 0
        start, stop = bounds(part, parts, len(x))
        for row in range(start, stop):
            centre, factor = mean[row], rstd[row]
            plain, crossed = like(centre, 0), like(centre, 0)
            for c in range(columns):
                normed, scaled = (x[row, c] - centre) * factor, grad[row, c] * weight[c]
                plain += scaled
                crossed += scaled * normed
                weight_parts[part, c] += grad[row, c] * normed
                bias_parts[part, c] += grad[row, c]
            plain, crossed = like(centre, plain / columns), like(centre, crossed / columns)
            for c in range(columns):
                out[row, c] = factor * (grad[row, c] * weight[c] - plain - (x[row, c] - centre) * factor * crossed)


@threaded
def add_rows(grad, order, starts, out):
    """`out[v]` is the sum of grad's rows `order[starts[v]:starts[v + 1]]`, added in order."""
    for v in prange(len(out)):
        for c in range(out.shape[1]):
            out[v, c] = 0
        for i in range(starts[v], starts[v + 1]):
            for c in range(out.shape[1]):
                out[v, c] += grad[order[i], c]
