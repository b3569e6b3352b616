"""Sums over axes. What is added up in which order depends on the shape alone, not on the number of threads."""

from mytorch.backends.loops.compiled import bounds, prange, private, threaded
from mytorch.backends.loops.functions import like

# Short sums in the array's type, their sum in fp64.
_BLOCK = 512


@private
def total(x, start, stop):
    """The sum of a stretch of a flat array."""
    found = 0.0
    for first in range(start, stop, _BLOCK):
        block = like(x[0], 0)
        for i in range(first, min(stop, first + _BLOCK)):
            block += x[i]
        found += block
    return found


@threaded
def sum_around(x, middle, inner, out):
    """`out [middle]`, of a flat x that is `[outer, middle, inner]`."""
    plane = middle * inner
    for m in prange(middle):
        found = 0.0
        for start in range(m * inner, len(x), plane):
            found += total(x, start, start + inner)
        out[m] = found


@threaded
def sum_leading(x, out):
    """`out [parts, columns]`: x `[rows, columns]` summed over each part of its rows."""
    parts, columns = out.shape
    for part in prange(parts):
        for c in range(columns):
            out[part, c] = 0
        start, stop = bounds(part, parts, len(x))
        for r in range(start, stop):
            for c in range(columns):
                out[part, c] += x[r, c]
