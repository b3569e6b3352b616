"""Ways in which a function is used besides one forward and one backward: each must give what the ordinary use gives.

Ordinary is what every other check does: all inputs require grad, all outputs are requested, memory is fresh.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch

from tilewise.verify.attempt import Attempt, are_within, differing
from tilewise.verify.implementation import Incoming, copies, declined, floating, gradients_of, leaves_of, outputs_of
from tilewise.verify.result import FAILURE, NOT_JUDGED, NOTE, WARNING, Finding
from tilewise.verify.suite import Problem, Tensors, only_sequence, sequences

Results = dict[str, torch.Tensor | None]


class Subject(Protocol):
    """A function on one problem in one dtype, as run.py has it."""

    problem: Problem
    dtype: torch.dtype
    # Without the arguments `returning`, which request optional outputs; the function may lack some of those.
    bare: Callable[..., Any]
    returning: dict[str, Any]
    may_lack: tuple[str, ...]
    incoming: Incoming | None

    def inputs(self, around: float, contiguous: bool = False, guarded: bool = True) -> Tensors:
        """Its inputs in memory of their own."""

    def attempt(self, inputs: Tensors, run: Callable[[], Results], guarded: bool = True) -> Attempt:
        """What `run` gives, watched."""

    def others(self) -> tuple[Tensors, Incoming | None]:
        """Inputs of the same shapes and other values, offsets too where they can differ."""


class Pair(NamedTuple):
    """What a use must give, and what it gave; `what` says how it was used.

    Where rounding is not the function's own it may differ by what is `allowed`, by name.
    """

    what: str
    expected: Attempt
    actual: Attempt
    allowed: dict[str, float] | None = None


class Ordinary:
    """The ordinary use of a subject, which other uses are compared with.

    What it gave is in `first`; `allowed` is by how much results may differ by the criterion, where the function does
    not repeat itself bit for bit.
    """

    def __init__(self, subject: Subject, first: Attempt, allowed: dict[str, float]) -> None:
        self.subject, self.first, self.allowed = subject, first, allowed
        self.function = partial(subject.bare, **subject.returning)
        again = self.on(subject.inputs(torch.nan), subject.incoming)
        self.repeats = not differing(first, again)
        self._other: Attempt | None = None

    def other(self) -> Attempt:
        """The ordinary use of the other values."""
        self._other = self._other or self.on(*self.subject.others())
        return self._other

    def on(self, inputs: Tensors, incoming: Incoming | None, guarded: bool = True) -> Attempt:
        """The ordinary use of these inputs."""
        return self.subject.attempt(inputs, lambda: self.evaluate(self.leaves(inputs), incoming), guarded)

    def leaves(self, inputs: Tensors) -> Tensors:
        """All floating inputs require grad, where gradients are checked."""
        return leaves_of(inputs, floating(inputs) if self.subject.incoming else ())

    def forward(self, leaves: Tensors) -> Tensors:
        """The outputs, with their graph."""
        return outputs_of(self.subject.problem, self.function, leaves, self.subject.may_lack)

    def backward(self, outputs: Tensors, leaves: Tensors, incoming: Incoming | None, retain: bool = False) -> Results:
        """Gradients of the leaves that require one."""
        subject = self.subject
        return gradients_of(subject.problem, outputs, leaves, subject.dtype, incoming, retain) if incoming else {}

    def evaluate(self, leaves: Tensors, incoming: Incoming | None) -> Results:
        """Outputs and gradients."""
        outputs = self.forward(leaves)
        return copies(outputs) | self.backward(outputs, leaves, incoming)

    def judge(self, one: Pair, external: bool) -> tuple[str, str]:
        """What differs, if that is a finding, and how severe it is.

        Other kernels may serve another use, and round in another way: of someone else's function that is a warning.
        """
        if one.expected.findings:
            # What it is compared with is an ordinary use of other values.
            return f"{one.what}: {'; '.join(finding.message for finding in one.expected.findings)}", FAILURE
        found = differing(one.expected, one.actual)
        rounding = bool(found) and are_within(one.expected, one.actual, one.allowed or self.allowed)
        if rounding and (one.allowed or not self.repeats):
            return "", FAILURE
        return found and f"{one.what}: {found}", WARNING if rounding and external else FAILURE


def _only(attempt: Attempt, names: Collection[str]) -> Attempt:
    return Attempt({name: x for name, x in attempt.results.items() if name in names}, attempt.findings)


def _without_gradients(use: Ordinary) -> Iterator[Pair]:
    ways: tuple[tuple[str, Callable[[], AbstractContextManager[Any]], bool], ...] = (
        ("no input requires grad", nullcontext, False),
        ("under torch.no_grad", torch.no_grad, True),
        ("under torch.inference_mode", torch.inference_mode, True),
    )
    for what, mode, required in ways:
        inputs = use.subject.inputs(torch.nan)
        leaves = use.leaves(inputs) if required else leaves_of(inputs, ())

        def run(leaves: Tensors = leaves, mode: Callable[[], AbstractContextManager[Any]] = mode) -> Results:
            with mode():
                return copies(use.forward(leaves))

        problem = use.subject.problem
        expected = _only(use.first, (*problem.outputs, *problem.updates))
        yield Pair(what, expected, use.subject.attempt(inputs, run))


def _without_optional_outputs(use: Ordinary) -> Iterator[Pair]:
    subject = use.subject
    problem = subject.problem
    optional = [name for name in problem.outputs if name in (*problem.exact, *problem.choices)]
    if not subject.returning:
        return

    def evaluate(function: Callable[..., Any], leaves: Tensors) -> Results:
        outputs = outputs_of(subject.problem, function, leaves, optional)
        needed = {name: x for name, x in outputs.items() if name not in optional}
        return copies(needed) | use.backward(needed, leaves, subject.incoming)

    def attempt(function: Callable[..., Any]) -> Attempt:
        inputs = subject.inputs(torch.nan)
        return subject.attempt(inputs, partial(evaluate, function, use.leaves(inputs)))

    bare = partial(subject.bare, **declined(subject.bare, subject.returning))
    yield Pair(f"without {', '.join(subject.returning)}", attempt(use.function), attempt(bare))


def _some_inputs(use: Ordinary) -> Iterator[Pair]:
    names = floating(use.subject.inputs(torch.nan))
    if use.subject.incoming is None or len(names) < 2:
        return
    for wanted in _each_alone_and_each_frozen(names):
        inputs = use.subject.inputs(torch.nan)
        leaves = leaves_of(inputs, wanted)
        actual = use.subject.attempt(inputs, partial(use.evaluate, leaves, use.subject.incoming))
        expected = _only(use.first, (*use.subject.problem.outputs, *(f"d{name}" for name in wanted)))
        yield Pair(f"only {', '.join(wanted)} require grad", expected, actual)


def _each_alone_and_each_frozen(names: list[str]) -> list[list[str]]:
    alone = [[name] for name in names]
    return alone + [others for name in names if (others := [one for one in names if one != name]) not in alone]


def _second_backward(use: Ordinary) -> Iterator[Pair]:
    subject, incoming = use.subject, use.subject.incoming
    if incoming is None:
        return
    inputs = subject.inputs(torch.nan)
    leaves = use.leaves(inputs)
    second: Results = {}

    def opposite(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return -incoming(name, shape)

    def run() -> Results:
        outputs = use.forward(leaves)
        first = use.backward(outputs, leaves, incoming, retain=True)
        # Exact in every format: an opposite gradient makes every intermediate the opposite.
        second.update(use.backward(outputs, leaves, opposite))
        return copies(outputs) | {name: x if x is None else x.clone() for name, x in first.items()}

    first = subject.attempt(inputs, run)
    yield Pair("the first of two backwards", use.first, first)
    if first.findings:
        return
    # Zeros have a sign too: added, they lose it.
    negated = Attempt({name: x if x is None else 0 - x for name, x in second.items()})
    expected = _only(use.first, second)
    zeros = {name: x if x is None else x + 0 for name, x in expected.results.items()}
    yield Pair("the second, of the opposite gradient", Attempt(zeros), negated)


def _two_calls(use: Ordinary) -> Iterator[Pair]:
    subject = use.subject
    inputs, (others, other_incoming) = subject.inputs(torch.nan), subject.others()
    leaves, other_leaves = use.leaves(inputs), use.leaves(others)
    second: Results = {}

    def run() -> Results:
        outputs = use.forward(leaves)
        other_outputs = use.forward(other_leaves)
        results = copies(outputs) | use.backward(outputs, leaves, subject.incoming)
        second.update(copies(other_outputs))
        second.update(use.backward(other_outputs, other_leaves, other_incoming))
        return results

    second_only = {f"the second {name}": x for name, x in others.items() if name not in subject.problem.updates}
    first = subject.attempt({**inputs, **second_only}, run)
    yield Pair("the first of two calls, both forwards before its backward", use.first, first)
    if not first.findings:
        yield Pair("the second of the two", use.other(), Attempt(second))


def _same_tensor(use: Ordinary) -> Iterator[Pair]:
    subject = use.subject
    inputs = subject.inputs(torch.nan)
    groups = _alike({name: x for name, x in inputs.items() if name not in subject.problem.updates})
    if not groups:
        return
    # The same values in several tensors, and then in one.
    apart, together = subject.inputs(torch.nan), subject.inputs(torch.nan)
    for first, *others in groups:
        apart |= {name: subject.inputs(torch.nan)[first] for name in others}
        together |= dict.fromkeys(others, together[first])
    expected = use.on(apart, subject.incoming)
    results, allowed = dict(expected.results), dict(use.allowed)
    for group in groups:
        names = [f"d{name}" for name in group if f"d{name}" in results]
        parts = [x for name in names if (x := results[name]) is not None]
        # autograd adds gradients up, which rounds.
        results |= dict.fromkeys(names, sum(parts, torch.zeros(())) if parts else None)
        allowed |= dict.fromkeys(names, sum(allowed.get(name, 0.0) for name in names))
    what = "; ".join(f"{', '.join(group)} are one tensor" for group in groups)
    yield Pair(what, Attempt(results, expected.findings), use.on(together, subject.incoming), allowed)


def _alike(inputs: Tensors) -> list[list[str]]:
    """The floating inputs of one shape, where there are several."""
    shapes: dict[torch.Size, list[str]] = {}
    for name in floating(inputs):
        shapes.setdefault(inputs[name].shape, []).append(name)
    return [names for names in shapes.values() if len(names) > 1]


def _same_memory(use: Ordinary) -> Iterator[Pair]:
    subject = use.subject
    inputs = subject.inputs(torch.nan)
    old = {name: x.clone() for name, x in inputs.items()}
    others, other_incoming = subject.others()
    use.on(inputs, subject.incoming)
    _overwrite(inputs, others)
    yield Pair("other values in the same memory", use.other(), use.on(inputs, other_incoming))
    _overwrite(inputs, old)
    yield Pair("the old values in it again", use.first, use.on(inputs, subject.incoming))


def _overwrite(inputs: Tensors, values: Tensors) -> None:
    """As a kernel writes: torch's version counters do not see it."""
    for name, x in inputs.items():
        alias = torch.tensor([], dtype=x.dtype, device=x.device).set_(
            x.untyped_storage(), x.storage_offset(), x.shape, x.stride()
        )
        once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())
        alias[once].copy_(values[name][once])


def _plain_memory(use: Ordinary) -> Iterator[Pair]:
    inputs = use.subject.inputs(torch.nan, guarded=False)
    actual = use.on(inputs, use.subject.incoming, guarded=False)
    yield Pair("in ordinary memory, without guards", use.first, actual)


def _invariance(use: Ordinary) -> Iterator[Pair]:
    subject = use.subject
    problem, inputs = subject.problem, subject.inputs(torch.nan)
    first = {name: x for name in problem.outputs if (x := use.first.results.get(name)) is not None}
    if not problem.invariant:
        return

    def outputs(calls: tuple[Tensors, ...]) -> Attempt:
        """What the last of them gives."""

        def run() -> Results:
            made = [use.forward(use.leaves(one)) for one in calls]
            return copies({name: made[-1][name] for name in first})

        return subject.attempt(calls[-1], run)

    for b in range(sequences(problem, inputs)):
        mine = problem.alone(subject.inputs(torch.nan), b)
        found = outputs((mine,))
        results = {name: x for name, x in found.results.items() if x is not None}
        actual = Attempt(dict(only_sequence(problem, results, mine, 0)), found.findings)
        yield Pair(f"sequence {b} alone", Attempt(dict(only_sequence(problem, first, inputs, b))), actual)
    for what, calls in problem.elsewhere(inputs):
        yield Pair(what, Attempt(dict(first)), outputs(calls))


class Use(NamedTuple):
    """A way of using a function: the status of a finding, what it is in a line, its runs, and why there may be none."""

    status: str
    about: str
    compare: Callable[[Ordinary], Iterator[Pair]]
    nothing: str = ""


USES = {
    "no-grad": Use(
        "wrong without gradients",
        "no input requires grad; under no_grad; under inference_mode",
        _without_gradients,
    ),
    "fewer-outputs": Use(
        "wrong without optional outputs",
        "optional outputs are not requested",
        _without_optional_outputs,
        "there are no optional outputs",
    ),
    "some-inputs": Use(
        "wrong where inputs are frozen",
        "only some inputs require grad",
        _some_inputs,
        "fewer than two gradients are checked",
    ),
    "second-backward": Use(
        "wrong in a second backward",
        "backward twice, with retain_graph",
        _second_backward,
        "no gradients are checked",
    ),
    "two-calls": Use("calls share state", "two forwards, then both backwards", _two_calls),
    "same-tensor": Use(
        "wrong where inputs are one tensor",
        "all inputs of one shape are the same tensor",
        _same_tensor,
        "no two inputs have one shape",
    ),
    "same-memory": Use(
        "remembers old values", "other values in the same memory, then the old ones again", _same_memory
    ),
    "plain-memory": Use("wrong in plain memory", "memory without guards around it", _plain_memory),
    "invariance": Use(
        "depends on what is around",
        "each sequence alone; caches of more room, other pages, keys that came in two calls",
        _invariance,
        "a sequence's results are not promised to be the same in another batch",
    ),
}


def applies(name: str, problem: Problem, gradients: bool) -> bool:
    """Whether the use of that name has anything to try, as far as that is known before a run."""
    if name == "fewer-outputs":
        return bool(problem.returning)
    if name == "invariance":
        return problem.invariant
    return (gradients and problem.differentiable) or name not in ("some-inputs", "second-backward")


def find(name: str, ordinary: Ordinary, external: bool) -> list[Finding]:
    """What is wrong with the use of that name."""
    use = USES[name]
    judged = [ordinary.judge(pair, external) for pair in use.compare(ordinary)]
    if not judged:
        return [Finding(NOT_JUDGED, f"{name}: {use.nothing}, not judged", NOTE)]
    return [Finding(use.status, message, severity) for message, severity in judged if message]
