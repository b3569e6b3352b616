"""Times implementations on one case, taking turns."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from tilewise import registry
from tilewise.bench.baseline import Call, CannotRunError
from tilewise.bench.contender import OURS, Contender
from tilewise.bench.operators import Operator
from tilewise.bench.result import Row, Verified
from tilewise.bench.timing import Clock, in_turns, runs_that_fit, summarise
from tilewise.bench.verified import written
from tilewise.verify.evaluate import evaluate
from tilewise.verify.memory import peak_memory
from tilewise.verify.problem import Problem, Tensors
from tilewise.verify.suite import Case

# Inputs of fewer bytes than this are made twice and taken in rotation.
ROTATED_BYTES = 256 << 20
# How far two right implementations may be apart, of the output's norm.
MOST_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SEED = 42


@dataclass(frozen=True)
class Work:
    """What an operator's definition does on a case: pairs of a query and a key, channels of both, bytes of inputs and outputs."""

    pairs: int
    channels: int
    values: int
    inputs: int
    outputs: int
    gradients: int

    def operations(self, mode: str, pairs: int | None) -> int:
        """A score and its use forward; backward the score again, and four products more."""
        forward = 2 * (self.channels + self.values)
        backward = 2 * (3 * self.channels + 2 * self.values)
        return (self.pairs if pairs is None else pairs) * {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[mode]

    def bytes(self, mode: str) -> int:
        """Each input read once and each output written once; backward both read, with the gradient that arrives, and gradients written."""
        forward = self.inputs + self.outputs
        backward = forward + self.outputs + self.gradients
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}[mode]


@dataclass
class _Ready:
    """One contender that runs: its calls by mode, one for each set of inputs, and what was measured."""

    contender: Contender
    calls: dict[str, list[Callable[[], object]]]
    pairs: int | None
    counts: dict[str, int] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass
class Bench:
    """One run's choices."""

    operator: registry.Operator
    bench: Operator
    contenders: Sequence[Contender]
    modes: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    warmup: int
    iterations: int | None
    clock: Clock

    def time_case(self, case: Case, verified: dict[str, Verified], refused: set[str], advance: Callable[[], None]) -> Iterator[Row]:
        """A row for each contender and mode; those in `refused` are not timed. `advance` is called once for each contender."""
        problem = case.problem
        reasons: dict[str, str] = {name: f"fails verify: {verified[name].why}; see: {verified[name].command}" for name in refused}
        ready: dict[str, _Ready] = {}
        try:
            sets = self._input_sets(problem)
            work, expected = self._work(problem, sets[0])
        except Exception as error:
            work, expected, sets = Work(0, 0, 0, 0, 0, 0), None, []
            reasons |= {contender.name: f"the case itself does not run: {_reason(error)}" for contender in self.contenders}
        for contender in self.contenders:
            if contender.name not in reasons:
                try:
                    ready[contender.name] = self._prepare(contender, problem, sets, expected)
                except Exception as error:
                    reasons[contender.name] = _reason(error)
            advance()
        for mode in self.modes:
            self._take_turns(mode, ready, reasons)
        for mode in self.modes:
            for contender in self.contenders:
                name = contender.name
                yield self._row(case, mode, name, ready.get(name), reasons.get(name, ""), work, verified.get(name))
        ready.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _input_sets(self, problem: Problem) -> list[Tensors]:
        """One set, or two where they are small."""
        generator = torch.Generator(self.device).manual_seed(SEED)

        def fill(_name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype) * size

        def make() -> Tensors:
            return {name: x.to(self.device) for name, x in problem.tensors(fill).items()}

        first = make()
        return [first] if _bytes(first) > ROTATED_BYTES else [first, make()]

    def _work(self, problem: Problem, tensors: Tensors) -> tuple[Work, torch.Tensor]:
        """What the definition does, counted on tilewise's own outputs, of which the first is also what others must agree with."""
        ours = next(contender for contender in self.contenders if contender.name == OURS)
        assert ours.implementation is not None
        function = partial(self.operator.load("function"), backend=ours.implementation.name, **problem.returning)
        with torch.no_grad():
            outputs = {name: x for name, x in evaluate(problem, function, tensors, self.dtype, None).items() if x is not None}
        floating = {name: x for name, x in tensors.items() if x.is_floating_point()}
        sizes = vars(problem)
        work = Work(
            self.bench.pairs(problem, tensors, outputs),
            sizes["D"],
            sizes["Dv"] or sizes["D"],
            _bytes(tensors),
            _bytes(outputs),
            _bytes(floating),
        )
        return work, outputs[problem.outputs[0]]

    def _prepare(self, contender: Contender, problem: Problem, sets: list[Tensors], expected: torch.Tensor | None) -> _Ready:
        """Its calls; a CannotRunError where its output is not the operator's."""
        calls = [contender.build(problem, tensors) for tensors in sets]
        o = calls[0].run()[0]
        if not contender.dense and contender.implementation is None and expected is not None:
            actual = calls[0].lay_out(o.detach())
            apart = ((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()
            if not apart <= MOST_APART[self.dtype]:
                raise CannotRunError(f"computes something else: its output differs from tilewise's by {apart:.1e} of its norm")
        return _Ready(contender, {mode: [_call(call, mode) for call in calls] for mode in self.modes}, calls[0].pairs)

    def _take_turns(self, mode: str, ready: dict[str, _Ready], reasons: dict[str, str]) -> None:
        """Warm up, then time in turns. Who fails has no times in any mode: what it did before may be the cause."""
        for name, one in list(ready.items()):
            try:
                # The first runs compile; the last tells how often there is time for.
                self.clock.run(one.calls[mode], max(1, self.warmup))
                one.memory[mode] = self._memory(one.calls[mode][0])
                one.counts[mode] = runs_that_fit(self.iterations, self.clock.run(one.calls[mode], 1)[0])
            except Exception as error:
                reasons[name] = f"{mode}: {_reason(error)}"
                del ready[name]
        done = dict.fromkeys(ready, 0)
        for turn in range(len(in_turns(1))):
            for name, one in ready.items():
                count = in_turns(one.counts[mode])[turn]
                one.samples.setdefault(mode, []).extend(self.clock.run(one.calls[mode], count, done[name]))
                done[name] += count

    def _memory(self, call: Callable[[], object]) -> tuple[int, int]:
        """Bytes at the peak of one run: what it allocates beyond what was there, and what the allocator holds in all."""
        allocated = peak_memory(call, self.device)
        return allocated, torch.cuda.max_memory_reserved(self.device) if self.device.type == "cuda" else 0

    def _row(self, case: Case, mode: str, name: str, one: _Ready | None, reason: str, work: Work, verified: Verified | None) -> Row:
        lengths = case.problem.tokens()
        batch = 1 if vars(case.problem).get("lengths") else vars(case.problem).get("B", 1)
        row = Row(case.name, written(case.problem), max(lengths, default=0), batch * sum(lengths), mode, name, verified=verified)
        if one is None:
            return replace(row, reason=reason)
        allocated, reserved = one.memory[mode]
        return replace(
            row,
            times=summarise(one.samples[mode]),
            operations=work.operations(mode, one.pairs),
            bytes=work.bytes(mode),
            peak_allocated=allocated,
            peak_reserved=reserved,
        )


def _call(call: Call, mode: str) -> Callable[[], object]:
    """One run in a mode. The backward alone keeps the graph of one forward and runs over it again."""
    if mode == "fwd":
        return call.run
    o = call.run()[0]
    incoming = torch.randn_like(o)
    if mode == "bwd":
        return lambda: torch.autograd.grad(o, call.leaves, incoming, retain_graph=True, allow_unused=True)
    return lambda: torch.autograd.grad(call.run()[0], call.leaves, incoming, allow_unused=True)


def _bytes(tensors: Tensors) -> int:
    return sum(x.numel() * x.element_size() for x in tensors.values())


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, CannotRunError) else f"{type(error).__name__}: {text}"
