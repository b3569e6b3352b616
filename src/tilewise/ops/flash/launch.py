"""Flash attention launches: choose tiles, allocate, build the grid, launch. Plain tensors in and out; no autograd."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import Launch, descriptor, fits_descriptor, padded_channels, row_strides, run_all
from tilewise.ops._host.packing import batch_size, tile_slots
from tilewise.ops.flash import configs
from tilewise.ops.flash.configs import Config
from tilewise.ops.flash.kernels_bwd import flash_bwd_dkdv_kernel, flash_bwd_dq_kernel, flash_bwd_prepare_kernel
from tilewise.ops.flash.kernels_fwd import flash_fwd_kernel

LOG2E = 1.4426950408889634
PREPARE_ROWS = 64

Taps = tuple[torch.Tensor, int, int, int]


@dataclass(frozen=True)
class Inputs:
    """One call's tensors and numbers: packed where cu_q is given, window limits None or >= 0 (causal is right = 0), softcap 0 for none."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float

    @property
    def heads(self) -> int:
        """Rows of the grid beside its tiles: query heads, of every batch entry where dense."""
        return self.q.shape[-2] * (self.q.shape[0] if self.cu_q is None else 1)

    def problem(self, *gradients: torch.Tensor) -> configs.Problem:
        """What decides the tiles; `gradients` are read through descriptors too."""
        readable = all(fits_descriptor(x) for x in (self.q, self.k, self.v, *gradients))
        return configs.Problem(self.q.shape[-1], self.v.shape[-1], self.q.element_size(), readable)


def _window(left: int, right: int, causal: bool, tokens: int) -> tuple[int | None, int | None]:
    """Limits as the kernels take them: None for no limit, also where it is wider than all tokens together and so cuts nothing."""
    if causal:
        right = 0
    return (None if left < 0 or left >= tokens else left), (None if right < 0 or right >= tokens else right)


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    causal: bool,
    window_left: int,
    window_right: int,
    scale: float,
    softcap: float,
) -> Inputs:
    """Inputs from the public arguments, the window normalised."""
    left, right = _window(window_left, window_right, causal, q.shape[-3] + k.shape[-3])
    return Inputs(q, k, v, cu_q, cu_k, left, right, scale, softcap)


def _arguments(inputs: Inputs, config: Config, do: torch.Tensor | None = None) -> dict[str, Any]:
    """What every kernel that walks tiles takes: tensors (as descriptors where the config says so), sizes and constants."""
    q, k, v = inputs.q, inputs.k, inputs.v
    block_d, block_dv = padded_channels(q.shape[-1]), padded_channels(v.shape[-1])
    read: Callable[[torch.Tensor, int, int], Any] = descriptor if config.tma else lambda x, rows, columns: x
    arguments = {
        "q": read(q, config.block_m, block_d),
        "k": read(k, config.block_n, block_d),
        "v": read(v, config.block_n, block_dv),
        "q_strides": row_strides(q),
        "k_strides": row_strides(k),
        "v_strides": row_strides(v),
        "cu_q": inputs.cu_q,
        "cu_k": inputs.cu_k,
        "n_batch": batch_size(q, inputs.cu_q),
        "group": q.shape[-2] // k.shape[-2],
        "n_queries": q.shape[-3],
        "n_keys": k.shape[-3],
        "score_scale": inputs.scale / inputs.softcap if inputs.softcap else None,
        "left": inputs.left,
        "right": inputs.right,
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "TMA": config.tma,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    if do is not None:
        arguments |= {"do": read(do, config.block_m, block_dv), "do_strides": row_strides(do)}
    return arguments


def forward_launch(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, config: Config, taps: Taps | None = None) -> Launch:
    """The forward kernel's launch."""
    n_tiles = tile_slots(inputs.q.shape[-3], config.block_m, inputs.cu_q)
    # The kernel's scale must be positive, so that it can take the row maximum first: the sign (or 0) goes into q.
    sign = 1 if inputs.softcap or inputs.scale > 0 else -1 if inputs.scale < 0 else 0
    arguments = _arguments(inputs, config) | {
        "o": o,
        "lse": lse,
        "o_strides": row_strides(o),
        "n_tiles": n_tiles,
        "n_heads": inputs.q.shape[-2],
        "scale_log2": (inputs.softcap or abs(inputs.scale) or 1.0) * LOG2E,
        "SIGN": sign,
        "taps": taps,
    }
    return Launch(flash_fwd_kernel, n_tiles * inputs.heads, arguments)


def forward(inputs: Inputs, config: Config | None = None, taps: Taps | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, Tq], with the given tiles or those that configs choose."""
    q, v = inputs.q, inputs.v
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], dtype=torch.float32, device=q.device)
    if o.numel():
        config = config or configs.choose("fwd", inputs.problem(), architecture(q.device))
        run_all([forward_launch(inputs, o, lse, config, taps)], q.device)
    return o, lse


def _prepare_launch(
    inputs: Inputs, o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None, delta: torch.Tensor, lse_log2: torch.Tensor
) -> Launch:
    n_tiles = tile_slots(inputs.q.shape[-3], PREPARE_ROWS, inputs.cu_q)
    dlse_strides = None if dlse is None else (0,) * (3 - dlse.dim()) + dlse.stride()
    arguments = {
        "o": o,
        "do": do,
        "lse": lse,
        "dlse": dlse,
        "delta": delta,
        "lse_log2": lse_log2,
        "o_strides": row_strides(o),
        "do_strides": row_strides(do),
        "dlse_strides": dlse_strides,
        "cu_q": inputs.cu_q,
        "n_batch": batch_size(inputs.q, inputs.cu_q),
        "n_tiles": n_tiles,
        "n_heads": inputs.q.shape[-2],
        "n_queries": inputs.q.shape[-3],
        "DV": o.shape[-1],
        "BLOCK_DV": padded_channels(o.shape[-1]),
        "BLOCK_M": PREPARE_ROWS,
        "enable_fp_fusion": True,
    }
    return Launch(flash_bwd_prepare_kernel, n_tiles * inputs.heads, arguments)


def backward_launches(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config_dkdv: Config,
    config_dq: Config,
) -> list[Launch]:
    """The backward's launches in order: prepare, dK and dV, dQ. `gradients` are the tensors to fill: dq, dk, dv."""
    q, k = inputs.q, inputs.k
    dq, dk, dv = gradients
    delta, lse_log2 = torch.empty_like(lse), torch.empty_like(lse)
    shared = {"lse_log2": lse_log2, "delta": delta, "scale": inputs.scale, "scale_log2": (inputs.softcap or inputs.scale) * LOG2E}
    tiles_k = tile_slots(k.shape[-3], config_dkdv.block_n, inputs.cu_k)
    dkdv = {"dk": dk, "dv": dv, "dk_strides": row_strides(dk), "dv_strides": row_strides(dv), "n_tiles": tiles_k, "n_heads_k": k.shape[-2]}
    tiles_q = tile_slots(q.shape[-3], config_dq.block_m, inputs.cu_q)
    dq_only = {"dq": dq, "dq_strides": row_strides(dq), "n_tiles": tiles_q, "n_heads": q.shape[-2]}
    group = q.shape[-2] // k.shape[-2]
    return [
        _prepare_launch(inputs, o, do, lse, dlse, delta, lse_log2),
        Launch(flash_bwd_dkdv_kernel, tiles_k * (inputs.heads // group), _arguments(inputs, config_dkdv, do) | shared | dkdv),
        Launch(flash_bwd_dq_kernel, tiles_q * inputs.heads, _arguments(inputs, config_dq, do) | shared | dq_only),
    ]


def _empty(x: torch.Tensor) -> torch.Tensor:
    """Contiguous memory for a gradient, whatever the strides of what it belongs to."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def backward(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config_dkdv: Config | None = None,
    config_dq: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the inputs' dtype and contiguous, from the output, its LSE and their gradients."""
    if do.stride(-1) != 1:
        do = do.contiguous()
    gradients = _empty(inputs.q), _empty(inputs.k), _empty(inputs.v)
    if inputs.heads:
        problem, arch = inputs.problem(do), architecture(inputs.q.device)
        config_dkdv = config_dkdv or configs.choose("dkdv", problem, arch)
        config_dq = config_dq or configs.choose("dq", problem, arch)
        run_all(backward_launches(inputs, o, lse, do, dlse, gradients, config_dkdv, config_dq), inputs.q.device)
    return gradients
