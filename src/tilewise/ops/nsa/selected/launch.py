"""Attention to named blocks: launches of both loop orders, forward and backward.

Plain tensors in and out; no autograd.
"""

from typing import Any, Literal

import torch
import triton.language as tl

from tilewise.ops._device.blocks import KeySums, ListsShape, Unions, UnionShape, Widths
from tilewise.ops._device.records import Scales
from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import (
    Launch,
    batch_size,
    descriptor,
    fits_descriptor,
    power_of_2,
    row_strides,
    strided,
    tile_widths,
    why_pointers,
)
from tilewise.ops._host.program import emit, note
from tilewise.ops._host.symbol import compute
from tilewise.ops.flash import launch as flash
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.selected import index
from tilewise.ops.nsa.selected.index import LISTS, UNION, Inputs, MadeLists
from tilewise.ops.nsa.selected.kernels.bwd import (
    ByEntry,
    Incoming,
    nsa_selected_bwd_keys_kernel,
    nsa_selected_bwd_lists_kernel,
    nsa_selected_bwd_queries_kernel,
    nsa_selected_bwd_union_kernel,
)
from tilewise.ops.nsa.selected.kernels.fwd import (
    nsa_selected_fwd_lists_kernel,
    nsa_selected_fwd_merge_kernel,
    nsa_selected_fwd_union_kernel,
)

# Which loop order: by keys (lists), by queries (unions), or whichever the device finds faster.
Order = Literal["lists", "union", "either"]


def widths(inputs: Any) -> Widths:
    """Channels of keys and of values."""
    channels, values = inputs.q.shape[-1], inputs.v.shape[-1]
    return Widths(channels, values, *tile_widths(channels, values, inputs.q.element_size()))


def _arguments(inputs: Inputs, config: configs.Config) -> dict[str, Any]:
    """What every kernel that multiplies tiles takes."""
    q, named = inputs.q, inputs.named
    arguments = {
        "q": strided(q),
        "k": strided(inputs.k),
        "v": strided(inputs.v),
        "cu": named.offsets,
        "n_batch": batch_size(q, named.cu),
        "n_tokens": q.shape[-3],
        "n_keys": named.n_keys,
        "n_heads": named.heads,
        "heads_a_key": named.heads // inputs.k.shape[-2],
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    return arguments | ({"maxnreg": config.registers} if config.registers and q.device.type != "cpu" else {})


def _precision(inputs: Inputs, config: configs.Config) -> str:
    return "tf32x3" if inputs.q.dtype == torch.float32 and not config.ieee else "ieee"


def _scales(inputs: Inputs) -> Scales:
    return Scales(inputs.scale * flash.LOG2E, None, inputs.scale)


def _positive(scale: float) -> dict[str, Any]:
    """The forward takes a row's maximum before scaling, which needs a positive scale: its sign (or 0) is
    applied separately.
    """
    return {"scale_log2": (abs(scale) or 1.0) * flash.LOG2E, "SIGN": 1 if scale > 0 else -1 if scale < 0 else 0}


def index_type(tokens: int, group: int, *tensors: torch.Tensor) -> tl.dtype:
    """32 bits where rows of so many tokens of every tensor (and of LSEs by head and token) lie within 2^31 elements."""
    most = max(tokens * abs(x.stride(-3)) + group * abs(x.stride(-2)) + x.shape[-1] for x in tensors)
    return tl.int32 if max(most, group * tensors[0].shape[-3] + tokens) < 2**31 else tl.int64


def _in_lists(
    inputs: Inputs, config: configs.Config, made: MadeLists, first_tile: int, *rows: torch.Tensor
) -> dict[str, Any]:
    """What the kernels in key order take in addition; `rows` are the tensors that they gather from."""
    named = inputs.named
    shape = ListsShape(
        **widths(inputs)._asdict(),
        S=named.indices.shape[-1],
        OWN=named.own,
        CAUSAL=inputs.causal,
        GROUP=inputs.group,
        GROUP_P=power_of_2(inputs.group),
        BLOCK_SIZE=named.block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=inputs.block_n,
        TOKENS=named.tile_tokens,
        INDEX=index_type(made.tokens.shape[0], inputs.group, *rows),
        PRECISION=_precision(inputs, config),
    )
    return {"lists": made.lists, "n_slots": named.block_slots, "first_tile": first_tile, "SHAPE": shape}


def _why_pointers(k: torch.Tensor, v: torch.Tensor, block_size: int, block_n: int) -> str | None:
    """Why keys in query order are not read through TMA; None where they are."""
    if block_n != block_size:
        return f"blocks of {block_size} keys are no power of two of at least 16: pointers, not TMA"
    return why_pointers(k=k, v=v)


def _in_unions(inputs: Inputs, unions: Unions, config: configs.Config) -> dict[str, Any]:
    """What the kernels in query order take in addition; keys through descriptors where they can be."""
    k, v, named, group_p = inputs.k, inputs.v, inputs.named, power_of_2(inputs.group)
    tma = config.tma and inputs.block_n == named.block_size and fits_descriptor(k) and fits_descriptor(v)
    shape = UnionShape(
        **widths(inputs)._asdict(),
        GROUP=inputs.group,
        GROUP_P=group_p,
        BLOCK_SIZE=named.block_size,
        BLOCK_M=config.block_m,
        BLOCK_N=inputs.block_n,
        SLOTS_P=named.slots_p,
        # Where queries are a part of their sequence, there are keys behind the last that is seen.
        TMA=2 if tma and named.n_keys is not None else tma,
        PRECISION=_precision(inputs, config),
    )
    if config.tma:
        note(inputs.q, _why_pointers, k, v, named.block_size, inputs.block_n)
    return {
        "k": descriptor(k, named.block_size, shape.BLOCK_D) if tma else k,
        "v": descriptor(v, named.block_size, shape.BLOCK_DV) if tma else v,
        "k_strides": None if tma else row_strides(k.stride()),
        "v_strides": None if tma else row_strides(v.stride()),
        "unions": unions,
        "n_tiles": named.tile_slots(config.block_m // group_p),
        "WANTED": UNION,
        "SHAPE": shape,
    }


# Rows of one program that merges or sums per-entry results (rows are independent: interpreted, few programs are
# faster), and keys of one that sums segments.
MERGED_ROWS = 64 if interpreting() else 16
SUMMED_ROWS = 64 if interpreting() else 8
SUMMED_KEYS = 16


def _forward_lists(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, flag: torch.Tensor | None) -> None:
    named, config = inputs.named, inputs.config("lists_fwd")
    order = {"flag": flag, "WANTED": LISTS}
    arguments = _arguments(inputs, config) | _positive(inputs.scale) | order | {"sel_scale": inputs.sel_scale}
    rows_a_token = named.heads * inputs.group
    bytes_a_token = rows_a_token * named.slots * (o.shape[-1] * o.element_size() + 4)
    chunks = index.chunks(named, bytes_a_token)
    # The first chunk is the longest: all reuse its memory.
    results = chunks[0].tiles * named.tile_tokens * rows_a_token * named.slots
    partial_o = o.new_empty((results, o.shape[-1]))
    partial = {"partial_o": partial_o, "partial_lse": o.new_empty((results,), dtype=torch.float32)}
    merging = order | partial | {"o": o, "lse": lse, "n_heads": named.heads, "n_tokens": inputs.q.shape[-3]}
    merging |= {
        "PACKED": named.cu is not None,
        "SLOTS": named.slots,
        "SLOTS_P": named.slots_p,
        "GROUP": inputs.group,
        "DV": o.shape[-1],
        "BLOCK_DV": widths(inputs).BLOCK_DV,
        "BLOCK_R": MERGED_ROWS,
        "num_warps": 4,
        "num_stages": 2,
        "enable_fp_fusion": True,
    }
    for chunk in chunks:
        made = index.make_lists(named, chunk, configs.segment_entries("forward", inputs.group), flag, LISTS)
        rows = chunk.tiles * named.tile_tokens * rows_a_token
        in_lists = _in_lists(inputs, config, made, chunk.first_tile, inputs.q)
        merge = merging | {"ranks": made.ranks, "tokens": made.tokens, "n_rows": rows}
        emit(
            o,
            Launch(nsa_selected_fwd_lists_kernel, made.most_segments, arguments | partial | in_lists),
            Launch(nsa_selected_fwd_merge_kernel, -(-rows // MERGED_ROWS), merge),
        )


def _forward_union(
    inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, unions: Unions, flag: torch.Tensor | None
) -> None:
    config = inputs.config("union_fwd")
    arguments = _arguments(inputs, config) | _in_unions(inputs, unions, config) | _positive(inputs.scale)
    arguments |= {"o": o, "lse": lse, "flag": flag}
    emit(o, Launch(nsa_selected_fwd_union_kernel, unions.sizes.shape[0], arguments))


def forward(inputs: Inputs, order: Order = "either") -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., T, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, T]."""
    q, v = inputs.q, inputs.v
    o = q.new_empty((*q.shape[:-1], v.shape[-1]))
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    if o.numel() == 0:
        return o, lse
    tokens = 0 if order == "lists" else inputs.union_tokens("union_fwd")
    flag = None
    if tokens:
        unions = index.make_unions(inputs.named, tokens)
        flag = index.faster_order(unions, "fwd", inputs.named, inputs.group) if order == "either" else None
        _forward_union(inputs, o, lse, unions, flag)
    if not tokens or order == "either":
        _forward_lists(inputs, o, lse, flag)
    return o, lse


def _prepare(
    inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> Incoming:
    if do.stride(-1) != 1:
        do = do.contiguous()
    lse_log2, delta = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    dense = flash.make_inputs(
        inputs.q, inputs.k, inputs.v, inputs.named.cu, inputs.named.cu, True, -1, -1, inputs.scale, 0.0
    )
    emit(o, flash.prepare_launch(dense, o, do, lse, dlse, delta, lse_log2))
    return Incoming(strided(do), lse_log2, delta)


def _backward_lists(
    inputs: Inputs,
    incoming: Incoming,
    sums: KeySums,
    dq: torch.Tensor | None,
    dsel: torch.Tensor | None,
    flag: torch.Tensor | None,
) -> None:
    """Add to dk (but for the scale) and dv, `sums` in fp32 by index head; and where dq is given write it."""
    named, config, block_n = inputs.named, inputs.config("lists_bwd"), inputs.block_n
    wanted = LISTS if dq is not None else UNION
    order = {"flag": flag, "WANTED": wanted}
    segment = configs.segment_entries("backward" if dq is not None else "dkdv", inputs.group)
    arguments = _arguments(inputs, config) | order
    arguments |= {
        "incoming": incoming,
        "sums": sums,
        "scales": _scales(inputs),
    }
    rows_a_token = named.heads * inputs.group
    # What stays by entry: a row of dq for each head, or without it the index and a share of the sums that further
    # segments store separately.
    shared = (sums.dk.shape[-1] + sums.dv.shape[-1]) * 4 * block_n // segment + 8
    by_entry = shared if dq is None else shared + inputs.group * dq.shape[-1] * dq.element_size()
    chunks = index.chunks(named, named.heads * named.slots * by_entry)
    # The first chunk is the longest: all reuse its memory.
    entries = chunks[0].tiles * named.tile_tokens * named.heads * named.slots
    aside = KeySums(*(x.new_empty((entries // segment * block_n, x.shape[-1]), dtype=torch.float32) for x in sums))
    partial_dq = None if dq is None else dq.new_empty((entries * inputs.group, dq.shape[-1]))
    arguments |= {"aside": aside, "by_entry": ByEntry(partial_dq, inputs.sel_scale, dsel)}
    summing = order | {"num_warps": 4, "enable_fp_fusion": True}
    keys = summing | sum_keys(inputs, sums, aside, heads=1)
    for chunk in chunks:
        made = index.make_lists(named, chunk, segment, flag, wanted)
        in_lists = _in_lists(inputs, config, made, chunk.first_tile, inputs.q, incoming.do.x)
        of_lists = {"ends": made.lists.ends, "extras": made.extras}
        launches = [
            Launch(nsa_selected_bwd_lists_kernel, made.most_segments, arguments | in_lists),
            Launch(nsa_selected_bwd_keys_kernel, named.lists * (block_n // SUMMED_KEYS), keys | of_lists),
        ]
        if dq is not None:
            rows = chunk.tiles * named.tile_tokens * rows_a_token
            queries = summing | {
                "partial_dq": partial_dq,
                "ranks": made.ranks,
                "tokens": made.tokens,
                "base": None,
                "dq": dq,
                "n_heads": named.heads,
                "n_rows": rows,
                "SLOTS": named.slots,
                "GROUP": inputs.group,
                "D": dq.shape[-1],
                "BLOCK_D": widths(inputs).BLOCK_D,
                "BLOCK_R": SUMMED_ROWS,
            }
            launches.append(Launch(nsa_selected_bwd_queries_kernel, -(-rows // SUMMED_ROWS), queries))
        emit(sums.dk, *launches)


def sum_keys(inputs: Any, sums: KeySums, aside: KeySums, heads: int) -> dict[str, Any]:
    """Arguments of the kernel that adds the further segments' sums, of `heads` KV heads that share a list."""
    named = inputs.named
    return {
        "aside": aside,
        "sums": sums,
        "cu": named.cu if named.cu_k is None else named.cu_k,
        "n_batch": batch_size(inputs.q, named.cu),
        "n_tokens": inputs.k.shape[-3],
        "n_heads": named.heads,
        "n_slots": named.block_slots,
        "WIDTHS": widths(inputs),
        "BLOCK_SIZE": named.block_size,
        "BLOCK_N": inputs.block_n,
        "BLOCK_R": SUMMED_KEYS,
        "HEADS": heads,
    }


def _backward_union(
    inputs: Inputs, incoming: Incoming, dq: torch.Tensor, unions: Unions, flag: torch.Tensor | None
) -> None:
    config = inputs.config("union_dq")
    arguments = _arguments(inputs, config) | _in_unions(inputs, unions, config)
    arguments |= {"incoming": incoming, "dq": dq, "flag": flag, "scales": _scales(inputs)}
    emit(dq, Launch(nsa_selected_bwd_union_kernel, unions.sizes.shape[0], arguments))


def backward(
    inputs: Inputs,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    order: Order = "either",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv in the inputs' dtype and contiguous; and sel_scale's gradient, fp32 by index head and slot, where
    there is one.
    """
    q, k, v, named = inputs.q, inputs.k, inputs.v, inputs.named
    dq = q.new_empty(q.shape)
    acc_dk, acc_dv = (x.new_zeros((*x.shape[:-2], named.heads, x.shape[-1]), dtype=torch.float32) for x in (k, v))
    sums = KeySums(acc_dk, acc_dv)
    dsel = None if inputs.sel_scale is None else q.new_zeros(named.indices.shape, dtype=torch.float32)
    if q.numel():
        incoming = _prepare(inputs, o, lse, do, dlse)
        tokens = 0 if order == "lists" else inputs.union_tokens("union_dq")
        flag = None
        if tokens:
            unions = index.make_unions(named, tokens)
            flag = index.faster_order(unions, "dq", inputs.named, inputs.group) if order == "either" else None
            _backward_union(inputs, incoming, dq, unions, flag)
            _backward_lists(inputs, incoming, sums, None, dsel, flag)
        if not tokens or order == "either":
            _backward_lists(inputs, incoming, sums, dq, dsel, flag)
    return dq, _finish(acc_dk, k, inputs.scale), _finish(acc_dv, v, 1.0), dsel


def _finish(sums: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    """x's gradient from its fp32 sums by index head."""
    return compute(_scale_heads, sums, x.shape[-2], scale, x.dtype, shape=x.shape, dtype=x.dtype)


def _scale_heads(sums: torch.Tensor, heads: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if sums.shape[-2] != heads:
        sums = sums.unflatten(-2, (heads, -1)).sum(-2)
    return (sums if scale == 1.0 else sums.mul_(scale)).to(dtype)
