"""A problem: one operator's sizes and options, read and written as one line (`B=1,T=64,causal=true`); it makes the
inputs.
"""

import dataclasses
import itertools
import math
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

# Values for the tensor of that name and shape, in fp64; `size` scales random ones.
Fill = Callable[[str, tuple[int, ...], float], torch.Tensor]
Tensors = dict[str, torch.Tensor]

# Guard elements on either side of every input: an implementation that reads them gets NaN, and a write to them shows.
GUARD = 512


@dataclass(frozen=True)
class Problem:
    """Base of each operator's problem: a frozen dataclass of int, float, bool, str and tuples of int, every field with
    a default.
    """

    # What the operator returns, in order.
    outputs: ClassVar[tuple[str, ...]]
    # Outputs that are fp32 for every input dtype.
    exact: ClassVar[tuple[str, ...]] = ()
    # Outputs that are choices, integers: judged by `judge_choice`, since more than one may be right.
    choices: ClassVar[tuple[str, ...]] = ()
    # Arguments with which the public function returns all of them, as the reference always does.
    returning: ClassVar[dict[str, Any]] = {}

    def tensors(self, fill: Fill) -> Tensors:
        """The inputs by argument name: floating tensors are cast and differentiated, the rest stays as it is."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """The arguments that are not tensors."""
        raise NotImplementedError

    def arguments(self, tensors: Tensors) -> dict[str, Any]:
        """The arguments made from `tensors`: each under its name, unless some are passed inside another, such as a
        model's weights.
        """
        return dict(tensors)

    def axes(self) -> dict[str, str]:
        """The axes of inputs and outputs, one letter each: B batch, T tokens, H heads, D channels."""
        raise NotImplementedError

    def offsets(self) -> dict[str, str]:
        """For packed inputs and outputs, by name: the input that holds the offsets of their sequences along T."""
        return {}

    @property
    def width(self) -> int:
        """The most channels of any input: by default interpreted kernels run narrow problems only."""
        raise NotImplementedError

    def tokens(self) -> tuple[int, ...]:
        """The lengths of its sequences of keys."""
        raise NotImplementedError

    def twice_as_long(self) -> Self:
        """The same with twice the tokens, for measuring how memory grows."""
        raise NotImplementedError

    def check(self) -> None:
        """A ValueError if the parameters do not fit together."""

    def floor(self, _name: str, _truth: Tensors, _inputs: Tensors) -> float:
        """A relative error that the contract itself costs a result, in any implementation."""
        return 0.0

    def storage_cost(self, _truth: Tensors, _incoming: Tensors, _dtype: torch.dtype) -> Tensors | None:
        """What a backward loses by starting from stored outputs, rounded to `dtype`, as incoming gradients with that
        effect.
        """
        return None

    def judge_choice(self, _name: str, _actual: torch.Tensor, _inputs: Tensors, _dtype: torch.dtype) -> str:
        """What is wrong with an integer output, a choice; empty if nothing is."""
        raise NotImplementedError

    def given_choice(self, _choices: Tensors) -> dict[str, torch.Tensor]:
        """Arguments that make the reference use these choices, right or wrong, so that the rest is compared for the
        same choices; none if it cannot.
        """
        return {}

    @classmethod
    def parse(cls, text: str) -> Self:
        """The problem that `text` describes: NAME=VALUE, or NAME alone for true, joined by commas; fields left out keep
        their defaults.
        """
        types = typing.get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for part in text.split(","):
            name, equals, value = part.strip().partition("=")
            if not equals and types.get(name) is bool:
                equals, value = "=", "true"
            if not equals or name not in names:
                raise ValueError(
                    f"{part.strip()!r} is not a parameter: expected NAME=VALUE with a name out of {', '.join(names)}"
                )
            try:
                values[name] = _read(value, types[name])
            except ValueError:
                raise ValueError(f"{part.strip()!r}: expected {_KINDS[_kind(types[name])]}") from None
        return cls(**values)

    def __str__(self) -> str:
        shown = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return ",".join(f"{name}={_write(value)}" for name, value, default in shown if value != default)


_KINDS = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "a word",
    tuple: "integers joined by /, such as 0/70/1",
}


def _kind(annotation: Any) -> type:
    """int for `int` and `int | None`, tuple for `tuple[int, ...]`."""
    given = next((kind for kind in typing.get_args(annotation) if kind not in (type(None), Ellipsis)), annotation)
    return tuple if typing.get_origin(annotation) is tuple else given


def _read(text: str, annotation: Any) -> Any:
    kind = _kind(annotation)
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError
        return text == "true"
    return tuple(int(part) for part in text.split("/")) if kind is tuple else kind(text)


def _write(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def cumulative(lengths: tuple[int, ...]) -> torch.Tensor:
    """Offsets of sequences of these lengths, packed."""
    return torch.tensor((0, *lengths)).cumsum(0).to(torch.int32)


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values with heads before tokens in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def cut(x: torch.Tensor, start: int) -> torch.Tensor:
    """The same values as the channels from `start` on of a wider tensor that holds NaN elsewhere."""
    wide = torch.full((*x.shape[:-1], -(-(start + x.shape[-1]) // 8) * 8 + 8), torch.nan, dtype=x.dtype)
    view = wide[..., start : start + x.shape[-1]]
    view.copy_(x)
    return view


def place(x: torch.Tensor, dtype: torch.dtype, device: torch.device, around: float) -> torch.Tensor:
    """x's values in `dtype` on `device`, strides and alignment kept, in memory that holds `around` everywhere else."""
    if not x.is_floating_point():
        return x.to(device).clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    offset = GUARD + x.storage_offset()
    memory = torch.full((offset + span + GUARD,), around, dtype=dtype, device=device)
    view = memory.as_strided(x.shape, x.stride(), offset)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
    view[once].copy_(x[once])
    return view


def sequences(problem: Problem, inputs: Tensors) -> int:
    """How many sequences the batch has."""
    for offsets in problem.offsets().values():
        return inputs[offsets].numel() - 1
    axes = problem.axes()
    return next((x.shape[axes[name].index("B")] for name, x in inputs.items() if "B" in axes.get(name, "")), 1)


def reverse(problem: Problem, tensors: Tensors, offsets: Mapping[str, torch.Tensor]) -> Tensors:
    """`tensors` (inputs, outputs or gradients by name) with the sequences in reverse order; `offsets` are those that
    `tensors` are packed by.
    """
    axes, packed = problem.axes(), problem.offsets()
    result = {}
    for name, x in tensors.items():
        base = name if name in axes else name.removeprefix("d")
        if name in packed.values():
            lengths = x.diff().flip(0)
            result[name] = torch.cat([x[:1], x[:1] + lengths.cumsum(0).to(x.dtype)])
        elif base in packed:
            ends = offsets[packed[base]].tolist()
            pieces = [x.narrow(axes[base].index("T"), start, end - start) for start, end in itertools.pairwise(ends)]
            result[name] = torch.cat(pieces[::-1], axes[base].index("T")) if pieces else x
        else:
            result[name] = x.flip(axes[base].index("B")) if "B" in axes.get(base, "") else x
    return result


FILLS = ("random", "range", "range-raw")
# Inputs that the rule negates, so that k = -q where the shapes agree.
NEGATED = ("k",)


def make_fill(rule: str, seed: int) -> Fill:
    """The fill called `rule`: `random`, `range` (element i of n is i/n) or `range-raw` (element i is i)."""
    generator = torch.Generator().manual_seed(seed)

    def random(_name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).double()

    def by_range(name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
        count = math.prod(shape)
        values = torch.arange(count, dtype=torch.float64) / (count if rule == "range" and count else 1)
        return (-values if name in NEGATED else values).reshape(shape)

    if rule not in FILLS:
        raise ValueError(f"there is no fill {rule!r}: expected one of {', '.join(FILLS)}")
    return random if rule == "random" else by_range
