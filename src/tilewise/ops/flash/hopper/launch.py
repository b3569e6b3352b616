"""Flash attention's launches on Hopper: the forward; and the backward: prepare, one kernel for all three gradients,
and dq from its accumulators. `flash.launch` decides which calls take this path.

Their tensor descriptors are for tiles of rows, of dense and of packed tensors.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch

from tilewise.ops._device.hopper.blocks import Workspace
from tilewise.ops._device.hopper.ring import RAGGED_ROWS
from tilewise.ops._device.records import Offsets, Scales, Sinks
from tilewise.ops._host import backend, launching
from tilewise.ops._host.gluon import gl
from tilewise.ops._host.launching import Descriptor, Launch, batch_size, lse_strides, row_strides, tile_slots
from tilewise.ops._host.program import Operation, emit
from tilewise.ops._host.symbol import cached, compute
from tilewise.ops.flash.configs import Inputs
from tilewise.ops.flash.hopper import configs as hopper_configs
from tilewise.ops.flash.hopper.bwd import BackwardTile, flash_bwd_hopper_kernel
from tilewise.ops.flash.hopper.configs import (
    ROWS,
    Backward,
    Forward,
    Order,
    choose_backward,
    is_wide,
    padded,
    piece,
    sweeps_heads,
)
from tilewise.ops.flash.hopper.fwd import ForwardTile, flash_fwd_hopper_kernel
from tilewise.ops.flash.hopper.sum import (
    FinishTile,
    PrepareTile,
    flash_bwd_hopper_finish_kernel,
    flash_bwd_hopper_prepare_kernel,
)
from tilewise.ops.flash.sinks import add_parts, make_parts

Index = tuple[slice, ...]

# A packed descriptor's outermost axis, see `tile_descriptor`: RAGGED_ROWS steps of this stride wrap around 2^64.
MOST_ROWS = RAGGED_ROWS.value
RAGGED_STRIDE = 2**64 // MOST_ROWS
# More than any index along that axis and the next.
MANY = 2**31 - 2**16
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
LOG2E = 1.4426950408889634
# Of a thread at launch, before warps are given theirs.
REGISTERS = 168
# Heads whose blocks are interleaved. Few, so that they share what is in the L2 cache; but a head's next block
# must begin two steps or more after the one before it, whose additions it follows: the shorter blocks are, the more
# heads between the two. Half as many where no limit to the right makes blocks shorter.
LONG_KEYS, TOGETHER_LONG, TOGETHER_SHORT = 8192, 4, 16
# Keys of a sequence from which on a free order was faster in most cases.
FREE_KEYS = 8192
# Bytes of accumulators of dQ that there should be at a time: what needs more is processed in chunks.
MOST_BYTES = 1 << 30
STATISTICS = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)


def fits_tiles(x: torch.Tensor) -> bool:
    """Whether `tile_descriptor` can describe dense `[B, T, H, D]` or packed `[N, H, D]` in place: aligned to 16 bytes
    in every axis, not empty.
    """
    if x.dim() == 4:
        return launching.fits_descriptor(x)
    if x.dim() != 3 or x.data_ptr() % 16 != 0 or x.numel() == 0 or x.shape[0] > MOST_ROWS:
        return False
    first, second, _ = x.stride()
    return (
        (first | second) % (16 // x.element_size()) == 0
        and min(first, second) > 0
        and max(first, second) < RAGGED_STRIDE
    )


@cached
def _layout(dtype: torch.dtype, *block_shape: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), DTYPES[dtype])


def tile_descriptor(x: torch.Tensor, rows: int, columns: int) -> Descriptor:
    """For tiles of `rows` tokens and `columns` channels of one head, to be read with `load_tile` and written with
    `store_tile`.

    Dense: over `[B, H, T, D]`. What lies past T or D reads as 0 and is not written.

    Packed: a sequence's end is no end of the tensor, and the next sequence's rows may hold NaN. So the axis of rows is
    given RAGGED_ROWS of them, and a sequence is shifted so that its end falls on that end: row r of n, of the sequence
    that ends at token e, has index `RAGGED_ROWS - n + r`. Two more axes bring its address, with s for the stride of
    rows, back to `(e - n + r) · s`: one with index e and stride s; one with index RAGGED_ROWS and stride
    `RAGGED_STRIDE - s`, which gives `2^64 - RAGGED_ROWS · s` elements, and addresses count modulo 2^64.
    """
    if x.dim() == 4:
        batch, tokens, heads, channels = x.shape
        stride_b, stride_t, stride_h, _ = x.stride()
        shape: tuple[int, ...] = (batch, heads, tokens, channels)
        strides: tuple[int, ...] = (stride_b, stride_h, stride_t, 1)
        block: tuple[int, ...] = (1, 1, rows, columns)
    else:
        _, heads, channels = x.shape
        stride_t, stride_h, _ = x.stride()
        shape = (MANY, MANY, heads, MOST_ROWS, channels)
        strides, block = (RAGGED_STRIDE - stride_t, stride_t, stride_h, stride_t, 1), (1, 1, 1, rows, columns)
    return Descriptor(x, shape, strides, block, _layout(x.dtype, *block))


def sm_count(device: torch.device) -> int:
    """How many SMs a device has; an H100's where launches are only collected, or simulated."""
    device = backend.actual(device)
    if device.type != "cuda" or backend.pretended() is not None:
        return backend.pretended_sms()
    return _sm_count(device)


@functools.cache
def _sm_count(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _choose(inputs: Inputs) -> Backward:
    return choose_backward(inputs.q.shape[-1], inputs.v.shape[-1])


def fits(inputs: Inputs) -> bool:
    """Whether the rows of all query heads, in whole tiles, can be numbered in 32 bits, as a tensor descriptor needs
    them.
    """
    rows = _choose(inputs).block_m
    return tile_slots(inputs.q.shape[-3], rows, inputs.cu_q) * rows * inputs.heads < 2**31


def leaves_idle(inputs: Inputs) -> bool:
    """Whether there are so few blocks of keys that a quarter of the SMs or more would idle."""
    programs = tile_slots(inputs.k.shape[-3], _choose(inputs).block_n, inputs.cu_k) * (inputs.heads // inputs.group)
    return 4 * programs < 3 * sm_count(inputs.q.device)


def _mean_keys(inputs: Inputs) -> int:
    """Keys of a sequence; of packed ones only the mean is known here."""
    return inputs.k.shape[-3] // (1 if inputs.cu_k is None else max(1, batch_size(inputs.q, inputs.cu_q)))


def choose_order(inputs: Inputs, deterministic: bool) -> Order:
    """The fixed order if asked for, else what was fastest on an H200.

    To zero accumulators up front takes a pass over memory; where they are zeroed lazily, no block overtakes the first.
    """
    limited, grouped = inputs.right is not None, inputs.group > 1
    narrow, long = padded(inputs.q.shape[-1]) == 64, _mean_keys(inputs) >= FREE_KEYS
    shares_keys = is_wide(inputs.q.shape[-1], inputs.v.shape[-1])
    if deterministic or inputs.left is not None or shares_keys:
        return "fixed"
    if long and limited and (grouped or not narrow):
        return "cleared"
    return "opened" if not grouped and (long or (limited and narrow)) else "fixed"


def _slices(count: int, most: int) -> list[slice]:
    """All of `count` in as few slices of at most `most` as there can be, of about the same size."""
    chunks = -(-count // max(1, most))
    return [slice(count * i // chunks, count * (i + 1) // chunks) for i in range(chunks)]


def _chunks(inputs: Inputs) -> Iterator[tuple[Index, Index, Index]]:
    """Some batch entries, or some KV heads of one: as many as MOST_BYTES has room for, but with blocks of keys for
    all SMs.

    As indices into tensors of queries, into those of keys, and into LSEs.
    """
    packed, group, heads_k, config = inputs.cu_q is not None, inputs.group, inputs.k.shape[-2], _choose(inputs)
    bytes_head = (
        4
        * tile_slots(inputs.q.shape[-3], config.block_m, inputs.cu_q)
        * config.block_m
        * group
        * padded(inputs.q.shape[-1])
    )
    fill = -(-sm_count(inputs.q.device) // tile_slots(inputs.k.shape[-3], config.block_n, inputs.cu_k))
    most = max(MOST_BYTES // bytes_head, fill)
    batch = 1 if packed else inputs.q.shape[0]
    entries = _slices(batch, most // heads_k)
    heads = _slices(heads_k, most) if len(entries) == batch else [slice(0, heads_k)]
    for entry, of_keys in itertools.product(entries, heads):
        lead = () if packed else (entry,)
        of_queries = slice(of_keys.start * group, of_keys.stop * group)
        yield (*lead, slice(None), of_queries), (*lead, slice(None), of_keys), (*lead, of_queries)


def _copy(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def readable(gradient: torch.Tensor) -> torch.Tensor:
    """The output's gradient as TMA can read it: a copy where it cannot, as of the expanded one that `o.sum()` gives."""
    return gradient if fits_tiles(gradient) else compute(_copy, gradient, shape=gradient.shape, dtype=gradient.dtype)


def _statistics(x: torch.Tensor, rows: int) -> Descriptor:
    """One number per query row, a tile at a time."""
    return Descriptor(x, (x.shape[0],), (1,), (rows,), STATISTICS)


def backward_launches(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    order: Order,
    config: Backward | None = None,
    parts: torch.Tensor | None = None,
) -> list[Launch]:
    """The launches in order: prepare, the backward kernel, dq from its accumulators.

    `gradients` are the tensors to fill: dq, dk, dv; and `parts` of dsinks, where there are sinks.
    """
    block_m, block_n, stages, slots, ahead = config or _choose(inputs)
    q, k, v = inputs.q, inputs.k, inputs.v
    dq, dk, dv = gradients
    block_d, block_dv = padded(q.shape[-1]), padded(v.shape[-1])
    piece_d, piece_dv = piece(block_d), piece(block_dv)
    wide = is_wide(q.shape[-1], v.shape[-1])
    # Each warpgroup has half of the keys, or all of them.
    rows_k = block_n if wide else block_n // 2
    slots_q, slots_k = tile_slots(q.shape[-3], block_m, inputs.cu_q), tile_slots(k.shape[-3], block_n, inputs.cu_k)
    n_batch = batch_size(q, inputs.cu_q)
    # Packed sequences are processed in order: not all of their keys count together.
    together = TOGETHER_LONG if _mean_keys(inputs) >= LONG_KEYS else TOGETHER_SHORT
    tiles, heads_k = slots_q * inputs.heads, inputs.heads // inputs.group
    delta, lse_log2 = (q.new_empty((tiles * block_m,), dtype=torch.float32) for _ in range(2))
    acc_dq = q.new_empty((tiles * block_m * block_d,), dtype=torch.float32)
    # How many blocks have added to each accumulator of dQ (in the free order, whether its first block has zeroed it),
    # and how many blocks have been taken.
    semaphores = q.new_empty((tiles,), dtype=torch.int32)
    counter = q.new_empty((1,), dtype=torch.int32)
    sweeps = sweeps_heads(inputs.group, inputs.left, inputs.right, _mean_keys(inputs))
    shared = {"n_batch": n_batch, "n_queries": q.shape[-3], "enable_fp_fusion": True}
    of_queries = {
        "acc_dq": acc_dq,
        "cu_q": inputs.cu_q,
        "n_slots": slots_q,
        "n_heads": q.shape[-2],
        "inside": 1 if sweeps else inputs.group,
    }
    of_keys = {"n_keys": k.shape[-3], "left": inputs.left, "right": inputs.right}
    prepare = {
        "o": o,
        "do": do,
        "lse": lse,
        "dlse": dlse,
        "delta": delta,
        "lse_log2": lse_log2,
        "sinks": Sinks(inputs.sinks, parts),
        "semaphores": semaphores,
        "counter": counter,
        "o_strides": row_strides(o.stride()),
        "do_strides": row_strides(do.stride()),
        "dlse_strides": None if dlse is None else lse_strides(dlse.stride()),
        "TILE": PrepareTile(v.shape[-1], block_d, launching.power_of_2(block_dv), block_m, ZEROES=order == "cleared"),
    }
    main = {
        "q": tile_descriptor(q, block_m, piece_d),
        "k": tile_descriptor(k, rows_k, piece_d),
        "v": tile_descriptor(v, rows_k, piece_dv),
        "do": tile_descriptor(do, block_m, piece_dv),
        "dk": tile_descriptor(dk, rows_k, piece_d),
        "dv": tile_descriptor(dv, rows_k, piece_dv),
        "lse_log2": _statistics(lse_log2, block_m),
        "delta": _statistics(delta, block_m),
        "workspace": Workspace(acc_dq, semaphores, counter),
        "offsets": Offsets(inputs.cu_q, inputs.cu_k),
        "n_slots_q": slots_q,
        "group": inputs.group,
        "together": together if inputs.right is not None else together // 2,
        "scales": Scales(
            scale=inputs.scale,
            scale_log2=(inputs.softcap or inputs.scale) * LOG2E,
            score_scale=inputs.scale / inputs.softcap if inputs.softcap else None,
        ),
        "TILE": BackwardTile(
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            STAGES=stages,
            SLOTS=slots,
            ORDERED=order == "fixed",
            ZEROES_LAZILY=order == "opened",
            PACKED=inputs.cu_q is not None,
            AHEAD=ahead,
            GROUPED=inputs.group > 1,
            SWEEPS=sweeps,
            WIDE=wide,
        ),
        "num_warps": 4,
        "maxnreg": REGISTERS,
    }
    finish = {
        "dq": dq,
        "dq_strides": row_strides(dq.stride()),
        "cu_k": inputs.cu_k,
        "scale": inputs.scale,
        "TILE": FinishTile(q.shape[-1], block_d, launching.power_of_2(block_d), block_m, block_n, wide),
    }
    return [
        Launch(flash_bwd_hopper_prepare_kernel, tiles, shared | of_queries | prepare),
        Launch(flash_bwd_hopper_kernel, min(slots_k * heads_k, sm_count(q.device)), shared | of_keys | main),
        Launch(flash_bwd_hopper_finish_kernel, tiles, shared | of_queries | of_keys | finish),
    ]


def plan_backward(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    order: Order = "fixed",
    config: Backward | None = None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, and dsinks where there are sinks, in the inputs' dtypes and contiguous, for a call that the Hopper
    kernels take: `why_not_hopper` of flash/route.py is None.

    With groups or under a left limit the order cannot be `opened`.
    """
    do = readable(do)
    dq, dk, dv = (x.new_empty(x.shape) for x in (inputs.q, inputs.k, inputs.v))
    parts = make_parts(inputs, (config or _choose(inputs)).block_m)
    for queries, keys, rows in _chunks(inputs):
        chunk = inputs._replace(q=inputs.q[queries], k=inputs.k[keys], v=inputs.v[keys])
        given = o[queries], lse[rows], do[queries], None if dlse is None else dlse[rows]
        chunk_parts = None
        if inputs.sinks is not None and parts is not None:
            chunk, chunk_parts = chunk._replace(sinks=inputs.sinks[rows[-1]]), parts[rows]
        # A chunk's accumulators are freed after it: the next one's take their place.
        gradients = dq[queries], dk[keys], dv[keys]
        emit(inputs.q, *backward_launches(chunk, *given, gradients, order, config, chunk_parts))
    return dq, dk, dv, *add_parts(inputs, parts)


backward = Operation(plan_backward)


def _order(inputs: Inputs, n_items: int) -> dict[str, Any]:
    """In which order work items are taken: from a work counter where they differ in length, else every n-th by each
    CTA.
    """
    k, v, q = inputs.k, inputs.v, inputs.q
    limited = inputs.right is not None
    bytes_a_kv_head = k.shape[-3] * (k.shape[-1] + v.shape[-1]) * k.element_size()
    counts = (limited or inputs.cu_q is not None) and n_items > sm_count(q.device)
    return {
        "together": hopper_configs.heads_together(inputs.heads, inputs.group, bytes_a_kv_head, limited),
        "counter": q.new_zeros((1,), dtype=torch.int32) if counts else None,
    }


def forward_launch(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, config: Forward | None = None) -> Launch:
    """The forward kernel's launch, with the given tiles or those that configs choose."""
    q, k, v, scale, softcap = inputs.q, inputs.k, inputs.v, inputs.scale, inputs.softcap
    config = config or hopper_configs.choose_forward(
        q.shape[-1], v.shape[-1], k.shape[-3], bool(softcap), inputs.left is not None, inputs.right is not None
    )
    width, value_width = hopper_configs.padded(q.shape[-1]), hopper_configs.padded(v.shape[-1])
    piece_d, piece_dv = piece(width), piece(value_width)
    n_tiles = tile_slots(q.shape[-3], config.block_m, inputs.cu_q)
    n_items = n_tiles * inputs.heads
    registers = hopper_configs.REGISTERS[config.groups]
    tile = ForwardTile(
        BLOCK_D=width,
        BLOCK_DV=value_width,
        BLOCK_N=config.block_n,
        STAGES=config.stages,
        GROUPS=config.groups,
        SLOTS=config.slots,
        O_IN_Q=config.o_in_q,
        PACKED=inputs.cu_q is not None,
        # Without limits, and with whole tiles of keys, no score is masked.
        MASK_LAST=any(x is not None for x in (inputs.left, inputs.right, inputs.cu_k))
        or k.shape[-3] % config.block_n != 0,
        SIGN=1 if softcap or scale > 0 else -1 if scale < 0 else 0,
        REGISTERS=registers.compute,
        REGISTERS_FETCH=registers.fetch,
    )
    # The kernel's scale must be positive, so that it can take the row maximum first: SIGN goes into the scores.
    scale_log2 = (softcap or abs(scale) or 1.0) * math.log2(math.e)
    arguments = _order(inputs, n_items) | {
        "q": tile_descriptor(q, ROWS, piece_d),
        "k": tile_descriptor(k, config.block_n, piece_d),
        "sinks": inputs.sinks,
        "v": tile_descriptor(v, config.block_n, piece_dv),
        "o": tile_descriptor(o, ROWS, piece_dv),
        "lse": lse,
        "offsets": Offsets(inputs.cu_q, inputs.cu_k),
        "n_batch": batch_size(q, inputs.cu_q),
        "n_tiles": n_tiles,
        "n_heads": q.shape[-2],
        "n_all_heads": inputs.heads,
        "group": inputs.group,
        "n_queries": q.shape[-3],
        "n_keys": k.shape[-3],
        "left": inputs.left,
        "right": inputs.right,
        "scales": Scales(scale_log2, scale / softcap if softcap else None, None),
        "TILE": tile,
        "num_warps": 4,
        "maxnreg": registers.start,
        "enable_fp_fusion": True,
    }
    return Launch(flash_fwd_hopper_kernel, min(n_items, sm_count(q.device)), arguments)
