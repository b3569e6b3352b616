"""Flash attention's calls that are audited."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tilewise.inspect.audit import CHANNELS, HEADS, KEY_HEADS, TOKENS, Case, in_words, layouts, offsets, rows
from tilewise.ops.flash import launch as flash


def cases() -> Iterator[Case]:
    """Under a causal mask and a window, on Hopper too, and many short sequences."""

    def call(
        q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, deterministic: bool = True, **mask: Any
    ) -> None:
        options = {"causal": False, "left": -1, "right": -1, "scale": 0.1, "softcap": 0.0} | mask
        inputs = flash.make_inputs(q, k, k, cu, cu, **options)
        o, lse = flash.forward(inputs)
        flash.backward(inputs, o, lse, q, lse, deterministic=deterministic)

    def on_hopper(q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None) -> None:
        call(q, k, cu, causal=True)
        call(q, k, cu, left=6_000_000, right=2_000_000)
        # In free order, sums are zeroed first; without groups and a mask, tile by tile.
        call(q, k, cu, deterministic=False, causal=True)
        call(q, q, cu, deterministic=False)

    for words, architecture, packed, stride in layouts():
        q, k, cu = (
            rows(HEADS, packed=packed, stride=stride),
            rows(KEY_HEADS, packed=packed, stride=stride),
            offsets(packed),
        )
        # Hopper has its own kernels, below; Blackwell loads through descriptors too.
        portable = 100 if architecture == 90 else architecture
        yield Case(f"{words}, causal", portable, partial(call, q, k, cu, causal=True))
        yield Case(f"{words}, a wide window", portable, partial(call, q, k, cu, left=6_000_000, right=2_000_000))
    for packed in (False, True):
        # The most heads that Hopper's backward takes for this many tokens.
        heads = 192 if packed else 96
        q, k, cu = rows(heads, packed=packed), rows(heads // 4, packed=packed), offsets(packed)
        yield Case(f"{in_words(packed, heads=heads)}, Hopper's own kernels", 90, partial(on_hopper, q, k, cu))
    short, batch = 16, TOKENS // 16
    q, k = (rows(heads, batch=batch, tokens=short) for heads in (HEADS, KEY_HEADS))
    yield Case(f"{batch:,} sequences of {short} tokens, {HEADS} heads of {CHANNELS}", 90, partial(call, q, k, None))
