"""What the problems of native sparse attention share: sizes, layouts, block patterns, and what fp32 costs a softmax."""

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from tilewise.verify import drawing
from tilewise.verify.rounding import score_rounding
from tilewise.verify.suite import Fill, Problem, Tensors, cumulative, cut, transposed

LAYOUTS = ("plain", "mixed", "mixed-aligned")
PATTERNS = ("random", "smooth", "repeats", "holes", "own")


@dataclass(frozen=True)
class Attention(Problem):
    """T tokens; Hk and Dv are H and D where 0; `size` multiplies q; a mixed layout has expanded keys, the others
    transposed or cut.
    """

    B: int = 1
    T: int = 64
    H: int = 2
    Hk: int | None = None
    D: int = 16
    Dv: int | None = None
    size: float = 1.0
    layout: str = "plain"

    @property
    def kv_heads(self) -> int:
        """KV heads."""
        return self.Hk or self.H

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.Dv or 0)

    @property
    def cut_at(self) -> int:
        """Where in a wider tensor a cut input starts: 16-byte aligned, or not."""
        return 8 if self.layout == "mixed-aligned" else 3

    def tokens(self) -> tuple[int, ...]:
        """T."""
        return (self.T,)

    def twice_as_long(self) -> Self:
        """Twice the tokens."""
        return dataclasses.replace(self, T=2 * self.T)

    def check(self) -> None:
        """Sizes that an attention can have."""
        if min(self.B, self.T) < 0 or self.H < 1 or not 1 <= self.D <= 256 or not 1 <= (self.Dv or self.D) <= 256:
            raise ValueError("sizes must not be negative, heads at least 1, channels from 1 to 256")
        if self.H % self.kv_heads:
            raise ValueError(f"H={self.H} is not a multiple of Hk={self.Hk}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")

    def generator(self) -> torch.Generator:
        """Random numbers that depend on the problem only, not on the seed: for indices and masks."""
        return torch.Generator().manual_seed(zlib.crc32(f"{type(self).__name__}:{self}".encode()))


@dataclass(frozen=True)
class Sequences(Attention):
    """As it is, or packed sequences of `lengths`."""

    lengths: tuple[int, ...] = ()
    scale: float | None = None

    @property
    def rows(self) -> tuple[int, ...]:
        """The axes before heads: packed tokens, or batch and tokens."""
        return (sum(self.lengths),) if self.lengths else (self.B, self.T)

    def tokens(self) -> tuple[int, ...]:
        """The packed sequences' lengths, or T."""
        return self.lengths or (self.T,)

    def twice_as_long(self) -> Self:
        """Twice the tokens."""
        return dataclasses.replace(self, T=2 * self.T, lengths=tuple(2 * length for length in self.lengths))

    def check(self) -> None:
        """Sizes that an attention can have."""
        super().check()
        if min(self.lengths, default=0) < 0:
            raise ValueError("lengths must not be negative")

    def queries(self, fill: Fill) -> torch.Tensor:
        """q, in the problem's layout: packed tokens, which cannot be transposed, are cut."""
        q = fill("q", (*self.rows, self.H, self.D), self.size)
        if self.layout == "plain":
            return q
        return cut(q, self.cut_at) if self.lengths else transposed(q)

    def keys_and_values(self, fill: Fill, names: tuple[str, str], rows: tuple[int, ...]) -> Tensors:
        """Under these names, with this many rows: if mixed, keys are one batch entry, expanded, and values are cut."""
        shared = self.layout != "plain" and not self.lengths
        k = fill("k", (*((1, *rows[1:]) if shared else rows), self.kv_heads, self.D), 1.0)
        v = fill("v", (*rows, self.kv_heads, self.Dv or self.D), 1.0)
        k = k.expand(*rows, -1, -1) if shared else k
        return {names[0]: k, names[1]: v if self.layout == "plain" else cut(v, self.cut_at)}

    def cu_seqlens(self) -> Tensors:
        """The offsets of packed sequences."""
        return {"cu_seqlens": cumulative(self.lengths)} if self.lengths else {}

    def scaling(self) -> dict[str, Any]:
        """The scale, where it is not the default."""
        return {} if self.scale is None else {"scale": self.scale}

    def letters(self, **axes: str) -> dict[str, str]:
        """Axes by name; without the batch where packed."""
        return {name: letters.replace("B", "") if self.lengths else letters for name, letters in axes.items()}

    def score_error(self, inputs: Tensors, *keys: str) -> float:
        """What fp32 costs the scores of q and any of these keys."""
        return max(score_rounding(inputs["q"], inputs[name], self.scale) for name in keys)

    def blocks_by_pattern(self, pattern: str, block: int, count: int) -> torch.Tensor:
        """Indices [B, T, Hk, count], or packed, each sequence's counted from its own start."""
        generator = self.generator()
        parts = [
            block_pattern(pattern, (1 if self.lengths else self.B, tokens, self.kv_heads, count), block, generator)
            for tokens in self.tokens()
        ]
        return torch.cat([part[0] for part in parts]) if self.lengths else parts[0]


def block_pattern(
    pattern: str, shape: tuple[int, int, int, int], block: int, generator: torch.Generator
) -> torch.Tensor:
    """Indices [B, T, Hk, S] of one length.

    random: different blocks up to the query's own, ascending, -1 at the end. smooth: the same for 32 queries in a row,
    always with the first block, the query's own and the one before it. repeats: any up to the query's own, in any
    order, some of them twice; in int64. holes: any, later ones too, with -1 between them, and every fifth query without
    any. own: the query's own block only.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"there is no pattern {pattern!r}: expected one of {', '.join(PATTERNS)}")
    batch, tokens, heads, count = shape
    blocks = -(-tokens // block)
    current = (torch.arange(tokens) // block)[:, None, None]
    if pattern == "repeats":
        return (torch.rand(shape, generator=generator) * (current + 1)).long()
    if pattern == "holes":
        indices = torch.randint(-1, max(blocks, 1), shape, generator=generator)
        indices[:, 4::5] = -1
        return indices.int()
    if pattern == "own":
        return torch.cat(
            [current.expand(batch, tokens, heads, 1), torch.full((batch, tokens, heads, count - 1), -1)], -1
        ).int()
    each = 32 if pattern == "smooth" else 1
    ranks = torch.rand((batch, -(-tokens // each), heads, blocks), generator=generator).repeat_interleave(each, 1)[
        :, :tokens
    ]
    block_of = torch.arange(blocks)
    if pattern == "smooth":
        ranks = ranks + ((block_of == 0) | (block_of == current) | (block_of == current - 1))
    ranks = ranks.masked_fill(block_of > current, -1.0)
    best, order = ranks.sort(dim=-1, descending=True)
    chosen = order.masked_fill(best < 0, blocks)[..., :count].sort(dim=-1).values
    return torch.nn.functional.pad(
        chosen.masked_fill(chosen == blocks, -1), (0, count - chosen.shape[-1]), value=-1
    ).int()


def drawn_sizes(draw: Callable[[Any], Any], longest: int, least: int = 0, packs: bool = False) -> dict[str, Any]:
    """Sizes of any shape; if it `packs`, also packed sequences, and a scale. The longest sequence has `least` tokens or
    more, unless none has any.
    """
    from hypothesis import strategies as st

    if packs and draw(st.booleans()):
        lengths = drawing.packed(draw, longest, least=least)
        room = drawing.Room(longest, zip(lengths, lengths, strict=True))
        sizes: dict[str, Any] = {"lengths": lengths}
    else:
        tokens = draw(drawing.tokens(longest, least) | st.just(0))
        room = drawing.Room(longest, [(tokens, tokens)])
        sizes = {"B": room.batch(draw), "T": tokens}
    sizes |= room.grouped_heads(draw)
    return sizes | {
        "D": draw(room.channels()),
        "Dv": draw(st.none() | room.channels()),
        "size": draw(st.sampled_from((1.0, 10.0))),
        "layout": draw(st.sampled_from(LAYOUTS)),
        **({"scale": drawing.scale(draw)} if packs else {}),
    }
