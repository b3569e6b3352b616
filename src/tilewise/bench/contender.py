"""What is timed: tilewise's own backend, a user's function, plain torch, and the operator's other baselines; and
whether it is right on the same case.

What a user would pick instead: how it is called on an operator's inputs, or why it cannot be.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tilewise.bench.result import Verified
from tilewise.verify.implementation import flat_outputs, load_function
from tilewise.verify.plan import implementations
from tilewise.verify.result import Check, Implementation, Result, Settings
from tilewise.verify.suite import Problem, Tensors
from tilewise.workbench.operator import Benchmark, Operator, UsageError


class CannotRunError(Exception):
    """Why something is not timed on this machine or this case."""


class Call(NamedTuple):
    """One implementation on one set of inputs.

    `run` returns its outputs, the first of which is the operator's, in its own layout; `leaves` are what the backward
    differentiates; `lay_out` converts the first output to the operator's layout. `pairs` is set if the work is not the
    operator's.
    """

    run: Callable[[], Sequence[torch.Tensor]]
    leaves: Sequence[torch.Tensor]
    lay_out: Callable[[torch.Tensor], torch.Tensor] = lambda x: x
    pairs: int | None = None


class Baseline(NamedTuple):
    """`build` makes its call from a problem and inputs by name; a CannotRunError says why there is none. `on` are the
    devices it is timed on unless requested by name; a `dense` one computes dense attention as a baseline of a sparse
    operator, so its output differs.
    """

    name: str
    about: str
    build: Callable[[Problem, Tensors], Call]
    on: tuple[str, ...] = ("cuda", "cpu")
    dense: bool = False


def as_leaf(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy that a backward differentiates."""
    return x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()


def floating_leaves(tensors: Tensors) -> Tensors:
    """The same inputs, the floating ones as leaves with their strides as they are."""
    return {name: x.detach().requires_grad_() if x.is_floating_point() else x for name, x in tensors.items()}


OURS = "tilewise"
PLAIN = "torch"
# The most scores, over all heads, for an fp64 truth: a gigabyte per copy on a GPU, and it takes several copies.
MOST_SCORES = {"cuda": 1 << 27, "cpu": 1 << 24}


class Contender(NamedTuple):
    """`implementation` is set if verify checks it; a baseline's output is compared with tilewise's, unless it is
    `dense` work of another kind.
    """

    name: str
    about: str
    build: Callable[[Problem, Tensors], Call]
    implementation: Implementation | None = None
    dense: bool = False


def own_implementation(operator: Operator) -> Implementation:
    """The backend that users get on this machine's device."""
    found = [implementation for implementation in implementations() if not implementation.interpreted]
    if not found:
        raise UsageError("interpreted kernels are not timed: unset TILEWISE_BACKEND to time the CPU backend")
    return found[0]


def contenders(
    operator: Operator,
    bench: Benchmark,
    impls: Sequence[str],
    asked: Sequence[str],
    dtype: torch.dtype,
    own: Implementation,
) -> list[Contender]:
    """The subject first: the first of `impls`, or tilewise.

    `asked` names baselines; by default those that fit the device.
    """
    plain = Baseline(
        PLAIN,
        "the definition in plain torch, in the same precision",
        _calls(partial(operator.load("reference"), compute_dtype=dtype)),
    )
    known = {baseline.name: baseline for baseline in (*bench.baselines, plain)}
    external = {_short(name, [*impls, *known]): Implementation(name, own.device, external=True) for name in impls}
    found = [Contender(name, one.name, _calls(load_function(operator, one)), one) for name, one in external.items()]
    found.append(Contender(OURS, f"backend {own.name!r}", _calls(load_function(operator, own)), own))
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise UsageError(
            f"{operator.name} has no baseline {unknown[0]!r}: expected some of {', '.join(known)}; any function can be"
            " given by --impl"
        )
    wanted = [known[name] for name in asked] or [baseline for baseline in known.values() if own.device in baseline.on]
    return found + [
        Contender(baseline.name, baseline.about, baseline.build, dense=baseline.dense) for baseline in wanted
    ]


def _short(name: str, among: Sequence[str]) -> str:
    """The function's own name, if it is unique."""
    last = name.rpartition(":")[2]
    others = [other.rpartition(":")[2] for other in among if other != name]
    return name if last in (OURS, *others) else last


def _calls(function: Callable[..., Any]) -> Callable[[Problem, Tensors], Call]:
    """Calls of a function with the operator's signature."""

    def build(problem: Problem, tensors: Tensors) -> Call:
        leaves = floating_leaves(tensors) if problem.differentiable else tensors

        def run() -> list[torch.Tensor]:
            return flat_outputs(function(**problem.arguments(leaves), **problem.options()))

        return Call(run, [x for x in leaves.values() if x.requires_grad])

    return build


def verify_case(
    run: Callable[[Check], Result],
    operator: Operator,
    implementation: Implementation,
    problem: Problem,
    dtype: str,
    gradients: bool,
) -> Verified:
    """Verify's result for an implementation on a problem, or on a shorter one of its kind if the truth does not fit."""
    checked = problem
    while _scores(checked) > MOST_SCORES[implementation.device]:
        checked = shorter(checked)
    check = Check(operator.name, implementation, written(checked), dtype, Settings(gradients=gradients))
    result = run(check)
    failed = [c.name for c in result.comparisons if not c.passed]
    words = [
        ", ".join(result.statuses),
        f"({', '.join(failed)})" if failed else "",
        *(finding.message for finding in result.findings),
    ]
    why = "" if result.passed else " ".join(word for word in words if word)
    return Verified(check.case, checked == problem, result.passed, why, "" if result.passed else check.command())


def written(problem: Problem) -> str:
    """The problem as --config takes it, even if all of it is defaults."""
    return str(problem) or f"D={vars(problem)['D']}"


def _scores(problem: Problem) -> int:
    sizes = vars(problem)
    batch = 1 if sizes.get("lengths") else sizes.get("B", 1)
    return int(batch * sizes.get("H", 1) * problem.scores())


def shorter(problem: Problem) -> Problem:
    """Half the batch if it can be halved; else half the heads, down to two KV heads; else half the tokens of every
    sequence.
    """
    sizes = vars(problem)
    heads = ("H", "Hk") if sizes.get("Hk") else ("H",)
    if sizes.get("B", 1) > 1 and not sizes.get("lengths"):
        return _halved(problem, "B")
    if all(sizes[name] % 2 == 0 for name in heads) and sizes[heads[-1]] > 2:
        return _halved(problem, *heads)
    return _halved(problem, *(("lengths", "lengths_k", "targets") if sizes.get("lengths") else ("T", "Tk")))


def _halved(problem: Problem, *names: str) -> Problem:
    sizes = {name: vars(problem)[name] for name in names if vars(problem).get(name)}
    return dataclasses.replace(
        problem, **{name: tuple(n // 2 for n in x) if isinstance(x, tuple) else x // 2 for name, x in sizes.items()}
    )
