"""Where block-sparse attention's branches meet: gates, layer norm and u; and the sum of their gradients of keys and
values. Launches: plain tensors in and out; no autograd.
"""

from typing import Any

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import Launch, batch_size, padded_channels, power_of_2, strided, tile_slots
from tilewise.ops._host.program import emit
from tilewise.ops.bsa import configs
from tilewise.ops.bsa.combine.kernels import (
    Branch,
    NormShape,
    bsa_bwd_keys_kernel,
    bsa_norm_bwd_kernel,
    bsa_norm_fwd_kernel,
)
from tilewise.ops.bsa.configs import LAYER_NORM_EPS

# Keys of one program that adds up their gradient.
KEYS = 32

# Of the compressed, the selected and the window branch, in this order; None where the window is left out, and where
# a gate is not given.
Branches = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def norm_rows(heads: int, channels: int) -> int:
    """Tokens of one program of the kernels over whole tokens: few where they are wide; interpreted, few programs are
    faster.
    """
    return 32 if interpreting() else max(1, configs.ELEMENTS_A_WARP // (power_of_2(heads) * padded_channels(channels)))


def _norm(u: torch.Tensor, branches: Branches, gates: Gates) -> dict[str, Any]:
    """What both kernels over whole tokens take."""
    heads, channels = u.shape[-2:]
    rows = norm_rows(heads, channels)
    shape = NormShape(heads, power_of_2(heads), channels, padded_channels(channels), rows, LAYER_NORM_EPS)
    elements = shape.H_P * shape.BLOCK_DV
    arguments = _records("", branches, tuple(None if gate is None else gate.contiguous() for gate in gates))
    return arguments | {
        "u": strided(u),
        "n_rows": _tokens(u),
        "n_tokens": u.shape[-3],
        "SHAPE": shape,
        "num_warps": min(max(1, rows * elements // configs.ELEMENTS_A_WARP), configs.MOST_WARPS),
        "enable_fp_fusion": True,
    }


def _records(prefix: str, outputs: Branches, gates: tuple[torch.Tensor | None, ...]) -> dict[str, Any]:
    """Each branch's output and gate, or their gradients, as the kernels take them."""
    each = zip(("cmp", "slc", "swa"), outputs, gates, strict=True)
    return {prefix + name: Branch(x, gate) for name, x, gate in each}


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // (x.shape[-1] * x.shape[-2])


def norm_forward(u: torch.Tensor, branches: Branches, gates: Gates, dtype: torch.dtype) -> torch.Tensor:
    """u times the sum of the branches' outputs, each times its gate and normalised; in `dtype`, contiguous."""
    o = branches[0].new_empty(branches[0].shape, dtype=dtype)
    if o.numel():
        arguments = _norm(u, branches, gates) | {"o": o}
        emit(o, Launch(bsa_norm_fwd_kernel, -(-_tokens(o) // norm_rows(*u.shape[-2:])), arguments))
    return o


def norm_backward(
    do: torch.Tensor, u: torch.Tensor, branches: Branches, gates: Gates
) -> tuple[torch.Tensor, Branches, Gates]:
    """The gradients of u, of the branches' outputs (in do's dtype) and of the gates; None where there is none."""
    o_cmp, o_slc, o_swa = branches
    du = u.new_empty(u.shape)
    do_cmp, do_slc = (x.new_empty(x.shape, dtype=do.dtype) for x in (o_cmp, o_slc))
    do_swa = None if o_swa is None else o_swa.new_empty(o_swa.shape, dtype=do.dtype)
    dg_cmp, dg_slc, dg_swa = (None if gate is None else gate.new_empty(gate.shape) for gate in gates)
    if du.numel():
        outgoing = _records("d", (do_cmp, do_slc, do_swa), (dg_cmp, dg_slc, dg_swa))
        arguments = _norm(u, branches, gates) | outgoing | {"do": do.contiguous(), "du": du}
        emit(du, Launch(bsa_norm_bwd_kernel, -(-_tokens(du) // norm_rows(*u.shape[-2:])), arguments))
    return du, (do_cmp, do_slc, do_swa), (dg_cmp, dg_slc, dg_swa)


def add_keys(
    x: torch.Tensor,
    dx_slc: torch.Tensor,
    dx_cmp: torch.Tensor,
    dx_swa: torch.Tensor | None,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    block_size: int,
    chunks: int,
) -> torch.Tensor:
    """The gradient of k or v, `x`, from all branches; that of the means comes in `chunks`."""
    dx = x.new_empty(x.shape)
    if dx.numel():
        n_tiles = tile_slots(x.shape[-3], KEYS, cu)
        tensors = {"dx_slc": dx_slc, "dx_cmp": dx_cmp, "dx_swa": dx_swa, "dx": dx}
        arguments = {name: None if y is None else strided(y) for name, y in tensors.items()}
        arguments |= {
            "cu": cu,
            "windows": windows,
            "n_batch": batch_size(x, cu),
            "n_tiles": n_tiles,
            "n_heads": x.shape[-2],
            "n_tokens": x.shape[-3],
            "n_windows": dx_cmp.shape[-3] // chunks,
            "n_chunks": chunks,
            "D": x.shape[-1],
            "BLOCK_D": padded_channels(x.shape[-1]),
            "BLOCK_M": KEYS,
            "BLOCK_SIZE": block_size,
            "enable_fp_fusion": True,
        }
        grid = n_tiles * x.shape[-2] * (x.shape[0] if cu is None else 1)
        emit(x, Launch(bsa_bwd_keys_kernel, grid, arguments))
    return dx
