"""Block-sparse attention's problem; the cases that verify checks, and those that bench times against dense HSTU
attention over the same q, k and v.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch

import tilewise
from tilewise.bench.contender import Baseline, Call, floating_leaves
from tilewise.bench.dense import in_blocks, in_window
from tilewise.verify import drawing
from tilewise.verify.compare import compare_choices
from tilewise.verify.rounding import EPS, score_rounding
from tilewise.verify.suite import Case, Fill, Problem, Suite, Tensors, cumulative, cut, transposed
from tilewise.workbench.bsa import planted
from tilewise.workbench.hstu.cases import LONG, SHORT
from tilewise.workbench.operator import Benchmark

LAYOUTS = ("plain", "mixed", "mixed-aligned")
GATES = ("cmp", "slc", "swa")
# With more heads than this, heads are not tried for each other's choice; and at most this many wrong ones are named.
MAX_SEARCHED = 16
MAX_LISTED = 4
# The fewest tokens that are drawn: `draw` says why.
LEAST_TOKENS = 40
# Where channels are alike, or one number outweighs a token's others, layer norm magnifies rounding: in eager torch by
# chance less than elsewhere. One-signed sums over keys overflow fp16 in eager torch, which then tells nothing.
LAWS = ("random", "small-head", "zero")
# Roundings in fp32 that a gate's gradient may be off by.
GATE_ROUNDINGS = 16


@dataclass(frozen=True)
class Bsa(Problem):
    """T tokens, or packed sequences of `lengths`; Dv is D where 0; `size` multiplies q; `gates` is all, none, or some
    joined by + (`cmp+swa`).

    Layer norm cancels any factor that all channels of a token share. So with one head the gates' gradients are about
    zero, as q's and k's are with one head and one token, and they could tell nothing: use two heads or more, or
    `gates=none`. It also cancels what channels have in common: a fill by rule makes neighbours so alike that in the
    wider cases some gradients are little more than rounding, which verify then reports.
    """

    outputs = ("o", "block_indices")
    choices = ("block_indices",)

    B: int = 1
    T: int = 64
    H: int = 4
    D: int = 16
    Dv: int | None = None
    block: int = 16
    count: int = 2
    window: int = 0
    gates: str = "all"
    interleave: bool = True
    lengths: tuple[int, ...] = ()
    scale: float | None = None
    size: float = 1.0
    layout: str = "plain"

    def _given_gates(self) -> tuple[str, ...]:
        """Names of the gates that are tensors; the others are None."""
        names = {"all": GATES, "none": ()}.get(self.gates, tuple(self.gates.split("+")))
        if not set(names) <= set(GATES):
            raise ValueError(
                f"there is no gate {self.gates!r}: expected all, none, or some of {', '.join(GATES)} joined by +"
            )
        return tuple(f"g_{name}" for name in names)

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, u, the gates that are not None, and the offsets of packed sequences."""
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")
        rows = (sum(self.lengths), self.H) if self.lengths else (self.B, self.T, self.H)
        mixed, start = self.layout != "plain", 3 if self.layout == "mixed" else 8
        # One batch entry of keys is expanded to all: packed tokens have no batch to expand over.
        shared = mixed and not self.lengths
        values = self.Dv or self.D
        q = fill("q", (*rows, self.D), self.size)
        k = fill("k", (*((1, *rows[1:]) if shared else rows), self.D), 1.0)
        v, u = (fill(name, (*rows, values), 1.0) for name in ("v", "u"))
        gates = {name: _between_0_and_1(fill(name, rows, 1.0)) for name in self._given_gates()}
        if mixed:
            q, u = (cut(q, start), cut(u, start)) if self.lengths else (transposed(q), transposed(u))
            k = k.expand(*rows, -1) if shared else k
            v, gates = cut(v, start), {name: cut(gate, start) for name, gate in gates.items()}
        return {
            "q": q,
            "k": k,
            "v": v,
            "u": u,
            **gates,
            **({"seq_offsets": cumulative(self.lengths)} if self.lengths else {}),
        }

    def options(self) -> dict[str, Any]:
        """Required arguments, including gates of None; the rest only where it differs from the defaults, so that an
        implementation may lack it.
        """
        options: dict[str, Any] = {f"g_{name}": None for name in GATES if f"g_{name}" not in self._given_gates()}
        options |= {"block_counts": self.count, "block_size": self.block}
        options |= {"window_size": self.window} if self.window else {}
        options |= {} if self.interleave else {"interleave": False}
        return options | ({"scale": self.scale} if self.scale is not None else {})

    def axes(self) -> dict[str, str]:
        """Batch, tokens, heads, channels, and S chosen blocks; without the batch where packed."""
        batch = "" if self.lengths else "B"
        tensors = dict.fromkeys(("q", "k", "v", "u", "o"), f"{batch}THD") | {
            f"g_{name}": f"{batch}TH" for name in GATES
        }
        return tensors | {"block_indices": f"{batch}HTS"}

    def offsets(self) -> dict[str, str]:
        """If packed, everything by the same offsets."""
        return dict.fromkeys(self.axes(), "seq_offsets") if self.lengths else {}

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.Dv or 0)

    def tokens(self) -> tuple[int, ...]:
        """The packed sequences' lengths, or T."""
        return self.lengths or (self.T,)

    def twice_as_long(self) -> Self:
        """Twice the tokens."""
        return dataclasses.replace(self, T=2 * self.T, lengths=tuple(2 * length for length in self.lengths))

    def floor(self, name: str, _truth: Tensors, inputs: Tensors) -> float:
        """What fp32 itself costs gradients.

        A gate's is a sum over channels of which layer norm leaves the smaller part: rounding of what cancels shows in
        the rest. Those of q and k contain SiLU's slope, which changes by up to half of a score's error.
        """
        if name in ("dq", "dk"):
            return score_rounding(inputs["q"], inputs["k"], self.scale) / 2
        return GATE_ROUNDINGS * EPS if name.startswith("dg_") else 0.0

    def _choice_shape(self) -> tuple[int, ...]:
        if self.lengths:
            return self.H, sum(self.lengths), self.count
        return self.B, self.H, self.T, min(self.count, -(-self.T // self.block))

    def judge_choice(self, _name: str, actual: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> str:
        """By score; with interleave, head 2i+1 by the scores of head 2i, whose choice it uses."""
        if tuple(actual.shape) != self._choice_shape():
            return f"shape {list(actual.shape)}, expected {list(self._choice_shape())}"
        if actual.dtype != torch.int32:
            return f"dtype {actual.dtype}, expected {torch.int32}"
        # Imported only here: a bug is planted in a process that has loaded the suite and nothing of tilewise.ops.
        from tilewise.ops.bsa.reference import choice_scores

        def scores(compute_dtype: torch.dtype) -> torch.Tensor:
            q, k = (inputs[name].to(torch.promote_types(compute_dtype, inputs[name].dtype)) for name in "qk")
            return choice_scores(
                q,
                k,
                block_size=self.block,
                scale=self.scale,
                seq_offsets=inputs.get("seq_offsets"),
                compute_dtype=compute_dtype,
            )

        truth, eager = scores(torch.float64), scores(dtype)
        if bool((eager[eager.isfinite()].abs() >= torch.finfo(dtype).max).any()):
            # Where 16 bits overflow on the way, fp32 tells what rounding costs.
            eager = scores(torch.float32)
        own = (torch.arange(self.H) // 2 * 2).tolist() if self.interleave else list(range(self.H))
        wrong = compare_choices(actual, truth[..., own, :, :], eager[..., own, :, :])
        if wrong:
            return wrong + _whose(actual, truth, eager, own)
        differing = (
            (actual != actual[..., own, :, :])
            .flatten(-2)
            .any(-1)
            .reshape(-1, self.H)
            .any(0)
            .nonzero()
            .flatten()
            .tolist()
        )
        return (
            f"head {differing[0]} must take head {own[differing[0]]}'s blocks (interleave), and does not"
            if differing
            else ""
        )

    def given_choice(self, choices: Tensors) -> dict[str, torch.Tensor]:
        """The blocks as they were chosen, for the reference to attend."""
        chosen = choices["block_indices"]
        return {"block_indices": chosen} if tuple(chosen.shape) == self._choice_shape() else {}


def _between_0_and_1(gate: torch.Tensor) -> torch.Tensor:
    """Gates as a model makes them, by a sigmoid; a fill by rule is between 0 and 1 already, and is left as it is."""
    return gate if bool(((gate >= 0) & (gate <= 1)).all()) else gate.sigmoid()


def _whose(actual: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, own: list[int]) -> str:
    """Which other head's choice a wrong head holds; empty if none."""
    heads = len(own)
    if heads > MAX_SEARCHED:
        return ""

    def fits(head: int, other: int) -> bool:
        return not compare_choices(actual[..., head, :, :], truth[..., other, :, :], eager[..., other, :, :])

    wrong = [head for head in range(heads) if not fits(head, own[head])]
    held = [(head, other) for head in wrong for other in range(heads) if other != own[head] and fits(head, other)]
    sentences = [f"head {head} takes head {other}'s blocks in place of head {own[head]}'s" for head, other in held]
    more = f" and {len(sentences) - MAX_LISTED} more" if len(sentences) > MAX_LISTED else ""
    return f"; {', '.join(sentences[:MAX_LISTED])}{more}" if sentences else ""


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Bsa(**parameters))


CASES = (
    _case("small", "B 1, T 64, H 4, D 16, Dv 32, blocks of 16", T=64, H=4, D=16, Dv=32, block=16),
    _case("medium", "B 2, T 128, H 8, D 32, Dv 64, blocks of 32", B=2, T=128, H=8, D=32, Dv=64, block=32),
    _case("large", "B 4, T 256, H 8, D 32, Dv 64, blocks of 32", B=4, T=256, H=8, D=32, Dv=64, block=32, count=4),
    _case("xl", "B 8, T 512, H 8, D 32, Dv 64, blocks of 32", B=8, T=512, H=8, D=32, Dv=64, block=32, count=4),
    _case("xxl", "B 16, T 1024, H 8, D 32, Dv 64, blocks of 32", B=16, T=1024, H=8, D=32, Dv=64, block=32, count=4),
    _case("no-tokens", "T 0", T=0),
    _case("one-token", "T 1: one key, and no whole block", B=3, T=1),
    _case("short", "T 5, shorter than a block: nothing is compressed", T=5, window=3),
    _case("block-1", "T 15, one less than a block", T=15),
    _case("block", "T 16: the last token alone sees the whole block compressed", T=16),
    _case("block+1", "T 17, one more than a block", T=17),
    _case("odd-length", "T 61, the last block in part", T=61, count=3),
    _case("odd-block", "blocks of 13", T=48, block=13, count=3),
    _case("no-interleave", "each head chooses for itself", T=50, interleave=False),
    _case("odd-heads", "5 heads, which cannot be paired", T=40, H=5, interleave=False),
    _case("window", "a window of 20 keys besides", T=66, window=20, count=3),
    _case("window-1", "a window of the query's own key", T=20, window=1),
    _case("window-long", "a window longer than the sequence", T=33, window=100),
    _case("no-gates", "every gate None", T=40, window=9, gates="none"),
    _case("gate-slc", "a gate on the chosen blocks alone", T=35, window=9, gates="slc"),
    _case("gates-cmp-swa", "no gate on the chosen blocks", T=35, window=9, gates="cmp+swa"),
    _case("scale", "scale 3", T=40, scale=3.0, window=9),
    _case("odd-channels", "D 40, Dv 24", T=33, D=40, Dv=24, window=9),
    _case("wide-values", "D 8, Dv 48", T=33, D=8, Dv=48),
    _case("count-1", "the own block alone is chosen, D 72", T=70, D=72, count=1),
    _case("count-all", "more blocks may be chosen than there are", T=40, count=9),
    _case("many-blocks", "20 blocks of 4, of which 6 are chosen", T=78, block=4, count=6),
    _case("large-logits", "logits up to about ±100", T=70, size=25.0, window=9),
    _case("strided", "transposed q and u, an expanded k, a cut v, cut gates", B=2, T=35, layout="mixed", window=9),
    _case("strided-aligned", "the same on lines of 16 bytes, D 72", B=2, T=56, D=72, layout="mixed-aligned", window=9),
    _case("packed", "lengths 0, 37, 1, 0, 49 of one batch", lengths=(0, 37, 1, 0, 49), Dv=24),
    # Lengths at which no token's compressed branch is nearly zero: layer norm would divide by that, and the rounding of
    # one element would decide.
    _case(
        "packed-window",
        "packed, a window of 9 keys, each head by itself",
        lengths=(20, 0, 3, 51),
        window=9,
        count=3,
        interleave=False,
    ),
    _case("packed-strided", "packed, cut out of wider tensors", lengths=(17, 0, 33), window=9, layout="mixed"),
    _case("packed-empty", "packed, and not one token", lengths=(0, 0)),
    _case("d-80", "D 80", T=100, D=80, block=32, window=20),
    _case("d-128", "D 128, 2 entries", B=2, T=144, D=128, block=32, window=40),
    _case("d-64-dv-128", "D 64, Dv 128", T=100, D=64, Dv=128, block=32, interleave=False),
    _case("packed-128", "packed, D 128", lengths=(100, 0, 129, 1), D=128, block=32),
)


def draw(draw: Callable[[Any], Any], longest: int) -> Bsa:
    """A problem of any shape and any options.

    With fewer heads, channels or tokens, all channels of a token may happen to be near zero, and layer norm magnifies
    the error there, in eager torch by chance less than elsewhere: then eager's error is no measure of the tolerance.
    """
    from hypothesis import strategies as st

    if draw(st.booleans()):
        sizes: dict[str, Any] = {"lengths": drawing.packed(draw, longest, least=LEAST_TOKENS)}
        room = drawing.Room(longest, zip(sizes["lengths"], sizes["lengths"], strict=True))
        heads = room.heads(draw, 4)
    else:
        tokens = draw(drawing.tokens(longest, LEAST_TOKENS) | st.just(0))
        room = drawing.Room(longest, [(tokens, tokens)])
        heads = room.heads(draw, 4)
        sizes = {"T": tokens, "B": room.batch(draw)}
    interleave = draw(st.booleans())
    block = draw(st.sampled_from((16, 4, 8, 13, 32, 64)))
    return Bsa(
        **sizes,
        H=heads // 2 * 2 if interleave else heads,
        D=draw(room.channels(4)),
        Dv=draw(room.channels(8)),
        block=block,
        count=draw(st.integers(1, 8)),
        window=draw(st.just(0) | st.integers(1, 100) | st.integers(1, longest)),
        gates=draw(st.sampled_from(("all", "none", "cmp", "slc", "swa", "cmp+slc", "cmp+swa", "slc+swa"))),
        interleave=interleave,
        scale=drawing.scale(draw, (1,)),
        size=draw(st.sampled_from((1.0, 10.0))),
        layout=draw(st.sampled_from(LAYOUTS)),
    )


SUITE = Suite(
    Bsa,
    CASES,
    growth=Bsa(T=128, H=2, D=16, block=32),
    use=Bsa(lengths=(9, 20), H=2, block=8, gates="cmp+slc"),
    draw=draw,
    mutants=planted.BSA,
    laws=LAWS,
    dear=("packed-window", "many-blocks"),
)


def pairs(problem: Problem, _tensors: Tensors, outputs: Tensors) -> int:
    """Blocks that have ended, keys of the chosen blocks, and near keys where there is a window."""
    assert isinstance(problem, Bsa)
    batch = 1 if problem.lengths else problem.B
    indices = outputs["block_indices"]
    # [B, H, T, S], or packed [H, N, S].
    position = torch.cat([torch.arange(tokens, device=indices.device) for tokens in problem.tokens()])[:, None]
    found = in_blocks(position, indices, problem.block)
    for tokens in problem.tokens():
        ended = int(((torch.arange(tokens) + 1) // problem.block).sum())
        near = in_window(tokens, tokens, problem.window - 1, 0) if problem.window else 0
        found += batch * problem.H * (ended + near)
    return found


def dense(problem: Problem, tensors: Tensors) -> Call:
    """tilewise's own HSTU attention, causal."""
    assert isinstance(problem, Bsa)
    lengths = problem.lengths or (problem.T,) * problem.B
    q, k, v = floating_leaves({name: tensors[name].reshape(-1, *tensors[name].shape[-2:]) for name in "qkv"}).values()
    offsets = cumulative(lengths).to(tensors["q"].device)
    work = problem.H * sum(in_window(tokens, tokens, -1, 0) for tokens in lengths)

    def run() -> tuple[torch.Tensor]:
        return (tilewise.hstu_attention(q, k, v, offsets, max_seq_len=max(lengths)),)

    return Call(run, [q, k, v], pairs=work)


def _cases(shapes: tuple[tuple[int, int, int, int, int], ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{b}x{n}-{d}",
            f"B {b}, N {n}, D {d}, Dv {dv}",
            Bsa(lengths=(n,) * b, H=h, D=d, Dv=dv, count=4, block=32, gates="cmp+slc"),
        )
        for b, n, h, d, dv in shapes
    )


BENCHMARK = Benchmark(
    _cases((*SHORT, *LONG)),
    _cases(SHORT[:4]),
    pairs,
    (Baseline("dense-hstu", "dense HSTU attention, tilewise's own", dense, dense=True),),
)
