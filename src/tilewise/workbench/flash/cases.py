"""Flash attention's problem; the cases that verify checks, and those that bench times against dense attention as torch
offers it.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from tilewise.bench.dense import Dense, baselines, window_pairs
from tilewise.verify import drawing
from tilewise.verify.rounding import delta_cost, score_rounding, softmax_floor
from tilewise.verify.suite import Case, Fill, Problem, Suite, Tensors, cumulative, cut, transposed
from tilewise.workbench.flash import planted
from tilewise.workbench.flash.planted_sync import SYNC
from tilewise.workbench.flash.planted_uses import USES
from tilewise.workbench.operator import Benchmark

LAYOUTS = ("plain", "mixed", "mixed-aligned", "transposed")
# None; of ordinary size, in q's dtype or in fp32; as large as large logits; -inf, which is none, for every other head.
SINKS = ("", "plain", "fp32", "large", "off")
LARGE_SINKS, LARGEST_SINK = 5000.0, 3e4
# Up to so many keys in a pack, each of its sequences takes the same kernels alone.
FEW_KEYS = 256


def make_sinks(fill: Fill, kind: str, heads: int) -> Tensors:
    """Of one of SINKS, by name."""
    if not kind:
        return {}
    # fp16 holds the largest, whatever the law.
    x = fill("sinks", (heads,), LARGE_SINKS if kind == "large" else 1.0).clamp(-LARGEST_SINK, LARGEST_SINK)
    return {"sinks": x.where(torch.arange(heads, device=x.device) % 2 == 0, -torch.inf) if kind == "off" else x}


@dataclass(frozen=True)
class Flash(Problem):
    """T queries and Tk keys (T where 0), or packed sequences of `lengths`; Hk and Dv are H and D where 0; `size`
    multiplies q; `sinks` is one of SINKS.
    """

    outputs = ("o", "lse")
    exact = ("lse",)
    invariant = True
    returning: ClassVar[dict[str, Any]] = {"return_lse": True}

    B: int = 1
    T: int = 64
    Tk: int | None = None
    H: int = 2
    Hk: int | None = None
    D: int = 16
    Dv: int | None = None
    lengths: tuple[int, ...] = ()
    lengths_k: tuple[int, ...] = ()
    causal: bool = False
    window: tuple[int, ...] = ()
    softcap: float = 0.0
    scale: float | None = None
    size: float = 1.0
    layout: str = "plain"
    sinks: str = ""

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, the offsets of packed sequences, and sinks."""
        return self._qkv(fill) | make_sinks(fill, self.sinks, self.H)

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """Sinks in fp32 beside 16-bit tensors, where that is what the problem is for."""
        if self.sinks != "fp32" or tensors["sinks"].dtype == torch.float64:
            return dict(tensors)
        return tensors | {"sinks": tensors["sinks"].float()}

    def _qkv(self, fill: Fill) -> Tensors:
        keys = self.T if self.Tk is None else self.Tk
        kv_heads, values = self.Hk or self.H, self.Dv or self.D
        if self.lengths:
            lengths_k = self.lengths_k or self.lengths
            q = fill("q", (sum(self.lengths), self.H, self.D), self.size)
            k = fill("k", (sum(lengths_k), kv_heads, self.D), 1.0)
            v = fill("v", (sum(lengths_k), kv_heads, values), 1.0)
            return {
                "q": q,
                "k": k,
                "v": v,
                "cu_seqlens_q": cumulative(self.lengths),
                "cu_seqlens_k": cumulative(lengths_k),
            }
        mixed = self.layout.startswith("mixed")
        q = fill("q", (self.B, self.T, self.H, self.D), self.size)
        k = fill("k", (1 if mixed else self.B, keys, kv_heads, self.D), 1.0)
        v = fill("v", (self.B, keys, kv_heads, values), 1.0)
        if self.layout == "plain":
            return {"q": q, "k": k, "v": v}
        k = k.expand(self.B, -1, -1, -1) if mixed else transposed(k)
        return {"q": transposed(q), "k": k, "v": cut(v, 3 if self.layout == "mixed" else 8)}

    def options(self) -> dict[str, Any]:
        """Only what differs from the defaults, so that an implementation may lack what a case does not use."""
        options: dict[str, Any] = {"causal": True} if self.causal else {}
        options |= {"window_size": self.window} if self.window else {}
        options |= {"softcap": self.softcap} if self.softcap else {}
        return options | ({"scale": self.scale} if self.scale is not None else {})

    def axes(self) -> dict[str, str]:
        """Batch, tokens, heads, channels; without the batch where packed."""
        if self.lengths:
            return {"q": "THD", "k": "THD", "v": "THD", "o": "THD", "lse": "HT", "sinks": "H"}
        return {"q": "BTHD", "k": "BTHD", "v": "BTHD", "o": "BTHD", "lse": "BHT", "sinks": "H"}

    def offsets(self) -> dict[str, str]:
        """Queries and results by the queries' offsets, keys and values by the keys'."""
        if not self.lengths:
            return {}
        return {
            "q": "cu_seqlens_q",
            "o": "cu_seqlens_q",
            "lse": "cu_seqlens_q",
            "k": "cu_seqlens_k",
            "v": "cu_seqlens_k",
        }

    def alone(self, inputs: Tensors, b: int) -> Tensors:
        """Where a pack has more than a few rows, in one of as many, before a sequence of NaN: kernels are chosen by
        them.
        """
        found = super().alone(inputs, b)
        for name, offsets in self.offsets().items():
            x, rows = found.get(name), int(inputs[offsets][-1])
            if x is not None and int(inputs["cu_seqlens_k"][-1]) > FEW_KEYS:
                found[name] = torch.cat([x, x.new_full((rows - len(x), *x.shape[1:]), torch.nan)])
                found[offsets] = torch.cat([found[offsets][:2], inputs[offsets][-1:]])
        return found

    @property
    def width(self) -> int:
        """The wider of D and Dv."""
        return max(self.D, self.Dv or 0)

    def tokens(self) -> tuple[int, ...]:
        """Keys of each sequence."""
        return self.lengths_k or self.lengths or (self.T if self.Tk is None else self.Tk,)

    def twice_as_long(self) -> Self:
        """Twice the queries and keys."""
        return dataclasses.replace(self, T=2 * self.T)

    def check(self) -> None:
        """Sizes that an attention can have."""
        sizes = (self.B, self.T, self.Tk or 0, *self.lengths, *self.lengths_k)
        if min(sizes) < 0 or self.H < 1 or not 1 <= self.D <= 256 or not 1 <= (self.Dv or self.D) <= 256:
            raise ValueError("sizes must not be negative, heads at least 1, channels from 1 to 256")
        if self.H % (self.Hk or self.H):
            raise ValueError(f"H={self.H} is not a multiple of Hk={self.Hk}")
        if len(self.window) not in (0, 2) or min(self.window, default=0) < -1:
            raise ValueError(
                f"window={'/'.join(map(str, self.window))}: expected two limits, such as 19/0, -1 for none"
            )
        if self.lengths_k and len(self.lengths_k) != len(self.lengths):
            raise ValueError("lengths and lengths_k must name the same number of sequences")
        if self.layout not in LAYOUTS:
            raise ValueError(f"there is no layout {self.layout!r}: expected one of {', '.join(LAYOUTS)}")
        if self.sinks not in SINKS:
            raise ValueError(f"there are no sinks {self.sinks!r}: expected one of {', '.join(SINKS[1:])}")

    def floor(self, name: str, truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs scores and LSE."""
        score = score_rounding(inputs["q"], inputs["k"], self.scale)
        return softmax_floor(name, score, truth["lse"], name not in self.outputs)

    def storage_cost(self, truth: Tensors, incoming: Tensors, dtype: torch.dtype) -> Tensors:
        """That of delta."""
        lost = delta_cost(truth["o"], incoming["o"], dtype)
        return {"o": torch.zeros_like(truth["o"]), "lse": lost.transpose(-1, -2)}


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Flash(**parameters))


CASES = (
    _case("small", "B 1, T 64, H 4, D 16, Dv 32", T=64, H=4, D=16, Dv=32),
    _case("medium", "B 2, T 128, H 8, D 32, Dv 64, causal", B=2, T=128, H=8, D=32, Dv=64, causal=True),
    _case("large", "B 4, T 256, H 8, D 32, Dv 64, causal", B=4, T=256, H=8, D=32, Dv=64, causal=True),
    _case("xl", "B 8, T 512, H 8, D 32, Dv 64, causal", B=8, T=512, H=8, D=32, Dv=64, causal=True),
    _case("xxl", "B 16, T 1024, H 8, D 32, Dv 64, causal", B=16, T=1024, H=8, D=32, Dv=64, causal=True),
    _case("one-key", "one query, one key", T=1, D=8),
    _case("no-keys", "queries and not one key: output 0, LSE -inf", T=5, Tk=0, D=8),
    _case("no-queries", "keys and not one query: gradients 0", T=0, Tk=5, D=8),
    _case("block-1", "T 63, one less than a tile", T=63, causal=True),
    _case("block+1", "T 65, one more than a tile", T=65),
    _case("odd-lengths", "T 129 past a tile's end", T=129),
    _case("many-keys", "17 queries over 1040 keys: many steps of the running sum", T=17, Tk=1040, H=1),
    _case("more-keys", "causal, Tq 33 < Tk 97: aligned at the bottom right", T=33, Tk=97, causal=True),
    _case("sees-nothing", "causal, Tq 97 > Tk 33: the first rows see no key", T=97, Tk=33, causal=True),
    _case("window", "causal window of 20 keys", T=150, causal=True, window=(19, 0)),
    _case("window-both", "10 keys before, 4 after", T=77, window=(10, 4)),
    _case("window-none", "a window that lies beyond the keys for some rows", T=40, Tk=70, window=(3, 0)),
    _case("softcap", "scores capped at ±4", T=65, softcap=4.0, causal=True),
    _case("negative-scale", "scale -0.3", T=65, scale=-0.3, causal=True),
    _case("zero-scale", "scale 0: the mean of the values", T=65, scale=0.0, causal=True),
    _case("gqa-3", "6 query heads, 2 KV heads", T=65, H=6, Hk=2, causal=True),
    _case("mqa-6", "6 query heads, one KV head", T=33, H=6, Hk=1),
    _case("mqa-16", "16 query heads, one KV head", T=33, H=16, Hk=1),
    _case("odd-channels", "D 40, Dv 24", T=65, D=40, Dv=24, causal=True),
    _case("one-channel", "D 1, Dv 1", T=33, D=1),
    _case("large-logits", "logits up to about ±1e4", T=65, size=2500.0, causal=True),
    _case("strided", "a transposed q, an expanded k, a cut v", B=2, T=51, H=4, layout="mixed", causal=True),
    _case(
        "strided-long",
        "300 keys, the same on lines of 16 bytes",
        B=2,
        T=70,
        Tk=300,
        D=64,
        layout="mixed-aligned",
        causal=True,
    ),
    _case(
        "strided-aligned",
        "300 keys, transposed q and k, a cut v on lines of 16 bytes",
        B=2,
        T=70,
        Tk=300,
        D=64,
        layout="transposed",
        causal=True,
    ),
    _case("packed", "lengths 0, 70, 1, 0, 33 of one batch", lengths=(0, 70, 1, 0, 33), H=4, Hk=2, causal=True),
    _case(
        "packed-cross",
        "packed, queries and keys of different lengths",
        lengths=(5, 0, 66, 9),
        lengths_k=(70, 3, 0, 40),
        causal=True,
    ),
    _case("packed-window", "packed, a window of 9 keys", lengths=(40, 0, 3, 71), window=(8, 0)),
    _case("sinks", "a sink for each of 6 query heads, 2 KV heads", T=65, H=6, Hk=2, causal=True, sinks="plain"),
    _case("sinks-large", "sinks and logits up to about ±1e4", T=49, H=4, size=2500.0, causal=True, sinks="large"),
    _case(
        "sinks-window",
        "Tq 97 > Tk 33, a window of 10 keys: rows that see no key have their sink, or none where it is -inf",
        T=97,
        Tk=33,
        H=4,
        causal=True,
        window=(9, 0),
        sinks="off",
    ),
    _case(
        "sinks-packed",
        "packed, softcap, negative scale, no keys for some sequences, every other sink -inf",
        lengths=(5, 0, 40, 9),
        lengths_k=(0, 3, 33, 20),
        H=4,
        Hk=2,
        softcap=4.0,
        scale=-0.3,
        causal=True,
        sinks="off",
    ),
    _case("d-80", "D 80", T=150, D=80, causal=True),
    _case("d-96-dv-128", "D 96, Dv 128", T=150, D=96, Dv=128, causal=True),
    _case("d-128", "D 128, 2 query heads for a KV head", B=2, T=200, H=4, Hk=2, D=128, causal=True),
    _case("d-192-dv-256", "D 192, Dv 256", T=130, H=1, D=192, Dv=256, causal=True),
    _case("d-256", "D 256, a window on both sides", T=150, H=1, D=256, window=(70, 20)),
    _case("packed-128", "packed, D 128", lengths=(130, 0, 257, 1), H=2, Hk=1, D=128, causal=True),
    _case("long-128", "513 tokens, D 128, 2 query heads for a KV head", T=513, H=4, Hk=2, D=128, causal=True),
    _case(
        "long-empty",
        "causal, Tq 600 > Tk 333, scale -0.3: whole tiles of rows see no key",
        T=600,
        Tk=333,
        D=72,
        scale=-0.3,
        causal=True,
    ),
    _case(
        "long-window",
        "450 queries, 700 keys, a window on both sides, softcap, 2 query heads for a KV head",
        T=450,
        Tk=700,
        H=2,
        Hk=1,
        D=96,
        window=(150, 40),
        softcap=5.0,
    ),
    _case(
        "long-packed",
        "packed, long and short, queries and keys apart, D 80, Dv 128",
        lengths=(300, 0, 1, 450),
        lengths_k=(310, 5, 60, 300),
        H=4,
        Hk=2,
        D=80,
        Dv=128,
        causal=True,
    ),
    _case(
        "long-sinks", "sinks, 2 query heads for a KV head", T=200, Tk=300, H=4, Hk=2, D=72, causal=True, sinks="fp32"
    ),
    _case(
        "long-sinks-packed",
        "sinks of packed sequences, most rows of the first see no key",
        lengths=(300, 0, 1, 130),
        lengths_k=(60, 5, 3, 280),
        H=2,
        Hk=1,
        D=72,
        window=(100, 0),
        sinks="off",
    ),
    _case(
        "long-192",
        "300 tokens, D 192, Dv 128, 2 query heads for a KV head",
        T=300,
        H=4,
        Hk=2,
        D=192,
        Dv=128,
        causal=True,
    ),
    _case(
        "long-packed-256",
        "packed, D 256, Dv 192, no keys more than 150 before a query",
        lengths=(270, 0, 300),
        H=2,
        Hk=1,
        D=256,
        Dv=192,
        window=(150, -1),
    ),
)


def draw(draw: Callable[[Any], Any], longest: int) -> Flash:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    if draw(st.booleans()):
        queries = keys = drawing.packed(draw, longest)
        sizes: dict[str, Any] = {"lengths": queries}
        if draw(st.booleans()):
            sizes["lengths_k"] = keys = drawing.packed(draw, longest, len(queries))
        room = drawing.Room(longest, zip(queries, keys, strict=True))
    else:
        tokens, keys = draw(drawing.tokens(longest)), draw(st.none() | drawing.tokens(longest))
        room = drawing.Room(longest, [(tokens, tokens if keys is None else keys)])
        sizes = {"B": room.batch(draw), "T": tokens, "Tk": keys, "layout": draw(st.sampled_from(LAYOUTS))}
    sizes |= room.grouped_heads(draw)
    limit = st.integers(-1, 100) | st.integers(-1, longest)
    return Flash(
        **sizes,
        D=draw(room.channels()),
        Dv=draw(st.none() | room.channels()),
        causal=draw(st.booleans()),
        window=draw(st.just(()) | st.tuples(limit, limit)),
        softcap=drawing.softcap(draw),
        scale=drawing.scale(draw),
        size=draw(st.sampled_from((1.0, 10.0))),
        sinks=draw(st.sampled_from(SINKS)),
    )


SUITE = Suite(
    Flash,
    CASES,
    growth=Flash(T=256, H=1, D=16, causal=True),
    use=Flash(lengths=(9, 0, 24), causal=True),
    draw=draw,
    cheap_to_use=True,
    mutants=planted.PORTABLE + planted.HOPPER + SYNC + USES,
    hopper=(
        "packed-128",
        "strided-aligned",
        "long-128",
        "long-empty",
        "long-window",
        "long-packed",
        "long-sinks",
        "long-sinks-packed",
        "long-192",
        "long-packed-256",
    ),
    leave_out=(
        "T=300,H=2,D=64,causal=true",
        "lengths=300/150,H=2,Hk=1,D=64",
        "T=300,H=4,D=64,causal=true",
        "T=40,Tk=700,H=2,D=64",
        "T=300,H=3,D=192,Dv=128,causal=true",
    ),
)


TOKENS = 16384


def describe(problem: Problem) -> Dense:
    """The problem's mask and scores."""
    assert isinstance(problem, Flash)
    left, right = problem.window or (-1, -1)
    return Dense(
        left,
        0 if problem.causal else right,
        problem.softcap,
        problem.scale,
        problem.lengths,
        problem.lengths_k,
        bool(problem.sinks),
    )


def pairs(problem: Problem, tensors: Tensors, _outputs: Tensors) -> int:
    """The pairs that the mask keeps."""
    dense = describe(problem)
    return window_pairs(tensors["q"], tensors["k"], dense.lengths, dense.left, dense.right, dense.lengths_k)


def _series(name: str, about: str, lengths: tuple[int, ...], **parameters: Any) -> tuple[Case, ...]:
    """The same number of tokens in ever fewer, longer sequences."""
    return tuple(
        _case(f"{name}-{tokens}", f"{about}, T {tokens}", B=TOKENS // tokens, T=tokens, **parameters)
        for tokens in lengths
    )


GPU_CASES = (
    *_series("causal-128", "D 128, causal", (512, 1024, 2048, 4096, 8192, 16384), H=16, D=128, causal=True),
    *_series("full-128", "D 128", (2048, 16384), H=16, D=128),
    *_series("causal-64", "D 64, causal", (2048, 16384), H=32, D=64, causal=True),
    *_series("full-64", "D 64", (2048, 16384), H=32, D=64),
    _case("gqa", "32 query heads, 4 KV heads, causal", B=4, T=4096, H=32, Hk=4, D=128, causal=True),
    _case(
        "packed",
        "8 sequences of 100 to 4096 tokens, causal",
        lengths=(4096, 100, 2048, 777, 1500, 3001, 512, 4000),
        H=16,
        D=128,
        causal=True,
    ),
)
CPU_CASES = tuple(
    _case(f"causal-64-{tokens}", f"D 64, causal, T {tokens}", T=tokens, H=4, D=64, causal=True)
    for tokens in (256, 1024, 4096)
)

BENCHMARK = Benchmark(GPU_CASES, CPU_CASES, pairs, baselines(describe, dense=False))
