"""Native sparse attention's parts as Triton launches: plain tensors in and out; no autograd.

`cpu.py` has the same functions.
"""

from typing import Any

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import Launch, padded_channels, row_strides
from tilewise.ops._host.packing import batch_size, tile_slots
from tilewise.ops._host.slot import compute
from tilewise.ops._host.template import emit
from tilewise.ops.nsa import selected
from tilewise.ops.nsa.choose import choose
from tilewise.ops.nsa.compressed import compressed_backward, compressed_forward
from tilewise.ops.nsa.kernels_combine import nsa_combine_bwd_kernel, nsa_combine_fwd_kernel
from tilewise.ops.nsa.kernels_compress import nsa_compress_bwd_kernel, nsa_compress_fwd_kernel, nsa_windows_kernel
from tilewise.ops.nsa.sizes import window_count

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

# Windows of one program that makes means, each a loop over its tokens (interpreted, few programs are faster); tokens of
# one that spreads gradients.
MEANS = 32 if interpreting() else 4
COMPRESSED_ROWS = 32
# Offsets of one program that finds where windows begin.
OFFSETS = 1024
COMBINED_ELEMENTS = 2048


def _compress_arguments(
    x: torch.Tensor,
    tokens: int,
    rows: int,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
) -> dict[str, Any]:
    return {
        "cu": cu,
        "windows": windows,
        "n_batch": batch_size(x, cu),
        "n_heads": x.shape[-2],
        "n_tokens": tokens,
        "n_windows": rows,
        "D": x.shape[-1],
        "BLOCK_D": padded_channels(x.shape[-1]),
        "SIZE": size,
        "STRIDE": stride,
        "enable_fp_fusion": True,
    }


def mean_windows(cu: torch.Tensor | None, tokens: int, stride: int) -> torch.Tensor | None:
    """Where the means of packed sequences begin, int32 [B + 1]: as `sizes.mean_windows`."""
    if cu is None:
        return None
    windows = cu.new_empty(cu.shape, dtype=torch.int32)
    arguments = {
        "cu": cu,
        "windows": windows,
        "n_offsets": cu.shape[0],
        "n_windows": tokens // stride,
        "STRIDE": stride,
        "BLOCK": OFFSETS,
    }
    emit(cu, Launch(nsa_windows_kernel, -(-cu.shape[0] // OFFSETS), arguments))
    return windows


def compress(
    x: torch.Tensor, cu: torch.Tensor | None, windows: torch.Tensor | None, size: int, stride: int
) -> torch.Tensor:
    """Means of windows: dense [B, C, H, D]; packed [N // stride, H, D], sequence b's from `windows[b]` on and zeros
    behind them.
    """
    tokens = x.shape[-3]
    rows = window_count(tokens, size, stride) if cu is None else tokens // stride
    y = x.new_empty((*x.shape[:-3], rows, *x.shape[-2:]))
    if y.numel():
        n_tiles = tile_slots(rows, MEANS, windows)
        arguments = _compress_arguments(x, tokens, rows, cu, windows, size, stride)
        arguments |= {"x": x, "y": y, "x_strides": row_strides(x.stride()), "y_strides": row_strides(y.stride())}
        arguments |= {"n_tiles": n_tiles, "BLOCK_N": MEANS}
        grid = n_tiles * x.shape[-2] * (x.shape[0] if cu is None else 1)
        emit(x, Launch(nsa_compress_fwd_kernel, grid, arguments))
    return y


def compress_backward(
    dy: torch.Tensor, tokens: int, cu: torch.Tensor | None, windows: torch.Tensor | None, size: int, stride: int
) -> torch.Tensor:
    """The gradient of `compress`, [B, tokens, H, D] or [tokens, H, D]."""
    dx = dy.new_empty((*dy.shape[:-3], tokens, *dy.shape[-2:]))
    if dx.numel():
        n_tiles = tile_slots(tokens, COMPRESSED_ROWS, cu)
        arguments = _compress_arguments(dy, tokens, dy.shape[-3], cu, windows, size, stride)
        arguments |= {
            "dy": dy,
            "dx": dx,
            "dy_strides": row_strides(dy.stride()),
            "dx_strides": row_strides(dx.stride()),
        }
        arguments |= {"n_tiles": n_tiles, "BLOCK_M": COMPRESSED_ROWS}
        grid = n_tiles * dy.shape[-2] * (dy.shape[0] if cu is None else 1)
        emit(dy, Launch(nsa_compress_bwd_kernel, grid, arguments))
    return dx


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
    return selected.forward(selected.make_inputs(q, k, v, indices, cu, block_size, scale))


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
    dq, dk, dv, _ = selected.backward(selected.make_inputs(q, k, v, indices, cu, block_size, scale), o, lse, do, dlse)
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
    return selected.forward(
        selected.make_inputs(q, k, v, indices, None, block_size, scale, sel_scale, own=own, causal=False)
    )


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
    inputs = selected.make_inputs(q, k, v, indices, None, block_size, scale, sel_scale, own=own, causal=False)
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
    """A block that was cut into parts, and a group that was cut into heads of its own, share one scale."""
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
