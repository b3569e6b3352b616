"""The attention function that transformers' layers call, over `flash_attention` and `selected_attention`."""

from collections.abc import Callable
from typing import Any, cast

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tilewise.integrations.transformers import blocks
from tilewise.integrations.transformers.masks import CHOSEN_KEYS, INSTEAD, Mask, Rows
from tilewise.integrations.transformers.refuse import Refuse
from tilewise.ops._host.checks import MAX_CHANNELS
from tilewise.ops.flash.api import flash_attention

Tensor = torch.Tensor
# What some layers pass that no kernel here takes, nor torch's sdpa where it is False.
_NOT_TAKEN = {
    "position_bias": ("a bias added to scores (position_bias, as T5 has)", True),
    "indices": (CHOSEN_KEYS, False),
    "sinks": ("sinks by token (sinks)", False),
    "cache": ("the paged cache of continuous batching (cache)", False),
    "output_attentions": ("returning the weights (output_attentions)", False),
}


def attention(refuse: Refuse) -> Callable[..., tuple[Tensor, None]]:
    """What AttentionInterface wants."""

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        block_indices: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        mask: Mask | None = getattr(attention_mask, "tilewise_mask", None)
        q_length, kv_length = query.shape[2], key.shape[2]
        layer = getattr(module, "layer_idx", "?")
        if mask is not None and (mask.q_length, mask.kv_length) != (q_length, kv_length):
            raise ValueError(
                f"the mask was made for {mask.q_length} queries and {mask.kv_length} keys, and layer"
                f" {layer} has {q_length} and {kv_length}: {INSTEAD}"
            )
        # What sdpa would not see, or would drop.
        lost = (
            softcap is not None
            or s_aux is not None
            or (attention_mask is None and sliding_window is not None)
            or ((cu_seq_lens_q is not None or cu_seq_lens_k is not None) and not _is_packed(mask))
        )
        by_sdpa = False
        if mask is not None and mask.refused:
            if lost:
                what = f"a mask of {mask.refused} together with softcap, sinks or cu_seq_lens"
                refuse(what, 'use attn_implementation="eager"', sdpa=False)
            by_sdpa = True
        if dropout > 0:
            refuse(f"dropout ({dropout} in training)", "set attention_dropout to 0, or " + INSTEAD, sdpa=not lost)
            by_sdpa = True
        for name, (what, sdpa) in _NOT_TAKEN.items():
            if given.get(name) is not None and given[name] is not False:
                refuse(what, 'use attn_implementation="eager"', sdpa=sdpa and not lost)
                by_sdpa = True
        if attention_mask is not None and mask is None:
            if attention_mask.numel() == 0:
                refuse("a mask that a model or a hook has copied or cut", INSTEAD, sdpa=False)
            # sdpa would broadcast one of fewer axes.
            has_all_axes = attention_mask.dim() == 4
            refuse(
                "a mask of the caller's own, or one that a model has replaced", INSTEAD, sdpa=has_all_axes and not lost
            )
            by_sdpa = True
        if max(query.shape[-1], value.shape[-1]) > MAX_CHANNELS:
            refuse(f"heads of more than {MAX_CHANNELS} channels", INSTEAD, sdpa=not lost)
            by_sdpa = True
        if not by_sdpa:
            if mask is None:
                mask = _by_module(module, q_length, kv_length, is_causal, sliding_window)
            elif sliding_window is not None and kv_length > sliding_window and mask.window[0] != sliding_window - 1:
                raise ValueError(
                    f"layer {layer} has sliding_window {sliding_window} and a mask with window {mask.window}: {INSTEAD}"
                )
            mask = _with_offsets(mask, cu_seq_lens_q, cu_seq_lens_k)
            wrong = "" if block_indices is None else blocks.unsupported(mask, softcap, s_aux)
            if wrong:
                refuse(f"a choice of blocks (block_indices) with {wrong}", blocks.INSTEAD, sdpa=not lost)
                by_sdpa = True
        if mask is None or by_sdpa:
            whole = attention_mask if mask is None or mask.full is None else mask.full()
            if block_indices is not None:
                whole = blocks.whole_mask(module, block_indices, whole, query, kv_length, given.get("position_ids"))
            options = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
            out: tuple[Tensor, None] = sdpa_attention_forward(
                module, query, key, value, whole, **options, position_bias=given.get("position_bias")
            )
            return out
        # [B, T, H, D]
        q, k, v = (x.transpose(1, 2) for x in (query, key[:, :, : mask.keys], value[:, :, : mask.keys]))
        if block_indices is not None:
            block_size = cast(Any, module).config.index_block_size
            return blocks.attend(q, k, v, block_indices.transpose(1, 2), mask, block_size, scaling), None
        return _dense(q, k, v, mask, scale=scaling, softcap=softcap or 0.0, sinks=s_aux), None

    return attend


def _by_module(
    module: torch.nn.Module, q_length: int, kv_length: int, is_causal: bool | None, sliding_window: int | None
) -> Mask:
    """Of a layer that has no mask, as vision towers do."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal) and q_length > 1
    if causal and q_length != kv_length:
        raise ValueError(
            f"a causal layer has {q_length} queries, {kv_length} keys and no mask: where its queries stand is not said;"
            f" {INSTEAD}"
        )
    before = -1 if sliding_window is None else sliding_window - 1
    return Mask(q_length, kv_length, causal, (before, 0 if causal and before >= 0 else before), kv_length)


def _is_packed(mask: Mask | None) -> bool:
    """Whether the mask knows of packed sequences, by their positions."""
    return mask is not None and mask.rows is not None and mask.rows.k is None


def _with_offsets(mask: Mask, cu_q: Tensor | None, cu_k: Tensor | None) -> Mask:
    """With the packed sequences that a caller's offsets say, where they are given."""
    if cu_q is None and cu_k is None:
        return mask
    if cu_q is None or cu_k is None:
        raise ValueError("one of cu_seq_lens_q and cu_seq_lens_k is given: give both, or neither")
    if mask.lengths is not None or mask.leftpad is not None or (mask.rows is not None and not _is_packed(mask)):
        raise ValueError("cu_seq_lens_q is given with padding or a static cache: leave one of the two out")
    return mask._replace(rows=Rows(None, None, cu_q, cu_k))


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Mask, **options: Any) -> Tensor:
    """Attention to all keys that the mask lets a query see."""
    options |= {"causal": mask.causal, "window_size": mask.window}
    rows = mask.rows
    if rows is None:
        return cast(Tensor, flash_attention(q, k, v, seqused_k=mask.lengths, leftpad_k=mask.leftpad, **options))
    given = rows.queries(q), rows.keys(k), rows.keys(v)
    o = cast(Tensor, flash_attention(*given, cu_seqlens_q=rows.cu_q, cu_seqlens_k=rows.cu_k, **options))
    return rows.back(o, *q.shape[:2])
