"""Native sparse attention's steps as Triton launches: plain tensors in and out; no autograd.

Queries may be a part of their sequences, consecutive ones: then `first` has the position of each sequence's first query
(int32 [B], None: 0), and keys are the sequences whole, packed ones with offsets `cu_k` of their own (None: as `cu`).

`cpu.py` has the same functions.
"""

from typing import Any

import torch

from tilewise.ops._host.launching import Launch, padded_channels
from tilewise.ops._host.program import emit
from tilewise.ops._host.symbol import compute
from tilewise.ops.nsa.choose.launch import choose
from tilewise.ops.nsa.compress.launch import (
    compress,
    compress_backward,
    compressed_backward,
    compressed_forward,
    mean_windows,
)
from tilewise.ops.nsa.kernels import nsa_combine_bwd_kernel, nsa_combine_fwd_kernel
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs

# Elements of one program that combines branches.
COMBINED_ELEMENTS = 2048


def selected_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
    cu_k: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention to the keys up to the token of the blocks it names, each once: output and LSE."""
    return selected.forward(make_inputs(q, k, v, indices, cu, block_size, scale, cu_k=cu_k, first=first))


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
    cu_k: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of `selected_forward`."""
    inputs = make_inputs(q, k, v, indices, cu, block_size, scale, cu_k=cu_k, first=first)
    dq, dk, dv, _ = selected.backward(inputs, o, lse, do, dlse)
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


def _rows(x: torch.Tensor) -> dict[str, Any]:
    """Sizes of a kernel that goes over [rows, D]."""
    block_d = padded_channels(x.shape[-1])
    return {
        "n_rows": x.numel() // x.shape[-1],
        "D": x.shape[-1],
        "BLOCK_D": block_d,
        "BLOCK_R": max(1, COMBINED_ELEMENTS // block_d),
    }


def combine(outputs: list[torch.Tensor], gates: list[torch.Tensor]) -> torch.Tensor:
    """The sum of up to three outputs, each times its gate."""
    o = outputs[0].new_empty(outputs[0].shape)
    if o.numel():
        sizes = _rows(o)
        arguments: dict[str, Any] = {"y": o, "x1": None, "x2": None, "gate1": None, "gate2": None}
        for i, (output, gate) in enumerate(zip(outputs, gates, strict=True)):
            arguments |= {f"x{i}": output, f"gate{i}": gate.contiguous()}
        emit(o, Launch(nsa_combine_fwd_kernel, -(-sizes["n_rows"] // sizes["BLOCK_R"]), arguments | sizes))
    return o


def combine_backward(do: torch.Tensor, output: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of one output and its gate, from that of the sum."""
    dx, dgate = output.new_empty(output.shape), gate.new_empty(gate.shape)
    if dx.numel():
        sizes = _rows(output)
        arguments = {"dy": do.contiguous(), "x": output, "gate": gate.contiguous(), "dx": dx, "dgate": dgate}
        emit(do, Launch(nsa_combine_bwd_kernel, -(-sizes["n_rows"] // sizes["BLOCK_R"]), arguments | sizes))
    return dx, dgate


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
