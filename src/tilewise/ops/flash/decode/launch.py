"""Attention over a cache: allocate, build the grids, launch append, splits and merge. Plain tensors; no autograd."""

import torch

from tilewise.ops._device.blocks import Widths
from tilewise.ops._device.records import Limits, Scales
from tilewise.ops._host import backend
from tilewise.ops._host.launching import Launch, batch_size, padded_channels, strided, tile_slots, tile_widths
from tilewise.ops._host.program import Operation, emit, note
from tilewise.ops._host.symbol import plain
from tilewise.ops.flash.decode import configs, prefill
from tilewise.ops.flash.decode.configs import Config
from tilewise.ops.flash.decode.configs import Inputs as Inputs
from tilewise.ops.flash.decode.configs import make_inputs as make_inputs
from tilewise.ops.flash.decode.kernels import (
    Cache,
    Parts,
    Rule,
    Shape,
    flash_decode_append_kernel,
    flash_decode_kernel,
    flash_decode_merge_kernel,
)
from tilewise.ops.flash.route import portable_instead

LOG2E = 1.4426950408889634


def shape_of(inputs: Inputs, config: Config) -> Shape:
    """The constants of a call's kernels."""
    q, k, v, group, paged = inputs.q, inputs.k, inputs.v, inputs.group, inputs.table is not None
    heads = configs.heads_of_a_tile(group, config.block_m)
    block_d, block_dv = tile_widths(q.shape[-1], v.shape[-1], q.element_size())
    return Shape(
        D=q.shape[-1],
        DV=v.shape[-1],
        BLOCK_D=block_d,
        BLOCK_DV=block_dv,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        TOKENS=config.block_m // heads,
        HEADS=heads,
        GROUP=group,
        CHUNKS=group // heads,
        PAGE=k.shape[1] if paged else None,
        MASKED=paged or config.block_m <= configs.PACKED_ROWS,
        # The kernel's scale must be positive: the sign (or 0) goes into q.
        SIGN=1 if inputs.softcap or inputs.scale > 0 else -1 if inputs.scale < 0 else 0,
        PRECISION="tf32x3" if q.dtype == torch.float32 else "ieee",
    )


def choose(inputs: Inputs) -> Config:
    """The tiles of a call."""
    q, v = inputs.q, inputs.v
    rows = None if inputs.cu_q is not None else inputs.group * min(q.shape[1], configs.SPLIT_TOKENS + 1)
    return configs.choose(rows, q.shape[-1], v.shape[-1], q.element_size(), backend.architecture(q.device))


def plan_forward(inputs: Inputs, config: Config | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, Tq], with the given tiles or those that configs
    choose.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if config is None and prefill.is_long(inputs):
        why_not = prefill.why_not(inputs)
        if why_not is None:
            return prefill.plan_forward(inputs)
        note(q, portable_instead, why_not)
    queries, heads = q.shape[-3], q.shape[-2]
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], heads, queries), dtype=torch.float32)
    if lse.numel() == 0:
        return o, lse
    config = config or choose(inputs)
    batch, packed = batch_size(q, inputs.cu_q), inputs.cu_q is not None
    shape = shape_of(inputs, config)
    rule = Rule(
        GIVEN=min(plain(inputs.num_splits), configs.FARTHEST) or None,
        TOKENS=configs.SPLIT_TOKENS,
        KV_HEADS=k.shape[-2],
        WORK=configs.WORK,
        ENOUGH=configs.ENOUGH,
        LONG=configs.LONG_KEYS,
        LEAST=configs.LEAST_KEYS,
        KEYS_A_ROW=configs.KEYS_A_ROW,
    )
    # The fewer queries the more splits: of packed ones, an entry may have one.
    most = configs.most_splits(
        1 if packed else queries, inputs.group, k.shape[-2], inputs.room, inputs.num_splits, config.block_n
    )
    parts = _parts(inputs, most, batch) if most > 1 else Parts(None, None, None, None)
    slots = tile_slots(queries, shape.TOKENS, inputs.cu_q) * (1 if packed else batch)
    shared = {
        "o": strided(o),
        "lse": lse,
        "parts": parts,
        "cache": Cache(inputs.cu_k, inputs.lengths, inputs.leftpad, inputs.table),
        "cu_q": inputs.cu_q,
        "n_batch": batch,
        "n_heads": heads,
        "n_queries": queries,
        "n_keys": inputs.room,
        "added": inputs.added,
        "limits": Limits(inputs.left, inputs.right),
        "SHAPE": shape,
        "RULE": rule,
        "enable_fp_fusion": True,
    }
    arguments = shared | {
        "q": strided(q),
        "k": strided(k),
        "v": strided(v),
        "sinks": inputs.sinks,
        "n_slots": slots,
        "n_pages": k.shape[0],
        "scales": Scales(
            (inputs.softcap or abs(inputs.scale) or 1.0) * LOG2E,
            inputs.scale / inputs.softcap if inputs.softcap else None,
            None,
        ),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    emit(q, Launch(flash_decode_kernel, slots * (heads // shape.HEADS) * most, arguments))
    if most > 1:
        tokens = tile_slots(queries, 1, inputs.cu_q) * (1 if packed else batch)
        early = backend.compiles_for(q.device) and backend.architecture(q.device) >= 90
        merge = shared | {"BLOCK_S": configs.MERGED, "EARLY": early, "num_warps": 1}
        if early:
            merge["launch_pdl"] = True
        emit(q, Launch(flash_decode_merge_kernel, tokens * heads, merge))
    return o, lse


def _parts(inputs: Inputs, most: int, batch: int) -> Parts:
    """Memory for at most so many splits of each entry."""
    q = inputs.q
    queries, heads = q.shape[-3], q.shape[-2]
    by_entry, by_query = most * queries * heads, 0
    if inputs.cu_q is not None and inputs.num_splits:
        by_entry, by_query = 0, most * heads
    elif inputs.cu_q is not None:
        by_entry = packed_region(most, heads, queries)
    rows = batch * by_entry + queries * by_query
    o = q.new_empty((rows, inputs.v.shape[-1]), dtype=torch.float32)
    return Parts(o, q.new_empty((rows,), dtype=torch.float32), by_entry, by_query)


def packed_region(most: int, heads: int, queries: int) -> int:
    """Rows that the splits of an entry of packed queries may have, whose own number the host does not know: more
    queries make fewer splits.
    """
    return min(most * heads * min(queries, configs.SPLIT_TOKENS), configs.WORK * 16)


def plan_append(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: torch.Tensor | None,
    table: torch.Tensor | None,
    first: int,
) -> None:
    """Copy k and v into the caches at positions lengths[b] + `first` and on."""
    batch, new, heads, _ = k.shape
    arguments = {
        "k": strided(k),
        "v": strided(v),
        "k_cache": strided(k_cache),
        "v_cache": strided(v_cache),
        "lengths": lengths,
        "table": table,
        "n_rows": batch * new * heads,
        "n_new": new,
        "n_heads": heads,
        "n_keys": configs.room_of(k_cache, table),
        "n_pages": k_cache.shape[0],
        "first": first,
        "WIDTHS": Widths(k.shape[-1], v.shape[-1], padded_channels(k.shape[-1]), padded_channels(v.shape[-1])),
        "PAGE": None if table is None else k_cache.shape[1],
        "BLOCK_R": configs.APPENDED,
    }
    emit(k, Launch(flash_decode_append_kernel, -(-(batch * new * heads) // configs.APPENDED), arguments))


def plan_append_forward(inputs: Inputs, k_new: torch.Tensor, v_new: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Append, and then attend to what has been appended too: inputs.added keys without it."""
    plan_append(inputs.k, inputs.v, k_new, v_new, inputs.lengths, inputs.table, inputs.added)
    return plan_forward(inputs._replace(added=inputs.added + k_new.shape[1]))


forward, append_forward = Operation(plan_forward), Operation(plan_append_forward)
