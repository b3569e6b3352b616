"""Attention to given blocks: its problem and cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewise.verify.rounding import delta_cost, softmax_floor
from tilewise.verify.suite import Case, Fill, Suite, Tensors, transposed
from tilewise.workbench.nsa import planted
from tilewise.workbench.nsa.base import PATTERNS, Sequences, drawn_sizes


@dataclass(frozen=True)
class NsaSelected(Sequences):
    """T queries, each over `count` blocks of `block` keys named by `pattern`: random, smooth, repeats, holes, own."""

    outputs = ("o", "lse")
    exact = ("lse",)
    returning: ClassVar[dict[str, Any]] = {"return_lse": True}

    block: int = 16
    count: int = 3
    pattern: str = "random"

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, the blocks, and the offsets of packed sequences."""
        indices = self.blocks_by_pattern(self.pattern, self.block, self.count)
        if self.layout != "plain" and not self.lengths:
            indices = transposed(indices)
        return {
            "q": self.queries(fill),
            **self.keys_and_values(fill, ("k", "v"), self.rows),
            "block_indices": indices,
            **self.cu_seqlens(),
        }

    def options(self) -> dict[str, Any]:
        """The block size, and the scale where it is not the default."""
        return {"block_size": self.block, **self.scaling()}

    def axes(self) -> dict[str, str]:
        """Batch, tokens, heads, channels, and S blocks; without the batch where packed."""
        return self.letters(q="BTHD", k="BTHD", v="BTHD", o="BTHD", lse="BHT", block_indices="BTHS")

    def offsets(self) -> dict[str, str]:
        """If packed, everything by the same offsets."""
        return dict.fromkeys(self.axes(), "cu_seqlens") if self.lengths else {}

    def check(self) -> None:
        """Blocks that can be named."""
        super().check()
        if self.block < 1 or self.count < 1:
            raise ValueError(f"block={self.block},count={self.count}: expected at least 1 of each")
        if self.pattern not in PATTERNS:
            raise ValueError(f"there is no pattern {self.pattern!r}: expected one of {', '.join(PATTERNS)}")

    def floor(self, name: str, truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs the scores, and gradients the LSE."""
        return softmax_floor(name, self.score_error(inputs, "k"), truth["lse"], name not in self.outputs)

    def storage_cost(self, truth: Tensors, incoming: Tensors, dtype: torch.dtype) -> Tensors:
        """Of a rounded o."""
        return {
            "o": torch.zeros_like(truth["o"]),
            "lse": delta_cost(truth["o"], incoming["o"], dtype).transpose(-1, -2),
        }


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, NsaSelected(**parameters))


_SIZES: dict[str, Any] = {"H": 8, "Hk": 2, "D": 32, "Dv": 64}

CASES = (
    _case("small", "B 1, T 64, H 4, Hk 2, D 16, Dv 32, 3 blocks of 16", H=4, Hk=2, D=16, Dv=32),
    _case("medium", "B 2, T 128, H 8, Hk 2, D 32, Dv 64, 4 blocks of 16", B=2, T=128, count=4, **_SIZES),
    _case(
        "large",
        "B 2, T 256, H 8, Hk 2, D 32, Dv 64, 4 blocks of 32, smooth",
        B=2,
        T=256,
        block=32,
        count=4,
        pattern="smooth",
        **_SIZES,
    ),
    _case(
        "xl",
        "B 8, T 512, H 8, Hk 2, D 32, Dv 64, 8 blocks of 32, smooth",
        B=8,
        T=512,
        block=32,
        count=8,
        pattern="smooth",
        **_SIZES,
    ),
    _case("xxl", "B 16, T 1024, H 8, Hk 2, D 32, Dv 64, 8 blocks of 64", B=16, T=1024, block=64, count=8, **_SIZES),
    _case("no-tokens", "T 0", T=0, D=8),
    _case("one-token", "T 1: one key", T=1, D=8, block=4),
    _case(
        "short",
        "T 5, shorter than a block; 3 query heads a KV head, more blocks than there are",
        T=5,
        H=3,
        Hk=1,
        D=8,
        Dv=3,
        block=32,
        count=4,
    ),
    _case(
        "repeats",
        "blocks named twice, in any order, count once; T 77, D 12, Dv 20",
        T=77,
        H=3,
        Hk=1,
        D=12,
        Dv=20,
        count=5,
        pattern="repeats",
    ),
    _case(
        "holes",
        "-1 between blocks, later ones, rows without any; blocks of 8",
        T=61,
        H=4,
        Hk=2,
        D=8,
        block=8,
        count=4,
        pattern="holes",
    ),
    _case("group-1", "one query head a KV head, 3 blocks of 8", T=43, H=1, D=8, block=8),
    _case(
        "own",
        "the own block alone; one query head a KV head, scale -0.3",
        T=50,
        H=2,
        block=8,
        count=2,
        pattern="own",
        scale=-0.3,
    ),
    _case(
        "smooth",
        "neighbours name the same blocks; 16 query heads, one KV head",
        T=50,
        H=16,
        Hk=1,
        D=8,
        block=8,
        count=4,
        pattern="smooth",
    ),
    _case("large-logits", "logits up to about ±100", T=65, size=25.0, H=4, Hk=2),
    _case(
        "strided",
        "one query head a KV head, transposed q and indices, expanded keys, cut values; scale 0",
        B=2,
        T=35,
        block=8,
        layout="mixed",
        scale=0.0,
    ),
    _case(
        "packed", "lengths 0, 29, 1, 0, 14 of one batch", lengths=(0, 29, 1, 0, 14), H=2, Hk=1, Dv=24, block=8, count=2
    ),
    _case("group-64", "64 query heads, one KV head, Dv 80", T=100, H=64, Hk=1, D=16, Dv=80),
    _case("group-6", "6 query heads, one KV head, D 80, blocks of 32", T=150, H=6, Hk=1, D=80, block=32, count=3),
    _case("block-48", "blocks of 48, D 96, Dv 128", B=2, T=300, H=4, Hk=1, D=96, Dv=128, block=48, count=4),
    _case(
        "block-128",
        "blocks of 128, D 128, alike for neighbours",
        T=600,
        H=4,
        Hk=2,
        D=128,
        block=128,
        count=3,
        pattern="smooth",
    ),
    _case(
        "block-64",
        "6 blocks of 64, D 72, some of them twice",
        T=500,
        H=4,
        Hk=1,
        D=72,
        block=64,
        count=6,
        pattern="repeats",
    ),
    _case("every-block", "blocks of 16, more named than there are, D 72", T=200, H=4, Hk=2, D=72, count=20),
    _case("d-256", "D 192, Dv 256, blocks of 32", T=130, H=2, Hk=1, D=192, Dv=256, block=32),
    _case(
        "strided-aligned",
        "strided on lines of 16 bytes, D 128",
        B=2,
        T=151,
        H=4,
        Hk=2,
        D=128,
        layout="mixed-aligned",
        pattern="holes",
    ),
    _case(
        "packed-128",
        "packed, D 128, blocks of 32",
        lengths=(130, 0, 257, 31, 1),
        H=4,
        Hk=2,
        D=128,
        block=32,
        pattern="smooth",
    ),
    _case(
        "packed-holes",
        "packed, cut out of wider tensors, -1 between blocks",
        lengths=(17, 0, 49),
        H=2,
        D=72,
        layout="mixed",
        pattern="holes",
    ),
)


def draw(draw: Callable[[Any], Any], longest: int) -> NsaSelected:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    return NsaSelected(
        **drawn_sizes(draw, longest, packs=True),
        block=draw(st.sampled_from((16, 4, 8, 13, 32, 64))),
        count=draw(st.integers(1, 8)),
        pattern=draw(st.sampled_from(PATTERNS)),
    )


SUITE = Suite(
    NsaSelected,
    CASES,
    growth=NsaSelected(T=256, H=1, block=64, count=2),
    use=NsaSelected(lengths=(9, 20), H=1, block=8),
    draw=draw,
    mutants=planted.SELECTED,
)
