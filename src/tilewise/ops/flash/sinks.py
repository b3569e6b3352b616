"""The gradient of sinks on the host: what each tile of queries adds to it, summed in a fixed order."""

import torch

from tilewise.ops._host.launching import tile_slots
from tilewise.ops._host.symbol import compute
from tilewise.ops.flash.configs import Inputs


def make_parts(inputs: Inputs, rows: int) -> torch.Tensor | None:
    """Memory for what each tile of `rows` queries adds, laid out as LSEs with tiles in place of tokens; None without
    sinks.
    """
    if inputs.sinks is None:
        return None
    *batch, queries, heads, _ = inputs.q.shape
    return inputs.q.new_empty((*batch, heads, tile_slots(queries, rows, inputs.cu_q)), dtype=torch.float32)


def add_parts(inputs: Inputs, parts: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The gradient of sinks; nothing without them."""
    sinks = inputs.sinks
    if sinks is None:
        return ()
    return (compute(_sum_of_parts, parts, sinks.dtype, shape=sinks.shape, dtype=sinks.dtype),)


def _sum_of_parts(parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return parts.transpose(0, -2).flatten(1).sum(1).to(dtype)
