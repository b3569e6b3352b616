"""One case in one dtype: the function under test against fp64 truth and eager torch in the same precision, all with
gradients.
"""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from tilewise import interpreter
from tilewise.verify import uses
from tilewise.verify.attempt import (
    Attempt,
    are_within,
    differing,
    error_finding,
    gpu_answers,
    memory_of,
    same_bits,
    wrong_update,
)
from tilewise.verify.compare import NON_FINITE, UNFIT, Comparison, Limits, compare, is_telling, limits_from_eager
from tilewise.verify.eager import ProductsThroughFp32, SlopesRounded
from tilewise.verify.implementation import Incoming, ModifiedError, accepted, evaluate, pinned
from tilewise.verify.result import (
    BATCH_ORDER,
    CHANGES_SETTINGS,
    CHOICE,
    FAILURE,
    MODIFIED,
    NO_GRADIENT,
    NOT_JUDGED,
    NOTE,
    OVERRUN,
    PADDING,
    SCHEDULE,
    STRIDED,
    UNREPEATABLE,
    UNWRITTEN,
    UPDATE,
    WARNING,
    Check,
    Finding,
)
from tilewise.verify.state import State
from tilewise.verify.suite import (
    GUARD,
    RULES,
    Problem,
    Tensors,
    make_fill,
    make_inputs,
    place,
    reverse,
    sequences,
)
from tilewise.verify.watch import Watch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Where kernels are interpreted and every further run is expensive, determinism and independence of the batch order are
# checked in this dtype only.
PROBED_DTYPE = "bf16"


class Single:
    """One case in one dtype."""

    def __init__(
        self, reference: Callable[..., Any], function: Callable[..., Any], problem: Problem, check: Check
    ) -> None:
        self.problem, self.check = problem, check
        self.dtype, self.device = DTYPES[check.dtype], torch.device(check.implementation.device)
        # Others' functions need not return what a backward keeps, in fp32, for itself: the LSE.
        external = check.implementation.external
        self.returning = accepted(function, problem.returning) if external else problem.returning
        self._reference, self.bare, self._function = reference, function, partial(function, **self.returning)
        self.may_lack: tuple[str, ...] = problem.exact if external else ()
        self._lacking = frozenset[str]()
        # Results of eager torch in 16 bits that fp32 took the place of.
        self._hopeless: Tensors = {}
        self._values = make_inputs(problem, check.settings.fill, check.settings.seed)
        self.incoming: Incoming | None = self._incoming if check.settings.gradients and problem.differentiable else None

    @pinned()
    def _incoming(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name in self._lacking:
            return torch.zeros(shape, dtype=torch.float64)
        seed = self.check.settings.seed + 1 + self.problem.outputs.index(name)
        fill = self.check.settings.fill if self.check.settings.fill in RULES else "random"
        return make_fill(fill, seed)(f"d{name}", shape, 1.0)

    @pinned()
    def inputs(self, around: float, contiguous: bool = False, guarded: bool = True) -> Tensors:
        """The inputs as the function gets them, in memory that holds `around` everywhere else."""
        return {
            name: place(x.contiguous() if contiguous else x, self.dtype, self.device, around, GUARD if guarded else 0)
            for name, x in self._values.items()
        }

    def call(self, inputs: Tensors, incoming: Incoming | None) -> dict[str, torch.Tensor | None]:
        """The function's results, and gradients if any arrive."""
        return evaluate(self.problem, self._function, inputs, self.dtype, incoming, self.may_lack)

    def ordinary(self) -> uses.Ordinary | None:
        """Its ordinary use, if that is right."""
        attempt = self.run_once(self.inputs(torch.nan), self.incoming)
        comparisons, findings = self._compare(attempt)
        # What is unfit to be judged can still be compared bit by bit.
        wrong = any(c.failure and c.failure.status != UNFIT for c in comparisons)
        if wrong or any(finding.severity != NOTE for finding in findings):
            return None
        return uses.Ordinary(self, attempt, {c.name: c.allowed for c in comparisons})

    def judge(self) -> tuple[tuple[Comparison, ...], tuple[Finding, ...]]:
        """The tensors' verdicts and other findings."""
        inputs = self.inputs(torch.nan)
        simulated = interpreter.simulated()
        attempt = self.run_once(inputs, self.incoming)
        simulated = interpreter.simulated() - simulated
        comparisons, findings = self._compare(attempt)
        if any(finding.severity != NOTE for finding in findings) or not all(c.passed for c in comparisons):
            # After a kernel error the GPU context is dead: this process is done, and its worker is replaced.
            return comparisons, (
                *findings,
                *(self._causes(comparisons) if self.device.type == "cpu" or gpu_answers() else ()),
            )
        return comparisons, (
            *findings,
            *self._repeats(attempt),
            *(self._schedules(attempt, {c.name: c.allowed for c in comparisons}) if simulated else ()),
            *self._reversed(attempt, inputs, {c.name: c.allowed for c in comparisons}),
        )

    def run_once(self, inputs: Tensors, incoming: Incoming | None, fresh: float = torch.nan) -> Attempt:
        """What one call gives."""
        return self.attempt(inputs, partial(self.call, inputs, incoming), fresh=fresh)

    def attempt(
        self,
        inputs: Tensors,
        run: Callable[[], dict[str, torch.Tensor | None]],
        guarded: bool = True,
        fresh: float = torch.nan,
    ) -> Attempt:
        """What `run` gives, and what it does besides: to the `inputs`, to memory that is not its own, to torch."""
        before = {name: (x.clone(), memory_of(x).clone()) for name, x in inputs.items()}
        with Watch(fresh) if guarded else nullcontext() as watch:
            # Other threads may be verifying too.
            state = State() if threading.current_thread() is threading.main_thread() else None
            try:
                results = run()
                if self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
            except ModifiedError as error:
                return Attempt({}, (Finding(MODIFIED, str(error)),))
            except Exception as error:
                return Attempt({}, (error_finding(error),))
            finally:
                changes = state.restore() if state else []
        findings = [Finding(CHANGES_SETTINGS, change) for change in changes]
        for name, x in inputs.items():
            values, memory = before[name]
            if name in self.problem.updates:
                # What it holds is judged later; what lies around it stays.
                torch.as_strided(memory.view(x.dtype), x.shape, x.stride(), x.storage_offset()).copy_(x)
            elif not same_bits(x, values):
                findings.append(Finding(MODIFIED, f"{name} is not what it was before the call"))
                continue
            if not torch.equal(memory_of(x), memory):
                findings.append(Finding(OVERRUN, f"memory next to {name} was written"))
        overrun = watch.overrun() if watch else ""
        return Attempt(results, (*findings, *((Finding(OVERRUN, overrun),) if overrun else ())))

    @pinned()
    def _compare(self, attempt: Attempt) -> tuple[tuple[Comparison, ...], tuple[Finding, ...]]:
        """Verdicts, and the attempt's findings with those on missing gradients and on choices."""
        if not attempt.results:
            return (), attempt.findings
        findings = list(attempt.findings)
        self._lacking = frozenset(self.problem.outputs) - frozenset(attempt.results)
        findings += [Finding(NOT_JUDGED, f"{name}: not returned, not judged", NOTE) for name in self._lacking]
        inputs = {name: place(x.contiguous(), self.dtype, self.device, 0.0) for name, x in self._values.items()}
        outputs = {name: x for name in self.problem.outputs if (x := attempt.results.get(name)) is not None}
        choices = {name: outputs[name] for name in self.problem.choices}
        for name, choice in choices.items():
            wrong = self.problem.judge_choice(name, choice, inputs, self.dtype)
            findings += [Finding(CHOICE, f"{name}: {wrong}")] if wrong else []
        given = self.problem.given_choice(choices)
        old = {name: inputs[name].clone() for name in self.problem.updates}
        truth, eager = self._truth_and_eager(inputs, given)
        for name, x in old.items():
            actual = attempt.results[name]
            assert actual is not None
            wrong = wrong_update(name, x, actual, eager[name])
            findings += [Finding(UPDATE, wrong)] if wrong else []
        further = self._storage_cost(inputs, given, truth)
        misshapen = any(outputs[name].shape != truth[name].shape for name in outputs)
        comparisons: list[Comparison] = []
        unfit: list[Comparison] = []
        for name, expected in truth.items():
            if name in (*choices, *old) or name in self._lacking or (misshapen and name not in outputs):
                continue
            actual = attempt.results[name]
            if actual is None and not bool(expected.any()):
                actual = torch.zeros_like(expected, dtype=self.dtype)
            if actual is None:
                findings.append(
                    Finding(NO_GRADIENT, f"no gradient reaches {name[1:]} (--no-grad checks outputs alone)")
                )
                continue
            # All-zero results, such as the gradient of a gate without a branch, are no candidates for what another
            # tensor holds by mistake.
            others = {
                other: x
                for other, x in truth.items()
                if other != name and other not in (*choices, *old) and bool(x.any())
            }
            one = self._compare_one(name, actual, truth, eager[name], further.get(name), others)
            (unfit if self._is_unfit_by_design(one, actual, expected) else comparisons).append(one)
        if not any(one.name in self.problem.outputs for one in comparisons):
            # Then nothing was judged.
            return (*comparisons, *unfit), tuple(findings)
        findings += [Finding(NOT_JUDGED, f"{one.name}: unfit in {self.check.dtype}, not judged", NOTE) for one in unfit]
        return tuple(comparisons), tuple(findings)

    def _is_unfit_by_design(self, one: Comparison, actual: torch.Tensor, expected: torch.Tensor) -> bool:
        """Raw numbers overflow, or rounding outweighs the result, as where values are alike; without the LSE's gradient
        little is left of those of saturated scores. What is beyond even the limit that says nothing, or not finite, is
        wrong all the same.
        """
        by_design = bool(self._lacking) or self.check.settings.fill not in ("random", "range")
        if not by_design or one.failure is None or one.failure.status != UNFIT:
            return False
        overflows = bool((expected[expected.isfinite()].abs() > torch.finfo(actual.dtype).max).any())
        return overflows or one.share <= 1

    def _compare_one(
        self,
        name: str,
        actual: torch.Tensor,
        truth: Tensors,
        eager: torch.Tensor,
        further: torch.Tensor | None,
        others: Tensors,
    ) -> Comparison:
        gradient = name not in self.problem.outputs
        axes = self.problem.axes()[name[1:] if gradient else name]
        tolerances, alike = self.check.settings.tolerances(), self.check.settings.fill == "constant"

        def judge(eager: torch.Tensor) -> Comparison:
            if tolerances:
                limits = Limits(rtol=tolerances[0], atol=tolerances[1])
            else:
                floor = self.problem.floor(name, truth, self._values)
                limits = limits_from_eager(
                    truth[name], eager, gradient=gradient, floor=floor, further=further, alike=alike
                )
            return compare(name, actual, truth[name], eager.dtype, limits, axes, others)

        one = judge(eager)
        if one.passed or name not in self._hopeless:
            return one
        # Nobody has chosen this problem: what 16 bits cost eager torch may be more than fp32 tells.
        narrow = judge(self._hopeless[name])
        return narrow if narrow.share <= 1 else one

    def _truth_and_eager(self, inputs: Tensors, given: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors]:
        def results(inputs: Tensors, **further: Any) -> Tensors:
            found = evaluate(self.problem, self._reference, inputs, self.dtype, self.incoming, (), **given, **further)
            return {name: inputs[name[1:]] * 0 if x is None else x for name, x in found.items()}

        truth = results({name: x.double() if x.is_floating_point() else x for name, x in inputs.items()})
        self._hopeless = {}
        with ProductsThroughFp32(), SlopesRounded():
            eager = results(inputs, compute_dtype=self.dtype)
        if self.dtype != torch.float32:
            with SlopesRounded():
                wide = results(inputs, compute_dtype=torch.float32)
            for name, x in eager.items():
                if name in (*self.problem.choices, *self.problem.updates):
                    continue
                # fp32 results are held to fp32's error; and where 16 bits lose everything on the way, fp32 tells what
                # rounding the result costs.
                overflows = not bool(x.isfinite()[truth[name].isfinite()].all())
                if name in self.problem.exact or overflows:
                    eager[name] = wide[name]
                elif not self._tells(name, truth[name], x):
                    eager[name] = wide[name]
                    if self.check.written_out:
                        self._hopeless[name] = x
        return truth, eager

    def _storage_cost(self, inputs: Tensors, given: dict[str, torch.Tensor], truth: Tensors) -> Tensors:
        """By gradient: the error of starting from stored outputs."""
        if self.incoming is None:
            return {}
        incoming = {
            name: self._incoming(name, tuple(truth[name].shape)).to(self.device) for name in self.problem.outputs
        }
        cost = self.problem.storage_cost(truth, incoming, self.dtype)
        if cost is None:
            return {}
        wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
        found = evaluate(self.problem, self._reference, wide, torch.float64, lambda name, _: cost[name], (), **given)
        return {name: x for name, x in found.items() if x is not None and name not in self.problem.outputs}

    def _tells(self, name: str, truth: torch.Tensor, eager: torch.Tensor) -> bool:
        return is_telling(truth, limits_from_eager(truth, eager, gradient=name not in self.problem.outputs))

    def _passes(self, attempt: Attempt, status: str = "") -> bool:
        """Whether `status`, or every failure if none is given, is gone."""
        comparisons, findings = self._compare(attempt)
        if status:
            return bool(comparisons) and not any(c.failure and c.failure.status == status for c in comparisons)
        return all(finding.severity == NOTE for finding in findings) and all(c.passed for c in comparisons)

    def _causes(self, comparisons: tuple[Comparison, ...]) -> list[Finding]:
        """Tries out why it failed: reruns with harmless memory around the inputs, harmless fresh memory, contiguous
        inputs.
        """
        findings = []
        if any(c.failure and c.failure.status == NON_FINITE for c in comparisons):
            if self._passes(self.run_once(self.inputs(0.0), self.incoming), NON_FINITE):
                findings.append(
                    Finding(
                        PADDING,
                        "with zeros in place of NaN around the inputs no result is NaN: memory outside them is read and"
                        " used",
                    )
                )
            if self._passes(self.run_once(self.inputs(torch.nan), self.incoming, fresh=0.0), NON_FINITE):
                findings.append(
                    Finding(
                        UNWRITTEN,
                        "with zeros in place of NaN in fresh memory no result is NaN: elements are never written",
                    )
                )
        strided = not all(x.is_contiguous() for x in self._values.values())
        if strided and self._passes(self.run_once(self.inputs(torch.nan, contiguous=True), self.incoming)):
            findings.append(Finding(STRIDED, "the same values in contiguous tensors pass"))
        return findings

    def _repeats(self, first: Attempt) -> list[Finding]:
        """Further runs on the same inputs must give the same bits."""
        probed = not self.check.implementation.interpreted or (
            self.check.dtype == PROBED_DTYPE and self.check.case == "small"
        )
        repeat = self.check.settings.repeat or (2 if probed else 1)
        for _ in range(repeat - 1):
            found = differing(first, self.run_once(self.inputs(torch.nan), self.incoming))
            if found:
                return [Finding(UNREPEATABLE, found)]
        return []

    def _schedules(self, first: Attempt, allowed: dict[str, float]) -> list[Finding]:
        """Under other interleavings simulated kernels must give the same bits; others' may add up in another order."""
        for seed in self.check.settings.schedules:
            with interpreter.scheduled(seed):
                again = self.run_once(self.inputs(torch.nan), self.incoming)
            found = differing(first, again)
            if found:
                rounding = self.check.implementation.external and are_within(first, again, allowed)
                message = f"under --schedule {seed}: {found}"
                return [Finding(SCHEDULE, message, WARNING if rounding else FAILURE)]
        return []

    def _reversed(self, first: Attempt, inputs: Tensors, allowed: dict[str, float]) -> list[Finding]:
        """The batch in reverse order must give the same bits, in reverse order.

        torch's own matmuls on a CPU may differ in the last bit with the memory address: for others' implementations
        that is a warning.
        """
        if sequences(self.problem, inputs) < 2 or (
            self.check.implementation.interpreted and self.check.dtype != PROBED_DTYPE
        ):
            return []
        mirrored, incoming = self.reversed()
        again = self.run_once(mirrored, incoming)
        results = {name: x for name, x in again.results.items() if x is not None}
        packed = {name: mirrored[name] for name in self.problem.offsets().values()}
        back = Attempt({**again.results, **reverse(self.problem, results, packed)}, again.findings)
        found = differing(first, back, skip=[f"d{name}" for name in self._values if self._is_shared(name)])
        rounding = not again.findings and are_within(first, back, allowed)
        if not found or (rounding and self.check.implementation.ranks):
            # Over ranks the batch shares tensors whose last elements torch rounds another way: no bits are promised.
            return []
        return [Finding(BATCH_ORDER, found, WARNING if rounding and self.check.implementation.external else FAILURE)]

    def _is_shared(self, name: str) -> bool:
        """Whether sequences share an input's elements: its gradient is then a sum over them, in their order."""
        by_sequence = "B" in self.problem.axes().get(name, "") or name in self.problem.offsets()
        return 0 in self._values[name].stride() or not by_sequence

    def others(self) -> tuple[Tensors, Incoming | None]:
        """Inputs of the same shapes and other values, and what arrives then: the batch in reverse order, so that
        offsets differ too; where that gives the same values, others by the next seed.
        """
        mirrored, incoming = self.reversed()
        floating = [name for name, x in self._values.items() if x.is_floating_point() and x.numel()]
        if any(not same_bits(mirrored[name], self._values[name].to(mirrored[name])) for name in floating):
            return mirrored, incoming
        inputs = self.inputs(torch.nan)
        for name, x in make_inputs(self.problem, "random", self.check.settings.seed + 1).items():
            if name in floating:
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in inputs[name].stride())
                inputs[name][once].copy_(x[once])
        return inputs, self.incoming

    def reversed(self) -> tuple[Tensors, Incoming | None]:
        """The inputs with the sequences in reverse order, and what arrives then."""
        packed = {name: self._values[name] for name in self.problem.offsets().values()}
        mirrored = self.inputs(torch.nan)
        for name, x in reverse(self.problem, self._values, packed).items():
            if mirrored[name].is_floating_point():
                # Strides stay as they were: an input expanded over the batch is the same in any order.
                once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in mirrored[name].stride())
                mirrored[name][once].copy_(x[once])
            else:
                mirrored[name] = x.to(self.device)

        def incoming(name: str, shape: tuple[int, ...]) -> torch.Tensor:
            return reverse(self.problem, {name: self._incoming(name, shape)}, packed)[name]

        return mirrored, incoming if self.incoming else None
