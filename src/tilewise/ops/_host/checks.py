"""Argument checks. Each error says what was expected, what came and what to do."""

import itertools
import math
import os
from collections.abc import Mapping

import torch

MAX_CHANNELS = 256
# torch.compile passes symbolic numbers.
WHOLE_NUMBERS = (int, torch.SymInt)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """`q [2, 128, 8, 64], k [2, 128, 4, 64]`: what came, for the end of a message."""
    return ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())


def check_attention_tensors(tensors: Mapping[str, torch.Tensor], packed: bool) -> list[torch.Size]:
    """Type, rank, dtype, device, last axis and channel count of tensors shaped `[B, T, H, D]`, or `[N, H, D]` where packed; returns the shapes."""
    shapes = []
    rank = 3 if packed else 4
    first_name = ""
    dtype = device = None
    for name, x in tensors.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if dtype is None:
            first_name, dtype, device = name, x.dtype, x.device
        shape = x.shape
        shapes.append(shape)
        if len(shape) != rank:
            layout = "[N, H, D], packed, since cu_seqlens_q is given" if packed else "[B, T, H, D] (give cu_seqlens_q for packed [N, H, D])"
            raise ValueError(f"{name} has {len(shape)} dimensions: expected {layout} (got shape {list(shape)})")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} is {x.dtype}: expected float16, bfloat16 or float32 (float64 too where backend='reference')")
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} and {first_name} is {dtype}: convert them to one dtype")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and {first_name} is on {device}: move them to one device")
        channels = shape[-1]
        if channels > 1 and x.stride(-1) != 1:
            raise ValueError(
                f"{name}'s last axis has stride {x.stride(-1)}: it must be contiguous; call {name}.contiguous() (got shape {list(shape)})"
            )
        if not 1 <= channels <= MAX_CHANNELS:
            raise ValueError(f"{name} has {channels} channels: expected 1 to {MAX_CHANNELS} (got shape {list(shape)})")
    return shapes


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    """Everything about q, k and v together: heads, channels, batch and lengths that fit."""
    tensors = {"q": q, "k": k, "v": v}
    shape_q, shape_k, shape_v = check_attention_tensors(tensors, packed)
    if shape_k[-1] != shape_q[-1]:
        raise ValueError(f"k has {shape_k[-1]} channels and q has {shape_q[-1]}: they must be equal (got shapes {shapes_of(tensors)})")
    if shape_v[:-1] != shape_k[:-1]:
        raise ValueError(f"v and k must agree in all but the last axis (got shapes {shapes_of(tensors)})")
    if not packed and shape_k[0] != shape_q[0]:
        raise ValueError(f"k has batch {shape_k[0]} and q has batch {shape_q[0]}: they must be equal (got shapes {shapes_of(tensors)})")
    heads_q, heads_k = shape_q[-2], shape_k[-2]
    if heads_q == 0 or heads_k == 0 or heads_q % heads_k != 0:
        raise ValueError(f"k has {heads_k} heads and q has {heads_q}: q's heads must be a multiple of k's (got shapes {shapes_of(tensors)})")


def check_not_fp64(x: torch.Tensor, name: str, backend: str) -> None:
    """fp64 is for the reference alone."""
    if x.dtype == torch.float64:
        raise TypeError(f"{name} is torch.float64: backend {backend!r} takes float16, bfloat16 or float32; backend='reference' also takes float64")


def check_offsets_tensor(offsets: torch.Tensor, name: str, device: torch.device, tokens: int, batch: int | None = None) -> None:
    """Type, rank, dtype, device and length of packed offsets `[B + 1]` of so many tokens."""
    if not isinstance(offsets, torch.Tensor):
        raise TypeError(f"{name} is a {type(offsets).__name__}: expected an int32 or int64 torch.Tensor of B + 1 offsets")
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {offsets.dtype}: expected int32 or int64")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(f"{name} has shape {list(offsets.shape)}: expected [B + 1] offsets, the first 0 and the last N")
    if offsets.device != device:
        raise ValueError(f"{name} is on {offsets.device} and q is on {device}: move it there")
    if offsets.shape[0] == 1 and tokens > 0:
        raise ValueError(f"{name} holds no sequence and there are {tokens} tokens: expected [B + 1] offsets, the first 0 and the last {tokens}")
    if batch is not None and offsets.shape[0] != batch + 1:
        raise ValueError(f"{name} holds {offsets.shape[0] - 1} sequences and cu_seqlens_q holds {batch}: they must be equal")


def values_are_checked(x: torch.Tensor) -> bool:
    """Values of CPU tensors always; of CUDA tensors only with TILEWISE_CHECK=1, for that costs a synchronisation."""
    return x.device.type == "cpu" or os.environ.get("TILEWISE_CHECK") == "1"


def check_offset_values(offsets: torch.Tensor, name: str, tokens: int, longest: int | None = None, longest_name: str = "") -> None:
    """The first 0, never decreasing, the last `tokens`, and no sequence longer than `longest` where that is given."""
    if not values_are_checked(offsets):
        return
    values = offsets.tolist()
    lengths = [b - a for a, b in itertools.pairwise(values)]
    if values[0] != 0:
        raise ValueError(f"{name} starts at {values[0]}: the first offset must be 0 (got {_short(values)})")
    if any(length < 0 for length in lengths):
        at = next(i for i, length in enumerate(lengths) if length < 0)
        raise ValueError(
            f"{name} decreases from {values[at]} to {values[at + 1]} at position {at + 1}: offsets never decrease (got {_short(values)})"
        )
    if values[-1] != tokens:
        raise ValueError(f"{name} ends at {values[-1]}: the last offset must be the number of tokens, {tokens} (got {_short(values)})")
    if longest is not None and lengths and max(lengths) > longest:
        raise ValueError(f"{longest_name} is {longest} and {name} holds a sequence of {max(lengths)} tokens: raise it, or leave it out")


def _short(values: list[int]) -> str:
    return str(values) if len(values) <= 10 else f"[{', '.join(map(str, values[:8]))}, ..., {values[-1]}]"


def check_number(value: float, name: str, minimum: float = -math.inf) -> None:
    """A finite real number, not below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, NUMBERS):
        raise TypeError(f"{name} is a {type(value).__name__}: expected a number")
    # Written as comparisons, which torch.compile can trace for symbolic numbers too; NaN fails them.
    if not (value >= minimum and -math.inf < value < math.inf):
        at_least = "" if minimum == -math.inf else f" of at least {minimum:g}"
        raise ValueError(f"{name} is {value}: expected a finite number{at_least}")


def check_window(window_size: tuple[int, int]) -> None:
    """Two whole numbers, -1 (no limit) or more."""
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2 or not all(isinstance(w, WHOLE_NUMBERS) for w in window_size):
        raise TypeError(f"window_size is {window_size!r}: expected two whole numbers (left, right), -1 meaning no limit")
    if min(window_size) < -1:
        raise ValueError(f"window_size is {tuple(window_size)}: each side must be -1 (no limit) or at least 0")
