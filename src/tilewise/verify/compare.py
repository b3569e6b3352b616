"""Is a tensor right? Judged against fp64 truth, by the error that eager torch makes in the same precision."""

import math
from dataclasses import dataclass

import torch

# How many times eager torch's error an implementation may make.
OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# Roundings in fp32 on the way to a result that eager torch may happen to get exactly (a softmax over one key).
INNER_ROUNDINGS = 4
# On a GPU fp32 products run as three TF32 products. Each operand keeps 21 bits (cut, not rounded: 4 fp32 roundings each), and the product of the
# two rests is dropped (8): 16 a product, and two products stand in a row.
THREE_TF32_ROUNDINGS = 32


@dataclass(frozen=True)
class Comparison:
    """One tensor's verdict, with the statistics of its difference from the truth and what was allowed."""

    name: str
    passed: bool
    problem: str
    max_diff: float
    mean_diff: float
    std_diff: float
    allowed: float

    def line(self) -> str:
        """One line for people."""
        mark = "✓" if self.passed else "✗"
        numbers = f"max {self.max_diff:.2e}  mean {self.mean_diff:.2e}  std {self.std_diff:.2e}  allowed {self.allowed:.2e}"
        return f"{mark} {self.name:<4} {numbers}{'  ' + self.problem if self.problem else ''}"


def compare(name: str, actual: torch.Tensor, truth: torch.Tensor, eager: torch.Tensor, *, gradient: bool = False, floor: float = 0.0) -> Comparison:
    """Compare `actual` with fp64 `truth`, given what `eager` torch makes of it in the same precision, and so in the dtype it must have.

    Its greatest error, and its root mean square error, may be 2 times eager's (3 times for gradients), each with a floor: two roundings of the
    largest value and a few of fp32, or `floor` times that value. Where the truth is exactly zero everywhere, actual must be so too. -inf must stand
    exactly where the truth has it.
    """
    problem = _mismatch(actual, truth, eager.dtype)
    if problem:
        return Comparison(name, False, problem, math.nan, math.nan, math.nan, math.nan)
    finite = truth.isfinite()
    expected = truth[finite].double()
    if expected.numel() == 0:
        return Comparison(name, True, "", 0.0, 0.0, 0.0, 0.0)
    diff = (actual[finite].double() - expected).abs()
    error = (eager[finite].double() - expected).abs()
    # A mean square error is well below half of the worst case.
    floor = max(floor, rounding_floor(actual.dtype, actual.device))
    factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
    allowed = max(factor * error.max().item(), floor * expected.abs().max().item())
    allowed_rms = max(factor * _rms(error), floor / 2 * _rms(expected))
    if diff.max().item() > allowed:
        at = tuple(int(i) for i in finite.nonzero()[diff.argmax()])
        problem = f"worst at {list(at)}: {actual[at].item():.6g}, expected {truth[at].item():.6g}"
    elif _rms(diff) > allowed_rms:
        problem = f"root mean square error {_rms(diff):.2e}, allowed {allowed_rms:.2e}"
    return Comparison(name, not problem, problem, diff.max().item(), diff.mean().item(), diff.std(correction=0).item(), allowed)


def rounding_floor(dtype: torch.dtype, device: torch.device) -> float:
    """The relative error that rounding alone may cost.

    Two roundings in `dtype`, each of half the distance between two numbers: of an operand, and of the result; and those in fp32 on the way.
    """
    inner = INNER_ROUNDINGS + (THREE_TF32_ROUNDINGS if device.type == "cuda" and dtype == torch.float32 else 0)
    return torch.finfo(dtype).eps + inner * torch.finfo(torch.float32).eps


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def _mismatch(actual: torch.Tensor, truth: torch.Tensor, dtype: torch.dtype) -> str:
    """What makes the tensors incomparable, or a value that is not finite where the truth is; empty where nothing does."""
    if actual.shape != truth.shape:
        return f"shape {list(actual.shape)}, expected {list(truth.shape)}"
    if actual.dtype != dtype:
        return f"dtype {actual.dtype}, expected {dtype}"
    bad = (~actual.isfinite() & truth.isfinite()) | (~truth.isfinite() & (actual != truth))
    if bad.any():
        at = tuple(int(i) for i in bad.nonzero()[0])
        return f"{actual[at].item()} at {list(at)}, expected {truth[at].item():.6g} ({int(bad.sum())} of {bad.numel()} elements)"
    return ""
