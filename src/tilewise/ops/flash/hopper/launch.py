"""The forward's launch on Hopper. `flash.problem` decides which calls take this path."""

from __future__ import annotations

import math
from typing import Any

import torch

from tilewise.ops._device.records import Offsets, Scales
from tilewise.ops._host.hopper import sm_count, tile_descriptor
from tilewise.ops._host.launching import Launch, batch_size, tile_slots
from tilewise.ops.flash.hopper import configs as hopper_configs
from tilewise.ops.flash.hopper.configs import ROWS, Forward
from tilewise.ops.flash.hopper.fwd import ForwardTile, flash_fwd_hopper_kernel
from tilewise.ops.flash.problem import Inputs


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
        "q": tile_descriptor(q, ROWS, width),
        "k": tile_descriptor(k, config.block_n, width),
        "v": tile_descriptor(v, config.block_n, value_width),
        "o": tile_descriptor(o, ROWS, value_width),
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
