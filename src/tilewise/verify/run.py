"""Runs cases: the truth in fp64, eager torch in the same precision, and the function under test, all with gradients."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from tilewise.ops._host.backend import interpreting
from tilewise.registry import Operator
from tilewise.verify.case import Case
from tilewise.verify.compare import Comparison, compare

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SEED = 42
# Interpreted kernels cost Python time: the larger cases are left to the CPU backend, and to a GPU.
NOT_INTERPRETED = ("large",)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Result:
    """One case of one backend in one dtype."""

    operator: str
    case: str
    dtype: str
    backend: str
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        """Whether every tensor passed."""
        return all(comparison.passed for comparison in self.comparisons)

    @property
    def worst(self) -> Comparison:
        """The first tensor that failed, else the one nearest to its limit."""
        failed = [comparison for comparison in self.comparisons if not comparison.passed]
        return failed[0] if failed else max(self.comparisons, key=lambda c: c.max_diff / c.allowed if c.allowed else 0.0)


def evaluate(case: Case, function: Callable[..., Any], inputs: Tensors, dtype: torch.dtype, seed: int) -> Tensors:
    """Outputs and gradients of `function` on `inputs`, by name, under random incoming gradients for every output.

    The incoming gradients are rounded to `dtype` (fp32 for the case's exact outputs) whatever the precision of `inputs`: all runs see the same.
    """
    leaves = {name: x.detach().requires_grad_(x.is_floating_point()) for name, x in inputs.items()}
    outputs = dict(zip(case.outputs, function(**leaves, **case.options), strict=True))
    generator = torch.Generator().manual_seed(seed + 1)
    incoming = [
        torch.randn(x.shape, generator=generator).to(torch.float32 if name in case.exact else dtype).to(x.device, x.dtype)
        for name, x in outputs.items()
    ]
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    gradients = torch.autograd.grad(list(outputs.values()), [leaves[name] for name in wanted], incoming)
    return {name: x.detach() for name, x in outputs.items()} | {f"d{name}": grad for name, grad in zip(wanted, gradients, strict=True)}


def verify_case(
    operator: Operator, case: Case, function: Callable[..., Any], dtype: torch.dtype, device: torch.device, seed: int = SEED
) -> tuple[Comparison, ...]:
    """Compare `function`, called as the operator's public function is, with the operator's reference on one case."""
    inputs = case.inputs(seed, dtype, device)
    reference = operator.load("reference")
    wide = {name: x.double() if x.is_floating_point() else x for name, x in inputs.items()}
    truth = evaluate(case, reference, wide, dtype, seed)
    eager = evaluate(case, partial(reference, compute_dtype=dtype), inputs, dtype, seed)
    if dtype != torch.float32:
        # What is kept in fp32 is held to fp32's error.
        exact = evaluate(case, partial(reference, compute_dtype=torch.float32), inputs, dtype, seed)
        eager |= {name: exact[name] for name in case.exact}
    actual = evaluate(case, function, inputs, dtype, seed)
    return tuple(
        compare(name, actual[name], truth[name], eager[name], gradient=name not in case.outputs, floor=_floor(case, name, truth)) for name in truth
    )


def _floor(case: Case, name: str, truth: Tensors) -> float:
    """The relative error that the contract itself costs: gradients start from an LSE that is kept in fp32."""
    if not case.huge_lse or name in case.outputs:
        return 0.0
    lse = truth["lse"]
    return torch.finfo(torch.float32).eps * lse[lse.isfinite()].abs().max().item()


def backends() -> Iterator[tuple[str, torch.device]]:
    """The backends that run here beside the reference, each with its device."""
    if interpreting():
        yield "triton", torch.device("cpu")
    elif torch.cuda.is_available():
        yield "triton", torch.device("cuda")
    yield "cpu", torch.device("cpu")


def verify_operator(operator: Operator, seed: int = SEED) -> Iterator[Result]:
    """The standard check of one operator: every backend that runs here, every case, every dtype."""
    public = operator.load("function")
    for backend, device in backends():
        interpreted = backend == "triton" and device.type == "cpu"
        function = partial(public, return_lse=True, backend=backend)
        for case in operator.load("cases"):
            if interpreted and case.name in NOT_INTERPRETED:
                continue
            for dtype_name, dtype in DTYPES.items():
                comparisons = verify_case(operator, case, function, dtype, device, seed)
                yield Result(operator.name, case.name, dtype_name, "triton (interpreted)" if interpreted else backend, comparisons)
