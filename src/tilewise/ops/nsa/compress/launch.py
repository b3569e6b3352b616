"""The compressed branch: means of windows, and attention to them with flash's kernels, where window c is a key that
stands at its last token, `c * stride + size - 1`.

Plain tensors in and out; no autograd. Packed, sequence b's windows are the rows `windows[b] .. windows[b + 1]`; rows
behind its last whole window hold zeros, and no query of the sequence stands far enough to see them.
"""

from typing import Any

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import Launch, batch_size, padded_channels, row_strides, tile_slots
from tilewise.ops._host.program import emit
from tilewise.ops.flash import launch as flash
from tilewise.ops.nsa.compress.kernels import nsa_compress_bwd_kernel, nsa_compress_fwd_kernel, nsa_windows_kernel
from tilewise.ops.nsa.problem import window_count

# Windows of one program that makes means, each a loop over its tokens (interpreted, few programs are faster); tokens of
# one that spreads gradients.
MEANS = 32 if interpreting() else 4
COMPRESSED_ROWS = 32
# Offsets of one program that finds where windows begin.
OFFSETS = 1024
# More than a sequence has.
MOST_TOKENS = 1 << 30


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
    """Where the means of packed sequences begin, int32 [B + 1]: as `problem.mean_windows`."""
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


def make_inputs(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    first: torch.Tensor | None = None,
) -> flash.Inputs:
    """What flash attention is called with."""
    # `c * stride <= t - (size - 1)`; a window longer than all tokens is seen by none, and must not overflow.
    right = -min(size - 1, MOST_TOKENS)
    return flash.Inputs(q, k_cmp, v_cmp, cu, windows, None, right, scale, 0.0, stride, first=first)


def compressed_forward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., T, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, T]; 0 and -inf for a query that sees no window."""
    return flash.plan_forward(make_inputs(q, k_cmp, v_cmp, cu, windows, size, stride, scale, first))


def compressed_backward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk_cmp and dv_cmp in the inputs' dtype and contiguous, from the output, its LSE and their gradients."""
    return flash.plan_backward(make_inputs(q, k_cmp, v_cmp, cu, windows, size, stride, scale, first), o, lse, do, dlse)
