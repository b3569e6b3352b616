"""Argument checks. Each error says what was expected, what was passed and how to fix it."""

import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

import torch

from tilewise.ops._host.symbol import Slot, Symbol, plain

MAX_CHANNELS = 256
# A program's checks are those of slots and symbols.
TENSORS = (torch.Tensor, Slot)
# torch.compile passes symbolic numbers of its own.
WHOLE_NUMBERS = (int, torch.SymInt, Symbol)
NUMBERS = (int, float, torch.SymInt, torch.SymFloat, Symbol)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def shapes_of(tensors: Mapping[str, torch.Tensor]) -> str:
    """`q [2, 128, 8, 64], k [2, 128, 4, 64]`: what was passed, for the end of a message."""
    return ", ".join(f"{name} {list(x.shape)}" for name, x in tensors.items())


def check_attention_tensors(
    tensors: Mapping[str, torch.Tensor], packed: bool, layout: str = "", offsets: str = "cu_seqlens_q"
) -> list[torch.Size]:
    """Type, rank, dtype, device, last axis and channel count of tensors shaped `[B, T, H, D]`, or `[N, H, D]` where
    packed; returns the shapes.

    `layout` is named in messages where dense tensors have another layout, and `offsets` is the name of the packed
    ones' offsets.
    """
    shapes = []
    rank = 3 if packed else 4
    first_name = ""
    dtype = device = None
    for name, x in tensors.items():
        if not isinstance(x, TENSORS):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
        if dtype is None:
            first_name, dtype, device = name, x.dtype, x.device
        shape = x.shape
        shapes.append(shape)
        if len(shape) != rank:
            usual = (
                f"[N, H, D], packed, since {offsets} is given"
                if packed
                else f"[B, T, H, D] (give {offsets} for packed [N, H, D])"
            )
            raise ValueError(
                f"{name} has {len(shape)} dimensions: expected {layout or usual} (got shape {list(shape)})"
            )
        if x.dtype not in DTYPES:
            raise TypeError(
                f"{name} is {x.dtype}: expected float16, bfloat16 or float32 (float64 too where backend='reference')"
            )
        if x.dtype != dtype:
            raise TypeError(f"{name} is {x.dtype} and {first_name} is {dtype}: convert them to one dtype")
        if x.device != device:
            raise ValueError(f"{name} is on {x.device} and {first_name} is on {device}: move them to one device")
        # A constant, as in the kernels.
        channels = plain(shape[-1])
        check_last_axis(x, name)
        if not 1 <= channels <= MAX_CHANNELS:
            raise ValueError(f"{name} has {channels} channels: expected 1 to {MAX_CHANNELS} (got shape {list(shape)})")
    return shapes


def check_last_axis(x: torch.Tensor, name: str) -> None:
    """Contiguous, which an empty tensor is with any strides."""
    if x.shape[-1] > 1 and x.stride(-1) != 1 and x.numel() != 0:
        expected = f"it must be contiguous; call {name}.contiguous()"
        raise ValueError(f"{name}'s last axis has stride {x.stride(-1)}: {expected} (got shape {list(x.shape)})")


def check_none_given(plan: str, **arguments: Any) -> None:
    """Nothing that a ContextPlan has itself, or that goes with none."""
    for name, x in arguments.items():
        if x is not None:
            raise ValueError(f"{name} is given with {plan}: the plan has the offsets of its batch; leave {name} out")


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, packed: bool) -> None:
    """Everything about q, k and v together: heads, channels, batch and lengths that fit."""
    tensors = {"q": q, "k": k, "v": v}
    check_fit(tensors, check_attention_tensors(tensors, packed), packed)


def check_fit(
    tensors: Mapping[str, torch.Tensor], shapes: list[torch.Size], packed: bool, heads_axis: int = -2
) -> None:
    """Heads, channels, batch and lengths of queries, keys and, where there is a third, values, in this order."""
    shape_q, shape_k, *shapes_v = shapes
    name_q, name_k, *names_v = tensors
    if shape_k[-1] != shape_q[-1]:
        raise ValueError(
            f"{name_k} has {shape_k[-1]} channels and {name_q} has {shape_q[-1]}: they must be equal (got shapes"
            f" {shapes_of(tensors)})"
        )
    if shapes_v and shapes_v[0][:-1] != shape_k[:-1]:
        raise ValueError(
            f"{names_v[0]} and {name_k} must agree in all but the last axis (got shapes {shapes_of(tensors)})"
        )
    if not packed and shape_k[0] != shape_q[0]:
        raise ValueError(
            f"{name_k} has batch {shape_k[0]} and {name_q} has batch {shape_q[0]}: they must be equal (got shapes"
            f" {shapes_of(tensors)})"
        )
    heads_q, heads_k = plain(shape_q[heads_axis]), plain(shape_k[heads_axis])
    if heads_q == 0 or heads_k == 0 or heads_q % heads_k != 0:
        raise ValueError(
            f"{name_k} has {heads_k} heads and {name_q} has {heads_q}: {name_q}'s heads must be a multiple of"
            f" {name_k}'s (got shapes {shapes_of(tensors)})"
        )


def check_one_length(tensors: Mapping[str, torch.Tensor], shapes: list[torch.Size]) -> None:
    """Queries, keys and further tensors, in this order, over the same tokens and heads: keys of the queries' shape, the
    rest with any number of channels.
    """
    shape_q, shape_k, *further = shapes
    name_q, name_k, *names = tensors
    if shape_k != shape_q:
        raise ValueError(f"{name_k} and {name_q} must have the same shape (got shapes {shapes_of(tensors)})")
    for name, shape in zip(names, further, strict=True):
        if shape[:-1] != shape_q[:-1]:
            raise ValueError(
                f"{name} and {name_q} must agree in all but the last axis (got shapes {shapes_of(tensors)})"
            )
    if plain(shape_q[-2]) == 0:
        raise ValueError(f"{name_q} has no heads: expected at least 1 (got shapes {shapes_of(tensors)})")


def check_beside(
    x: torch.Tensor, name: str, q: torch.Tensor, shape: tuple[int, ...], axes: str, name_q: str = "q"
) -> None:
    """A gate or a factor: q's dtype or float32, on q's device, of this shape, whose axes are called `axes`."""
    if not isinstance(x, TENSORS):
        raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor {axes}")
    if x.dtype not in (q.dtype, torch.float32):
        raise TypeError(f"{name} is {x.dtype} and {name_q} is {q.dtype}: expected {name_q}'s dtype or float32")
    check_place(x, name, q.device, shape, axes, name_q)


def check_indices_tensor(
    x: torch.Tensor, name: str, device: torch.device, shape: tuple[int, ...], axes: str, name_q: str = "q"
) -> None:
    """Indices of blocks: int32 or int64, on q's device, of this shape, whose axes are called `axes`."""
    if not isinstance(x, TENSORS):
        raise TypeError(f"{name} is a {type(x).__name__}: expected an int32 or int64 torch.Tensor {axes}")
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {x.dtype}: expected int32 or int64")
    check_place(x, name, device, shape, axes, name_q)


def check_sinks(sinks: torch.Tensor, q: torch.Tensor, backend: str) -> None:
    """One sink a query head, in any dtype that is computed with."""
    if not isinstance(sinks, TENSORS):
        raise TypeError(f"sinks is a {type(sinks).__name__}: expected a torch.Tensor [Hq]")
    if sinks.dtype not in DTYPES:
        raise TypeError(f"sinks is {sinks.dtype}: expected float16, bfloat16 or float32")
    if backend != "reference":
        check_not_fp64(sinks, "sinks", backend)
    check_place(sinks, "sinks", q.device, (plain(q.shape[-2]),), "[Hq], one a query head")


def check_sink_values(sinks: torch.Tensor) -> None:
    """Finite, or -inf where a head has none."""
    if not values_are_checked(sinks):
        return
    bad = sinks.isnan() | (sinks == math.inf)
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        raise ValueError(f"sinks holds {float(sinks[at])} for head {at}: expected a finite number, or -inf for no sink")


def check_place(
    x: torch.Tensor, name: str, device: torch.device, shape: tuple[int, ...], axes: str, name_q: str = "q"
) -> None:
    """Shape, whose axes are called `axes`, and q's device."""
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(x.shape)}: expected {axes}, here {list(shape)}")
    if x.device != device:
        raise ValueError(f"{name} is on {x.device} and {name_q} is on {device}: move it there")


def check_index_values(
    indices: torch.Tensor, name: str, blocks: torch.Tensor | int, read: torch.Tensor | None = None
) -> None:
    """Each index -1 or a block of its sequence, which has `blocks` of them (broadcast to the indices), where `read`
    says that it counts.
    """
    if not values_are_checked(indices):
        return
    outside = (indices < -1) | (indices >= blocks)
    if read is not None:
        outside &= read
    if bool(outside.any()):
        at = outside.nonzero()[0].tolist()
        count = blocks if isinstance(blocks, int) else int(blocks.expand(indices.shape)[tuple(at)])
        raise ValueError(
            f"{name} holds {int(indices[tuple(at)])} at {at}: expected -1 (no block) or 0 to {count - 1}, for there are"
            f" {count} blocks"
        )


def check_not_fp64(x: torch.Tensor, name: str, backend: str) -> None:
    """fp64 is for the reference alone."""
    if x.dtype == torch.float64:
        raise TypeError(
            f"{name} is torch.float64: backend {backend!r} takes float16, bfloat16 or float32; backend='reference' also"
            " takes float64"
        )


def check_offsets_tensor(
    offsets: torch.Tensor, name: str, device: torch.device, tokens: int, batch: int | None = None
) -> None:
    """Type, rank, dtype, device and length of packed offsets `[B + 1]` of this many tokens."""
    if not isinstance(offsets, TENSORS):
        raise TypeError(
            f"{name} is a {type(offsets).__name__}: expected an int32 or int64 torch.Tensor of B + 1 offsets"
        )
    if offsets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} is {offsets.dtype}: expected int32 or int64")
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(
            f"{name} has shape {list(offsets.shape)}: expected [B + 1] offsets, the first 0 and the last N"
        )
    if offsets.device != device:
        raise ValueError(f"{name} is on {offsets.device} and q is on {device}: move it there")
    if offsets.shape[0] == 1 and tokens > 0:
        raise ValueError(
            f"{name} holds no sequence and there are {tokens} tokens: expected [B + 1] offsets, the first 0 and the"
            f" last {tokens}"
        )
    if batch is not None and offsets.shape[0] != batch + 1:
        raise ValueError(
            f"{name} holds {offsets.shape[0] - 1} sequences and cu_seqlens_q holds {batch}: they must be equal"
        )


def values_are_checked(x: torch.Tensor) -> bool:
    """Values of CPU tensors always; of CUDA tensors only with TILEWISE_CHECK=1, since that costs a synchronisation."""
    return x.device.type == "cpu" or (x.device.type != "meta" and os.environ.get("TILEWISE_CHECK") == "1")


def check_offset_values(
    offsets: torch.Tensor, name: str, tokens: int, longest: int | None = None, longest_name: str = ""
) -> None:
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
            f"{name} decreases from {values[at]} to {values[at + 1]} at position {at + 1}: offsets never decrease (got"
            f" {_short(values)})"
        )
    if values[-1] != tokens:
        raise ValueError(
            f"{name} ends at {values[-1]}: the last offset must be the number of tokens, {tokens} (got"
            f" {_short(values)})"
        )
    if longest is not None and lengths and max(lengths) > longest:
        raise ValueError(
            f"{longest_name} is {longest} and {name} holds a sequence of {max(lengths)} tokens: it must be at least"
            " that"
        )


def check_target_values(num_targets: torch.Tensor, name: str, offsets: torch.Tensor) -> None:
    """Targets of each sequence: 0 to its length, as `offsets` has it."""
    if not values_are_checked(num_targets):
        return
    for b, (count, (start, stop)) in enumerate(
        zip(num_targets.tolist(), itertools.pairwise(offsets.tolist()), strict=True)
    ):
        if not 0 <= count <= stop - start:
            raise ValueError(
                f"{name} is {count} for sequence {b}: expected 0 to {stop - start}, for it has {stop - start} tokens"
            )


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


def as_float(value: Any) -> Any:
    """A number as a float; a symbol of one stays a symbol."""
    return value if isinstance(value, Symbol) and isinstance(value.value, float) else float(value)


def check_whole(value: int, name: str, minimum: int) -> None:
    """A whole number, not below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, WHOLE_NUMBERS):
        raise TypeError(f"{name} is {value!r}: expected a whole number of at least {minimum}")
    if value < minimum:
        raise ValueError(f"{name} is {value}: expected a whole number of at least {minimum}")


def check_window(window_size: tuple[int, int]) -> None:
    """Two whole numbers, -1 (no limit) or more."""
    if (
        not isinstance(window_size, (tuple, list))
        or len(window_size) != 2
        or not all(isinstance(w, WHOLE_NUMBERS) and not isinstance(w, bool) for w in window_size)
    ):
        raise TypeError(
            f"window_size is {window_size!r}: expected two whole numbers (left, right), -1 meaning no limit"
        )
    if min(window_size) < -1:
        raise ValueError(f"window_size is {tuple(window_size)}: each side must be -1 (no limit) or at least 0")
