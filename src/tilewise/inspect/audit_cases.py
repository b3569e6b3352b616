"""Calls at virtual sizes, for the audit of their launches: 10 million tokens, many heads, strides far apart.

Tensors have shapes and no memory.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops._host.launching import Launch, capture

# Not a multiple of any tile.
TOKENS = 10_000_019
CHANNELS = 128
HEADS, KEY_HEADS = 256, 16
# Elements from token to token where a tensor is a slice of something wide, such as all layers' projections side by
# side.
FAR = 1 << 20
# Lengths of packed sequences.
LENGTHS = (3_000_017, 0, TOKENS - 3_000_017)


@dataclass(frozen=True)
class Case:
    """One call at a virtual size: in words, for which architecture, and the call."""

    sizes: str
    architecture: int
    call: Callable[[], object]

    def launches(self) -> list[Launch]:
        """What it launches, of each kernel, with each set of constants and optional arguments, the first
        and the last.
        """
        with capture(self.architecture) as found:
            self.call()
        ends: dict[Any, list[Launch]] = {}
        for launch in found:
            # Upper case is constexpr.
            constants = (repr(value) for name, value in sorted(launch.arguments.items()) if name.isupper())
            key = (launch.kernel.__name__, *constants, *_missing(launch.arguments.items()))
            ends[key] = [*ends.get(key, [])[:1], launch]
        return [launch for pair in ends.values() for launch in pair]


def _missing(named: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Optional arguments, and fields of records, that are not given."""
    for name, value in named:
        if value is None:
            yield name
        elif hasattr(value, "_asdict"):
            yield from (f"{name}.{field}" for field in _missing(value._asdict().items()))


def rows(heads: int, *, packed: bool = False, batch: int = 2, tokens: int = TOKENS, stride: int = 0) -> torch.Tensor:
    """[B, T, H, D], or packed [N, H, D], in bf16; with a stride, tokens lie so many elements apart."""
    sizes: tuple[int, ...] = (tokens, heads, CHANNELS)
    strides: tuple[int, ...] = (stride or heads * CHANNELS, CHANNELS, 1)
    if not packed:
        sizes, strides = (batch, *sizes), (strides[0] * tokens, *strides)
    return torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")


def gates(*, packed: bool) -> torch.Tensor:
    """A gate of each token and head."""
    return torch.empty((*(() if packed else (2,)), TOKENS, HEADS), dtype=torch.bfloat16, device="meta")


def named(count: int, *, packed: bool) -> torch.Tensor:
    """The blocks that each token and key head names."""
    return torch.empty((*(() if packed else (2,)), TOKENS, KEY_HEADS, count), dtype=torch.int32, device="meta")


def offsets(packed: bool) -> torch.Tensor | None:
    """Of the packed sequences, where they are packed."""
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32) if packed else None


def in_words(packed: bool, far: bool = False, batch: int = 2, heads: int = HEADS) -> str:
    """What the tensors are."""
    many = (
        f"packed sequences of {', '.join(f'{length:,}' for length in LENGTHS)} tokens"
        if packed
        else f"{batch} x {TOKENS:,} tokens"
    )
    return f"{many}, {heads} heads of {CHANNELS}" + (f", {FAR:,} elements from token to token" if far else "")


def layouts() -> Iterator[tuple[str, int, bool, int]]:
    """In words, the architecture, packed or not, and the stride of tokens: dense tensors with descriptors where there
    are any, the others without.
    """
    for architecture, packed, far in ((90, False, False), (80, False, True), (90, True, True)):
        yield in_words(packed, far), architecture, packed, FAR if far else 0
