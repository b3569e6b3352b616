"""Native sparse attention's steps as Triton launches: plain tensors in and out; no autograd.

`cpu.py` has the same functions.
"""

import torch

from tilewise.ops._host.symbol import compute
from tilewise.ops.nsa.choose.launch import choose
from tilewise.ops.nsa.combine.launch import combine, combine_backward
from tilewise.ops.nsa.compress.launch import (
    compress,
    compress_backward,
    compressed_backward,
    compressed_forward,
    mean_windows,
)
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs

__all__ = [
    "attend_backward",
    "attend_forward",
    "choose",
    "combine",
    "combine_backward",
    "compress",
    "compress_backward",
    "compressed_backward",
    "compressed_forward",
    "mean_windows",
    "selected_backward",
    "selected_forward",
]


def selected_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys up to the token of the blocks it names, each once: output and LSE."""
    return selected.forward(make_inputs(q, k, v, indices, cu, block_size, scale))


def selected_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of `selected_forward`."""
    dq, dk, dv, _ = selected.backward(make_inputs(q, k, v, indices, cu, block_size, scale), o, lse, do, dlse)
    return dq, dk, dv


def attend_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to whole named blocks, each as often as it is named and scaled by its sel_scale, and to the token's own
    up to it.
    """
    return selected.forward(make_inputs(q, k, v, indices, None, block_size, scale, sel_scale, own=own, causal=False))


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and sel_scale's gradient of `attend_forward`."""
    inputs = make_inputs(q, k, v, indices, None, block_size, scale, sel_scale, own=own, causal=False)
    dq, dk, dv, dsel = selected.backward(inputs, o, lse, do, dlse)
    if sel_scale is None or dsel is None:
        return dq, dk, dv, None
    if sel_scale.numel() == 0:
        return dq, dk, dv, sel_scale.new_zeros(sel_scale.shape)
    *_, heads, slots = sel_scale.shape
    return (
        dq,
        dk,
        dv,
        compute(_add_shared, dsel, heads, slots, sel_scale.dtype, shape=sel_scale.shape, dtype=sel_scale.dtype),
    )


def _add_shared(dsel: torch.Tensor, heads: int, slots: int, dtype: torch.dtype) -> torch.Tensor:
    """A block that was cut into parts, and a group that was cut into separate index heads, share one scale."""
    return dsel.unflatten(-1, (slots, -1)).sum(-1).unflatten(-2, (heads, -1)).sum(-2).to(dtype)
