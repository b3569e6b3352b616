"""Triton's own code for layouts, which needs no GPU."""

import functools
from typing import Any

from triton._C.libtriton import gluon_ir, ir


@functools.cache
def builder() -> Any:
    """Makes layouts and operations of Triton's."""
    context = ir.context()
    ir.load_dialects(context)
    made = gluon_ir.GluonOpBuilder(context)
    # It does not keep its context alive.
    made.context = context
    return made


def offset_bases(layout: Any, shape: list[int]) -> list[list[int]]:
    """Which element of shared memory in a layout each bit of an offset leads to."""
    if hasattr(layout, "offset_bases"):
        return list(layout.offset_bases)
    return list(builder().to_linear_layout(layout._to_ir(builder()), shape).offset_bases)
