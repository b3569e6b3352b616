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


def linear_layout(layout: Any, shape: list[int]) -> Any:
    """A layout as a linear one; those that are stay so."""
    if type(layout).__name__ in ("AutoLayout", "DistributedLinearLayout", "SharedLinearLayout"):
        return layout
    return builder().to_linear_layout(layout._to_ir(builder()), shape)


def bank_conflicts(layout: Any, shared: Any, shape: list[int], bits: int) -> int:
    """Of an access to shared memory in a layout by a tile in another, of elements of so many bits."""
    made = builder()
    return int(made.get_shared_bank_conflicts(layout._to_ir(made), shared._to_ir(made), shape, bits))


def offset_bases(layout: Any, shape: list[int]) -> list[list[int]]:
    """Which element of shared memory in a layout each bit of an offset leads to."""
    if hasattr(layout, "offset_bases"):
        return list(layout.offset_bases)
    return list(linear_layout(layout, shape).offset_bases)
