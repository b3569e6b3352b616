"""Native sparse attention's problem and cases."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.verify import drawing
from tilewise.verify.compare import compare_choices
from tilewise.verify.rounding import EPS
from tilewise.verify.suite import LAWS, Case, Fill, Suite, Tensors, cut
from tilewise.workbench.nsa import planted
from tilewise.workbench.nsa.base import Sequences, drawn_sizes
from tilewise.workbench.nsa.cases_compressed import check_windows, window_count

# The fewest tokens that are drawn: `draw` says why.
LEAST_TOKENS = 40
GATES = ("cmp", "slc", "swa")


@dataclass(frozen=True)
class Nsa(Sequences):
    """`compress` and `stride` of the windows, `count` blocks of `block` keys, a window of `window` keys.

    `gates` is all, or some joined by + (`cmp+swa`): the others are None, which leaves their branches out. `learned`
    gives k_cmp and v_cmp, `given` gives the blocks, drawn at random.

    Where every query sees only one key, as with one token, q's and k's gradients are zero by definition, and a backward
    that starts from stored outputs leaves the rounding of two numbers that should cancel: use `scale=0` there, or more
    tokens.
    """

    compress: int = 8
    stride: int = 4
    block: int = 8
    count: int = 4
    window: int = 16
    init: int = 1
    local: int = 2
    gates: str = "all"
    learned: bool = False
    given: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:  # type: ignore[override]
        """The blocks too, where any are selected."""
        return ("o", "block_indices") if self._selects() else ("o",)

    @property
    def choices(self) -> tuple[str, ...]:  # type: ignore[override]
        """The blocks, where any are selected."""
        return self.outputs[1:]

    @property
    def returning(self) -> dict[str, Any]:  # type: ignore[override]
        """The blocks are requested if any are selected; else that would be an error."""
        return {"return_indices": True} if self._selects() else {}

    def _selects(self) -> bool:
        return "g_slc" in self._given_gates()

    def _given_gates(self) -> tuple[str, ...]:
        """Names of the gates that are tensors; the others are None."""
        names = GATES if self.gates == "all" else tuple(self.gates.split("+"))
        if not set(names) <= set(GATES):
            raise ValueError(
                f"there is no gate {self.gates!r}: expected all, or some of {', '.join(GATES)} joined by +"
            )
        return tuple(f"g_{name}" for name in names)

    def tensors(self, fill: Fill) -> Tensors:
        """q, k, v, the gates that are not None, learned windows, given blocks, and the offsets of packed sequences."""
        tensors = {"q": self.queries(fill), **self.keys_and_values(fill, ("k", "v"), self.rows)}
        for name in self._given_gates():
            gate = _between_0_and_1(fill(name, (*self.rows, self.H), 1.0))
            tensors[name] = gate if self.layout == "plain" else cut(gate, self.cut_at)
        if self.learned:
            counts = [window_count(tokens, self.compress, self.stride) for tokens in self.tokens()]
            tensors |= self.keys_and_values(
                fill, ("k_cmp", "v_cmp"), (sum(counts),) if self.lengths else (self.B, counts[0])
            )
        if self.given:
            tensors["block_indices"] = self.blocks_by_pattern("random", self.block, self.count)
        return tensors | self.cu_seqlens()

    def options(self) -> dict[str, Any]:
        """Sizes and gates of None; init and local blocks and the scale where they are not the defaults, so that an
        implementation may lack them.
        """
        options: dict[str, Any] = {f"g_{name}": None for name in GATES if f"g_{name}" not in self._given_gates()}
        options |= {
            "compress_size": self.compress,
            "compress_stride": self.stride,
            "block_size": self.block,
            "block_count": self.count,
        }
        options |= {"window_size": self.window, **self.scaling()}
        options |= {} if self.init == 1 else {"init_blocks": self.init}
        return options | ({} if self.local == 2 else {"local_blocks": self.local})

    def axes(self) -> dict[str, str]:
        """Batch, tokens or windows, heads, channels, and S blocks; without the batch where packed."""
        gates = {f"g_{name}": "BTH" for name in GATES}
        return self.letters(
            q="BTHD", k="BTHD", v="BTHD", k_cmp="BTHD", v_cmp="BTHD", o="BTHD", block_indices="BTHS", **gates
        )

    def offsets(self) -> dict[str, str]:
        """If packed, everything by the same offsets; none with learned windows, whose own offsets are no input."""
        return dict.fromkeys(self.axes(), "cu_seqlens") if self.lengths and not self.learned else {}

    def check(self) -> None:
        """Sizes that fit together."""
        super().check()
        check_windows(self.compress, self.stride, block=self.block)
        if self.window < 1 or self.count < 1 or min(self.init, self.local) < 0 or self.init + self.local > self.count:
            raise ValueError(
                f"window={self.window},count={self.count},init={self.init},local={self.local}: expected a window and a"
                " count of at least 1, and init + local blocks, not negative, of at most count"
            )
        self._given_gates()

    def floor(self, name: str, _truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs the scores; gradients also depend on LSEs, each at most the largest score plus the logarithm
        of its keys.
        """
        score = self.score_error(inputs, "k", *(("k_cmp",) if self.learned else ()))
        longest = max(self.tokens(), default=0)
        return score if name in self.outputs else 2 * score + EPS * torch.tensor(max(longest, 1)).log().item()

    def _choice_shape(self) -> tuple[int, ...]:
        return (*self.rows, self.kv_heads, self.count)

    def judge_choice(self, _name: str, actual: torch.Tensor, inputs: Tensors, dtype: torch.dtype) -> str:
        """By score; given blocks must come back as they are."""
        if tuple(actual.shape) != self._choice_shape():
            return f"shape {list(actual.shape)}, expected {list(self._choice_shape())}"
        if actual.dtype != torch.int32:
            return f"dtype {actual.dtype}, expected {torch.int32}"
        if self.given:
            return "" if torch.equal(actual, inputs["block_indices"]) else "the blocks are not those that were given"
        # Imported only here: a bug is planted in a process that has loaded the suite and nothing of tilewise.ops.
        from tilewise.ops.nsa.reference import choice_scores, compress_mean

        def scores(compute_dtype: torch.dtype) -> torch.Tensor:
            q, k = (inputs[name].to(compute_dtype) for name in ("q", "k_cmp" if self.learned else "k"))
            cu_seqlens = inputs.get("cu_seqlens")
            return choice_scores(
                q,
                k if self.learned else compress_mean(k, self.compress, self.stride, cu_seqlens),
                compress_size=self.compress,
                compress_stride=self.stride,
                block_size=self.block,
                init_blocks=self.init,
                local_blocks=self.local,
                scale=self.scale,
                cu_seqlens=cu_seqlens,
                compute_dtype=compute_dtype,
            )

        return compare_choices(actual, scores(torch.float64), scores(dtype))

    def given_choice(self, choices: Tensors) -> dict[str, torch.Tensor]:
        """The blocks as they were chosen, for the reference to attend."""
        chosen = choices.get("block_indices")
        return (
            {"block_indices": chosen}
            if chosen is not None and not self.given and tuple(chosen.shape) == self._choice_shape()
            else {}
        )


def _between_0_and_1(gate: torch.Tensor) -> torch.Tensor:
    """Gates as a model makes them, by a sigmoid; a fill by rule is between 0 and 1 already, and is left as it is."""
    return gate if bool(((gate >= 0) & (gate <= 1)).all()) else gate.sigmoid()


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Nsa(**parameters))


_PAPER: dict[str, Any] = {"compress": 32, "stride": 16}
_SIZES: dict[str, Any] = {"H": 8, "Hk": 2, "D": 32, "Dv": 64, **_PAPER}

CASES = (
    _case("small", "B 1, T 64, H 4, Hk 2, D 16, Dv 32, 4 blocks of 8", H=4, Hk=2, D=16, Dv=32),
    _case("medium", "B 2, T 128, H 8, Hk 2, D 32, Dv 64, 4 blocks of 16", B=2, T=128, block=16, **_SIZES),
    _case("large", "B 2, T 256, H 8, Hk 2, D 32, Dv 64, 4 blocks of 32", B=2, T=256, block=32, window=64, **_SIZES),
    _case(
        "xl", "B 8, T 512, H 8, Hk 2, D 32, Dv 64, 5 blocks of 32", B=8, T=512, block=32, count=5, window=128, **_SIZES
    ),
    _case(
        "xxl",
        "B 16, T 1024, H 8, Hk 2, D 32, Dv 64, 8 blocks of 64",
        B=16,
        T=1024,
        block=64,
        count=8,
        window=256,
        **_SIZES,
    ),
    _case("no-tokens", "T 0", T=0, D=8),
    _case("one-token", "T 1: one key, and no window; scale 0", T=1, D=8, H=4, Hk=2, scale=0.0),
    _case(
        "short",
        "T 5, shorter than a window; 3 query heads a KV head, nothing selected",
        T=5,
        H=3,
        Hk=1,
        D=8,
        Dv=3,
        window=3,
        gates="cmp+swa",
    ),
    _case(
        "odd-length",
        "T 61, 3 query heads a KV head, D 12, Dv 5, windows of 12",
        T=61,
        H=3,
        Hk=1,
        D=12,
        Dv=5,
        compress=12,
        block=16,
    ),
    _case(
        "choice-alone",
        "selected blocks alone, of which the own one is forced",
        T=70,
        H=4,
        Hk=2,
        gates="slc",
        init=0,
        local=1,
        count=3,
    ),
    _case(
        "mqa-16",
        "16 query heads, one KV head; scale 0, where blocks tie",
        T=25,
        H=16,
        Hk=1,
        D=8,
        block=4,
        local=1,
        count=3,
        window=7,
        scale=0.0,
    ),
    _case(
        "ties", "scale 0 again: 2 of 5 blocks of 4", T=19, H=2, Hk=1, D=8, block=4, local=1, init=0, count=2, scale=0.0
    ),
    _case("large-logits", "logits up to about ±50; no sliding window", T=65, H=2, Hk=1, size=12.0, gates="cmp+slc"),
    _case(
        "strided",
        "transposed q, expanded k, cut v and gates; scale -0.3",
        B=2,
        T=35,
        H=2,
        Hk=1,
        layout="mixed",
        local=1,
        count=3,
        scale=-0.3,
    ),
    _case(
        "learned",
        "learned windows; more blocks may be selected than there are",
        T=50,
        H=2,
        Hk=1,
        learned=True,
        count=9,
        window=100,
    ),
    _case(
        "packed",
        "lengths 0, 29, 1, 0, 14 of one batch, blocks of 4",
        lengths=(0, 29, 1, 0, 14),
        H=2,
        Hk=1,
        Dv=24,
        block=4,
        local=1,
        count=3,
    ),
    _case("group-64", "64 query heads, one KV head, Dv 80", T=100, H=64, Hk=1, D=16, Dv=80),
    _case(
        "group-6",
        "6 query heads, one KV head, D 80, windows wider than a block",
        T=150,
        H=6,
        Hk=1,
        D=80,
        compress=32,
        stride=8,
        block=16,
    ),
    _case(
        "block-48",
        "blocks of 48, D 96, Dv 128",
        B=2,
        T=300,
        H=4,
        Hk=1,
        D=96,
        Dv=128,
        compress=24,
        stride=12,
        block=48,
        window=50,
    ),
    _case("block-128", "blocks of 128, D 128", T=600, H=2, Hk=1, D=128, block=128, window=200, **_PAPER),
    _case("many-blocks", "9 of 32 blocks of 16, D 72", T=500, H=4, Hk=1, D=72, block=16, count=9, window=130, **_PAPER),
    _case("no-compression", "the window and the selected blocks, D 72", T=200, H=4, Hk=2, D=72, gates="slc+swa"),
    _case("given", "given blocks, D 72", T=200, H=4, Hk=2, D=72, given=True),
    _case("nothing-forced", "no block is forced, D 72", T=200, H=4, Hk=2, D=72, init=0, local=0, count=3),
    _case("d-256", "D 192, Dv 256", T=130, H=2, Hk=1, D=192, Dv=256, block=32),
    _case(
        "strided-aligned",
        "on lines of 16 bytes, D 128, learned windows",
        B=2,
        T=151,
        H=4,
        Hk=2,
        D=128,
        layout="mixed-aligned",
        learned=True,
    ),
    _case("packed-128", "packed, D 128", lengths=(130, 0, 257, 31, 1), H=4, Hk=2, D=128, block=32, window=40, **_PAPER),
    _case(
        "packed-learned",
        "packed, cut out of wider tensors, learned windows, D 72",
        lengths=(17, 0, 49, 7),
        D=72,
        layout="mixed",
        learned=True,
    ),
    _case("packed-empty", "packed, and not one token, D 72", lengths=(0, 0), D=72),
)


def draw(draw: Callable[[Any], Any], longest: int) -> Nsa:
    """A problem of any shape and any options.

    With enough keys per query, and scores small enough that more than one of them counts: else q's and k's gradients
    are little more than what a backward loses by starting from each branch's stored output, which only the branches
    themselves would tell.
    """
    from hypothesis import strategies as st

    stride, init, local = draw(st.sampled_from((1, 4, 8))), draw(st.integers(0, 2)), draw(st.integers(0, 2))
    compress = stride * draw(st.integers(1, 4))
    sizes = drawn_sizes(draw, longest, max(LEAST_TOKENS, 2 * compress), packs=True) | {
        "size": 1.0,
        "scale": drawing.scale(draw, high=-1),
    }
    # In fp32 no tile holds 20 keys of more channels, which cannot be cut into equal parts: the operator says so.
    wide = max(sizes["D"], sizes["Dv"] or 0) > 128
    return Nsa(
        **sizes,
        compress=compress,
        stride=stride,
        block=stride * draw(st.sampled_from((4, 8, 16) if wide else (4, 5, 8, 16))),
        count=draw(st.integers(max(1, init + local), 8)),
        window=draw(st.integers(9, 100) | st.integers(9, longest)),
        init=init,
        local=local,
        gates=draw(st.sampled_from(("all", "cmp", "slc", "swa", "cmp+slc", "cmp+swa", "slc+swa"))),
        learned=draw(st.booleans()),
        given=draw(st.booleans()),
    )


SUITE = Suite(
    Nsa,
    CASES,
    growth=Nsa(T=256, H=1, block=64, count=3, gates="cmp+slc", **_PAPER),
    use=Nsa(lengths=(9, 20), H=1),
    draw=draw,
    mutants=planted.WHOLE,
    # Where keys are alike, q's gradient is 0, and all that is left the rounding of each branch; where all have one
    # sign, little more is left of keys of few channels.
    laws=tuple(law for law in LAWS if law not in ("constant", "one-signed")),
)
