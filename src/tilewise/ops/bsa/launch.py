"""Block-sparse attention as Triton launches: its branches in order, then layer norm. Plain tensors in and out;
no autograd.

The compressed and the window branch are SiLU attention's kernels; means of blocks and the best scores come from native
sparse attention's.
"""

import torch

from tilewise.ops._host.launching import batch_size
from tilewise.ops._host.program import Operation
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.choose.launch import choose
from tilewise.ops.bsa.combine.launch import Branches, Gates, add_keys, norm_backward, norm_forward
from tilewise.ops.bsa.configs import Options, Results
from tilewise.ops.bsa.selected import launch as selected
from tilewise.ops.hstu import launch as silu
from tilewise.ops.nsa.compress.launch import compress, mean_windows


def _compressed(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    options: Options,
) -> silu.Inputs:
    """Block c stands at `c · block_size` and is seen from `block_size - 1` tokens later on."""
    # A block longer than all tokens is seen by none, and must not overflow.
    right = -min(options.block_size - 1, q.shape[-3])
    return silu.Inputs(
        q, k_cmp, v_cmp, cu, windows, silu.Mask(True, None, right, options.block_size), options.scale, None, 1.0
    )


def _window(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu: torch.Tensor | None, options: Options
) -> silu.Inputs:
    left = options.window_size - 1
    return silu.Inputs(
        q, k, v, cu, None, silu.Mask(True, left if left < q.shape[-3] else None, 0), options.scale, None, 1.0
    )


def plan_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: Gates,
    cu: torch.Tensor | None,
    options: Options,
) -> Results:
    """All branches, their blocks, and the output."""
    block_size, tokens = options.block_size, q.shape[-3]
    shared = 2 if options.interleave else 1
    windows = mean_windows(cu, tokens, block_size)
    k_cmp, v_cmp = (compress(x, cu, windows, block_size, block_size) for x in (k, v))
    dtype = configs.branch_dtype(q.dtype)
    o_cmp = silu.plan_forward(_compressed(q, k_cmp, v_cmp, cu, windows, options), dtype=dtype)
    count = options.block_counts if cu is not None else min(options.block_counts, -(-tokens // block_size))
    indices, public = choose(q, k_cmp, cu, windows, count, block_size, shared, options.scale)
    o_slc = selected.forward(selected.make_inputs(q, k, v, indices, cu, block_size, options.scale))
    o_swa = silu.plan_forward(_window(q, k, v, cu, options), dtype=dtype) if options.window_size else None
    o = norm_forward(u, (o_cmp, o_slc, o_swa), gates, q.dtype)
    return Results(o, public, k_cmp, v_cmp, o_cmp, o_slc, o_cmp.new_empty((0,)) if o_swa is None else o_swa)


def plan_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: Gates,
    block_indices: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o_cmp: torch.Tensor,
    o_slc: torch.Tensor,
    o_swa: torch.Tensor,
    cu: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, du and the gates' gradients, None for a gate that is None."""
    block_size, tokens = options.block_size, q.shape[-3]
    branches: Branches = (o_cmp, o_slc, o_swa if options.window_size else None)
    du, (do_cmp, do_slc, do_swa), dgates = norm_backward(do, u, branches, gates)
    windows = mean_windows(cu, tokens, block_size)
    chunks = configs.query_chunks(
        k_cmp.shape[-3] * k_cmp.shape[-2], tokens // max(1, batch_size(q, cu) if cu is not None else 1)
    )
    indices = block_indices[..., :: 2 if options.interleave else 1, :, :].transpose(-3, -2)
    dq_cmp, dk_cmp, dv_cmp = silu.plan_backward(
        _compressed(q, k_cmp, v_cmp, cu, windows, options), do_cmp, chunks=chunks
    )
    dq, dk_slc, dv_slc = selected.backward(
        selected.make_inputs(q, k, v, indices, cu, block_size, options.scale), do_slc, dq_cmp
    )
    dk_swa = dv_swa = None
    if do_swa is not None:
        dq_swa, dk_swa, dv_swa = silu.plan_backward(_window(q, k, v, cu, options), do_swa)
        dq = dq.add_(dq_swa)
    dk = add_keys(k, dk_slc, dk_cmp, dk_swa, cu, windows, block_size, chunks)
    dv = add_keys(v, dv_slc, dv_cmp, dv_swa, cu, windows, block_size, chunks)
    return dq, dk, dv, du, *dgates


forward, backward = Operation(plan_forward), Operation(plan_backward)
