"""Why attention to named blocks takes the slower of two ways, for `tilewise.explain`."""

import torch

from tilewise.ops._host.launching import why_pointers


def pointers(k: torch.Tensor, v: torch.Tensor, block_size: int, block_n: int) -> str | None:
    """Why keys in query order are not read through TMA; None where they are."""
    if block_n != block_size:
        return f"blocks of {block_size} keys are no power of two of at least 16: pointers, not TMA"
    return why_pointers(k=k, v=v)


def key_order_only(plain: bool, group: int, tokens: int, slots: int) -> str:
    """Why the query order cannot serve: `tokens` of a tile that name `slots` blocks each, for a GQA group."""
    if not plain:
        reason = "own blocks or sel_scale"
    elif group == 1:
        reason = "one query head for each KV head"
    else:
        reason = f"{tokens} tokens of a tile with {slots} blocks each"
    return f"{reason}: key order only (lists)"
