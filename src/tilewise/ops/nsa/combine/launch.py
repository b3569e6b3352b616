"""The branches' outputs, each times its gate, summed: launches. Plain tensors in and out; no autograd."""

from typing import Any

import torch

from tilewise.ops._host.launching import Launch, padded_channels
from tilewise.ops._host.program import emit
from tilewise.ops.nsa.combine.kernels import nsa_combine_bwd_kernel, nsa_combine_fwd_kernel

# Elements of one program.
COMBINED_ELEMENTS = 2048


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
