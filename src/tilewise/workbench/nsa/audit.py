"""Calls of native sparse attention that are audited, part by part."""

from collections.abc import Iterator
from functools import partial

import torch

from tilewise.inspect.audit import (
    FAR,
    HEADS,
    KEY_HEADS,
    TOKENS,
    Case,
    gates,
    in_words,
    layouts,
    named,
    offsets,
    rows,
)
from tilewise.ops.nsa import launch as nsa
from tilewise.ops.nsa.problem import Sizes, mean_windows


def _compressed_call(
    q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, size: int = 32, stride: int = 16
) -> None:
    windows = mean_windows(cu, q.shape[-3], stride)
    k_cmp = nsa.compress(k, cu, windows, size, stride)
    o, lse = nsa.compressed_forward(q, k_cmp, k_cmp, cu, windows, size, stride, 0.1)
    nsa.compressed_backward(q, k_cmp, k_cmp, o, lse, q, None, cu, windows, size, stride, 0.1)
    nsa.compress_backward(k_cmp, q.shape[-3], cu, windows, size, stride)


def _selected_call(
    q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor, cu: torch.Tensor | None, block: int
) -> None:
    o, lse = nsa.selected_forward(q, k, k, indices, cu, block, 0.1)
    nsa.selected_backward(q, k, k, indices, o, lse, q, None, cu, block, 0.1)


def compressed() -> Iterator[Case]:
    """Means of windows, and attention to them."""
    for words, architecture, packed, stride in layouts():
        q, k, cu = (
            rows(HEADS, packed=packed, stride=stride),
            rows(KEY_HEADS, packed=packed, stride=stride),
            offsets(packed),
        )
        yield Case(f"{words}, windows of 32 every 16", architecture, partial(_compressed_call, q, k, cu))


def choose() -> Iterator[Case]:
    """The choice of blocks."""
    sizes = Sizes(32, 16, 64, 16, 1, 2)
    for packed, stride in ((False, 0), (True, FAR)):
        # One sequence: chunks of sequences this long hold one tile each.
        q, cu = rows(HEADS, packed=packed, batch=1, stride=stride), offsets(packed)
        k_cmp, lse = (
            rows(KEY_HEADS, packed=packed, batch=1, tokens=TOKENS // 16 - (not packed)),
            torch.empty(HEADS, TOKENS, device="meta"),
        )
        windows = mean_windows(cu, TOKENS, 16)
        yield Case(
            f"{in_words(packed, packed, 1)}, 16 blocks of 64",
            90,
            partial(nsa.choose, q, k_cmp, lse, cu, windows, sizes, 0.1),
        )


def selected() -> Iterator[Case]:
    """Attention to named blocks."""
    for words, architecture, packed, stride in layouts():
        q, k, cu = (
            rows(HEADS, packed=packed, stride=stride),
            rows(KEY_HEADS, packed=packed, stride=stride),
            offsets(packed),
        )
        indices, block = named(16, packed=packed), 16 if packed else 64
        yield Case(f"{words}, 16 blocks of {block}", architecture, partial(_selected_call, q, k, indices, cu, block))


def attend() -> Iterator[Case]:
    """native_sparse_attend."""
    q, k, indices = rows(HEADS), rows(KEY_HEADS), named(8, packed=False)
    scale = torch.empty(indices.shape, device="meta")

    def call() -> None:
        o, lse = nsa.attend_forward(q, k, k, indices, scale, True, 64, 0.1)
        nsa.attend_backward(q, k, k, indices, scale, o, lse, q, None, True, 64, 0.1)

    yield Case(f"{in_words(False)}, 8 blocks of 64 and the own one", 90, call)


def combine() -> Iterator[Case]:
    """The gated sum."""
    o, gate = rows(HEADS), gates(packed=False)

    def combine() -> None:
        nsa.combine([o, o, o], [gate, gate, gate])
        nsa.combine_backward(o, o, gate)

    yield Case(f"{in_words(False)}, three branches", 90, combine)
