"""Where elements lie in shared memory, written out for Triton 3.6, whose own code does not tell.

A layout there is linear: each bit of an offset moves on by some coordinates, and those of several bits are combined by
exclusive or.
"""

import math
from collections.abc import Sequence
from typing import Any

from triton.experimental.gluon import language as gl

from tilewise._gluon.faults import KernelFaultError, executed

# Copies by TMA have at most so many rows, and shared memory of more is laid out copy after copy.
LONGEST = 256
# A swizzled row is cut into so many bytes, which change places; the pattern fills as many bytes, or rows of so many.
CHUNK_BYTES, PATTERN_BYTES = 16, 128


def written_bases(layout: Any, shape: Sequence[int]) -> list[list[int]]:
    """The coordinates of each bit of an offset, from the lowest on."""
    if isinstance(layout, gl.SwizzledSharedLayout):
        return _of_swizzled(layout, shape)
    known = isinstance(layout, gl.NVMMASharedLayout) and not layout.fp4_padded and max(shape) <= LONGEST
    # Tritons differ there.
    if not known or (layout.transposed and (len(shape) > 2 or not layout.swizzle_byte_width)):
        message = f"where elements of {list(shape)} lie in {layout}, which Triton 3.6 does not tell"
        raise KernelFaultError("not simulated", message, executed())
    # Transposed, the first axis is the contiguous one, and the others count the rows.
    axes = [*range(1, len(shape)), 0] if layout.transposed else list(range(len(shape)))
    columns = shape[axes[-1]]
    rows = math.prod(shape) // columns
    width, steps = columns, []
    if layout.swizzle_byte_width:
        width = 8 * layout.swizzle_byte_width // layout.element_bitwidth
        steps = _swizzle(layout)
    bits = [(0, 1 << i) for i in range(width.bit_length() - 1)]
    bits += [(1 << i, steps[i] if i < len(steps) else 0) for i in range(rows.bit_length() - 1)]
    bits += [(0, 1 << i) for i in range(width.bit_length() - 1, columns.bit_length() - 1)]
    return [_coordinates(row, column, [shape[axis] for axis in axes], axes) for row, column in bits]


def _swizzle(layout: Any) -> list[int]:
    """By how many columns each bit of a row's number moves its chunks."""
    chunk = 8 * CHUNK_BYTES // layout.element_bitwidth
    per_phase = PATTERN_BYTES // layout.swizzle_byte_width
    phases = layout.swizzle_byte_width // CHUNK_BYTES
    return [(row // per_phase) % phases * chunk for row in (1, 2, 4)]


def _coordinates(row: int, column: int, sizes: Sequence[int], axes: Sequence[int]) -> list[int]:
    found = [0] * len(axes)
    found[axes[-1]] = column
    for size, axis in zip(reversed(sizes[:-1]), reversed(axes[:-1]), strict=True):
        row, found[axis] = divmod(row, size)
    return found


def _of_swizzled(layout: Any, shape: Sequence[int]) -> list[list[int]]:
    bases = []
    for place, axis in enumerate(layout.order):
        for i in range(shape[axis].bit_length() - 1):
            basis = [0] * len(shape)
            basis[axis] = 1 << i
            if place == 1:
                phase = ((1 << i) // layout.per_phase) % layout.max_phase
                inner = layout.order[0]
                basis[inner] = layout.vec * phase % shape[inner]
            bases.append(basis)
    return bases
