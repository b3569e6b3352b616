"""HSTU attention's problem; the cases that verify checks, and those that bench times against what a user would write
in torch for sequences of one length.
"""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

from tilewise.bench.contender import Baseline, Call, CannotRunError, as_leaf
from tilewise.verify import drawing
from tilewise.verify.rounding import score_rounding
from tilewise.verify.suite import Case, Fill, Problem, Suite, Tensors, cumulative, cut
from tilewise.workbench.hstu import planted
from tilewise.workbench.operator import Benchmark

LAYOUTS = ("plain", "mixed", "mixed-aligned")


@dataclass(frozen=True)
class Hstu(Problem):
    """Packed sequences of `lengths`, the last `targets` tokens of each targets, the first `context` of each context;
    `attn` is max_attn_len.

    Dv is D where 0, max_seq_len the longest length where 0; `size` multiplies q.
    """

    outputs = ("o",)
    invariant = True

    lengths: tuple[int, ...] = (64,)
    H: int = 2
    D: int = 16
    Dv: int | None = None
    causal: bool = True
    targets: tuple[int, ...] = ()
    attn: int = 0
    context: int = 0
    max_seq_len: int | None = None
    alpha: float | None = None
    size: float = 1.0
    layout: str = "plain"

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, the offsets, and the number of targets where there are any."""
        tokens, mixed = sum(self.lengths), self.layout != "plain"
        q = fill("q", (tokens, self.H, self.D), self.size)
        # One head of keys is expanded to all: packed tokens have no batch to expand over.
        k = fill("k", (tokens, 1 if mixed else self.H, self.D), 1.0)
        v = fill("v", (tokens, self.H, self.Dv or self.D), 1.0)
        if mixed:
            q, k, v = _heads_first(q), k.expand(-1, self.H, -1), cut(v, 3 if self.layout == "mixed" else 8)
        targets = {"num_targets": torch.tensor(self.targets)} if self.targets else {}
        return {"q": q, "k": k, "v": v, "seq_offsets": cumulative(self.lengths), **targets}

    def options(self) -> dict[str, Any]:
        """max_seq_len; the rest only where it differs from the defaults, so that an implementation may lack what a case
        does not use.
        """
        options: dict[str, Any] = {"max_seq_len": self.max_seq_len or max(1, *self.lengths)}
        options |= {} if self.causal else {"causal": False}
        options |= {"max_attn_len": self.attn} if self.attn else {}
        options |= {"contextual_seq_len": self.context} if self.context else {}
        return options | ({"alpha": self.alpha} if self.alpha is not None else {})

    def axes(self) -> dict[str, str]:
        """Tokens, heads, channels; a number of targets for each of the batch."""
        return {"q": "THD", "k": "THD", "v": "THD", "o": "THD", "num_targets": "B"}

    def offsets(self) -> dict[str, str]:
        """Everything by the same offsets."""
        return dict.fromkeys(("q", "k", "v", "o"), "seq_offsets")

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.Dv or 0)

    def tokens(self) -> tuple[int, ...]:
        """The sequences' lengths."""
        return self.lengths

    def twice_as_long(self) -> Self:
        """Twice the tokens."""
        longest = self.max_seq_len and 2 * self.max_seq_len
        return dataclasses.replace(self, lengths=tuple(2 * length for length in self.lengths), max_seq_len=longest)

    def check(self) -> None:
        """Sizes that an attention can have."""
        if (
            not self.lengths
            or min(self.lengths) < 0
            or self.H < 1
            or not 1 <= self.D <= 256
            or not 1 <= (self.Dv or self.D) <= 256
        ):
            raise ValueError(
                "expected at least one length, none of them negative, heads at least 1, channels from 1 to 256"
            )
        if self.targets and len(self.targets) != len(self.lengths):
            raise ValueError("lengths and targets must name the same number of sequences")
        if any(not 0 <= count <= length for count, length in zip(self.targets, self.lengths, strict=False)):
            raise ValueError("targets must not be negative, nor more than the sequence has tokens")
        if min(self.attn, self.context) < 0:
            raise ValueError(f"attn={self.attn},context={self.context}: neither may be negative")
        if self.max_seq_len and self.max_seq_len < max(self.lengths):
            raise ValueError(f"max_seq_len={self.max_seq_len} is less than the longest sequence, {max(self.lengths)}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")

    def floor(self, name: str, _truth: Tensors, inputs: Tensors) -> float:
        """The slope of SiLU changes by half of what fp32 costs a score."""
        return score_rounding(inputs["q"], inputs["k"], self.alpha) / 2 if name in ("dq", "dk") else 0.0


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """The same values with heads before tokens in memory."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Hstu(**parameters))


_SIZES: dict[str, Any] = {"H": 8, "D": 32, "Dv": 64}
_EIGHT = (512, 300, 77, 450, 1, 0, 512, 129)

CASES = (
    _case("small", "lengths 40 and 24, H 4, D 16, Dv 32", lengths=(40, 24), H=4, D=16, Dv=32),
    _case("medium", "lengths 128 and 70, H 8, D 32, Dv 64, targets", lengths=(128, 70), targets=(10, 3), **_SIZES),
    _case(
        "large",
        "4 lengths to 256, H 8, D 32, Dv 64, targets",
        lengths=(256, 131, 0, 200),
        targets=(20, 5, 0, 9),
        **_SIZES,
    ),
    _case(
        "xl",
        "8 lengths to 512, H 8, D 32, Dv 64, targets",
        lengths=_EIGHT,
        targets=(40, 20, 7, 0, 1, 0, 512, 9),
        **_SIZES,
    ),
    _case(
        "xxl", "16 lengths to 1024, H 8, D 32, Dv 64", lengths=(*_EIGHT, *(2 * length for length in _EIGHT)), **_SIZES
    ),
    _case("no-tokens", "sequences and not one token", lengths=(0, 0), D=8, targets=(0, 0)),
    _case("one-token", "one token, which sees itself", lengths=(1,), D=8),
    _case("block-1", "length 63, one less than a tile", lengths=(63,)),
    _case("block", "lengths 64 and 128, whole tiles", lengths=(64, 128), H=1, causal=False),
    _case("block+1", "length 65, one more than a tile", lengths=(65,)),
    _case("odd-lengths", "lengths 37, 5 and 101, of no tile", lengths=(37, 5, 101), H=1),
    _case("empty-sequences", "lengths 0, 33, 0, 0, 17, 0", lengths=(0, 33, 0, 0, 17, 0)),
    _case("full", "not causal: every token sees every token", lengths=(70, 33), causal=False),
    _case("targets", "7, 0 and 3 targets", lengths=(70, 33, 9), targets=(7, 0, 3)),
    _case(
        "targets-full",
        "not causal, with targets, which see what comes before them",
        lengths=(66, 20),
        targets=(6, 1),
        causal=False,
    ),
    _case("targets-many", "70 targets, more than a tile, after 10 tokens", lengths=(80,), targets=(70,), H=1),
    _case(
        "all-targets", "one sequence is targets throughout: each sees itself alone", lengths=(20, 33), targets=(20, 4)
    ),
    _case("attn-1", "the key before a query and its own", lengths=(66, 1), attn=1),
    _case("attn", "20 keys before a query", lengths=(90, 33), attn=20),
    _case("attn-full", "not causal, 9 keys on both sides", lengths=(77, 5), attn=9, causal=False),
    _case("attn-long", "a limit longer than the sequence", lengths=(40,), attn=100),
    _case("targets-attn", "targets that see 7 keys before the first of them", lengths=(60, 45), targets=(9, 2), attn=7),
    _case("context", "5 contextual tokens, which see all", lengths=(70, 12), context=5),
    _case("context-full", "not causal, context and a limit", lengths=(70, 12), context=5, attn=4, causal=False),
    _case("context-1", "one contextual token", lengths=(35,), context=1),
    _case(
        "context-long", "sequences shorter than their context, as long, and longer", lengths=(2, 4, 5, 6, 30), context=5
    ),
    _case(
        "context-targets",
        "context and targets that overlap: where none is between them, a token sees itself",
        lengths=(8, 6, 9, 30),
        context=5,
        targets=(4, 6, 4, 3),
    ),
    _case("all", "context, targets and a limit", lengths=(80, 0, 41), context=6, targets=(8, 0, 5), attn=11),
    _case(
        "all-full",
        "not causal, context, targets and a limit",
        lengths=(41, 0, 70),
        context=6,
        targets=(5, 0, 8),
        attn=11,
        causal=False,
    ),
    _case("odd-channels", "D 40, Dv 24", lengths=(65,), D=40, Dv=24),
    _case("wide-values", "D 8, Dv 48, alpha -0.6", lengths=(33, 20), D=8, Dv=48, alpha=-0.6),
    _case("one-channel", "D 1, Dv 1; not causal, 3 keys on both sides", lengths=(33,), D=1, attn=3, causal=False),
    _case("large-logits", "logits up to about ±100", lengths=(65,), size=25.0),
    _case("alpha", "alpha 0.7, max_seq_len 300", lengths=(50, 30), alpha=0.7, max_seq_len=300),
    _case("negative-alpha", "alpha -0.3", lengths=(65,), alpha=-0.3),
    _case(
        "strided",
        "q with heads first, one head of keys for all, a cut v",
        lengths=(40, 3, 29),
        H=4,
        targets=(4, 0, 2),
        layout="mixed",
    ),
    _case(
        "strided-aligned", "the same on lines of 16 bytes", lengths=(40, 3, 29), H=4, context=3, layout="mixed-aligned"
    ),
    _case(
        "many-short", "12 sequences of up to 7 tokens", lengths=(3, 0, 7, 1, 2, 5) * 2, targets=(1, 0, 2, 1, 0, 3) * 2
    ),
    _case(
        "d-80", "D 80, context, targets and a limit", lengths=(150, 0, 33), D=80, context=6, targets=(20, 0, 5), attn=40
    ),
    _case("d-64-dv-128", "D 64, Dv 128, not causal", lengths=(100, 65), D=64, Dv=128, causal=False),
    _case("d-128", "D 128, targets", lengths=(130, 0, 257, 1), H=4, D=128, targets=(9, 0, 70, 1)),
    _case("d-192-dv-256", "D 192, Dv 256", lengths=(130,), H=1, D=192, Dv=256),
    _case("d-256", "D 256, a limit", lengths=(150, 40), H=1, D=256, attn=70),
    _case(
        "strided-128",
        "D 128, q with heads first, one head of keys for all, a cut v",
        lengths=(151, 70),
        D=128,
        layout="mixed-aligned",
    ),
    _case(
        "many-short-128", "80 sequences of up to 40 tokens, D 128", lengths=(40, 0, 17, 3, 33, 1, 12, 25) * 10, D=128
    ),
    _case(
        "long",
        "length 1500, D 72, context, targets and a limit",
        lengths=(1500, 20),
        H=1,
        D=72,
        context=70,
        targets=(130, 2),
        attn=300,
    ),
    _case("long-full", "length 1300, D 72, not causal", lengths=(1300,), H=1, D=72, causal=False),
)


def draw(draw: Callable[[Any], Any], longest: int) -> Hstu:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    lengths = drawing.packed(draw, longest)
    room = drawing.Room(longest, zip(lengths, lengths, strict=True))
    far = st.just(0) | st.integers(1, 100) | st.integers(1, longest)
    return Hstu(
        lengths=lengths,
        H=room.heads(draw),
        D=draw(room.channels()),
        Dv=draw(st.none() | room.channels()),
        causal=not draw(st.booleans()),
        targets=tuple(draw(st.integers(0, length)) for length in lengths) if draw(st.booleans()) else (),
        attn=draw(far),
        context=draw(far),
        max_seq_len=draw(st.none() | st.integers(max(1, *lengths), longest)),
        alpha=drawing.scale(draw),
        size=draw(st.sampled_from((1.0, 10.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


SUITE = Suite(
    Hstu,
    CASES,
    growth=Hstu(lengths=(256,), H=1),
    use=Hstu(lengths=(9, 0, 24), targets=(2, 0, 3)),
    draw=draw,
    cheap_to_use=True,
    mutants=planted.HSTU,
    dear=("many-short",),
)


def pairs(problem: Problem, _tensors: Tensors, _outputs: Tensors) -> int:
    """The pairs that the mask keeps."""
    from tilewise.ops.hstu.reference import keep_mask

    assert isinstance(problem, Hstu)
    targets = problem.targets or (None,) * len(problem.lengths)
    found = {
        (tokens, number): int(
            keep_mask(tokens, problem.causal, number, problem.attn, problem.context, torch.device("cpu")).sum()
        )
        for tokens, number in set(zip(problem.lengths, targets, strict=True))
    }
    return problem.H * sum(found[one] for one in zip(problem.lengths, targets, strict=True))


def batched(problem: Problem, tensors: Tensors) -> Call:
    """Two batched products with SiLU and the causal mask between them."""
    assert isinstance(problem, Hstu)
    if len(set(problem.lengths)) != 1:
        raise CannotRunError("sequences of different lengths do not make a batch")
    if problem.targets or problem.attn or problem.context or not problem.causal:
        raise CannotRunError("written for the causal mask alone")
    length, longest = problem.lengths[0], int(problem.options()["max_seq_len"])
    leaves = [as_leaf(tensors[name].unflatten(0, (-1, length)).transpose(1, 2)) for name in "qkv"]
    q, k, v = leaves
    alpha = problem.D**-0.5 if problem.alpha is None else problem.alpha
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)

    def run() -> tuple[torch.Tensor]:
        weights = torch.nn.functional.silu(q @ k.mT * alpha) / longest
        return (weights.masked_fill(later, 0.0) @ v,)

    return Call(run, leaves, lambda o: o.transpose(1, 2).flatten(0, 1))


def jagged(longest: int, number: int) -> tuple[int, ...]:
    """Lengths drawn evenly from 1 to the longest, the same ones always."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(1, longest + 1, (number,), generator=generator).tolist())


# (batch, tokens, heads, channels of q and k, of v).
SHORT = ((1, 64, 4, 16, 32), (2, 128, 8, 32, 64), (4, 256, 8, 32, 64), (8, 512, 8, 32, 64), (16, 1024, 8, 32, 64))
LONG = ((8, 4096, 4, 128, 128), (8, 8192, 4, 128, 128))
FULL = ((32, 1024, 8, 32, 64), (8, 4096, 8, 32, 64), (32, 2048, 4, 128, 128))


def _cases() -> tuple[Case, ...]:
    shapes = (*SHORT, *FULL, *LONG)
    full = [(f"{b}x{n}-{d}", f"B {b}, N {n}, D {d}, Dv {dv}", (n,) * b, (h, d, dv)) for b, n, h, d, dv in shapes]
    uneven = [
        (f"jagged-{b}x{n}-{d}", f"B {b}, lengths 1 to {n}, D {d}, Dv {dv}", jagged(n, b), (h, d, dv))
        for b, n, h, d, dv in (*FULL, LONG[-1])
    ]
    return tuple(
        Case(name, about, Hstu(lengths=lengths, H=h, D=d, Dv=dv))
        for name, about, lengths, (h, d, dv) in itertools.chain(full, uneven)
    )


BENCHMARK = Benchmark(
    _cases(),
    tuple(
        Case(f"{b}x{n}-{d}", f"B {b}, N {n}, D {d}, Dv {dv}", Hstu(lengths=(n,) * b, H=h, D=d, Dv=dv))
        for b, n, h, d, dv in SHORT[:4]
    ),
    pairs,
    (Baseline("batched", "two batched products in torch, SiLU and the mask between them", batched),),
)
