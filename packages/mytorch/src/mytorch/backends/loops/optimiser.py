"""Optimisers' updates in place, each in one pass over the memory; flat arrays in as many parts as there are threads."""

import math

from mytorch.backends.loops.compiled import bounds, prange, private, threaded
from mytorch.backends.loops.functions import like


@private
def decayed(grad, decay, x):
    """Grad with weight decay; without any an infinite x must not make it NaN."""
    return grad + decay * x if decay != 0 else grad


@threaded
def sgd(x, grad, velocity, lr, momentum, weight_decay, parts):
    """With a velocity where there is one (its length is not 0)."""
    for part in prange(parts):
        start, stop = bounds(part, parts, len(x))
        rate, kept, decay = like(x[0], lr), like(x[0], momentum), like(x[0], weight_decay)
        if len(velocity):
            for i in range(start, stop):
                velocity[i] = kept * velocity[i] + decayed(grad[i], decay, x[i])
                x[i] -= rate * velocity[i]
        else:
            for i in range(start, stop):
                x[i] -= rate * decayed(grad[i], decay, x[i])


@threaded
def adam(x, grad, first, second, shrink, decay, keep_first, keep_second, rate, correction, eps, parts):
    """x shrinks by a factor before the step; correction divides the second moment, and the first one's is
    in the rate.
    """
    for part in prange(parts):
        one = like(x[0], 1)
        shrink_, decay_, rate_, correction_, eps_ = (
            like(one, shrink),
            like(one, decay),
            like(one, rate),
            like(one, correction),
            like(one, eps),
        )
        move_first, move_second = like(one, 1 - keep_first), like(one, 1 - keep_second)
        start, stop = bounds(part, parts, len(x))
        for i in range(start, stop):
            value = x[i] * shrink_
            g = decayed(grad[i], decay_, value)
            first[i] += move_first * (g - first[i])
            second[i] += move_second * (g * g - second[i])
            x[i] = value - rate_ * first[i] / (math.sqrt(second[i] / correction_) + eps_)
