"""Attention to compressed windows: its problem, cases and planted bugs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from tilewise.verify.rounding import delta_cost, softmax_floor
from tilewise.verify.suite import Case, Fill, Mutant, Suite, Tensors
from tilewise.workbench.nsa.base import Sequences, drawn_sizes


@dataclass(frozen=True)
class NsaCompressed(Sequences):
    """T queries over the windows of `compress` tokens, one each `stride`, that T tokens have."""

    outputs = ("o", "lse")
    exact = ("lse",)
    returning: ClassVar[dict[str, Any]] = {"return_lse": True}

    compress: int = 8
    stride: int = 4

    def tensors(self, fill: Fill) -> Tensors:
        """q, k_cmp, v_cmp and the offsets of packed sequences."""
        counts = [window_count(tokens, self.compress, self.stride) for tokens in self.tokens()]
        rows = (sum(counts),) if self.lengths else (self.B, counts[0])
        return {"q": self.queries(fill), **self.keys_and_values(fill, ("k_cmp", "v_cmp"), rows), **self.cu_seqlens()}

    def options(self) -> dict[str, Any]:
        """The windows, and the scale where it is not the default."""
        return {"compress_size": self.compress, "compress_stride": self.stride, **self.scaling()}

    def axes(self) -> dict[str, str]:
        """Batch, tokens or windows, heads, channels; without the batch where packed."""
        return self.letters(q="BTHD", k_cmp="BTHD", v_cmp="BTHD", o="BTHD", lse="BHT")

    def check(self) -> None:
        """Windows of whole strides."""
        super().check()
        check_windows(self.compress, self.stride)

    def floor(self, name: str, truth: Tensors, inputs: Tensors) -> float:
        """What fp32 costs the scores, and gradients the LSE."""
        return softmax_floor(name, self.score_error(inputs, "k_cmp"), truth["lse"], name not in self.outputs)

    def storage_cost(self, truth: Tensors, incoming: Tensors, dtype: torch.dtype) -> Tensors:
        """Of a rounded o."""
        return {
            "o": torch.zeros_like(truth["o"]),
            "lse": delta_cost(truth["o"], incoming["o"], dtype).transpose(-1, -2),
        }


def window_count(tokens: int, compress: int, stride: int) -> int:
    """Whole windows in this many tokens."""
    return max(0, (tokens - compress) // stride + 1)


def check_windows(compress: int, stride: int, **blocks: int) -> None:
    """A ValueError where a size is not a whole number of strides."""
    for name, size in {"compress": compress, **blocks}.items():
        if stride < 1 or size < 1 or size % stride:
            raise ValueError(
                f"{name}={size},stride={stride}: expected sizes of at least 1, {name} a multiple of stride"
            )


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, NsaCompressed(**parameters))


_SIZES: dict[str, Any] = {"H": 8, "Hk": 2, "D": 32, "Dv": 64}

CASES = (
    _case("small", "B 1, T 64, H 4, Hk 2, D 16, Dv 32, windows of 8, one each 4", H=4, Hk=2, D=16, Dv=32),
    _case(
        "medium",
        "B 2, T 128, H 8, Hk 2, D 32, Dv 64, windows of 16, one each 8",
        B=2,
        T=128,
        compress=16,
        stride=8,
        **_SIZES,
    ),
    _case(
        "large",
        "B 4, T 256, H 8, Hk 2, D 32, Dv 64, windows of 32, one each 16",
        B=4,
        T=256,
        compress=32,
        stride=16,
        **_SIZES,
    ),
    _case(
        "xl",
        "B 8, T 512, H 8, Hk 2, D 32, Dv 64, windows of 32, one each 16",
        B=8,
        T=512,
        compress=32,
        stride=16,
        **_SIZES,
    ),
    _case(
        "xxl",
        "B 16, T 1024, H 8, Hk 2, D 32, Dv 64, windows of 32, one each 16",
        B=16,
        T=1024,
        compress=32,
        stride=16,
        **_SIZES,
    ),
    _case("no-tokens", "T 0", T=0, D=8),
    _case("one-token", "one token, windows of one", T=1, D=8, compress=1, stride=1),
    _case("no-windows", "T 7, windows of 8: output 0, LSE -inf", T=7, D=8, H=3, Hk=1),
    _case("one-window", "T 16, windows of 16: the last token alone sees it", T=16, D=8, compress=16, stride=16),
    _case(
        "odd-length",
        "T 75, windows of 12, one each 4; 3 query heads a KV head, D 12, Dv 5",
        T=75,
        H=6,
        Hk=2,
        D=12,
        Dv=5,
        compress=12,
    ),
    _case(
        "every-token",
        "148 windows, one a token: several tiles of keys; scale -0.3",
        T=150,
        H=1,
        compress=3,
        stride=1,
        scale=-0.3,
    ),
    _case(
        "mqa-16",
        "16 query heads, one KV head; windows that do not overlap; scale 0",
        T=41,
        H=16,
        Hk=1,
        D=8,
        compress=4,
        scale=0.0,
    ),
    _case("large-logits", "logits up to about ±100", T=65, size=25.0),
    _case("strided", "a transposed q, expanded keys, cut values", B=2, T=51, H=4, Hk=2, layout="mixed"),
    _case("packed", "lengths 0, 29, 7, 1, 0, 14 of one batch", lengths=(0, 29, 7, 1, 0, 14), H=2, Hk=1, Dv=24),
    _case("group-64", "64 query heads, one KV head, Dv 80", T=100, H=64, Hk=1, D=16, Dv=80),
    _case("group-6", "6 query heads, one KV head, D 80", T=150, H=6, Hk=1, D=80, compress=16, stride=8),
    _case("many-windows", "447 windows, D 72", T=450, H=2, Hk=1, D=72, compress=4, stride=1),
    _case(
        "sparse-windows",
        "windows of 64, one each 64, D 96, Dv 128",
        B=2,
        T=300,
        H=4,
        Hk=1,
        D=96,
        Dv=128,
        compress=64,
        stride=64,
    ),
    _case("d-256", "D 192, Dv 256", T=130, H=2, Hk=1, D=192, Dv=256),
    _case(
        "strided-aligned", "strided on lines of 16 bytes, D 128", B=2, T=151, H=4, Hk=2, D=128, layout="mixed-aligned"
    ),
    _case(
        "packed-128",
        "packed, D 128, windows of 32, one each 16",
        lengths=(130, 0, 257, 31, 1),
        H=4,
        Hk=2,
        D=128,
        compress=32,
        stride=16,
    ),
    _case("packed-strided", "packed, cut out of wider tensors, D 72", lengths=(17, 0, 49), H=2, D=72, layout="mixed"),
)


def draw(draw: Callable[[Any], Any], longest: int) -> NsaCompressed:
    """A problem of any shape and any options."""
    from hypothesis import strategies as st

    stride = draw(st.sampled_from((1, 2, 4, 8, 16)))
    return NsaCompressed(
        **drawn_sizes(draw, longest, packs=True), compress=stride * draw(st.integers(1, 4)), stride=stride
    )


_LAUNCH = "nsa.compress.launch"
_VISIBLE = "right = -min(size - 1, MOST_TOKENS)"

MUTANTS = (
    Mutant(
        "window-early",
        "a window is seen one token early",
        _LAUNCH,
        _VISIBLE,
        "right = -min(size - 2, MOST_TOKENS)",
    ),
    Mutant(
        "window-late",
        "a window is seen one token late",
        _LAUNCH,
        _VISIBLE,
        "right = -min(size, MOST_TOKENS)",
    ),
    Mutant("window-begun", "a window is seen as soon as it begins", _LAUNCH, _VISIBLE, "right = 0"),
    Mutant(
        "stride-ignored",
        "windows lie side by side in the mask",
        "_device.scores",
        "o_n = o_n * KEY_STRIDE",
        "o_n = o_n",
    ),
    Mutant(
        "aligned-at-the-end",
        "windows are counted from the last query",
        "_device.scores",
        "if KEY_STRIDE is not None: off = 0",
        "off = off",
    ),
    Mutant(
        "too-few-tiles",
        "half of the key tiles are not read",
        "_device.scores",
        "(position + (KEY_STRIDE - 1)) // KEY_STRIDE",
        "position // (2 * KEY_STRIDE)",
    ),
    Mutant(
        "forgotten-rescale",
        "earlier sums keep the old maximum",
        "flash.kernels.fwd",
        "acc_scaled = acc * rescale[:, None]",
        "acc_scaled = acc",
    ),
    Mutant(
        "missing-scale",
        "scores are not scaled",
        "flash.kernels.fwd",
        "m, l, scales.scale_log2, MASKED",
        "m, l, 1.4426950408889634, MASKED",
    ),
    Mutant(
        "wrong-kv-head",
        "query heads take KV heads round robin",
        "flash.kernels.fwd",
        "i_h // group",
        "i_h % (n_heads // group)",
    ),
    Mutant(
        "empty-row-shift",
        "-inf minus -inf",
        "_device.scores",
        'shift = tl.where(m_new == float("-inf"), 0.0, m_new)',
        "shift = m_new",
    ),
    Mutant(
        "lse-in-log2",
        "the LSE is a logarithm to base 2",
        "_device.scores",
        "(m + tl.log2(l)) * 0.6931471805599453",
        "m + tl.log2(l)",
    ),
    Mutant(
        "delta-dropped",
        "softmax's second gradient term is dropped",
        "_device.scores",
        "b_ds = b_p * (b_dp - b_delta)",
        "b_ds = b_p * b_dp",
    ),
    Mutant(
        "lse-gradient",
        "the LSE's incoming gradient is ignored",
        "_device.scores",
        "b_delta -= tl.load",
        "b_delta -= 0.0 * tl.load",
    ),
    Mutant("dq-unscaled", "dQ lacks the scale", "flash.kernels.bwd", "acc_dq * scales.scale", "acc_dq"),
    Mutant("dk-unscaled", "dK lacks the scale", "flash.kernels.bwd", "acc_dk * scales.scale", "acc_dk"),
    Mutant(
        "backward-unmasked",
        "dK and dV see windows that have not ended",
        "flash.kernels.bwd",
        "KEY_STRIDE), b_pT, 0.0)",
        "KEY_STRIDE), b_pT, b_pT)",
    ),
    Mutant(
        "packed-start",
        "every sequence starts at token 0",
        "_device.rows",
        "start, n_rows = sequence_bounds",
        "_, n_rows = sequence_bounds",
    ),
)

SUITE = Suite(
    NsaCompressed,
    CASES,
    growth=NsaCompressed(T=256, H=2, Hk=1, compress=32, stride=16),
    use=NsaCompressed(lengths=(9, 20)),
    draw=draw,
    mutants=MUTANTS,
)
