"""The call of the native-sparse-attention-pytorch package: its problem and cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewise.verify.rounding import delta_cost, score_rounding, softmax_floor
from tilewise.verify.suite import Case, Fill, Suite, Tensors, cut, transposed
from tilewise.workbench.nsa import planted
from tilewise.workbench.nsa.base import Attention, drawn_sizes

MASKS = ("random", "all", "none")
# The value of masked indices: nothing may read it.
UNREAD = 1 << 20


@dataclass(frozen=True)
class NsaAttend(Attention):
    """T queries, each over its own block (where `own`) and `count` selected blocks of `block` keys, some named more
    than once.

    `among` limits the named blocks to the first ones, this many (0: all); `mask` is random, all or none; `apart` names
    blocks per query head, not per KV head; `scaled` passes sel_scale, with some zeros in it; `window` requests the
    sliding window too.
    """

    exact = ("lse", "lse_win")
    returning: ClassVar[dict[str, Any]] = {"return_lse": True}

    block: int = 16
    count: int = 3
    among: int = 0
    mask: str = "random"
    apart: bool = False
    scaled: bool = False
    own: bool = True
    window: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """In the order of the flattened nested pairs."""
        return ("o", "o_win", "lse", "lse_win") if self.window else ("o", "lse")

    def _named(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices and mask."""
        generator = self.generator()
        shape = (self.B, self.H if self.apart else self.kv_heads, self.T, self.count)
        blocks = -(-self.T // self.block)
        indices = torch.randint(0, max(min(self.among or blocks, blocks), 1), shape, generator=generator)
        if self.mask != "random":
            return indices, torch.full(shape, self.mask == "all")
        mask = torch.rand(shape, generator=generator) < 0.7
        return indices.masked_fill(~mask, UNREAD), mask

    def tensors(self, fill: Fill) -> Tensors:
        """fq, fk, fv, indices, mask and sel_scale."""
        mixed = self.layout != "plain"
        q = fill("q", (self.B, self.H, self.T, self.D), self.size)
        k = fill("k", (1 if mixed else self.B, self.kv_heads, self.T, self.D), 1.0)
        v = fill("v", (self.B, self.kv_heads, self.T, self.Dv or self.D), 1.0)
        indices, mask = self._named()
        if mixed:
            q, k, v = transposed(q), k.expand(self.B, -1, -1, -1), cut(v, self.cut_at)
            indices, mask = transposed(indices), transposed(mask)
        tensors = {"fq": q, "fk": k, "fv": v, "selected_block_indices": indices, "fmask": mask}
        if not self.scaled:
            return tensors
        factor = fill("sel_scale", tuple(indices.shape), 1.0)
        factor = factor * (torch.arange(factor.numel()).view(factor.shape) % 7 > 0)
        return tensors | {"sel_scale": cut(factor, self.cut_at) if mixed else factor}

    def options(self) -> dict[str, Any]:
        """The block size, and what differs from the defaults, so that an implementation may lack what a case does not
        use.
        """
        options: dict[str, Any] = {"block_size": self.block}
        options |= {} if self.own else {"include_block_causal": False}
        return options | ({"return_sliding_window_out": True} if self.window else {})

    def axes(self) -> dict[str, str]:
        """Batch, heads, tokens, channels, and S blocks."""
        tensors = dict.fromkeys(("fq", "fk", "fv", "o", "o_win"), "BHTD") | dict.fromkeys(("lse", "lse_win"), "BHT")
        return tensors | dict.fromkeys(("selected_block_indices", "fmask", "sel_scale"), "BHTS")

    def check(self) -> None:
        """Blocks that can be named."""
        super().check()
        if self.block < 1 or min(self.count, self.among) < 0:
            raise ValueError(
                f"block={self.block},count={self.count},among={self.among}: expected blocks of at least 1, and no"
                " negative number of them"
            )
        if self.mask not in MASKS:
            raise ValueError(f"there is no mask {self.mask!r}: expected one of {', '.join(MASKS)}")

    def floor(self, name: str, truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs the scores, the largest of which sel_scale makes larger, and gradients the LSE."""
        factor = (
            max(1.0, inputs["sel_scale"].abs().max().item()) if self.scaled and inputs["sel_scale"].numel() else 1.0
        )
        score = score_rounding(inputs["fq"], inputs["fk"]) * factor
        lse = (
            truth[name]
            if name.startswith("lse")
            else torch.cat([x.flatten() for key, x in truth.items() if key.startswith("lse")])
        )
        return softmax_floor(name, score, lse, name not in self.outputs)

    def storage_cost(self, truth: Tensors, incoming: Tensors, dtype: torch.dtype) -> Tensors:
        """Of a rounded o, and a rounded o_win."""
        pairs = {"lse": "o", "lse_win": "o_win"} if self.window else {"lse": "o"}
        costs = {lse: delta_cost(truth[o], incoming[o], dtype) for lse, o in pairs.items()}
        return costs | {o: torch.zeros_like(truth[o]) for o in pairs.values()}


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, NsaAttend(**parameters))


_SIZES: dict[str, Any] = {"H": 8, "Hk": 2, "D": 32, "Dv": 64, "scaled": True, "window": True}
_507: dict[str, Any] = {
    "B": 4,
    "T": 507,
    "H": 4,
    "Hk": 2,
    "D": 64,
    "block": 32,
    "count": 6,
    "among": 2,
    "scaled": True,
    "window": True,
}

CASES = (
    _case(
        "small",
        "B 1, T 64, H 4, Hk 2, D 16, Dv 32, 3 blocks of 16, sel_scale, the window",
        H=4,
        Hk=2,
        D=16,
        Dv=32,
        scaled=True,
        window=True,
    ),
    _case(
        "medium",
        "B 2, T 128, H 8, Hk 2, D 32, Dv 64, 4 blocks of 16, sel_scale, the window",
        B=2,
        T=128,
        count=4,
        **_SIZES,
    ),
    _case(
        "large",
        "B 2, T 256, H 8, Hk 2, D 32, Dv 64, 4 blocks of 32, sel_scale, the window",
        B=2,
        T=256,
        block=32,
        count=4,
        **_SIZES,
    ),
    _case(
        "xl",
        "B 8, T 512, H 8, Hk 2, D 32, Dv 64, 8 blocks of 32, sel_scale, the window",
        B=8,
        T=512,
        block=32,
        count=8,
        **_SIZES,
    ),
    _case(
        "xxl",
        "B 16, T 1024, H 8, Hk 2, D 32, Dv 64, 8 blocks of 64, sel_scale, the window",
        B=16,
        T=1024,
        block=64,
        count=8,
        **_SIZES,
    ),
    _case(
        "nsa-507",
        "B 4, T 507, H 4, Hk 2, D 64, blocks of 32, 6 named out of the first two, sel_scale, the window",
        **_507,
    ),
    _case("no-tokens", "T 0", T=0, D=8),
    _case(
        "one-token",
        "T 1: its own key, and the same again as a selected block",
        T=1,
        D=8,
        block=4,
        mask="all",
        scaled=True,
        window=True,
    ),
    _case(
        "short", "T 5, shorter than a block; 3 query heads a KV head", T=5, H=3, Hk=1, D=8, Dv=3, block=32, scaled=True
    ),
    _case(
        "repeats",
        "4 namings of the first two blocks; T 50, D 12, Dv 20",
        T=50,
        H=3,
        Hk=1,
        D=12,
        Dv=20,
        count=4,
        among=2,
        mask="all",
    ),
    _case(
        "selected-only",
        "no own block: rows that see nothing, later blocks; every query head names its own",
        T=61,
        H=4,
        Hk=2,
        D=8,
        block=8,
        count=2,
        own=False,
        apart=True,
        scaled=True,
    ),
    _case(
        "none-selected",
        "every block masked out: the own block alone, and the window",
        T=50,
        block=16,
        mask="none",
        scaled=True,
        window=True,
    ),
    _case("none-selected-short", "the same without a window; blocks of 8", T=19, D=8, block=8, count=1, mask="none"),
    _case(
        "apart",
        "every query head names its own blocks; blocks of 8",
        T=41,
        H=4,
        Hk=2,
        D=8,
        block=8,
        count=2,
        apart=True,
        scaled=True,
    ),
    _case("mqa-16", "16 query heads, one KV head; no sel_scale", T=33, H=16, Hk=1, D=8, block=8, count=2, window=True),
    _case("large-logits", "logits up to about ±100", T=65, size=10.0, H=2, Hk=1, scaled=True),
    _case(
        "strided",
        "transposed fq, expanded fk, cut fv and sel_scale",
        B=2,
        T=35,
        H=2,
        Hk=1,
        count=2,
        layout="mixed",
        scaled=True,
        window=True,
    ),
    _case("group-64", "64 query heads, one KV head, Dv 80", T=100, H=64, Hk=1, D=16, Dv=80, scaled=True),
    _case(
        "group-6",
        "6 query heads, one KV head, D 80, blocks of 32",
        T=150,
        H=6,
        Hk=1,
        D=80,
        block=32,
        scaled=True,
        window=True,
    ),
    _case(
        "block-48",
        "blocks of 48, D 96, Dv 128",
        B=2,
        T=200,
        H=4,
        Hk=1,
        D=96,
        Dv=128,
        block=48,
        count=4,
        scaled=True,
        window=True,
    ),
    _case(
        "block-128",
        "blocks of 128, D 128, no own block",
        T=400,
        H=4,
        Hk=2,
        D=128,
        block=128,
        own=False,
        scaled=True,
        window=True,
    ),
    _case(
        "block-64",
        "6 namings of blocks of 64, for each query head its own",
        T=300,
        H=4,
        Hk=1,
        D=72,
        block=64,
        count=6,
        apart=True,
        scaled=True,
    ),
    _case("d-256", "D 192, Dv 256, blocks of 32", T=130, H=2, Hk=1, D=192, Dv=256, block=32, scaled=True),
    _case("no-selection", "no block is selected, not even a masked one; D 72", T=70, H=2, D=72, count=0, window=True),
    _case(
        "strided-aligned",
        "strided on lines of 16 bytes, D 128",
        B=2,
        T=151,
        H=4,
        Hk=2,
        D=128,
        layout="mixed-aligned",
        scaled=True,
        window=True,
    ),
)


def draw(draw: Callable[[Any], Any], longest: int) -> NsaAttend:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    return NsaAttend(
        **drawn_sizes(draw, longest),
        block=draw(st.sampled_from((16, 4, 8, 13, 32, 64))),
        count=draw(st.integers(0, 8)),
        among=draw(st.integers(0, 4)),
        mask=draw(st.sampled_from(MASKS)),
        apart=draw(st.booleans()),
        scaled=draw(st.booleans()),
        own=not draw(st.booleans()),
        window=draw(st.booleans()),
    )


SUITE = Suite(
    NsaAttend,
    CASES,
    growth=NsaAttend(T=256, H=1, block=64, count=2, scaled=True),
    use=NsaAttend(B=2, T=24, H=1, scaled=True, window=True),
    draw=draw,
    mutants=planted.ATTEND,
)
