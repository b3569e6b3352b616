"""Attention to the compressed windows, with flash's kernels: window c is a key that stands at its last token,
`c * stride + size - 1`.

Plain tensors in and out; no autograd. Packed, sequence b's windows are the rows `windows[b] .. windows[b + 1]`; rows
behind its last whole window hold zeros, and no query of the sequence stands far enough to see them.
"""

import torch

from tilewise.ops.flash import launch as flash


def make_inputs(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
) -> flash.Inputs:
    """What flash attention is called with."""
    # `c * stride <= t - (size - 1)`; a window longer than all tokens is seen by none, and must not overflow.
    right = -min(size - 1, q.shape[-3])
    return flash.Inputs(q, k_cmp, v_cmp, cu, windows, None, right, scale, 0.0, stride)


def compressed_forward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., T, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, T]; 0 and -inf for a query that sees no window."""
    return flash.plan_forward(make_inputs(q, k_cmp, v_cmp, cu, windows, size, stride, scale))


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk_cmp and dv_cmp in the inputs' dtype and contiguous, from the output, its LSE and their gradients."""
    return flash.plan_backward(make_inputs(q, k_cmp, v_cmp, cu, windows, size, stride, scale), o, lse, do, dlse)
