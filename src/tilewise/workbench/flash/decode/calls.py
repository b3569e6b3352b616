"""Attention over a cache as its problems call it: as flash_attention does where queries are packed."""

from typing import Any

import torch

from tilewise.ops.flash import api
from tilewise.ops.flash.decode import api as decode
from tilewise.ops.flash.decode import reference as definition


def attend(*, cu_seqlens_q: torch.Tensor | None = None, **arguments: Any) -> Any:
    """The public function that takes these arguments."""
    if cu_seqlens_q is None:
        return decode.flash_attention_with_kvcache(**arguments)
    return api.flash_attention(cu_seqlens_q=cu_seqlens_q, **arguments)


def reference(*, cu_seqlens_q: torch.Tensor | None = None, num_splits: int = 0, **arguments: Any) -> Any:
    """Its definition, which knows no splits."""
    if cu_seqlens_q is None:
        return definition.flash_attention_with_kvcache(**arguments)
    return definition.attend_cached(cu_seqlens_q=cu_seqlens_q, **arguments)
