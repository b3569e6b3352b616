"""Attention to named blocks: launches of both loop orders, forward and backward.

Plain tensors in and out; no autograd.
"""

from typing import Any, Literal, NamedTuple

import torch
import triton.language as tl

from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import (
    Launch,
    descriptor,
    fits_descriptor,
    power_of_2,
    row_strides,
    tile_widths,
    why_pointers,
)
from tilewise.ops._host.packing import batch_size
from tilewise.ops._host.slot import compute
from tilewise.ops._host.template import emit, note
from tilewise.ops.flash import launch as flash
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.selected import index
from tilewise.ops.nsa.selected.index import LISTS, UNION, Unions
from tilewise.ops.nsa.selected.kernels.bwd import (
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
from tilewise.ops.nsa.selected.problem import Inputs

# Which loop order: by keys (lists), by queries (unions), or whichever the device finds faster.
Order = Literal["lists", "union", "either"]


def _arguments(inputs: Inputs, config: configs.Config) -> dict[str, Any]:
    """What every kernel that multiplies tiles takes."""
    q, k, v, named, *_ = inputs
    block_d, block_dv = tile_widths(q.shape[-1], v.shape[-1], q.element_size())
    arguments = {
        "q": q,
        "k": k,
        "v": v,
        "q_strides": row_strides(q.stride()),
        "k_strides": row_strides(k.stride()),
        "v_strides": row_strides(v.stride()),
        "cu": named.cu,
        "n_batch": batch_size(q, named.cu),
        "n_tokens": q.shape[-3],
        "n_heads": named.heads,
        "heads_a_key": named.heads // k.shape[-2],
        "scale_log2": inputs.scale * flash.LOG2E,
        "GROUP": inputs.group,
        "GROUP_P": power_of_2(inputs.group),
        "D": q.shape[-1],
        "DV": v.shape[-1],
        "BLOCK_D": block_d,
        "BLOCK_DV": block_dv,
        "BLOCK_SIZE": named.block_size,
        "BLOCK_M": config.block_m,
        "BLOCK_N": max(16, power_of_2(named.block_size)),
        "PRECISION": "tf32x3" if q.dtype == torch.float32 and not config.ieee else "ieee",
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }
    return arguments | ({"maxnreg": config.registers} if config.registers and q.device.type != "cpu" else {})


def _positive(scale: float) -> dict[str, Any]:
    """The forward takes a row's maximum before scaling, which wants a positive scale: its sign (or 0) is
    applied apart.
    """
    return {"scale_log2": (abs(scale) or 1.0) * flash.LOG2E, "SIGN": 1 if scale > 0 else -1 if scale < 0 else 0}


def index_type(tokens: int, group: int, *tensors: torch.Tensor) -> tl.dtype:
    """32 bits where rows of so many tokens of every tensor (and of LSEs by head and token) lie within 2^31 elements."""
    most = max(tokens * abs(x.stride(-3)) + group * abs(x.stride(-2)) + x.shape[-1] for x in tensors)
    return tl.int32 if max(most, group * tensors[0].shape[-3] + tokens) < 2**31 else tl.int64


def _in_lists(inputs: Inputs, lists: index.Lists, first_tile: int, *rows: torch.Tensor) -> dict[str, Any]:
    """What the kernels in key order take beside; `rows` are the tensors that they gather from."""
    named = inputs.named
    return {
        "INDEX": index_type(lists.tokens.shape[0], inputs.group, *rows),
        "perm": lists.perm,
        "segments": lists.segments,
        "ends": lists.ends,
        "sel_scale": inputs.sel_scale,
        "n_slots": named.tile_slots(named.block_size),
        "first_tile": first_tile,
        "S": named.indices.shape[-1],
        "OWN": named.own,
        "CAUSAL": inputs.causal,
        "TOKENS": named.tile_tokens,
    }


def _why_pointers(k: torch.Tensor, v: torch.Tensor, block_size: int, block_n: int) -> str | None:
    """Why keys in query order are not read through TMA; None where they are."""
    if block_n != block_size:
        return f"blocks of {block_size} keys are no power of two of at least 16: pointers, not TMA"
    return why_pointers(k=k, v=v)


def _in_unions(inputs: Inputs, unions: Unions, arguments: dict[str, Any], config: configs.Config) -> dict[str, Any]:
    """What the kernels in query order take beside; keys through descriptors where they can be."""
    named = inputs.named
    tma = (
        config.tma
        and arguments["BLOCK_N"] == named.block_size
        and fits_descriptor(inputs.k)
        and fits_descriptor(inputs.v)
    )
    beside = {
        "blocks": unions.blocks,
        "bits": unions.bits,
        "sizes": unions.sizes,
        "n_tiles": named.tile_slots(unions.tokens),
        "SLOTS_P": named.slots_p,
        "TMA": tma,
        "WANTED": UNION,
    }
    if config.tma:
        note(inputs.q, _why_pointers, inputs.k, inputs.v, named.block_size, arguments["BLOCK_N"])
    if tma:
        rows = named.block_size
        beside |= {
            "k": descriptor(inputs.k, rows, arguments["BLOCK_D"]),
            "v": descriptor(inputs.v, rows, arguments["BLOCK_DV"]),
        }
        beside |= {"k_strides": None, "v_strides": None}
    return beside


def _forward_lists(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, flag: torch.Tensor | None) -> None:
    named, config = inputs.named, inputs.config("lists_fwd")
    arguments = _arguments(inputs, config) | _positive(inputs.scale) | {"flag": flag, "WANTED": LISTS}
    rows_a_token = named.heads * inputs.group
    bytes_a_token = rows_a_token * named.slots * (o.shape[-1] * o.element_size() + 4)
    chunks = index.chunks(named, bytes_a_token)
    # The first chunk is the longest: all use its memory, one after another.
    results = chunks[0].tiles * named.tile_tokens * rows_a_token * named.slots
    partial_o = o.new_empty((results, o.shape[-1]))
    partial = {"partial_o": partial_o, "partial_lse": o.new_empty((results,), dtype=torch.float32)}
    for chunk in chunks:
        lists = index.make_lists(named, chunk, configs.segment_entries("forward", inputs.group), flag, LISTS)
        rows = chunk.tiles * named.tile_tokens * rows_a_token
        merge = {
            "ranks": lists.ranks,
            "tokens": lists.tokens,
            "o": o,
            "lse": lse,
            "n_rows": rows,
            "PACKED": named.cu is not None,
            "SLOTS": named.slots,
            "SLOTS_P": named.slots_p,
            "BLOCK_R": MERGED_ROWS,
            "num_warps": 4,
            "num_stages": 2,
        }
        shared = {
            name: arguments[name]
            for name in ("flag", "WANTED", "n_heads", "n_tokens", "GROUP", "DV", "BLOCK_DV", "enable_fp_fusion")
        }
        emit(
            o,
            Launch(
                nsa_selected_fwd_lists_kernel,
                lists.most_segments,
                arguments | partial | _in_lists(inputs, lists, chunk.first_tile, inputs.q),
            ),
            Launch(nsa_selected_fwd_merge_kernel, -(-rows // MERGED_ROWS), shared | partial | merge),
        )


# Rows of one program that merges or sums what was left by entry (rows do not meet: interpreted, few programs are
# faster), and keys of one that sums segments.
MERGED_ROWS = 64 if interpreting() else 16
SUMMED_ROWS = 64 if interpreting() else 8
SUMMED_KEYS = 16


def _forward_union(
    inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, unions: Unions, flag: torch.Tensor | None
) -> None:
    config = inputs.config("union_fwd")
    arguments = _arguments(inputs, config)
    arguments |= (
        _in_unions(inputs, unions, arguments, config) | _positive(inputs.scale) | {"o": o, "lse": lse, "flag": flag}
    )
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
        flag = index.faster_order(unions, "fwd", inputs.named.slots, inputs.group) if order == "either" else None
        _forward_union(inputs, o, lse, unions, flag)
    if not tokens or order == "either":
        _forward_lists(inputs, o, lse, flag)
    return o, lse


class Rows(NamedTuple):
    """What a backward reads for each row of queries: the output's gradient, LSE in base 2 (+inf where the row saw
    nothing), and delta.
    """

    do: torch.Tensor
    lse_log2: torch.Tensor
    delta: torch.Tensor

    def arguments(self) -> dict[str, Any]:
        """As the kernels take them."""
        return {
            "do": self.do,
            "do_strides": row_strides(self.do.stride()),
            "lse_log2": self.lse_log2,
            "delta": self.delta,
        }


def _prepare(inputs: Inputs, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None) -> Rows:
    if do.stride(-1) != 1:
        do = do.contiguous()
    lse_log2, delta = lse.new_empty(lse.shape), lse.new_empty(lse.shape)
    dense = flash.make_inputs(
        inputs.q, inputs.k, inputs.v, inputs.named.cu, inputs.named.cu, True, -1, -1, inputs.scale, 0.0
    )
    emit(o, flash.prepare_launch(dense, o, do, lse, dlse, delta, lse_log2))
    return Rows(do, lse_log2, delta)


def _backward_lists(
    inputs: Inputs,
    rows: Rows,
    sums: tuple[torch.Tensor, torch.Tensor],
    dq: torch.Tensor | None,
    dsel: torch.Tensor | None,
    flag: torch.Tensor | None,
) -> None:
    """Add to dk (but for the scale) and dv, `sums` in fp32 by index head; and where dq is given write it."""
    named, config = inputs.named, inputs.config("lists_bwd")
    wanted = LISTS if dq is not None else UNION
    segment = configs.segment_entries("backward" if dq is not None else "dkdv", inputs.group)
    dk, dv = sums
    arguments = (
        _arguments(inputs, config)
        | rows.arguments()
        | {
            "flag": flag,
            "WANTED": wanted,
            "dk": dk,
            "dv": dv,
            "dsel": dsel,
            "scale": inputs.scale,
        }
    )
    rows_a_token = named.heads * inputs.group
    slots = named.tile_slots(named.block_size)
    # What stays by entry: a row of dq for each head, or without it the index and a share of the sums that further
    # segments leave aside.
    shared = (dk.shape[-1] + dv.shape[-1]) * 4 * arguments["BLOCK_N"] // segment + 8
    by_entry = shared if dq is None else shared + inputs.group * dq.shape[-1] * dq.element_size()
    chunks = index.chunks(named, named.heads * named.slots * by_entry)
    # The first chunk is the longest: all use its memory, one after another.
    entries, block_n = chunks[0].tiles * named.tile_tokens * named.heads * named.slots, arguments["BLOCK_N"]
    left_aside = entries // segment * block_n
    partial: dict[str, torch.Tensor | None] = {
        "partial_dk": dk.new_empty((left_aside, dk.shape[-1]), dtype=torch.float32),
        "partial_dv": dv.new_empty((left_aside, dv.shape[-1]), dtype=torch.float32),
        "partial_dq": None if dq is None else dq.new_empty((entries * inputs.group, dq.shape[-1])),
    }
    for chunk in chunks:
        lists = index.make_lists(named, chunk, segment, flag, wanted)
        names = ("flag", "WANTED", "n_heads", "enable_fp_fusion")
        keys = {
            name: arguments[name]
            for name in (
                *names,
                "dk",
                "dv",
                "cu",
                "n_batch",
                "n_tokens",
                "D",
                "DV",
                "BLOCK_D",
                "BLOCK_DV",
                "BLOCK_SIZE",
            )
        }
        keys |= {
            "ends": lists.ends,
            "extras": lists.extras,
            "n_slots": slots,
            "BLOCK_N": block_n,
            "BLOCK_R": SUMMED_KEYS,
            "HEADS": 1,
            "num_warps": 4,
        }
        tokens = chunk.tiles * named.tile_tokens
        aside = {name: partial[name] for name in ("partial_dk", "partial_dv")}
        in_lists = _in_lists(inputs, lists, chunk.first_tile, inputs.q, rows.do)
        launches = [
            Launch(nsa_selected_bwd_lists_kernel, lists.most_segments, arguments | partial | in_lists),
            Launch(nsa_selected_bwd_keys_kernel, named.lists * (block_n // SUMMED_KEYS), keys | aside),
        ]
        if dq is not None:
            queries = {name: arguments[name] for name in (*names, "GROUP", "D", "BLOCK_D")}
            queries |= {
                "partial_dq": partial["partial_dq"],
                "ranks": lists.ranks,
                "tokens": lists.tokens,
                "base": None,
                "dq": dq,
                "n_rows": tokens * rows_a_token,
            }
            queries |= {"SLOTS": named.slots, "BLOCK_R": SUMMED_ROWS, "num_warps": 4}
            launches.append(Launch(nsa_selected_bwd_queries_kernel, -(-tokens * rows_a_token // SUMMED_ROWS), queries))
        emit(dk, *launches)


def _backward_union(inputs: Inputs, rows: Rows, dq: torch.Tensor, unions: Unions, flag: torch.Tensor | None) -> None:
    config = inputs.config("union_dq")
    arguments = _arguments(inputs, config) | rows.arguments()
    arguments |= _in_unions(inputs, unions, arguments, config) | {"dq": dq, "flag": flag, "scale": inputs.scale}
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
    sums = acc_dk, acc_dv
    dsel = None if inputs.sel_scale is None else q.new_zeros(named.indices.shape, dtype=torch.float32)
    if q.numel():
        rows = _prepare(inputs, o, lse, do, dlse)
        tokens = 0 if order == "lists" else inputs.union_tokens("union_dq")
        flag = None
        if tokens:
            unions = index.make_unions(named, tokens)
            flag = index.faster_order(unions, "dq", inputs.named.slots, inputs.group) if order == "either" else None
            _backward_union(inputs, rows, dq, unions, flag)
            _backward_lists(inputs, rows, sums, None, dsel, flag)
        if not tokens or order == "either":
            _backward_lists(inputs, rows, sums, dq, dsel, flag)
    return dq, _finish(acc_dk, k, inputs.scale), _finish(acc_dv, v, 1.0), dsel


def _finish(sums: torch.Tensor, x: torch.Tensor, scale: float) -> torch.Tensor:
    """x's gradient from its fp32 sums by index head."""
    return compute(_scale_heads, sums, x.shape[-2], scale, x.dtype, shape=x.shape, dtype=x.dtype)


def _scale_heads(sums: torch.Tensor, heads: int, scale: float, dtype: torch.dtype) -> torch.Tensor:
    if sums.shape[-2] != heads:
        sums = sums.unflatten(-2, (heads, -1)).sum(-2)
    return (sums if scale == 1.0 else sums.mul_(scale)).to(dtype)
