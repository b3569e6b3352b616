"""Convolution and pooling, an image or a part of the batch a thread.

A convolution is a matrix product whose left side is never built: pixel p of the result and tap k of the window meet at
`image[pixels[p] + taps[k]]` of an image with a border of zeros, so the product takes two lists of offsets. Which list
is the rows' and which is summed over tells the result from the weight's gradient; the input's gradient is a convolution
of the incoming one, spread apart by the stride, with the weight turned round.
"""

import numpy as np

from mytorch.backends.loops.compiled import bounds, prange, private, threaded
from mytorch.backends.loops.functions import choose
from mytorch.backends.loops.tiles import ROWS, multiply


@private
def place(image, spread, corner, width, plane, bordered):
    """Write image `[C, H, W]` into a plane of zeros a channel, from a corner on and spread apart."""
    for c in range(image.shape[0]):
        for y in range(image.shape[1]):
            at = c * plane + (corner[0] + y * spread[0]) * width + corner[1]
            for x in range(image.shape[2]):
                bordered[at + x * spread[1]] = image[c, y, x]


@private
def convolve_part(start, stop, images, spread, corner, size, weight, bias, pixels, taps, ranges, out):
    """Images from start to stop."""
    plane, count = size[0] * size[1], out.shape[2]
    bordered = np.zeros(images.shape[1] * plane, images.dtype)
    tile = np.empty((ROWS, weight.shape[1]), images.dtype)
    for b in range(start, stop):
        place(images[b], spread, corner, size[1], plane, bordered)
        for p in range(0, count, ROWS):
            for r in range(ROWS):
                for o in range(len(bias)):
                    tile[r, o] = bias[o]
            first, last = ranges[p // ROWS]
            multiply(bordered, pixels[p : p + ROWS], taps[first:last], weight[first:last], tile)
            if p + ROWS <= count:
                for o in range(out.shape[1]):
                    for r in range(ROWS):
                        out[b, o, p + r] = tile[r, o]
            else:
                for o in range(out.shape[1]):
                    for r in range(count - p):
                        out[b, o, p + r] = tile[r, o]


@threaded
def convolve(images, spread, corner, size, weight, bias, pixels, taps, ranges, parts, out):
    """`out [B, O, P]` of images set into planes of a size.

    weight is `[taps, whole vectors]`, bias as wide, pixels are filled up to whole ROWS, and of these each has a range
    of taps, for the first and the last rows of the window may see nothing but the border.
    """
    for part in prange(parts):
        start, stop = bounds(part, parts, len(images))
        convolve_part(start, stop, images, spread, corner, size, weight, bias, pixels, taps, ranges, out)


@private
def convolve_weight_part(start, stop, images, corner, size, grad, pixels, taps, out):
    """Images from start to stop add up `out [taps, whole vectors]`."""
    plane = size[0] * size[1]
    bordered = np.zeros(images.shape[1] * plane, images.dtype)
    turned = np.zeros((grad.shape[2], out.shape[1]), images.dtype)
    for t in range(out.shape[0]):
        for o in range(out.shape[1]):
            out[t, o] = 0
    for b in range(start, stop):
        place(images[b], (1, 1), corner, size[1], plane, bordered)
        for p in range(grad.shape[2]):
            for o in range(grad.shape[1]):
                turned[p, o] = grad[b, o, p]
        multiply(bordered, taps, pixels, turned, out)


@threaded
def convolve_weight(images, corner, size, grad, pixels, taps, out):
    """`out [parts, taps, whole vectors]`: each part of the batch accumulates its own weight gradient; taps are filled
    up to whole ROWS.
    """
    for part in prange(len(out)):
        start, stop = bounds(part, len(out), len(images))
        convolve_weight_part(start, stop, images, corner, size, grad, pixels, taps, out[part])


@private
def larger(value, at, top, where):
    """The larger of two and where it stands; NaN counts as larger than all, and the first of equals stays."""
    found = (not (value <= top)) & (top == top)
    return choose(found, value, top), choose(found, at, where)


@private
def pool_row(image, row, size, step, out, out_where):
    """One row of the result; windows of 2 x 2 without a loop, in a third of the time."""
    width = image.shape[1]
    for x in range(len(out)):
        column = x * step
        at = row * width + column
        top, where = image[row, column], at
        if size[0] == 2 and size[1] == 2:
            top, where = larger(image[row, column + 1], at + 1, top, where)
            top, where = larger(image[row + 1, column], at + width, top, where)
            top, where = larger(image[row + 1, column + 1], at + width + 1, top, where)
        else:
            for i in range(size[0]):
                for j in range(size[1]):
                    top, where = larger(image[row + i, column + j], at + i * width + j, top, where)
        out[x], out_where[x] = top, where


@threaded
def pool(images, size, stride, out, where):
    """The largest of each window of images `[N, H, W]`, and where it stood."""
    for n in prange(len(images)):
        for y in range(out.shape[1]):
            pool_row(images[n], y * stride[0], size, stride[1], out[n, y], where[n, y])


@threaded
def pool_grad(grad, where, out):
    """Grad `[N, P]` added up at where, in `out [N, H * W]`."""
    for n in prange(len(grad)):
        for p in range(out.shape[1]):
            out[n, p] = 0
        for p in range(grad.shape[1]):
            out[n, where[n, p]] += grad[n, p]
