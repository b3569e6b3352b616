"""The launches of every operator at virtual sizes: 10 million tokens, many heads, strides far apart.

Tensors have shapes and no memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewise.ops._host.launching import Launch, capture
from tilewise.ops.bsa import launch as bsa
from tilewise.ops.bsa.options import Options
from tilewise.ops.flash import launch as flash
from tilewise.ops.hstu import launch as hstu
from tilewise.ops.nsa import launch as nsa
from tilewise.ops.nsa.sizes import Sizes, mean_windows

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
            key = (
                launch.kernel.__name__,
                *constants,
                *(name for name, value in launch.arguments.items() if value is None),
            )
            ends[key] = [*ends.get(key, [])[:1], launch]
        return [launch for pair in ends.values() for launch in pair]


def cases(part: str) -> Iterator[Case]:
    """The cases of one part of an operator, see PARTS."""
    yield from _CASES[part]()


def _rows(heads: int, *, packed: bool = False, batch: int = 2, tokens: int = TOKENS, stride: int = 0) -> torch.Tensor:
    """[B, T, H, D], or packed [N, H, D], in bf16; with a stride, tokens lie so many elements apart."""
    sizes: tuple[int, ...] = (tokens, heads, CHANNELS)
    strides: tuple[int, ...] = (stride or heads * CHANNELS, CHANNELS, 1)
    if not packed:
        sizes, strides = (batch, *sizes), (strides[0] * tokens, *strides)
    return torch.empty_strided(sizes, strides, dtype=torch.bfloat16, device="meta")


def _gates(*, packed: bool) -> torch.Tensor:
    return torch.empty((*(() if packed else (2,)), TOKENS, HEADS), dtype=torch.bfloat16, device="meta")


def _named(count: int, *, packed: bool) -> torch.Tensor:
    """The blocks that each token and key head names."""
    return torch.empty((*(() if packed else (2,)), TOKENS, KEY_HEADS, count), dtype=torch.int32, device="meta")


def _offsets(packed: bool) -> torch.Tensor | None:
    return torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32) if packed else None


def _words(packed: bool, far: bool = False, batch: int = 2, heads: int = HEADS) -> str:
    many = (
        f"packed sequences of {', '.join(f'{length:,}' for length in LENGTHS)} tokens"
        if packed
        else f"{batch} x {TOKENS:,} tokens"
    )
    return f"{many}, {heads} heads of {CHANNELS}" + (f", {FAR:,} elements from token to token" if far else "")


def _layouts() -> Iterator[tuple[str, int, bool, int]]:
    """In words, the architecture, packed or not, and the stride of tokens: dense tensors with descriptors where there
    are any, the others without.
    """
    for architecture, packed, far in ((90, False, False), (80, False, True), (90, True, True)):
        yield _words(packed, far), architecture, packed, FAR if far else 0


def _flash() -> Iterator[Case]:
    def call(
        q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, deterministic: bool = True, **mask: Any
    ) -> None:
        options = {"causal": False, "left": -1, "right": -1, "scale": 0.1, "softcap": 0.0} | mask
        inputs = flash.make_inputs(q, k, k, cu, cu, **options)
        o, lse = flash.forward(inputs)
        flash.backward(inputs, o, lse, q, lse, deterministic=deterministic)

    def on_hopper(q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None) -> None:
        call(q, k, cu, causal=True)
        call(q, k, cu, left=6_000_000, right=2_000_000)
        # In a free order, sums are cleared before; without groups and a mask, tile by tile.
        call(q, k, cu, deterministic=False, causal=True)
        call(q, q, cu, deterministic=False)

    for words, architecture, packed, stride in _layouts():
        q, k, cu = (
            _rows(HEADS, packed=packed, stride=stride),
            _rows(KEY_HEADS, packed=packed, stride=stride),
            _offsets(packed),
        )
        # Hopper has its own kernels, below; Blackwell reads with descriptors too.
        portable = 100 if architecture == 90 else architecture
        yield Case(f"{words}, causal", portable, partial(call, q, k, cu, causal=True))
        yield Case(f"{words}, a wide window", portable, partial(call, q, k, cu, left=6_000_000, right=2_000_000))
    for packed in (False, True):
        # As many heads as Hopper's backward takes of so many tokens.
        heads = 192 if packed else 96
        q, k, cu = _rows(heads, packed=packed), _rows(heads // 4, packed=packed), _offsets(packed)
        yield Case(f"{_words(packed, heads=heads)}, Hopper's own kernels", 90, partial(on_hopper, q, k, cu))
    short, batch = 16, TOKENS // 16
    q, k = (_rows(heads, batch=batch, tokens=short) for heads in (HEADS, KEY_HEADS))
    yield Case(f"{batch:,} sequences of {short} tokens, {HEADS} heads of {CHANNELS}", 90, partial(call, q, k, None))


def _compressed_call(
    q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, size: int = 32, stride: int = 16
) -> None:
    windows = mean_windows(cu, q.shape[-3], stride)
    k_cmp = nsa.compress(k, cu, windows, size, stride)
    o, lse = nsa.compressed_forward(q, k_cmp, k_cmp, cu, windows, size, stride, 0.1)
    nsa.compressed_backward(q, k_cmp, k_cmp, o, lse, q, None, cu, windows, size, stride, 0.1)
    nsa.compress_backward(k_cmp, q.shape[-3], cu, windows, size, stride)


def _selected_call(
    q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor, cu: torch.Tensor | None, block: int
) -> None:
    o, lse = nsa.selected_forward(q, k, k, indices, cu, block, 0.1)
    nsa.selected_backward(q, k, k, indices, o, lse, q, None, cu, block, 0.1)


def _compressed() -> Iterator[Case]:
    for words, architecture, packed, stride in _layouts():
        q, k, cu = (
            _rows(HEADS, packed=packed, stride=stride),
            _rows(KEY_HEADS, packed=packed, stride=stride),
            _offsets(packed),
        )
        yield Case(f"{words}, windows of 32 every 16", architecture, partial(_compressed_call, q, k, cu))


def _choose() -> Iterator[Case]:
    sizes = Sizes(32, 16, 64, 16, 1, 2)
    for packed, stride in ((False, 0), (True, FAR)):
        # One sequence: chunks of so long ones hold a tile each.
        q, cu = _rows(HEADS, packed=packed, batch=1, stride=stride), _offsets(packed)
        k_cmp, lse = (
            _rows(KEY_HEADS, packed=packed, batch=1, tokens=TOKENS // 16 - (not packed)),
            torch.empty(HEADS, TOKENS, device="meta"),
        )
        windows = mean_windows(cu, TOKENS, 16)
        yield Case(
            f"{_words(packed, packed, 1)}, 16 blocks of 64",
            90,
            partial(nsa.choose, q, k_cmp, lse, cu, windows, sizes, 0.1),
        )


def _selected() -> Iterator[Case]:
    for words, architecture, packed, stride in _layouts():
        q, k, cu = (
            _rows(HEADS, packed=packed, stride=stride),
            _rows(KEY_HEADS, packed=packed, stride=stride),
            _offsets(packed),
        )
        indices, block = _named(16, packed=packed), 16 if packed else 64
        yield Case(f"{words}, 16 blocks of {block}", architecture, partial(_selected_call, q, k, indices, cu, block))


def _attend() -> Iterator[Case]:
    q, k, indices = _rows(HEADS), _rows(KEY_HEADS), _named(8, packed=False)
    scale = torch.empty(indices.shape, device="meta")

    def call() -> None:
        o, lse = nsa.attend_forward(q, k, k, indices, scale, True, 64, 0.1)
        nsa.attend_backward(q, k, k, indices, scale, o, lse, q, None, True, 64, 0.1)

    yield Case(f"{_words(False)}, 8 blocks of 64 and the own one", 90, call)


def _combine() -> Iterator[Case]:
    o, gate = _rows(HEADS), _gates(packed=False)

    def combine() -> None:
        nsa.combine([o, o, o], [gate, gate, gate])
        nsa.combine_backward(o, o, gate)

    yield Case(f"{_words(False)}, three branches", 90, combine)


def _hstu() -> Iterator[Case]:
    cu, targets = torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor([0, 1000, 2_000_000])

    def call(x: torch.Tensor, targets: torch.Tensor | None, causal: bool, reach: int, context: int) -> None:
        inputs = hstu.make_inputs(x, x, x, cu, targets, TOKENS, 0.1, causal, reach, context)
        hstu.forward(inputs)
        hstu.backward(inputs, x)

    near, far = (_rows(HEADS, packed=True, stride=stride) for stride in (0, FAR))
    yield Case(f"{_words(True)}, causal", 90, partial(call, near, None, True, 0, 0))
    yield Case(f"{_words(True, True)}, a wide reach both ways", 80, partial(call, far, None, False, 6_000_000, 0))
    yield Case(
        f"{_words(True, True)}, targets, context and a wide reach",
        90,
        partial(call, far, targets, True, 5_000_000, 1_000_000),
    )


def _bsa() -> Iterator[Case]:
    def call(x: torch.Tensor, gate: torch.Tensor, cu: torch.Tensor | None, options: Options) -> None:
        gates = (gate, gate, gate)
        results = bsa.forward(x, x, x, x, gates, cu, options)
        bsa.backward(x, x, x, x, x, gates, *results[1:], cu, options)

    for words, architecture, packed, stride in _layouts():
        x, gate, cu = _rows(HEADS, packed=packed, stride=stride), _gates(packed=packed), _offsets(packed)
        options = Options(4, 64 if packed else 32, 3_000_000, 0.1, packed)
        yield Case(
            f"{words}, 4 blocks of {options.block_size} and a wide window",
            architecture,
            partial(call, x, gate, cu, options),
        )


_CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "flash": _flash,
    "compressed": _compressed,
    "choose": _choose,
    "selected": _selected,
    "attend": _attend,
    "combine": _combine,
    "hstu": _hstu,
    "bsa": _bsa,
}
