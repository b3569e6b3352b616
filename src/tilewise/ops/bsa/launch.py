"""Block-sparse attention as Triton launches: its branches one after another, then layer norm. Plain tensors in and out;
no autograd.

The compressed and the window branch are SiLU attention's kernels; means of blocks and the best scores come from native
sparse attention's.
"""

from typing import Any

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import Launch, padded_channels, power_of_2, row_strides
from tilewise.ops._host.packing import batch_size, tile_slots
from tilewise.ops._host.program import Operation
from tilewise.ops._host.slot import compute
from tilewise.ops._host.template import emit
from tilewise.ops.bsa import configs, selected
from tilewise.ops.bsa.kernels_keys import bsa_bwd_keys_kernel
from tilewise.ops.bsa.kernels_norm import bsa_norm_bwd_kernel, bsa_norm_fwd_kernel
from tilewise.ops.bsa.options import LAYER_NORM_EPS, Options, Results
from tilewise.ops.hstu import launch as silu
from tilewise.ops.nsa.launch import compress, mean_windows

# Keys of one program that adds up their gradient.
KEYS = 32

Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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


def norm_rows(heads: int, channels: int) -> int:
    """Tokens of one program of the kernels over whole tokens: few where they are wide; interpreted, few programs are
    faster.
    """
    return 32 if interpreting() else max(1, configs.ELEMENTS_A_WARP // (power_of_2(heads) * padded_channels(channels)))


def _norm(u: torch.Tensor, branches: list[torch.Tensor | None], gates: Gates) -> dict[str, Any]:
    """What both kernels over whole tokens take."""
    heads, channels = u.shape[-2:]
    elements = power_of_2(heads) * padded_channels(channels)
    rows = norm_rows(heads, channels)
    arguments: dict[str, Any] = {
        name: None if gate is None else gate.contiguous()
        for name, gate in zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True)
    }
    arguments |= dict(zip(("o_cmp", "o_slc", "o_swa"), branches, strict=True))
    return arguments | {
        "u": u,
        "u_strides": row_strides(u.stride()),
        "n_rows": _tokens(u),
        "n_tokens": u.shape[-3],
        "BLOCK_R": rows,
        "H": heads,
        "H_P": power_of_2(heads),
        "DV": channels,
        "BLOCK_DV": padded_channels(channels),
        "EPS": LAYER_NORM_EPS,
        "num_warps": min(max(1, rows * elements // configs.ELEMENTS_A_WARP), configs.MOST_WARPS),
        "enable_fp_fusion": True,
    }


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // (x.shape[-1] * x.shape[-2])


def _sum_of_parts(x: torch.Tensor, parts: int) -> torch.Tensor:
    return x.unflatten(-3, (parts, -1)).sum(-4)


def _add_keys(
    x: torch.Tensor,
    dx_slc: torch.Tensor,
    dx_cmp: torch.Tensor,
    dx_swa: torch.Tensor | None,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    block_size: int,
    parts: int,
) -> torch.Tensor:
    """The gradient of k or v, `x`, from all branches; that of the means comes in `parts`."""
    if parts > 1:
        rows = dx_cmp.shape[-3] // parts
        dx_cmp = compute(
            _sum_of_parts, dx_cmp, parts, shape=(*dx_cmp.shape[:-3], rows, *dx_cmp.shape[-2:]), dtype=dx_cmp.dtype
        )
    dx = x.new_empty(x.shape)
    if dx.numel():
        n_tiles = tile_slots(x.shape[-3], KEYS, cu)
        tensors = {"dx_slc": dx_slc, "dx_cmp": dx_cmp, "dx_swa": dx_swa, "dx": dx}
        strides = {"slc_strides": dx_slc, "cmp_strides": dx_cmp, "swa_strides": dx_swa, "strides": dx}
        arguments: dict[str, Any] = tensors | {
            name: None if y is None else row_strides(y.stride()) for name, y in strides.items()
        }
        arguments |= {
            "cu": cu,
            "windows": windows,
            "n_batch": batch_size(x, cu),
            "n_tiles": n_tiles,
            "n_heads": x.shape[-2],
        }
        arguments |= {"n_tokens": x.shape[-3], "n_windows": dx_cmp.shape[-3], "D": x.shape[-1]}
        arguments |= {
            "BLOCK_D": padded_channels(x.shape[-1]),
            "BLOCK_M": KEYS,
            "BLOCK_SIZE": block_size,
            "enable_fp_fusion": True,
        }
        grid = n_tiles * x.shape[-2] * (x.shape[0] if cu is None else 1)
        emit(x, Launch(bsa_bwd_keys_kernel, grid, arguments))
    return dx


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
    o_cmp = silu.plan_forward(_compressed(q, k_cmp, v_cmp, cu, windows, options))
    count = options.block_counts if cu is not None else min(options.block_counts, -(-tokens // block_size))
    indices, public = selected.choose(q, k_cmp, cu, windows, count, block_size, shared, options.scale)
    o_slc = selected.forward(selected.make_inputs(q, k, v, indices, cu, block_size, options.scale))
    o_swa = silu.plan_forward(_window(q, k, v, cu, options)) if options.window_size else None
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    if o.numel():
        emit(
            o,
            Launch(
                bsa_norm_fwd_kernel,
                -(-_tokens(o) // norm_rows(*u.shape[-2:])),
                _norm(u, [o_cmp, o_slc, o_swa], gates) | {"o": o},
            ),
        )
    return Results(o, public, k_cmp, v_cmp, o_cmp, o_slc, q.new_empty((0,)) if o_swa is None else o_swa)


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
    branches = [o_cmp, o_slc, o_swa if options.window_size else None]
    du, do_cmp, do_slc = (x.new_empty(x.shape) for x in (u, o_cmp, o_slc))
    do_swa = o_swa.new_empty(o_swa.shape) if options.window_size else None
    dgates = [None if gate is None else gate.new_empty(gate.shape) for gate in gates]
    if du.numel():
        outgoing = dict(
            zip(
                ("do_cmp", "do_slc", "do_swa", "dg_cmp", "dg_slc", "dg_swa"),
                (do_cmp, do_slc, do_swa, *dgates),
                strict=True,
            )
        )
        arguments = _norm(u, branches, gates) | outgoing | {"do": do.contiguous(), "du": du}
        emit(du, Launch(bsa_norm_bwd_kernel, -(-_tokens(du) // norm_rows(*u.shape[-2:])), arguments))
    windows = mean_windows(cu, tokens, block_size)
    parts = configs.query_parts(
        k_cmp.shape[-3] * k_cmp.shape[-2], tokens // max(1, batch_size(q, cu) if cu is not None else 1)
    )
    indices = block_indices[..., :: 2 if options.interleave else 1, :, :].transpose(-3, -2)
    dq_cmp, dk_cmp, dv_cmp = silu.plan_backward(_compressed(q, k_cmp, v_cmp, cu, windows, options), do_cmp, parts=parts)
    dq, dk_slc, dv_slc = selected.backward(
        selected.make_inputs(q, k, v, indices, cu, block_size, options.scale), do_slc, dq_cmp
    )
    dk_swa = dv_swa = None
    if do_swa is not None:
        dq_swa, dk_swa, dv_swa = silu.plan_backward(_window(q, k, v, cu, options), do_swa)
        dq = dq.add_(dq_swa)
    dk = _add_keys(k, dk_slc, dk_cmp, dk_swa, cu, windows, block_size, parts)
    dv = _add_keys(v, dv_slc, dv_cmp, dv_swa, cu, windows, block_size, parts)
    return dq, dk, dv, du, *dgates


forward, backward = Operation(plan_forward), Operation(plan_backward)
