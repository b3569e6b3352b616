"""One run of a function, and two of them compared bit by bit."""

import traceback
from typing import NamedTuple

import torch

from tilewise._gluon.faults import KernelFaultError
from tilewise.verify.implementation import RankError, WrongReturnError
from tilewise.verify.result import ERROR, Finding


class Attempt(NamedTuple):
    """One run of the function: its results, and other findings."""

    results: dict[str, torch.Tensor | None]
    findings: tuple[Finding, ...] = ()


def error_finding(error: Exception) -> Finding:
    """What the function raised, with its place."""
    if isinstance(error, WrongReturnError | KernelFaultError | RankError):
        return Finding(ERROR, str(error))
    frames = traceback.extract_tb(error.__traceback__)
    place = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    return Finding(ERROR, f"{type(error).__name__}: {error}{place}")


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """The whole allocation that x is in, as bytes."""
    return torch.tensor([], dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether shape, dtype and every bit agree; one NaN is like another, for conversions differ in its bits."""
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: torch.Tensor) -> torch.Tensor:
    """A row of bytes for each element."""
    x = x.masked_fill(x.isnan(), torch.nan) if x.is_floating_point() else x
    return x.contiguous().view(-1, 1).view(torch.uint8)


def wrong_update(name: str, before: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    """What is wrong with an input that is written in place, where any bit is; empty where none is."""
    if same_bits(actual, expected):
        return ""
    old, found, wanted = map(_bits, (before, actual, expected))
    wrong, written = ((x != wanted).any(-1).view(expected.shape) for x in (found, old))
    return (
        f"{name}: {int((wrong & written).sum())} of the {int(written.sum())} elements that change are wrong, and"
        f" {int((wrong & ~written).sum())} that do not have changed; the first at {wrong.nonzero()[0].tolist()}"
    )


def are_within(first: Attempt, second: Attempt, allowed: dict[str, float]) -> bool:
    """Whether nothing was found, and the results differ by rounding at most."""
    if second.findings or first.results.keys() != second.results.keys():
        return False
    pairs = ((x, second.results[name], allowed.get(name, 0.0)) for name, x in first.results.items())
    return all(
        x is y
        or (x is not None and y is not None and same_bits(x, y))
        or (
            x is not None
            and y is not None
            and x.shape == y.shape
            and bool(((x == y) | ((x.double() - y.double()).abs() <= limit)).all())
        )
        for x, y, limit in pairs
    )


def differing(first: Attempt, second: Attempt, skip: list[str] | None = None) -> str:
    """Which results differ in any bit, and by how much; empty where none does."""
    if second.findings:
        return "; ".join(finding.message for finding in second.findings)
    sentences = []
    for name, x in first.results.items():
        if name not in second.results:
            sentences.append(f"{name} is not returned again")
            continue
        y = second.results[name]
        if x is None or y is None:
            if x is not y:
                sentences.append(f"{name} is {'missing' if y is None else 'there'}, and was not before")
            continue
        if same_bits(x, y) or name in (skip or []):
            continue
        if x.shape != y.shape or x.dtype != y.dtype:
            sentences.append(f"{name} is {y.dtype} {list(y.shape)} where it was {x.dtype} {list(x.shape)}")
            continue
        sentences.append(
            f"{name} in {int((x != y).sum())} of {x.numel()} elements, by up to"
            f" {(x.double() - y.double()).abs().max().item():.2e}"
        )
    return "; ".join(sentences)


def gpu_answers() -> bool:
    """Whether the GPU still works; true if there is none."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return False
    return True
