"""Drop-in functions for code written for flash-attn 2.8: its names, order and defaults of arguments, and its returns.

They call tilewise.flash_attention and tilewise.flash_attention_with_kvcache, which have no dropout, no ALiBi and no
rotary of their own: such an argument raises, by name, and says what to use instead.
"""

from typing import Any

import torch

from tilewise.ops.flash.api import flash_attention
from tilewise.ops.flash.decode.api import flash_attention_with_kvcache

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Tensor = torch.Tensor
_NO_WINDOW = (-1, -1)
_ROTATE_BEFORE = (
    "rotate q and k before the call, each at its own position (tilewise.nn.rotary.rotate pairs channels as"
    " rotary_interleaved=False does), and leave it out"
)
_INSTEAD = {
    "alibi_slopes": "scores have no bias here; use torch.nn.attention.flex_attention with a score_mod, or flash-attn",
    "rotary_cos": _ROTATE_BEFORE,
    "rotary_sin": _ROTATE_BEFORE,
    "cache_batch_idx": (
        "give block_table=cache_batch_idx[:, None], which takes entries of the cache as pages of T_max rows (a multiple"
        " of 16), or the entries themselves, k_cache[cache_batch_idx], where nothing is written"
    ),
}


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash-attn's, by tilewise.flash_attention.

    Args:
        q: `[B, Tq, Hq, D]`.
        k, v: `[B, Tk, Hk, ·]`; Hq is a multiple of Hk.
        dropout_p: 0; anything else raises.
        softmax_scale: by default `D ** -0.5`.
        causal: aligned at the bottom right.
        window_size: (left, right); -1 means no limit.
        softcap: where > 0, scores become `softcap · tanh(score / softcap)`.
        alibi_slopes: None; anything else raises.
        deterministic: whether gradients have the same bits each time. False allows more speed, where there is any.
        return_attn_probs: also return the LSE, and None in the place of probabilities.
        s_aux: sinks `[Hq]`, which flash-attn 2.8 has not: Hugging Face's models pass them by that name.

    Returns:
        The output, or with return_attn_probs `(output, lse, None)`, the LSE fp32 `[B, Hq, Tq]`.
    """
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(q, k, v, *options, sinks=s_aux)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    s_aux: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash_attn_func, of packed sequences.

    Args:
        q: `[Nq, Hq, D]`, sequences end to end.
        k, v: `[Nk, Hk, ·]`, or with block_table pools `[pages, page_size, Hk, ·]`.
        cu_seqlens_q, cu_seqlens_k: offsets `[B + 1]`; with block_table the differences of cu_seqlens_k are the numbers
            of keys.
        max_seqlen_q, max_seqlen_k: the longest sequences; checked where values are, and not needed.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic: as in flash_attn_func.
        return_attn_probs: as in flash_attn_func; the LSE is `[Hq, Nq]`.
        block_table: `[B, P]`: key j of a sequence is row `j % page_size` of page `block_table[b, j // page_size]`. For
            inference: it raises where grad mode is on and a tensor requires grad.
        s_aux: as in flash_attn_func.
    """
    packed: dict[str, Any] = {"cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": max_seqlen_q, "sinks": s_aux}
    if block_table is None:
        packed |= {"cu_seqlens_k": cu_seqlens_k, "max_seqlen_k": max_seqlen_k}
    else:
        packed |= {"seqused_k": cu_seqlens_k.diff(), "page_table": block_table}
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    return _attend(q, k, v, *options, **packed)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash_attn_func, of queries, keys and values in one tensor `[B, T, 3, H, D]`."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _parts(qkv, "qkv", "[B, T, 3, H, D]")
    return _attend(q, k, v, *options)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash_attn_func, of keys and values in one tensor `[B, Tk, 2, Hk, D]`."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _parts(kv, "kv", "[B, T, 2, H, D]")
    return _attend(q, k, v, *options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash_attn_varlen_func, of queries, keys and values in one tensor `[N, 3, H, D]`."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    q, k, v = _parts(qkv, "qkv", "[N, 3, H, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """As flash_attn_varlen_func, of keys and values in one tensor `[Nk, 2, Hk, D]`."""
    options = (dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs)
    k, v = _parts(kv, "kv", "[N, 2, H, D]")
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = _NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """As flash-attn's, by tilewise.flash_attention_with_kvcache: write new keys and values into a cache, in place, and
    attend to all of it. For inference: it raises where grad mode is on and a tensor requires grad.

    Args:
        q: `[B, Tq, Hq, D]`.
        k_cache, v_cache: `[B, T_max, Hk, ·]`, or with block_table pools `[pages, page_size, Hk, ·]`.
        k, v: new keys and values `[B, Tn, Hk, ·]`, both or neither; they want cache_seqlens.
        rotary_cos, rotary_sin, cache_batch_idx, alibi_slopes: None; anything else raises.
        cache_seqlens: keys in the cache before the call, `[B]` or one number; None means that it is full.
        cache_leftpad: `[B]`: slots at the start that hold no keys. Not with block_table.
        block_table: `[B, P]`; page_size is a multiple of 16.
        softmax_scale, causal, window_size, softcap: as in flash_attn_func.
        rotary_interleaved: changes nothing without rotary_cos.
        num_splits: 0 chooses, 1 never splits.
        return_softmax_lse: also return the LSE.

    Returns:
        The output, or with return_softmax_lse `(output, lse)`, the LSE fp32 `[B, Hq, Tq]`.
    """
    _refuse(rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx, alibi_slopes=alibi_slopes)
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("k is given without cache_seqlens: give the position it is written at, [B] or one number")
        cache_seqlens = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    return flash_attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        leftpad_k=cache_leftpad,
        page_table=block_table,
        causal=causal,
        window_size=window_size,
        scale=softmax_scale,
        softcap=max(softcap, 0.0),
        num_splits=num_splits,
        return_lse=return_softmax_lse,
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    return_attn_probs: bool,
    **more: Any,
) -> Tensor | tuple[Tensor, Tensor, None]:
    if dropout_p != 0:
        raise ValueError(
            f"dropout_p is {dropout_p}: attention has no dropout here; give 0.0, or use"
            " torch.nn.functional.scaled_dot_product_attention, which has"
        )
    _refuse(alibi_slopes=alibi_slopes)
    out, lse = flash_attention(
        q,
        k,
        v,
        causal=causal,
        window_size=window_size,
        scale=softmax_scale,
        # There, any number up to 0 means none.
        softcap=max(softcap, 0.0),
        deterministic=deterministic,
        return_lse=True,
        **more,
    )
    return (out, lse, None) if return_attn_probs else out


def _refuse(**given: Tensor | None) -> None:
    for name, x in given.items():
        if x is not None:
            raise ValueError(f"{name} is given: tilewise.compat has none; {_INSTEAD[name]}")


def _parts(x: Tensor, name: str, axes: str) -> tuple[Tensor, ...]:
    """Views of a tensor that holds several, along the axis before heads and channels."""
    sizes = axes.strip("[]").split(", ")
    if x.dim() != len(sizes) or x.shape[-3] != int(sizes[-3]):
        raise ValueError(f"{name} has shape {list(x.shape)}: expected {axes}")
    return x.unbind(-3)
