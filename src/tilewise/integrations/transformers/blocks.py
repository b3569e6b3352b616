"""Layers whose queries attend to blocks of keys that they choose: MiniMax-M3's, over `selected_attention`.

Blocks are counted from the first slot of a row of the batch, so that every sequence must begin there.
"""

from typing import Any, cast

import torch

from tilewise.integrations.transformers.masks import Mask
from tilewise.ops._host.register import autocasting
from tilewise.ops.nsa.problem import check_backend
from tilewise.ops.nsa.steps import selected_attention, selected_forward

Tensor = torch.Tensor
INSTEAD = (
    'pad on the right, and generate from prompts of one length, or one at a time; or use attn_implementation="eager"'
)


def unsupported(mask: Mask, softcap: float | None, sinks: Tensor | None) -> str:
    """What cannot be with a choice of blocks; nothing where all can."""
    if not mask.causal or mask.window != (-1, -1) or softcap is not None or sinks is not None:
        return "a mask that is not causal, a window, softcap or sinks"
    if mask.leftpad is not None or (mask.rows is not None and not mask.rows.leading):
        return "padding on the left or between tokens, or packed sequences"
    return ""


def whole_mask(
    module: torch.nn.Module, chosen: Tensor, mask: Tensor | None, query: Tensor, keys: int, position_ids: Tensor | None
) -> Tensor:
    """The mask with the choice in it, as transformers makes it for eager and sdpa."""
    indexer = cast(Any, module).indexer
    return indexer.build_block_mask(chosen, mask, keys, query.dtype, query.device, position_ids)


def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, mask: Mask, block_size: int, scale: float | None) -> Tensor:
    """Of `[B, T, H, D]`, with a choice for each query and KV head, `[B, T, Hk, S]`."""
    rows = mask.rows
    if rows is not None:
        first = rows.cu_k.diff() - rows.cu_q.diff()
        given = rows.queries(q), rows.keys(k), rows.keys(v), rows.queries(chosen), rows.cu_q, rows.cu_k, first
        return rows.back(_last_queries(*given, block_size, scale), *q.shape[:2])
    if mask.lengths is None and mask.keys == mask.q_length:
        return cast(Tensor, selected_attention(q, k, v, chosen, block_size=block_size, scale=scale))
    used = mask.keys if mask.lengths is None else mask.lengths
    first = torch.zeros(len(q), dtype=torch.int32, device=q.device) + (used - mask.q_length)
    return _last_queries(q, k, v, chosen, None, None, first, block_size, scale)


@autocasting
def _last_queries(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    chosen: Tensor,
    cu: Tensor | None,
    cu_k: Tensor | None,
    first: Tensor,
    block_size: int,
    scale: float | None,
) -> Tensor:
    """Of queries from position `first` of their sequences on; keys behind the last query are never seen."""
    backend = check_backend(None, q, "q", block_size)
    if backend == "reference":
        raise NotImplementedError(
            "TILEWISE_BACKEND is 'reference', which attends to chosen blocks from whole sequences of one length alone,"
            " and here are a cache or padding: set it to 'cpu' or 'triton', or leave it out"
        )
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, _ = selected_forward.call_checked((q, k, v, chosen.contiguous(), cu, cu_k, first), (block_size, scale, backend))
    return o
