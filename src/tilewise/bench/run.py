"""Times implementations on one case, in turns, and measures what the machine can do at all."""

import contextlib
import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch

from tilewise.bench.contender import OURS, Call, CannotRunError, Contender, written
from tilewise.bench.dense import Work, bytes_of
from tilewise.bench.result import Ceiling, Row, Verified
from tilewise.bench.timing import TURNS, Clock, Entry, Times
from tilewise.verify.implementation import evaluate
from tilewise.verify.suite import Case, Problem, Tensors, place
from tilewise.verify.watch import peak_memory
from tilewise.workbench.operator import Benchmark, Operator

# Inputs smaller than this, in bytes, are made twice and used in rotation.
ROTATED_BYTES = 256 << 20
# How far two correct implementations may differ, relative to the output's norm.
MOST_APART = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
SEED = 42
# Rows and columns of the product, bytes of the copy, and how often each is tried.
MATRIX = {"cuda": 8192, "cpu": 2048}
COPIED = {"cuda": 1 << 30, "cpu": 256 << 20}
TRIES = 10


class _Measured(NamedTuple):
    times: Times
    allocated: int
    reserved: int


@dataclass
class Bench:
    """One run's choices."""

    operator: Operator
    bench: Benchmark
    contenders: Sequence[Contender]
    modes: Sequence[str]
    dtype: torch.dtype
    device: torch.device
    warmup: int
    iterations: int | None
    clock: Clock

    def time_case(self, case: Case, verified: Mapping[str, Verified]) -> list[Row]:
        """A row for each contender and mode.

        A contender that fails verify is not timed; one that fails once has no times in any mode: one failure may cause
        others.
        """
        problem, work, expected, sets = case.problem, Work(), None, list[Tensors]()
        reasons = {
            name: f"fails verify: {one.why}; see: {one.command}" for name, one in verified.items() if not one.passed
        }
        if "torch._dynamo" in sys.modules:
            # Dynamo compiles a function for a few shapes only, then runs it uncompiled.
            torch._dynamo.reset()
        try:
            sets = self._input_sets(problem)
            work, expected = self._work(problem, sets[0])
        except Exception as error:
            for contender in self.contenders:
                reasons.setdefault(contender.name, f"the case itself does not run: {_reason(error)}")
        # A wrong output is no reference for others; and a choice in lower precision is a different choice.
        expected = None if OURS in reasons or problem.choices else expected
        calls: dict[str, list[Call]] = {}
        for contender in self.contenders:
            if contender.name not in reasons:
                with self._noted(contender.name, calls, reasons):
                    calls[contender.name] = self._prepare(contender, problem, sets, expected)
        measured = {mode: self._take_turns(mode, calls, reasons) for mode in self.modes}
        rows = []
        for mode in self.modes:
            for name in (contender.name for contender in self.contenders):
                row = self._row(case, mode, name, verified.get(name))
                if name in calls:
                    times, allocated, reserved = measured[mode][name]
                    operations = work.operations(mode, calls[name][0].pairs)
                    rows.append(
                        replace(
                            row,
                            times=times,
                            operations=operations,
                            bytes=work.bytes(mode),
                            peak_allocated=allocated,
                            peak_reserved=reserved,
                        )
                    )
                else:
                    rows.append(replace(row, reason=reasons[name]))
        del calls, sets, expected
        self._free()
        return rows

    @contextlib.contextmanager
    def _noted(
        self, name: str, calls: dict[str, list[Call]], reasons: dict[str, str], mode: str = ""
    ) -> Iterator[None]:
        """Inside, an error becomes the reason why a contender has no times."""
        try:
            yield
        except Exception as error:
            reasons[name] = f"{mode}: {_reason(error)}" if mode else _reason(error)
            calls.pop(name, None)
            self._free()

    def _free(self) -> None:
        gc.collect()
        # After a kernel error the GPU context is dead: that has been noted already.
        with contextlib.suppress(RuntimeError):
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _input_sets(self, problem: Problem) -> list[Tensors]:
        """One set of inputs, or two if they are small."""
        generator = torch.Generator(self.device).manual_seed(SEED)

        def fill(_name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype) * size

        def make() -> Tensors:
            # A copy to another device would make strided inputs contiguous.
            tensors = problem.tensors(fill)
            return {
                name: x.to(self.device) if x.is_contiguous() else place(x, self.dtype, self.device, 0.0)
                for name, x in tensors.items()
            }

        first = make()
        return [first] if bytes_of(first) > ROTATED_BYTES else [first, make()]

    def _work(self, problem: Problem, tensors: Tensors) -> tuple[Work, torch.Tensor]:
        """The definition's work, counted on tilewise's own outputs; other implementations must agree with the first of
        them.
        """
        ours = next(contender for contender in self.contenders if contender.name == OURS)
        assert ours.implementation is not None
        function = partial(self.operator.load("function"), backend=ours.implementation.name, **problem.returning)
        with torch.no_grad():
            made = evaluate(problem, function, tensors, self.dtype, None)
            outputs = {name: x for name in problem.outputs if (x := made[name]) is not None}
        pairs, sizes = self.bench.pairs(problem, tensors, outputs), vars(problem)
        floating = {name: x for name, x in tensors.items() if x.is_floating_point()}
        work = Work(
            pairs, sizes["D"], sizes.get("Dv") or sizes["D"], bytes_of(tensors), bytes_of(outputs), bytes_of(floating)
        )
        return work, outputs[problem.outputs[0]]

    def _prepare(
        self, contender: Contender, problem: Problem, sets: list[Tensors], expected: torch.Tensor | None
    ) -> list[Call]:
        """Its calls, one for each set of inputs; a CannotRunError where its output is not the operator's."""
        calls = [contender.build(problem, tensors) for tensors in sets]
        with torch.no_grad():
            actual = calls[0].lay_out(calls[0].run()[0])
        if expected is not None and contender.implementation is None and not contender.dense:
            apart = ((actual.float() - expected.float()).norm() / expected.float().norm().clamp(min=1e-30)).item()
            if not apart <= MOST_APART[self.dtype]:
                raise CannotRunError(
                    f"computes something else: its output differs from tilewise's by {apart:.1e} of its norm"
                )
        return calls

    def _take_turns(self, mode: str, calls: dict[str, list[Call]], reasons: dict[str, str]) -> dict[str, _Measured]:
        """Warm up, then time in turns. Graphs live as long as this."""
        memory: dict[str, tuple[int, int]] = {}
        entries: dict[str, Entry] = {}
        for name in list(calls):
            with self._noted(name, calls, reasons, mode):
                # One graph of a backward may take as much memory as all the rest.
                runs = [_run(call, mode) for call in (calls[name][:1] if mode == "bwd" else calls[name])]
                # The first runs compile.
                self.clock.run(runs, max(1, self.warmup))
                memory[name] = self._memory(runs[0])
                entries[name] = Entry(self.clock, runs, self.iterations)
        for turn in range(TURNS):
            for name in list(calls):
                with self._noted(name, calls, reasons, mode):
                    entries[name].take_turn(turn)
        return {name: _Measured(entries[name].times, *memory[name]) for name in calls}

    def _memory(self, call: Callable[[], object]) -> tuple[int, int]:
        """Peak bytes of one run above what was in use before: allocated, and reserved by the allocator for it."""
        if self.device.type != "cuda":
            return peak_memory(call, self.device), 0
        self._free()
        before = torch.cuda.memory_reserved(self.device)
        return peak_memory(call, self.device), torch.cuda.max_memory_reserved(self.device) - before

    def _row(self, case: Case, mode: str, name: str, verified: Verified | None) -> Row:
        lengths, sizes = case.problem.tokens(), vars(case.problem)
        batch = 1 if sizes.get("lengths") else sizes.get("B", 1)
        return Row(
            case.name,
            written(case.problem),
            max(lengths, default=0),
            batch * sum(lengths),
            mode,
            name,
            verified=verified,
        )


def _run(call: Call, mode: str) -> Callable[[], object]:
    """One run in a mode. The backward alone keeps the autograd graph of one forward and reruns it."""
    if mode == "fwd":
        return call.run
    o = call.run()[0]
    incoming = torch.randn_like(o)
    if mode == "bwd":
        return lambda: torch.autograd.grad(o, call.leaves, incoming, retain_graph=True, allow_unused=True)
    return lambda: torch.autograd.grad(call.run()[0], call.leaves, incoming, allow_unused=True)


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, CannotRunError) else f"{type(error).__name__}: {text}"


def measure_ceiling(device: torch.device, dtype: torch.dtype, clock: Clock) -> Ceiling:
    """On a CPU the matmul is in fp32, in which its backends compute."""
    dtype = dtype if device.type == "cuda" else torch.float32
    size = MATRIX[device.type]
    # Random numbers: zeros draw less power, and run faster.
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.randint(-128, 128, (COPIED[device.type],), dtype=torch.int8, device=device)
    target = torch.empty_like(source)

    def best(call: object) -> float:
        assert callable(call)
        clock.run([call], 3)
        return min(clock.run([call], TRIES))

    return Ceiling(
        2 * size**3 / best(lambda: torch.matmul(a, b, out=product)) / 1e9,
        2 * source.numel() / best(lambda: target.copy_(source)) / 1e6,
        str(dtype).removeprefix("torch."),
    )


@contextlib.contextmanager
def busy(device: torch.device) -> Iterator[None]:
    """Inside, the GPU is kept busy, so that the clocks read are those under load."""
    ended = threading.Event()

    def work() -> None:
        a = torch.randn(MATRIX["cuda"], MATRIX["cuda"], device=device, dtype=torch.bfloat16)
        product = torch.empty_like(a)
        while not ended.is_set():
            torch.matmul(a, a, out=product)
            torch.cuda.synchronize(device)

    worker = threading.Thread(target=work)
    if device.type == "cuda":
        worker.start()
        # Long enough for clocks to rise.
        time.sleep(0.5)
    try:
        yield
    finally:
        ended.set()
        if device.type == "cuda":
            worker.join()
