"""What an operator declares to be verified: its problem, named cases, planted bugs, and how to draw further cases.

A problem is one operator's sizes and options, read and written as one line (`B=1,T=64,causal=true`); it makes the
inputs. planting.py plants the bugs.
"""

import dataclasses
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from tilewise.workbench.operator import did_you_mean

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
    # Inputs that the function writes in place, as the reference does: judged bit by bit.
    updates: ClassVar[tuple[str, ...]] = ()
    # Whether results have gradients.
    differentiable: ClassVar[bool] = True
    # Whether a sequence's outputs are promised to have the same bits whatever is around it.
    invariant: ClassVar[bool] = False
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

    def first_head(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """What the first head has of the input of that name, as a view; None where it has no heads."""
        axes = self.axes().get(name, "")
        return x.select(axes.index("H"), 0) if "H" in axes else None

    def offsets(self) -> dict[str, str]:
        """For packed inputs and outputs, by name: the input that holds the offsets of their sequences along T."""
        return {}

    def alone(self, inputs: Tensors, b: int) -> Tensors:
        """Sequence b as the first of a batch of its own."""
        return only_sequence(self, inputs, inputs, b)

    def elsewhere(self, _inputs: Tensors) -> Iterator[tuple[str, tuple[Tensors, ...]]]:
        """The same sequences in other surroundings, each in words: calls of which the last is to give the same."""
        yield from ()

    @property
    def width(self) -> int:
        """The most channels of any input: by default only narrow problems run without a GPU."""
        raise NotImplementedError

    def tokens(self) -> tuple[int, ...]:
        """The lengths of its sequences of keys."""
        raise NotImplementedError

    def scores(self) -> int:
        """Of one head of all of `tokens`: by default as many queries as keys."""
        return sum(n * n for n in self.tokens())

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


def place(x: torch.Tensor, dtype: torch.dtype, device: torch.device, around: float, guard: int = GUARD) -> torch.Tensor:
    """x's values in `dtype` on `device`, strides and alignment kept, in memory that holds `around` everywhere else."""
    if not x.is_floating_point():
        return x.to(device).clone()
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    offset = guard + x.storage_offset()
    memory = torch.full((offset + span + guard,), around, dtype=dtype, device=device)
    view = memory.as_strided(x.shape, x.stride(), offset)
    once = _once(x)
    view[once].copy_(x[once])
    return view


def _once(x: torch.Tensor) -> tuple[slice, ...]:
    """The part of x that has each element in memory once, where x is expanded."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())


def sequences(problem: Problem, inputs: Tensors) -> int:
    """How many sequences the batch has."""
    for offsets in problem.offsets().values():
        return inputs[offsets].numel() - 1
    axes = problem.axes()
    return next((x.shape[axes[name].index("B")] for name, x in inputs.items() if "B" in axes.get(name, "")), 1)


def only_sequence(problem: Problem, tensors: Tensors, offsets: Mapping[str, torch.Tensor], b: int) -> Tensors:
    """Of `tensors` (inputs or outputs by name) what sequence b has, as views; `offsets` are those that `tensors` are
    packed by.
    """
    axes, packed = problem.axes(), problem.offsets()
    result = {}
    for name, x in tensors.items():
        if name in packed.values():
            result[name] = x[b : b + 2] - x[b]
        elif name in packed:
            start, end = offsets[packed[name]][b : b + 2].tolist()
            result[name] = x.narrow(axes[name].index("T"), start, end - start)
        else:
            result[name] = x.narrow(axes[name].index("B"), b, 1) if "B" in axes.get(name, "") else x
    return result


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


# Laws of random values, the ordinary one first; and rules.
LAWS = ("random", "one-signed", "heavy-tails", "small-head", "constant", "zero")
RULES = ("range", "range-raw")
FILLS = (*LAWS, *RULES)
# Inputs that a rule negates, so that k = -q where the shapes agree.
NEGATED = ("k",)
# Heavy tails: Student's t of so many degrees of freedom, cut off where fp16 can still hold ten times as much.
FREEDOM, FARTHEST = 3, 1e3
# A constant is a whole number of these: sums of equal terms are then exact in fp32, which would else round each step of
# a sum the same way, and so lose more than it does of any other numbers.
EIGHTHS = 8
# What makes a head about a thousand times smaller without rounding it.
SMALLER = 2.0**-10


def make_fill(rule: str, seed: int) -> Fill:
    """The fill called `rule`: `random` (normal), `one-signed` (its absolute values), `heavy-tails`, `constant` (one
    number throughout a tensor), `zero`, `range` (element i of n is i/n) or `range-raw` (element i is i).

    `small-head` is normal here: which elements are a head's, `make_inputs` knows.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def by_law(_name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
        if rule == "zero":
            return torch.zeros(shape, dtype=torch.float64)
        x = (normal() * EIGHTHS).round().div(EIGHTHS).expand(shape).clone() if rule == "constant" else normal(*shape)
        if rule == "one-signed":
            x = x.abs()
        if rule == "heavy-tails":
            x = (x / normal(FREEDOM, *shape).square().mean(0).sqrt()).clamp(-FARTHEST, FARTHEST)
        return (x * size).double()

    def by_range(name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
        count = math.prod(shape)
        values = torch.arange(count, dtype=torch.float64) / (count if rule == "range" and count else 1)
        return (-values if name in NEGATED else values).reshape(shape)

    if rule not in FILLS:
        raise ValueError(f"there is no fill {rule!r}: {did_you_mean(rule, FILLS)}expected one of {', '.join(FILLS)}")
    return by_range if rule in RULES else by_law


def make_inputs(problem: Problem, rule: str, seed: int) -> Tensors:
    """The problem's inputs, filled by `rule`; under `small-head` their first head is a thousand times smaller."""
    inputs = problem.tensors(make_fill(rule, seed))
    if rule == "small-head":
        for name, x in inputs.items():
            head = problem.first_head(name, x) if x.is_floating_point() else None
            if head is not None:
                head[_once(head)] *= SMALLER
    return inputs


# Sizes that every operator has, in order; other cases are the edge battery.
NAMED = ("small", "medium", "large", "xl", "xxl", "nsa-507")
# Without a GPU, cases up to this many channels run by default.
NARROW = 64
# CPU seconds that one check may take before it counts as a hang.
TIME_LIMIT = 120.0
# The largest cases on a CPU, where they run by name only.
LONG_TIME_LIMIT = 1800.0


@dataclass(frozen=True)
class Case:
    """One problem with a name."""

    name: str
    about: str
    problem: Problem

    def time_limit(self, device: str) -> float:
        """CPU seconds that it may take."""
        return LONG_TIME_LIMIT if device == "cpu" and self.name in ("xl", "xxl") else TIME_LIMIT


@dataclass(frozen=True)
class Mutant:
    """A planted bug: in the source of `module` (under tilewise.ops, or `parallel.` one), every `old` becomes `new`.

    With a `capability`, its kernels run only on GPUs of that compute capability; where it must be `simulated`, a GPU
    does not show it for certain. With a `use` (uses.py), nothing but that use of the operator shows it.
    """

    name: str
    about: str
    module: str
    old: str
    new: str
    capability: tuple[int, int] | None = None
    use: str = ""
    simulated: bool = False

    @property
    def planted_in(self) -> str:
        """The module's whole name."""
        return f"tilewise.{'' if self.module.startswith('parallel.') else 'ops.'}{self.module}"

    @property
    def backend(self) -> str:
        """The backend whose code it is in."""
        return "cpu" if self.module.endswith(".cpu") else "triton"

    def plant(self, source: str) -> str:
        """The source with the bug; a ValueError if `old` is not in it, since then nothing would be planted."""
        # Differences in whitespace and trailing commas are ignored, so that reformatting a kernel does not disarm a
        # mutant.
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        pattern = re.sub(r"(\\[(\[])", r"\1\\s*", pattern)
        pattern = re.sub(r"(\\[)\]])", r",?\\s*\1", pattern)
        planted, count = re.subn(pattern, lambda _: self.new, source)
        if count == 0:
            raise ValueError(
                f"the planted bug {self.name!r} finds no {self.old!r} in {self.planted_in}: bring it up to date"
            )
        return planted


@dataclass(frozen=True)
class Suite:
    """All that verify needs of one operator.

    `draw` builds a problem from hypothesis's draw function and the longest length allowed, its values by one of `laws`;
    `growth` is the problem that memory is measured on, and `use` a small one, of more than one sequence, that is used
    in every way (uses.py): where kernels are interpreted by default only if that is `cheap_to_use`. The `dear` cases
    take long there and catch no bug that others miss: by default they run elsewhere. `hopper` are those that its
    kernels for Hopper take, where it has some: simulated, the first by default; `leave_out` are small ones for
    --leave-out.
    """

    problem: type[Problem]
    cases: tuple[Case, ...]
    growth: Problem
    use: Problem
    draw: Callable[[Callable[[Any], Any], int], Problem]
    mutants: tuple[Mutant, ...] = ()
    laws: tuple[str, ...] = LAWS
    cheap_to_use: bool = False
    dear: tuple[str, ...] = ()
    hopper: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()

    def find(self, text: str) -> Case:
        """The case called `text`, or the problem that it writes out."""
        for case in self.cases:
            if case.name == text:
                return case
        if "=" in text:
            problem = self.problem.parse(text)
            problem.check()
            return Case(text, "", problem)
        known = [case.name for case in self.cases]
        raise ValueError(
            f"there is no case {text!r}: {did_you_mean(text, known)}expected one of {', '.join(known)}, or a problem"
            " such as T=65,D=16"
        )

    def planted(self, capability: tuple[int, int] | None) -> tuple[Mutant, ...]:
        """The bugs in kernels that run on a GPU of this compute capability; None where kernels are interpreted."""
        return tuple(one for one in self.mutants if one.capability in (None, capability) and not one.simulated)

    def planted_for_hopper(self) -> tuple[Mutant, ...]:
        """The bugs in kernels for Hopper alone, where those are simulated."""
        return tuple(mutant for mutant in self.mutants if mutant.capability is not None)

    def standard(self, device: str, interpreted: bool, everything: bool = False) -> tuple[Case, ...]:
        """The cases that run by default: all on a GPU; elsewhere `small`, `medium` and the narrow edge battery, or, for
        `everything`, all up to `large`; interpreted, `small` and the narrow edge battery.
        """

        def runs(case: Case) -> bool:
            narrow = case.name not in NAMED and case.problem.width <= NARROW
            if interpreted:
                return narrow or case.name == "small"
            if device == "cpu":
                return case.name not in ("xl", "xxl") if everything else narrow or case.name in ("small", "medium")
            return True

        return tuple(case for case in self.cases if runs(case))
