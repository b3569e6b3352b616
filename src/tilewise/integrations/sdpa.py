"""torch's scaled_dot_product_attention, varlen_attn and what is built on them, by tilewise's kernels.

Where torch chooses flash attention (CUDA tensors in fp16 or bf16, no mask but is_causal) it calls five operators; these
are theirs. Nothing is active until `activate` is called.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import library
from torch.nn import attention

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops.flash.api import flash_attention, flash_backward

__all__ = ["activate", "active", "restore"]

Tensor = torch.Tensor
NAME = "tilewise"


class _Options(NamedTuple):
    causal: bool
    left: int
    right: int
    scale: float | None


def activate() -> None:
    """From now on torch's flash attention is tilewise's, in the whole process. Needs torch 2.11."""
    _registry().activate_flash_attention_impl(NAME)


def restore() -> None:
    """torch's own again."""
    if _registry().current_flash_attention_impl() == NAME:
        _registry().restore_flash_attention_impl()


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Inside, torch's flash attention is tilewise's; then what it was before. A backward is tilewise's if it runs
    inside.
    """
    before = _registry().current_flash_attention_impl()
    activate()
    try:
        yield
    finally:
        if before is None:
            restore()
        else:
            _registry().activate_flash_attention_impl(before)


def _registry() -> Any:
    # torch 2.10 has a part of it.
    if not hasattr(attention, "restore_flash_attention_impl"):
        raise RuntimeError(
            f"tilewise.integrations.sdpa needs torch 2.11 or later, for its registry of flash attention (got"
            f" {torch.__version__}); call tilewise.flash_attention itself, or tilewise.compat's functions"
        )
    if NAME not in attention.list_flash_attention_impls():
        attention.register_flash_attention_impl(NAME, register_fn=Installed)
    return attention


class Installed:
    """The operators, as long as it lives and is not removed; on a dispatch key that torch knows."""

    def __init__(self, key: str = "CUDA") -> None:
        self._library: library.Library | None = library.Library("aten", "IMPL", key)
        for name, function in _OPERATORS.items():
            # torch 2.11 has none that writes into a given tensor.
            if hasattr(torch.ops.aten, name):
                self._library.impl(name, function, key)

    def remove(self) -> None:
        """torch's own are in force again."""
        if self._library is not None:
            self._library._destroy()
            self._library = None


def _flash_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_forward."""
    _refuse(dropout_p, return_debug_mask, alibi_slopes)
    options = _options(is_causal, window_size_left, window_size_right, scale)
    given: dict[str, Any] = {"cu_seqlens_q": cum_seq_q, "num_splits": num_splits or 0}
    if block_table is not None:
        given |= {"seqused_k": seqused_k, "page_table": block_table}
    elif seqused_k is not None:
        given |= _used(cum_seq_q, cum_seq_k, seqused_k)
    else:
        given |= {"cu_seqlens_k": cum_seq_k}
    o, lse = _attend(query, key, value, options, **given)
    return _laid_out(o, query), lse, *_nothing(query)


def _flash_forward_inplace(out: Tensor, *arguments: Any, **named: Any) -> Tensor:
    """aten::_flash_attention_forward_no_dropout_inplace."""
    o, lse, *_ = _flash_forward(*arguments, **named)
    out.copy_(o)
    return lse


def _flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor | None,
    unused: Tensor | None,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """aten::_flash_attention_backward."""
    _refuse(dropout_p)
    options = _options(is_causal, window_size_left, window_size_right, scale)
    return _differentiate(grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, options)


def _dense_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """aten::_scaled_dot_product_flash_attention, of `[B, H, T, D]`."""
    _refuse(dropout_p, return_debug_mask)
    q, k, v = _tokens_first(query, key, value)
    o, lse = _attend(q, k, v, _options(is_causal, None, None, scale))
    return _laid_out(o.transpose(1, 2), query), lse, None, None, query.shape[2], key.shape[2], *_nothing(query)


def _dense_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor | None,
    philox_offset: Tensor | None,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """aten::_scaled_dot_product_flash_attention_backward."""
    _refuse(dropout_p)
    do, q, k, v, o = _tokens_first(grad_out, query, key, value, out)
    found = _differentiate(do, q, k, v, o, logsumexp, None, None, _options(is_causal, None, None, scale))
    return tuple(_tokens_first(*found))


_OPERATORS = {
    "_flash_attention_forward": _flash_forward,
    "_flash_attention_forward_no_dropout_inplace": _flash_forward_inplace,
    "_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_flash_attention": _dense_forward,
    "_scaled_dot_product_flash_attention_backward": _dense_backward,
}


def _attend(q: Tensor, k: Tensor, v: Tensor, options: _Options, **given: Any) -> tuple[Tensor, Tensor]:
    # Autograd is torch's own, above these operators.
    with torch.no_grad():
        return flash_attention(  # type: ignore[return-value]
            q,
            k,
            v,
            causal=options.causal,
            window_size=(options.left, options.right),
            scale=options.scale,
            return_lse=True,
            **given,
        )


def _differentiate(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    options: _Options,
) -> tuple[Tensor, ...]:
    scale = q.shape[-1] ** -0.5 if options.scale is None else checks.as_float(options.scale)
    numbers = options.causal, options.left, options.right, scale, 0.0
    how = torch.are_deterministic_algorithms_enabled(), resolve_backend(None, q.device)
    given = do.contiguous(), None, q, k, v, o.contiguous(), lse.contiguous(), cu_q, cu_k, None
    with torch.no_grad():
        dq, dk, dv, _ = flash_backward.call_checked(given, (*numbers, *how))
    return dq, dk, dv


def _options(causal: bool, left: int | None, right: int | None, scale: float | None) -> _Options:
    return _Options(causal, -1 if left is None else left, -1 if right is None else right, scale)


def _used(cu_q: Tensor | None, cu_k: Tensor | None, used: Tensor) -> dict[str, Tensor]:
    """Offsets of packed keys of which each sequence's first ones exist: the rest is a sequence without queries."""
    if cu_q is None or cu_k is None:
        raise RuntimeError("seqused_k is given without offsets and without block_table: expected packed keys, or pages")
    ends = cu_k[:-1] + used
    return {
        "cu_seqlens_q": torch.cat((torch.stack((cu_q[:-1], cu_q[1:]), 1).flatten(), cu_q[-1:])),
        "cu_seqlens_k": torch.cat((torch.stack((cu_k[:-1], ends), 1).flatten(), cu_k[-1:])),
    }


def _refuse(dropout_p: float, debug_mask: bool = False, alibi_slopes: Tensor | None = None) -> None:
    """What flash attention of torch can do and tilewise's cannot."""
    instead = "leave tilewise's inactive for it (tilewise.integrations.sdpa.restore)"
    if dropout_p != 0.0:
        raise RuntimeError(f"dropout_p is {dropout_p}: tilewise's attention has no dropout; set it to 0, or {instead}")
    if debug_mask:
        raise RuntimeError(f"return_debug_mask is True: tilewise's attention has no dropout mask; {instead}")
    if alibi_slopes is not None:
        raise RuntimeError(f"alibi_slopes is given: tilewise's attention has no bias; {instead}")


def _tokens_first(*tensors: Tensor) -> list[Tensor]:
    """`[B, H, T, D]` to `[B, T, H, D]`, and back."""
    return [x.transpose(1, 2) for x in tensors]


def _laid_out(o: Tensor, query: Tensor) -> Tensor:
    """In the strides that torch promises its compiler: the query's."""
    expected = torch.empty_like(query, device="meta").stride()
    return o if o.stride() == expected or o.numel() == 0 else torch.empty_like(query).copy_(o)


def _nothing(query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """In place of random state and of a dropout mask."""
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)
    return seed, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)
