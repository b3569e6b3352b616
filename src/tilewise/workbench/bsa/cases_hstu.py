"""Block-sparse attention as an HSTU layer calls it: its problem and cases."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from tilewise.verify import drawing
from tilewise.verify.rounding import EPS
from tilewise.verify.suite import Case, Fill, Problem, Suite, Tensors, cumulative, cut
from tilewise.workbench.bsa import planted
from tilewise.workbench.bsa.cases import GATE_ROUNDINGS, LAWS, LEAST_TOKENS

LAYOUTS = ("plain", "cut")
# The best block's score for a query of length 1, and the gap from one block to the next: far above rounding in 16 bits.
BEST, RATIO = 4.0, 2.0**0.5
# With more, the worst scores would be lost in the rounding of the other channels.
MAX_BLOCKS = 12


@dataclass(frozen=True)
class HstuBsa(Problem):
    """Packed sequences of `lengths`, padded to `n` (0: to the longest); Dv is D where 0; `layout` cut takes q, k, v and
    u out of wider tensors.

    The choice of blocks is not returned and cannot be judged, so the inputs make it unambiguous. Two channels decide.
    In each of them all keys of a block hold the same number, and no two blocks of a head have numbers close to each
    other; the other channels of a block's keys have mean 0; and each query is 0 in one of the two, so that queries of a
    head choose by two different orders. Gates are made of q times weights, which are inputs like the others: their
    gradient has come through the gates. Each sequence has its own weights, since a sum over all sequences would change
    with their order.
    """

    outputs = ("attn_output", "padded_q", "padded_k")

    lengths: tuple[int, ...] = (64,)
    n: int = 0
    H: int = 4
    D: int = 16
    Dv: int | None = None
    block: int = 16
    count: int = 2
    window: int = 0
    layout: str = "plain"

    @property
    def padded(self) -> int:
        """The padded length."""
        return self.n or max(self.lengths, default=0)

    @property
    def values(self) -> int:
        """Channels of v."""
        return self.Dv or self.D

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, u, the offsets, the mask that tells the padded length, and the gate model's weights."""
        tokens = sum(self.lengths)
        generator = torch.Generator().manual_seed(0)
        q, k = (fill(name, (tokens, self.H, self.D), 1.0).clone() for name in ("q", "k"))
        v, u = (fill(name, (tokens, self.H * self.values), 1.0) for name in ("v", "u"))
        size, by = 1 + q[..., 0].sigmoid(), torch.randint(0, 2, (tokens, self.H), generator=generator)
        q[..., :2] = size[..., None] * torch.nn.functional.one_hot(by, 2)
        for start, stop in itertools.pairwise(cumulative(self.lengths).tolist()):
            whole = (stop - start) // self.block
            blocks = k[start : start + whole * self.block].unflatten(0, (whole, self.block))
            blocks -= blocks.mean(1, keepdim=True)
            order = torch.rand(whole, self.H, 2, generator=generator).argsort(0)
            blocks[..., :2] = (BEST / RATIO**order).to(k.dtype)[:, None]
        flat = {"q": q.flatten(1), "k": k.flatten(1), "v": v, "u": u}
        flat = {name: cut(x, 3) for name, x in flat.items()} if self.layout == "cut" else flat
        mask = torch.ones(len(self.lengths), self.padded, self.padded, dtype=torch.bool)
        weights = fill("gate_weights", (len(self.lengths), 3, self.H, self.D), self.D**-0.5)
        return flat | {"x_offsets": cumulative(self.lengths), "invalid_attn_mask": mask, "gate_weights": weights}

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """The weights inside a gate model."""
        others = {name: x for name, x in tensors.items() if name != "gate_weights"}
        return others | {"gate_model": _GateModel(tensors["gate_weights"])}

    def options(self) -> dict[str, Any]:
        """Sizes; the window only where there is one, so that an implementation may lack it."""
        options = {
            "num_heads": self.H,
            "attention_dim": self.D,
            "linear_dim": self.values,
            "block_counts": self.count,
            "block_size": self.block,
        }
        return options | ({"window_size": self.window} if self.window else {})

    def axes(self) -> dict[str, str]:
        """Tokens and channels, those of all heads together; padded: batch, tokens, heads, channels."""
        tensors = dict.fromkeys(("q", "k", "v", "u", "attn_output"), "TD") | dict.fromkeys(
            ("padded_q", "padded_k"), "BTHD"
        )
        return tensors | {"invalid_attn_mask": "B??", "gate_weights": "B?HD"}

    def first_head(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """Heads lie side by side in the channels."""
        return x[:, : x.shape[-1] // self.H] if self.axes().get(name) == "TD" else super().first_head(name, x)

    def offsets(self) -> dict[str, str]:
        """Of what is packed."""
        return dict.fromkeys(("q", "k", "v", "u", "attn_output"), "x_offsets")

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.values)

    def tokens(self) -> tuple[int, ...]:
        """The sequences' lengths."""
        return self.lengths

    def twice_as_long(self) -> Self:
        """Twice the tokens."""
        return dataclasses.replace(self, lengths=tuple(2 * length for length in self.lengths), n=2 * self.n)

    def check(self) -> None:
        """Lengths that fit, and blocks that can be told apart."""
        longest = max(self.lengths, default=0)
        if self.n and self.n < longest:
            raise ValueError(f"n={self.n}: expected 0 or at least the longest sequence's {longest} tokens")
        if self.D < 2 or self.block < 1 or longest // self.block > MAX_BLOCKS:
            raise ValueError(
                f"D={self.D},block={self.block}: expected 2 channels or more, and at most {MAX_BLOCKS} whole blocks in"
                " a sequence"
            )
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")

    def floor(self, name: str, _truth: Tensors, _inputs: Tensors) -> float:
        """What fp32 itself costs gradients, as in block-sparse attention's own problem; the weights' come through the
        gates'.
        """
        return {"dq": 2, "dk": 2, "dgate_weights": GATE_ROUNDINGS}.get(name, 0) * EPS


class _GateModel:
    """Maps padded_q [B, n, H, D] to three gates [B, n, H] between 0 and 1, by weights [B, 3, H, D].

    Only by sums, products and quotients: a CPU's sigmoid differs in the last bit with the memory address, so with the
    order of the batch.
    """

    def __init__(self, weights: torch.Tensor) -> None:
        self._weights = weights

    def __call__(self, padded_q: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(
            0.5 + 0.5 * torch.nn.functional.softsign((padded_q * weight[:, None]).sum(-1))
            for weight in self._weights.unbind(1)
        )


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, HstuBsa(**parameters))


_WIDE: dict[str, Any] = {"H": 8, "D": 32, "Dv": 64, "block": 32}

CASES = (
    _case(
        "small", "one sequence of 57 tokens padded to 64, H 4, D 16, Dv 32, blocks of 16", lengths=(57,), n=64, Dv=32
    ),
    _case("medium", "128 and 77 tokens, H 8, D 32, Dv 64, blocks of 32", lengths=(128, 77), **_WIDE),
    _case(
        "large",
        "256, 100, 0 and 181 tokens, H 8, D 32, Dv 64, blocks of 32",
        lengths=(256, 100, 0, 181),
        count=4,
        **_WIDE,
    ),
    _case(
        "xl",
        "8 sequences of up to 384 tokens, H 8, D 32, Dv 64",
        lengths=(384, 200, 0, 371, 64, 1, 300, 129),
        count=4,
        **_WIDE,
    ),
    _case(
        "xxl",
        "8 sequences of up to 1024 tokens, blocks of 128",
        lengths=(1024, 700, 0, 999, 64, 1, 300, 129),
        count=4,
        **_WIDE | {"block": 128},
    ),
    _case("no-tokens", "two empty sequences", lengths=(0, 0), n=8),
    _case("no-padding", "two empty sequences, padded to nothing", lengths=(0, 0)),
    _case("one-token", "sequences of one token", lengths=(1,) * 3),
    _case("short", "5 and 9 tokens, shorter than a block", lengths=(5, 9), window=3),
    _case("empty-sequences", "0, 70, 0, 0, 33, 0 tokens, D 72", lengths=(0, 70, 0, 0, 33, 0), D=72),
    _case("odd-lengths", "21, 13 and 61 tokens", lengths=(21, 13, 61), count=3),
    _case("block-ends", "15, 16, 17 and 32 tokens: about the end of a block", lengths=(15, 16, 17, 32)),
    _case("odd-block", "blocks of 13, D 72", lengths=(60, 39), D=72, block=13, count=3),
    _case("odd-heads", "5 heads, which cannot be paired", lengths=(50, 31), H=5),
    _case("window", "a window of 20 keys besides, D 72", lengths=(90, 41), D=72, window=20, count=3),
    _case("window-long", "a window longer than every sequence, D 72", lengths=(40, 17), D=72, window=100),
    _case("odd-channels", "D 20, Dv 24", lengths=(20, 9), D=20, Dv=24, window=9),
    _case("count-1", "the own block alone is chosen, D 72", lengths=(70, 20), D=72, count=1),
    _case("count-all", "more blocks may be chosen than there are, D 72", lengths=(70, 20), D=72, count=9),
    _case("long-padding", "33 and 7 tokens padded to 200", lengths=(33, 7), n=200),
    _case("cut", "q, k, v and u cut out of wider tensors", lengths=(33, 0, 21), window=9, layout="cut"),
    _case("d-80", "D 80, Dv 128, blocks of 32", lengths=(100, 150), D=80, Dv=128, block=32, window=40),
)


def draw(draw: Callable[[Any], Any], longest: int) -> HstuBsa:
    """A problem of any shape and any options, of as many blocks as can be told apart; heads, channels and tokens enough
    for layer norm, as in block-sparse attention's own.
    """
    from hypothesis import strategies as st

    block = draw(st.sampled_from((16, 8, 13, 32, 64, 128)))
    lengths = drawing.packed(draw, min(longest, (MAX_BLOCKS + 1) * block - 1), least=LEAST_TOKENS)
    room = drawing.Room(longest, zip(lengths, lengths, strict=True))
    return HstuBsa(
        lengths=lengths,
        n=draw(st.just(0) | st.integers(max(lengths), max(lengths) + 100)),
        H=room.heads(draw, 4),
        D=draw(room.channels(4)),
        Dv=draw(room.channels(8)),
        block=block,
        count=draw(st.integers(1, 8)),
        window=draw(st.just(0) | st.integers(1, 100) | st.integers(1, longest)),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


SUITE = Suite(
    HstuBsa,
    CASES,
    growth=HstuBsa(lengths=(64,), H=2, block=32),
    use=HstuBsa(lengths=(5, 11), H=2, block=8),
    draw=draw,
    mutants=planted.HSTU_BSA,
    laws=LAWS,
    dear=("block-ends", "one-token"),
)
