"""SiLU attention launches: choose tiles, allocate, build the grid, launch. Plain tensors in and out; no autograd.

`make_inputs` is HSTU attention; the compressed and the window branch of block-sparse attention are the same kernels
with other numbers.
"""

from typing import Any, NamedTuple

import torch

from tilewise.ops._device.records import Packed, SiluScales, SiluTile, Taps
from tilewise.ops._device.rows import order_tiles_kernel
from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import (
    Launch,
    batch_size,
    descriptor,
    fits_descriptor,
    padded_channels,
    read_strides,
    strided,
    tile_slots,
    tile_widths,
    why_pointers,
)
from tilewise.ops._host.program import Operation, emit, note
from tilewise.ops.flash.launch import LOG2E
from tilewise.ops.hstu import configs
from tilewise.ops.hstu.configs import Config
from tilewise.ops.hstu.kernels.bwd import hstu_bwd_dkdv_kernel, hstu_bwd_dq_kernel
from tilewise.ops.hstu.kernels.fwd import hstu_fwd_kernel

# Sequences, and tiles of one, that a program of `order_tiles_kernel` takes at a time.
ORDERED = 1024


class Mask(NamedTuple):
    """Which pairs take part: flash attention's limits and key stride; with targets or a context left is the reach, and
    `causal` says the rest.
    """

    causal: bool
    left: int | None
    right: int | None
    key_stride: int | None = None
    num_targets: torch.Tensor | None = None
    context: int | None = None


class Inputs(NamedTuple):
    """One call's tensors and numbers: packed where cu_q is given; cu_k only where keys have their own offsets.

    Weights are `gain · s · sigmoid(alpha · s)`, a gain of None being 1, and `factor` times their sum with the values is
    the output.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    mask: Mask
    alpha: float
    gain: float | None
    factor: float

    def problem(self, *gradients: torch.Tensor) -> configs.Problem:
        """What decides the tiles of a kernel that reads q, k, v and `gradients`."""
        tensors = (self.q, self.k, self.v, *gradients)
        readable = all(fits_descriptor(_batched(x)) for x in tensors)
        wide_words = all(stride % 16 == 0 for x in tensors for stride in x.stride()[:-1])
        channels = sum(widths(self.q.shape[-1], self.v.shape[-1], self.q.element_size()))
        return configs.Problem(channels, self.q.element_size(), readable, wide_words)


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seq_offsets: torch.Tensor,
    num_targets: torch.Tensor | None,
    max_seq_len: int,
    alpha: float,
    causal: bool,
    max_attn_len: int,
    contextual_seq_len: int,
) -> Inputs:
    """Inputs from the public arguments of `hstu_attention`."""
    # A limit that is wider than all tokens cuts nothing: it is dropped, and cannot overflow.
    left = max_attn_len if 0 < max_attn_len < q.shape[0] else None
    # A prefix longer than all tokens is as long as they are, and one more puts all of them at position 0.
    context = min(contextual_seq_len, q.shape[0] + 1) or None
    mask = Mask(causal, left, 0 if causal else left, None, num_targets, context)
    # In fp16 a weight without its alpha might be too large a number.
    gain = alpha if q.dtype == torch.float16 else None
    return Inputs(q, k, v, seq_offsets, None, mask, alpha, gain, (1.0 if gain else alpha) / max_seq_len)


def widths(channels: int, values: int, element_size: int) -> tuple[int, int]:
    """Channels of q and k, and of v, padded to tiles.

    As `tile_widths`, but for 32 channels next to 64 in 16 bits, the shape of many recommenders: these kernels, which
    transpose no product, come out right with tiles of just that width (a test checks it), and run a tenth faster.
    """
    if element_size == 2 and (padded_channels(channels), padded_channels(values)) == (32, 64):
        return 32, 64
    return tile_widths(channels, values, element_size)


def _batched(x: torch.Tensor) -> torch.Tensor:
    """Packed tokens as one batch entry, which is how descriptors see them."""
    return x if x.dim() == 4 else x[None]


class Tiles(NamedTuple):
    """A grid over tiles of tokens: how many slots there are in all, tiles of one dense sequence, and the order of
    packed ones.
    """

    slots: int
    of_sequence: int
    order: torch.Tensor | None
    launches: list[Launch]


def order_tiles(x: torch.Tensor, batch: int, cu: torch.Tensor | None, block: int, last_first: bool) -> Tiles:
    """The tiles of all sequences, longest sequences first, so that what runs last is short; LAST_FIRST, each from its
    last tile down.
    """
    tokens = x.shape[-3]
    n_tiles = tile_slots(tokens, block, cu)
    if cu is None:
        return Tiles(n_tiles * batch, n_tiles, None, [])
    order = x.new_empty((n_tiles, 4), dtype=torch.int32)
    arguments = {"cu": cu, "tiles": order, "n_batch": batch, "n_tokens": tokens, "n_slots": n_tiles}
    arguments |= {"LAST_FIRST": last_first, "BLOCK": block, "BLOCK_B": ORDERED, "num_warps": 4}
    return Tiles(n_tiles, n_tiles, order, [Launch(order_tiles_kernel, batch, arguments)])


def _arguments(inputs: Inputs, config: Config, tiles: Tiles, do: torch.Tensor | None = None) -> dict[str, Any]:
    """What every kernel takes: tensors, sizes and constants."""
    q, k, v, mask = inputs.q, inputs.k, inputs.v, inputs.mask
    block_d, block_dv = widths(q.shape[-1], v.shape[-1], q.element_size())
    tma = 0 if not config.tma else 1 if inputs.cu_q is None else 2
    tensors = {
        "q": _readable(q, config, config.block_m, block_d),
        "k": _readable(k, config, config.block_n, block_d),
        "v": _readable(v, config, config.block_n, block_dv),
    }
    limit = {"maxnreg": config.registers} if config.registers and q.device.type != "cpu" else {}
    return (
        tensors
        | limit
        | {
            "strides": read_strides(tma, q, k, v, do),
            "packed": Packed(inputs.cu_q, inputs.cu_k, tiles.order),
            "num_targets": mask.num_targets,
            "n_tiles": tiles.of_sequence,
            "n_heads": q.shape[-2],
            "n_queries": q.shape[-3],
            "n_keys": k.shape[-3],
            "left": mask.left,
            "right": mask.right,
            "context": mask.context,
            "TILE": SiluTile(
                D=q.shape[-1],
                DV=v.shape[-1],
                BLOCK_D=block_d,
                BLOCK_DV=block_dv,
                BLOCK_M=config.block_m,
                BLOCK_N=config.block_n,
                KEY_STRIDE=mask.key_stride,
                TMA=tma,
                PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
                CAUSAL=mask.causal,
                HISTORY=mask.num_targets is not None or mask.context is not None,
            ),
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,
        }
    )


def _scales(inputs: Inputs) -> SiluScales:
    """Of the forward; what only a backward needs is None."""
    return SiluScales(
        alpha_log2=inputs.alpha * LOG2E, gain=inputs.gain, ratio=None, factor=inputs.factor, factor_s=None
    )


def _readable(x: torch.Tensor, config: Config, rows: int, columns: int) -> Any:
    """A tensor as a kernel reads it: a descriptor where the config says so."""
    return descriptor(_batched(x), rows, columns) if config.tma else x


def _choose(kernel: configs.Kernel, inputs: Inputs, *gradients: torch.Tensor) -> Config:
    problem, card = inputs.problem(*gradients), architecture(inputs.q.device)
    config = configs.choose(kernel, problem, card)
    if not config.tma:
        note(inputs.q, _why_pointers, kernel, inputs, problem, card, *gradients)
    return config


def _why_pointers(
    kernel: configs.Kernel, inputs: Inputs, problem: configs.Problem, card: int, *gradients: torch.Tensor
) -> str | None:
    """Why tiles do not come through tensor descriptors, where they could."""
    if not configs.choose(kernel, problem._replace(descriptors=True), card).tma:
        return None
    tensors = dict(zip(("q", "k", "v", "do"), (inputs.q, inputs.k, inputs.v, *gradients), strict=False))
    return why_pointers(**{name: _batched(x) for name, x in tensors.items()})


def forward_launches(inputs: Inputs, o: torch.Tensor, config: Config, taps: Taps | None = None) -> list[Launch]:
    """The forward's launches in order."""
    q = inputs.q
    tiles = order_tiles(q, batch_size(q, inputs.cu_q), inputs.cu_q, config.block_m, inputs.mask.causal)
    arguments = _arguments(inputs, config, tiles) | {"o": strided(o), "scales": _scales(inputs), "taps": taps}
    return [*tiles.launches, Launch(hstu_fwd_kernel, tiles.slots * q.shape[-2], arguments)]


def plan_forward(
    inputs: Inputs, config: Config | None = None, taps: Taps | None = None, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Output [..., T, H, Dv] in q's dtype, or in `dtype`, with the given tiles or those that configs choose."""
    q, v = inputs.q, inputs.v
    o = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=dtype or q.dtype)
    if o.numel():
        emit(q, *forward_launches(inputs, o, config or _choose("fwd", inputs), taps))
    return o


def backward_launches(
    inputs: Inputs,
    do: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    config_dkdv: Config,
    config_dq: Config,
    taps: tuple[Taps | None, Taps | None] = (None, None),
    chunks: int = 1,
) -> list[Launch]:
    """The backward's launches in order: dK and dV, then dQ.

    `gradients` are the tensors to fill: dq, dk, dv; for `chunks` see `backward`.
    """
    q, k = inputs.q, inputs.k
    dq, dk, dv = gradients
    _, block_dv = widths(q.shape[-1], do.shape[-1], do.element_size())
    batch = batch_size(q, inputs.cu_q)
    tiles_k = order_tiles(k, batch, inputs.cu_k if inputs.cu_k is not None else inputs.cu_q, config_dkdv.block_n, False)
    tiles_q = order_tiles(q, batch, inputs.cu_q, config_dq.block_m, inputs.mask.causal)
    launches = [*tiles_k.launches, *tiles_q.launches]
    gain = inputs.gain or 1.0
    scales = _scales(inputs)._replace(ratio=inputs.alpha / gain, factor_s=inputs.factor * gain)
    keys: dict[str, Any] = {"dk": strided(dk), "dv": strided(dv), "chunks": chunks if chunks > 1 else None}
    if inputs.cu_k is not None:
        # The tiles of dK and dV are the keys'.
        keys["packed"] = Packed(inputs.cu_k, inputs.cu_q, tiles_k.order)
    queries = {"dq": strided(dq), "scales": scales._replace(factor=None)}
    for kernel, tiles, config, outputs, tap in (
        (hstu_bwd_dkdv_kernel, tiles_k._replace(slots=tiles_k.slots * chunks), config_dkdv, keys, taps[0]),
        (hstu_bwd_dq_kernel, tiles_q, config_dq, queries, taps[1]),
    ):
        beside = {"do": _readable(do, config, config.block_m, block_dv), "scales": scales, "taps": tap}
        arguments = _arguments(inputs, config, tiles, do) | beside | outputs
        launches.append(Launch(kernel, tiles.slots * q.shape[-2], arguments))
    return launches


def plan_backward(
    inputs: Inputs,
    do: torch.Tensor,
    config_dkdv: Config | None = None,
    config_dq: Config | None = None,
    taps: tuple[Taps | None, Taps | None] = (None, None),
    chunks: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the inputs' dtype and contiguous, from the output's gradient.

    With more than one chunk, where keys are few and queries many, each of the chunks of the queries has its own
    programs: dk and dv come in fp32 with the chunks' rows end to end, to be added by the caller.
    """
    if do.stride(-1) != 1:
        do = do.contiguous()
    dq = inputs.q.new_empty(inputs.q.shape)
    dk, dv = (
        x.new_empty(
            (*x.shape[:-3], x.shape[-3] * chunks, *x.shape[-2:]), dtype=x.dtype if chunks == 1 else torch.float32
        )
        for x in (inputs.k, inputs.v)
    )
    if do.numel():
        config_dkdv = config_dkdv or _choose("dkdv", inputs, do)
        emit(
            do,
            *backward_launches(
                inputs, do, (dq, dk, dv), config_dkdv, config_dq or _choose("dq", inputs, do), taps, chunks
            ),
        )
    return dq, dk, dv


forward, backward = Operation(plan_forward), Operation(plan_backward)
