"""What benchmarks/host.py measures: small calls, long ones against their CUDA graphs, and calls whose shape is new."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hstu import BLOCK, COUNT, KINDS, Attention, Batch, Shape
from torch.nn.functional import scaled_dot_product_attention

import tilewise
from tilewise.bench.timing import Call, Varied, captured

Contender = Call | Varied

FORWARD, STEP = "forward", "forward + backward"
# What the project asks: ours over the other.
OF_SDPA, OF_FLASH, OF_GRAPH, OF_DENSE, OF_REPEATED, OF_TORCH = 1.5, 1.5, 1.2, 1.0, 2.0, 1 / 0.8

TOKENS, HEADS, CHANNELS = (128, 256, 512), 8, 64
# One short batch: 512 tokens.
SHORT = (200, 56, 128, 128)
BLOCK_SPARSE: tuple[Shape, ...] = ((8, 4096, 8, 32, 64), (8, 4096, 4, 128, 128))
NSA_TOKENS, NSA_HEADS, NSA_KEY_HEADS, NSA_CHANNELS = 4096, 64, 4, 128
# Calls that are long on the GPU, or launch many kernels: fewer in a batch, so that the driver's queue of about 1,000
# launches never fills and makes the host wait for the GPU.
LONG_CALLS = 20
CNN_CALLS = 50

# New shapes: so many calls, each with another longest sequence, drawn from these lengths.
NEW_SHAPES, LENGTHS = 1000, range(128, 2176)
# A batch has a second sequence, of length // SHORTER.
SHORTER = 4
# Warm-up lengths lie this far apart. Each comes with its successor, for Triton compiles numbers that 16 divides apart.
APART = 256
QKV = {"q": (8, 64), "k": (8, 64), "v": (8, 64)}
# Last axes of each operator's packed tensors.
PACKED: dict[str, dict[str, tuple[int, ...]]] = {
    "flash": QKV,
    "nsa": {"q": (16, 64), "k": (1, 64), "v": (1, 64), "g_cmp": (16,), "g_slc": (16,), "g_swa": (16,)},
    "hstu": QKV,
    "bsa": {**QKV, "u": (8, 64), "g_cmp": (8,), "g_slc": (8,)},
}


class Compared(NamedTuple):
    """Two contenders; at most `asked` times the other's time is asked of ours."""

    ours: str
    other: str
    asked: float | None


@dataclass(frozen=True)
class Case:
    """Contenders that are measured against each other; `build` takes the device's name."""

    name: str
    topic: str
    build: Callable[[str], Mapping[str, Contender]]
    compared: tuple[Compared, ...]
    clock: str = "host"
    calls: int = 200
    rounds: int = 30
    grad: bool = True
    # No kernel may be compiled or loaded after the warm-up.
    compiles_nothing: bool = False


def draw(*shape: int, device: str, grad: bool = False) -> torch.Tensor:
    """Random bf16."""
    return torch.randn(shape, device=device, dtype=torch.bfloat16).requires_grad_(grad)


def flash(tokens: int, device: str, grad: bool) -> Attention:
    """Causal attention of one sequence."""
    q, k, v, do = (draw(1, tokens, HEADS, CHANNELS, device=device, grad=grad and i < 3) for i in range(4))
    return Attention(lambda: tilewise.flash_attention(q, k, v, causal=True), [q, k, v], do)


def sdpa(tokens: int, device: str, grad: bool) -> Attention:
    """The same by torch's own choice of kernel, in its own layout."""
    q, k, v, do = (draw(1, HEADS, tokens, CHANNELS, device=device, grad=grad and i < 3) for i in range(4))
    return Attention(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), [q, k, v], do)


def nsa(tokens: int, device: str, grad: bool) -> Attention:
    """All of native sparse attention, with three gates, as benchmarks/nsa.py times it."""
    heads = (NSA_HEADS, NSA_KEY_HEADS, NSA_KEY_HEADS)
    q, k, v = (draw(1, tokens, h, NSA_CHANNELS, device=device, grad=grad) for h in heads)
    gates = {name: draw(1, tokens, NSA_HEADS, device=device, grad=grad) for name in ("g_cmp", "g_slc", "g_swa")}
    do = draw(1, tokens, NSA_HEADS, NSA_CHANNELS, device=device)
    return Attention(lambda: tilewise.native_sparse_attention(q, k, v, **gates), [q, k, v, *gates.values()], do)


def attend_packed(operator: str, tensors: Mapping[str, torch.Tensor], offsets: torch.Tensor, longest: int) -> Any:
    """One packed call of an operator."""
    if operator == "flash":
        return tilewise.flash_attention(
            **tensors,
            causal=True,
            cu_seqlens_q=offsets,
            cu_seqlens_k=offsets,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
        )
    if operator == "nsa":
        return tilewise.native_sparse_attention(**tensors, cu_seqlens=offsets)
    if operator == "hstu":
        return tilewise.hstu_attention(**tensors, seq_offsets=offsets, max_seq_len=longest)
    choice = {"block_counts": COUNT, "block_size": BLOCK}
    return tilewise.block_sparse_attn(**tensors, g_swa=None, **choice, seq_offsets=offsets)[0]


class Packed:
    """Packed batches of an operator as views into one allocation, so that a batch of another length costs nothing."""

    def __init__(self, operator: str, most_tokens: int, device: str, grad: bool) -> None:
        self._operator, self._grad = operator, grad
        torch.manual_seed(0)
        last = PACKED[operator]
        self._tensors = {name: draw(most_tokens, *axes, device=device) for name, axes in last.items()}
        self._do = draw(most_tokens, last["q"][0], last["v"][-1], device=device)

    def attention(self, offsets: torch.Tensor, tokens: int, longest: int) -> Attention:
        """One batch, with leaves of its own."""
        found = {name: x.narrow(0, 0, tokens).requires_grad_(self._grad) for name, x in self._tensors.items()}
        operator, do = self._operator, self._do.narrow(0, 0, tokens)
        return Attention(lambda: attend_packed(operator, found, offsets, longest), list(found.values()), do)


def offsets_of(batches: Sequence[Sequence[int]], device: str) -> Iterator[torch.Tensor]:
    """Offsets of each batch, as rows of one tensor that lie 256 bytes apart: aligned as an allocation is."""
    table = torch.zeros(len(batches), 64, dtype=torch.int32)
    for row, lengths in zip(table, batches, strict=True):
        row[1 : len(lengths) + 1] = torch.tensor(lengths, dtype=torch.int32).cumsum(0)
    table = table.to(device)
    return (row[: len(lengths) + 1] for row, lengths in zip(table, batches, strict=True))


def packed_calls(operator: str, batches: Sequence[Sequence[int]], device: str, grad: bool) -> list[Call]:
    """A call for each batch of lengths; nothing is left to prepare when it is made."""
    source = Packed(operator, max(map(sum, batches)), device, grad)
    found = []
    for offsets, lengths in zip(offsets_of(batches, device), batches, strict=True):
        found.append(_call(source.attention(offsets, sum(lengths), max(lengths)), grad))
    return found


class Lengths(NamedTuple):
    """Longest sequences of the warm-up, of the timed calls, and of the call that is repeated."""

    warm: list[int]
    timed: list[int]
    repeated: int


def new_lengths(step: bool, count: int = NEW_SHAPES, among: range = LENGTHS) -> Lengths:
    """`count` lengths in random order, each once. Forward and step take different ones, and the warm-up others."""
    warm = [length for start in range(among.start, among.stop + 1, APART) for length in (start, start + 1)]
    rest = sorted(set(among) - set(warm))
    random.Random(0).shuffle(rest)
    timed = rest[count : 2 * count] if step else rest[:count]
    if len(timed) < count:
        raise ValueError(f"{len(rest)} lengths are left in {among}: give at least {2 * count + len(warm)}")
    return Lengths(warm, timed, sorted(timed)[count // 2])


def new_shapes(operator: str, lengths: Lengths, device: str, grad: bool) -> dict[str, Contender]:
    """Calls that all have another shape, against one of the middle size that is repeated."""

    def calls(longest: Sequence[int]) -> list[Call]:
        return packed_calls(operator, [(length, length // SHORTER) for length in longest], device, grad)

    warm = calls(lengths.warm)
    return {"new shapes": Varied(warm * 3, calls(lengths.timed)), "repeated": calls([lengths.repeated])[0]}


def packed_once(operator: str, lengths: Sequence[int], device: str, grad: bool) -> Call:
    """One batch, over and over."""
    return packed_calls(operator, [lengths], device, grad)[0]


def _call(attention: Attention, step: bool) -> Call:
    return attention.step if step else attention.attend


def _flash_cases(step: bool) -> Iterator[Case]:
    for tokens in TOKENS:

        def build(device: str, tokens: int = tokens) -> dict[str, Contender]:
            return {
                "flash": _call(flash(tokens, device, step), step),
                "sdpa": _call(sdpa(tokens, device, step), step),
            }

        compared = (Compared("flash", "sdpa", OF_SDPA),)
        yield Case(f"flash, T {tokens}, {_direction(step)}", "flash", build, compared, grad=step)


def _hstu_case(step: bool) -> Case:
    def build(device: str) -> dict[str, Contender]:
        return {
            "hstu": packed_once("hstu", SHORT, device, step),
            "flash": _call(flash(sum(SHORT), device, step), step),
            "flash packed": packed_once("flash", SHORT, device, step),
        }

    compared = (Compared("hstu", "flash", OF_FLASH), Compared("hstu", "flash packed", OF_FLASH))
    name = f"hstu, {len(SHORT)} sequences, {sum(SHORT)} tokens, {_direction(step)}"
    return Case(name, "hstu", build, compared, grad=step)


def _bsa_cases(step: bool) -> Iterator[Case]:
    for shape in BLOCK_SPARSE:

        def build(device: str, shape: Shape = shape) -> dict[str, Contender]:
            # Each with leaves of its own: see `captured`.
            kinds = ("block-sparse", "block-sparse", "dense")
            called, graph, dense = (_call(KINDS[kind](Batch(shape, jagged=False)), step) for kind in kinds)
            return {"block-sparse": called, "graph": captured(graph), "dense hstu": dense}

        batch, longest, heads, channels, values = shape
        name = f"block-sparse hstu, B {batch}, N {longest}, H {heads}, D {channels}, Dv {values}, {_direction(step)}"
        compared = (Compared("block-sparse", "graph", OF_GRAPH), Compared("block-sparse", "dense hstu", OF_DENSE))
        yield Case(name, "bsa", build, compared, clock="whole", calls=LONG_CALLS, grad=step)


def _nsa_case(step: bool) -> Case:
    def build(device: str) -> dict[str, Contender]:
        return {
            "nsa": _call(nsa(NSA_TOKENS, device, step), step),
            "graph": captured(_call(nsa(NSA_TOKENS, device, step), step)),
        }

    name = f"nsa, T {NSA_TOKENS}, {NSA_HEADS} and {NSA_KEY_HEADS} heads, {_direction(step)}"
    compared = (Compared("nsa", "graph", OF_GRAPH),)
    return Case(name, "nsa", build, compared, clock="whole", calls=LONG_CALLS, grad=step)


def _new_case(operator: str, step: bool) -> Case:
    def build(device: str) -> dict[str, Contender]:
        return new_shapes(operator, new_lengths(step), device, step)

    calls = 200 if operator in ("flash", "hstu") else LONG_CALLS
    name, compared = f"{operator}, new shapes, {_direction(step)}", (Compared("new shapes", "repeated", OF_REPEATED),)
    times = {"calls": calls, "rounds": NEW_SHAPES // calls}
    return Case(name, "new-shapes", build, compared, **times, grad=step, compiles_nothing=True)


def _cnn_case() -> Case:
    def build(device: str) -> dict[str, Contender]:
        from cnn import mytorch_step, torch_step

        from mytorch import Device

        return {"mytorch": mytorch_step(Device(device)), "torch": torch_step(device)}

    compared = (Compared("mytorch", "torch", OF_TORCH),)
    return Case("mytorch, training step of a CNN", "cnn", build, compared, clock="whole", calls=CNN_CALLS)


def _direction(step: bool) -> str:
    return STEP if step else FORWARD


def cases() -> dict[str, Case]:
    """All, by name. A forward runs without grad."""
    both = (False, True)
    found = [case for step in both for case in _flash_cases(step)]
    found += [_hstu_case(step) for step in both]
    found += [case for step in both for case in _bsa_cases(step)]
    found += [_nsa_case(step) for step in both]
    found += [_new_case(operator, step) for operator in PACKED for step in both]
    return {case.name: case for case in (*found, _cnn_case())}
