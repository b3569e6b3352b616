"""Flash attention launches: choose kernels (Hopper's own, in Gluon, or the portable ones) and tiles, allocate, build
the grid, launch. Plain tensors in and out; no autograd.
"""

from typing import Any

import torch

from tilewise.ops._device.records import Heads, Offsets, RowStats, Scales, Sinks, Strided, Taps, Tile
from tilewise.ops._host import backend, gluon
from tilewise.ops._host.launching import (
    Launch,
    batch_size,
    descriptor,
    fits_descriptor,
    lse_strides,
    padded_channels,
    read_strides,
    strided,
    tile_slots,
    tile_widths,
    why_pointers,
)
from tilewise.ops._host.program import Operation, emit, note
from tilewise.ops._host.symbol import compute
from tilewise.ops.flash import configs
from tilewise.ops.flash.configs import Config, Problem
from tilewise.ops.flash.configs import Inputs as Inputs
from tilewise.ops.flash.configs import make_inputs as make_inputs
from tilewise.ops.flash.decode import configs as decode_configs
from tilewise.ops.flash.decode import launch as decode_launch
from tilewise.ops.flash.kernels.bwd import flash_bwd_dkdv_kernel, flash_bwd_dq_kernel, flash_bwd_prepare_kernel
from tilewise.ops.flash.kernels.fwd import flash_fwd_kernel
from tilewise.ops.flash.route import portable_instead, why_not_hopper
from tilewise.ops.flash.sinks import add_parts, make_parts

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch

LOG2E = 1.4426950408889634
PREPARE_ROWS = 64


def problem_of(inputs: Inputs, *gradients: torch.Tensor) -> Problem:
    """What decides the tiles of a kernel that reads q, k, v and `gradients`."""
    q, k, v = inputs.q, inputs.k, inputs.v
    readable = all(fits_descriptor(x) for x in (q, k, v, *gradients))
    return Problem(q.shape[-1], v.shape[-1], k.shape[-3], q.element_size(), readable)


def _readable(inputs: Inputs, config: Config) -> tuple[Any, Any, Any]:
    """q, k and v as a kernel reads them: descriptors where the config says so."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if not config.tma:
        return q, k, v
    block_d, block_dv = tile_widths(q.shape[-1], v.shape[-1], q.element_size())
    rows_q, rows_k = config.block_m, config.block_n
    return descriptor(q, rows_q, block_d), descriptor(k, rows_k, block_d), descriptor(v, rows_k, block_dv)


def _arguments(inputs: Inputs, config: Config, do: torch.Tensor | None = None) -> dict[str, Any]:
    """What every kernel that walks tiles takes: tensors, sizes and constants."""
    q, k, v = inputs.q, inputs.k, inputs.v
    block_d, block_dv = tile_widths(q.shape[-1], v.shape[-1], q.element_size())
    read_q, read_k, read_v = _readable(inputs, config)
    return {
        "q": read_q,
        "k": read_k,
        "v": read_v,
        "strides": read_strides(config.tma, q, k, v, do),
        "cu": Offsets(inputs.cu_q, inputs.cu_k, inputs.first),
        "n_batch": batch_size(q, inputs.cu_q),
        "n_queries": q.shape[-3],
        "n_keys": k.shape[-3],
        "left": inputs.left,
        "right": inputs.right,
        "TILE": Tile(
            D=q.shape[-1],
            DV=v.shape[-1],
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            KEY_STRIDE=inputs.key_stride,
            # Where queries are a part of their sequence, there are keys behind the last that is seen.
            TMA=2 if config.tma and inputs.first is not None else config.tma,
            PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
        ),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }


def _incoming(inputs: Inputs, do: torch.Tensor, config: Config) -> Any:
    """The output's gradient, as a descriptor where the config says so."""
    if not config.tma:
        return do
    _, block_dv = tile_widths(inputs.q.shape[-1], do.shape[-1], do.element_size())
    return descriptor(do, config.block_m, block_dv)


def _score_scale(inputs: Inputs) -> float | None:
    """What scores are multiplied by before softcap; None where there is none."""
    return inputs.scale / inputs.softcap if inputs.softcap else None


def forward_launch(
    inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, config: Config, taps: Taps | None = None
) -> Launch:
    """The forward kernel's launch."""
    n_tiles = tile_slots(inputs.q.shape[-3], config.block_m, inputs.cu_q)
    # The kernel's scale must be positive, so that it can take the row maximum first: the sign (or 0) goes into q.
    sign = 1 if inputs.softcap or inputs.scale > 0 else -1 if inputs.scale < 0 else 0
    arguments = _arguments(inputs, config) | {
        "sinks": inputs.sinks,
        "o": strided(o),
        "lse": lse,
        "n_tiles": n_tiles,
        "n_heads": inputs.q.shape[-2],
        "group": inputs.group,
        "scales": Scales((inputs.softcap or abs(inputs.scale) or 1.0) * LOG2E, _score_scale(inputs), None),
        "taps": taps,
        "SIGN": sign,
    }
    return Launch(flash_fwd_kernel, n_tiles * inputs.heads, arguments)


def _choose(kernel: configs.Kernel, inputs: Inputs, *gradients: torch.Tensor) -> Config:
    problem, card = problem_of(inputs, *gradients), backend.architecture(inputs.q.device)
    config = configs.choose(kernel, problem, card)
    if not config.tma:
        note(inputs.q, _why_pointers, kernel, inputs, problem, card, *gradients)
    return config


def _why_pointers(
    kernel: configs.Kernel, inputs: Inputs, problem: Problem, card: int, *gradients: torch.Tensor
) -> str | None:
    """Why tiles do not come through tensor descriptors, where they could."""
    if not configs.choose(kernel, problem._replace(keys=configs.TINY_KEYS + 1, descriptors=True), card).tma:
        return None
    if problem.keys <= configs.TINY_KEYS:
        return f"at most {configs.TINY_KEYS} keys: pointers, not TMA"
    return why_pointers(q=inputs.q, k=inputs.k, v=inputs.v, **dict(zip(("do",), gradients, strict=False)))


def plan_forward(
    inputs: Inputs, config: Config | None = None, taps: Taps | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, Tq], with the given tiles or those that configs
    choose.
    """
    q, v = inputs.q, inputs.v
    if inputs.num_splits > 1:
        return decode_launch.plan_forward(_by_splits(inputs))
    shape = q.shape
    o = q.new_empty((*shape[:-1], v.shape[-1]))
    lse = q.new_empty((*shape[:-3], shape[-2], shape[-3]), dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    why_not = why_not_hopper("forward", inputs) if config is None and taps is None else "the tiles are given"
    if why_not is None:
        launched = hopper_launch.forward_launch(inputs, o, lse)
    else:
        note(q, portable_instead, why_not)
        launched = forward_launch(inputs, o, lse, config or _choose("fwd", inputs), taps)
    emit(q, launched)
    return o, lse


def _by_splits(inputs: Inputs) -> decode_configs.Inputs:
    """The same call for the kernels that split its keys."""
    return decode_configs.Inputs(
        inputs.q,
        inputs.k,
        inputs.v,
        inputs.cu_q,
        None,
        None,
        None,
        inputs.sinks,
        inputs.k.shape[-3],
        inputs.left,
        inputs.right,
        inputs.scale,
        inputs.softcap,
        inputs.num_splits,
        inputs.cu_k,
    )


def prepare_launch(
    inputs: Inputs,
    o: torch.Tensor,
    do: torch.Tensor,
    lse: torch.Tensor,
    dlse: torch.Tensor | None,
    delta: torch.Tensor,
    lse_log2: torch.Tensor,
    parts: torch.Tensor | None = None,
) -> Launch:
    """Fills delta and lse_log2, which every kernel of a backward reads, and the `parts` of dsinks where there are
    sinks.
    """
    n_tiles = tile_slots(inputs.q.shape[-3], PREPARE_ROWS, inputs.cu_q)
    arguments = {
        "o": strided(o),
        "do": strided(do),
        "lse": lse,
        "dlse": Strided(dlse, None if dlse is None else lse_strides(dlse.stride())),
        "delta": delta,
        "lse_log2": lse_log2,
        "sinks": Sinks(inputs.sinks, parts),
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
    taps: tuple[Taps | None, Taps | None] = (None, None),
    parts: torch.Tensor | None = None,
) -> list[Launch]:
    """The backward's launches in order: prepare, dK and dV, dQ. `gradients` are the tensors to fill: dq, dk, dv, and
    `parts` of dsinks; `taps` for the last two kernels.

    Where config_dkdv divides a group into chunks, dk and dv have a head for each chunk: see `_add_chunks`.
    """
    q, k = inputs.q, inputs.k
    dq, dk, dv = gradients
    delta, lse_log2 = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    shared = {
        "stats": RowStats(lse_log2, delta),
        "scales": Scales((inputs.softcap or inputs.scale) * LOG2E, _score_scale(inputs), inputs.scale),
    }
    tiles_k = tile_slots(k.shape[-3], config_dkdv.block_n, inputs.cu_k)
    dkdv = {
        "do": _incoming(inputs, do, config_dkdv),
        "dk": strided(dk),
        "dv": strided(dv),
        "n_tiles": tiles_k,
        "n_heads_k": k.shape[-2] * config_dkdv.chunks,
        "heads": Heads(inputs.group // config_dkdv.chunks, config_dkdv.chunks),
        "taps": taps[0],
    }
    tiles_q = tile_slots(q.shape[-3], config_dq.block_m, inputs.cu_q)
    dq_only = {
        "do": _incoming(inputs, do, config_dq),
        "dq": strided(dq),
        "n_tiles": tiles_q,
        "n_heads": q.shape[-2],
        "group": inputs.group,
        "taps": taps[1],
    }
    return [
        prepare_launch(inputs, o, do, lse, dlse, delta, lse_log2, parts),
        Launch(
            flash_bwd_dkdv_kernel,
            tiles_k * (inputs.heads // inputs.group) * config_dkdv.chunks,
            _arguments(inputs, config_dkdv, do) | shared | dkdv,
        ),
        Launch(
            flash_bwd_dq_kernel,
            tiles_q * inputs.heads,
            _arguments(inputs, config_dq, do) | shared | dq_only,
        ),
    ]


def _choose_dkdv(inputs: Inputs, *gradients: torch.Tensor) -> Config:
    """The tiles of dK and dV, and into how many chunks a group is divided."""
    config = _choose("dkdv", inputs, *gradients)
    programs = tile_slots(inputs.k.shape[-3], config.block_n, inputs.cu_k) * inputs.heads // inputs.group
    # Packed sequences share the queries: of their lengths only the mean is known here.
    sequences = 1 if inputs.cu_q is None else max(1, batch_size(inputs.q, inputs.cu_q))
    steps = -(-inputs.q.shape[-3] // (sequences * config.block_m))
    return config._replace(chunks=configs.divide_group(programs, inputs.group, steps))


def _why_not_hopper_backward(inputs: Inputs) -> str | None:
    """Why a backward is not for Hopper's own kernels; None where it is.

    Of the calls that they take, they leave the few whose groups the portable ones divide to keep a GPU busy.
    """
    reason = why_not_hopper("backward", inputs)
    if reason is not None:
        return reason
    if not hopper_launch.fits(inputs):
        return "more than 2^31 query rows of all heads"
    if hopper_launch.leaves_idle(inputs) and _choose_dkdv(inputs).chunks > 1:
        return "few KV blocks, so a GQA group is divided"
    return None


def _empty(x: torch.Tensor, chunks: int = 1) -> torch.Tensor:
    """Contiguous memory for a gradient, regardless of its tensor's strides; of more than one chunk, each head's
    chunks side by side in fp32.
    """
    if chunks == 1:
        return x.new_empty(x.shape)
    return x.new_empty((*x.shape[:-2], x.shape[-2] * chunks, x.shape[-1]), dtype=torch.float32)


def _sum_of_chunks(gradient: torch.Tensor, chunks: int, dtype: torch.dtype) -> torch.Tensor:
    return gradient.unflatten(-2, (-1, chunks)).sum(-2).to(dtype)


def _add_chunks(gradient: torch.Tensor, chunks: int, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x that `_empty` made room for, from its chunks, added in a fixed order."""
    return gradient if chunks == 1 else compute(_sum_of_chunks, gradient, chunks, x.dtype, shape=x.shape, dtype=x.dtype)


def plan_backward(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config_dkdv: Config | None = None,
    config_dq: Config | None = None,
    taps: tuple[Taps | None, Taps | None] = (None, None),
    deterministic: bool = True,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, and dsinks where there are sinks, in the inputs' dtypes and contiguous, from the output, its LSE
    and their gradients.

    Where not deterministic, sums may be made in any order; only Hopper's own kernels gain by it.
    """
    if do.stride(-1) != 1:
        do = do.contiguous()
    q, k, v = inputs.q, inputs.k, inputs.v
    parts = make_parts(inputs, PREPARE_ROWS)
    if not inputs.heads:
        return _empty(q), _empty(k), _empty(v), *add_parts(inputs, parts)
    portable = config_dkdv is not None or config_dq is not None or any(taps)
    why_not = "the tiles are given" if portable else _why_not_hopper_backward(inputs)
    if why_not is None:
        return hopper_launch.plan_backward(inputs, o, lse, do, dlse, hopper_launch.choose_order(inputs, deterministic))
    note(q, portable_instead, why_not)
    config_dkdv = config_dkdv or _choose_dkdv(inputs, do)
    config_dq = config_dq or _choose("dq", inputs, do)
    chunks = config_dkdv.chunks
    gradients = _empty(q), _empty(k, chunks), _empty(v, chunks)
    emit(q, *backward_launches(inputs, o, lse, do, dlse, gradients, config_dkdv, config_dq, taps, parts))
    dk, dv = _add_chunks(gradients[1], chunks, k), _add_chunks(gradients[2], chunks, v)
    return gradients[0], dk, dv, *add_parts(inputs, parts)


forward, backward = Operation(plan_forward), Operation(plan_backward)
