"""Is a tensor right? Judged against fp64 truth, by the error that eager torch makes in the same precision.

Is a choice of blocks right? Judged by the scores of the chosen blocks: of two scores equal within rounding, either may
be chosen.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tilewise.verify.bias import signed_error
from tilewise.verify.diagnose import HeatMap, diagnose, heat_map

# How many times eager torch's error an implementation may make.
OUTPUT_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
# fp32 roundings on the way to a result that eager torch may happen to get exactly (a softmax over one key) or sum in a
# better order: n terms of one sign, added one by one, lose half a rounding times sqrt(n), and a few hundred terms are
# common.
INNER_ROUNDINGS = 8
# On a GPU fp32 products run as three TF32 products. Each operand keeps 21 bits (cut, not rounded: 4 fp32 roundings
# each), and the product of the two remainders is dropped (8): 16 per product, and two products follow each other.
THREE_TF32_ROUNDINGS = 32
# A truth whose mean square is at most this many times the limit cannot tell right from wrong.
TELLING = 4.0
# Below this an fp64 truth is zero by definition: what it holds is fp64's own rounding.
ZERO = 1e-12
RTOL, ATOL = 1e-3, 1e-4

# Why a tensor failed.
WRONG, SHAPE, DTYPE, NON_FINITE, UNFIT = "wrong values", "wrong shape", "wrong dtype", "non-finite values", "unfit case"
INDENT = "    "


@dataclass(frozen=True)
class Failure:
    """What a failed tensor shows: a status, where it is worst, how much of it is off, and the shape of the error."""

    status: str
    problem: str
    diagnosis: tuple[str, ...] = ()
    actual_range: tuple[float, float] = (math.nan, math.nan)
    expected_range: tuple[float, float] = (math.nan, math.nan)
    # Elements off by more than atol + rtol · |truth|, the rule that judged; rtol is 0 where eager torch's error did.
    # None of them where the root mean square alone is too large.
    exceeding: int = 0
    rtol: float = RTOL
    atol: float = ATOL
    elements: int = 0
    worst: tuple[int, ...] = ()
    worst_actual: float = math.nan
    worst_expected: float = math.nan
    heat: HeatMap | None = None


@dataclass(frozen=True)
class Comparison:
    """One tensor's verdict, with the statistics of its difference from the truth and what was allowed."""

    name: str
    max_diff: float = math.nan
    mean_diff: float = math.nan
    std_diff: float = math.nan
    max_rel_diff: float = math.nan
    mean_rel_diff: float = math.nan
    allowed: float = math.nan
    failure: Failure | None = None
    # The error as a share of what is allowed, by element or by root mean square, whichever is larger: above 1 it fails.
    share: float = math.nan
    # The mean of the signed difference, in units of the last place.
    bias: float = math.nan

    @property
    def passed(self) -> bool:
        """Whether the tensor is right."""
        return self.failure is None

    def statistics(self) -> str:
        """The difference, in one line."""
        return (
            f"max_diff {self.max_diff:.2e}  mean_diff {self.mean_diff:.2e}  std_diff {self.std_diff:.2e}  "
            f"max_rel_diff {self.max_rel_diff:.2e}  mean_rel_diff {self.mean_rel_diff:.2e}"
        )

    def lines(self) -> list[str]:
        """The statistics and, if it failed, what is wrong."""
        failure = self.failure
        allowed = "" if math.isnan(self.allowed) else f"  allowed {self.allowed:.2e}"
        lines = [f"{mark(self.passed)} {self.name:<5} {self.statistics()}{allowed}"]
        if failure is None:
            return lines
        details = [f"{failure.status}: {failure.problem}"]
        if failure.exceeding:
            rule = (
                f"rtol {failure.rtol:g} and atol {failure.atol:g}"
                if failure.rtol
                else f"the {failure.atol:.2e} allowed"
            )
            of_all = 100 * failure.exceeding / failure.elements
            details.append(f"{failure.exceeding} of {failure.elements} elements ({of_all:.3g} %) exceed {rule}")
        if failure.elements:
            (low, high), (from_, to) = failure.actual_range, failure.expected_range
            details.append(f"from {low:.4g} to {high:.4g}, expected {from_:.4g} to {to:.4g}")
        return lines + [
            f"{INDENT}{detail}" for detail in [*details, *(f"looks like: {sentence}" for sentence in failure.diagnosis)]
        ]


def mark(passed: bool) -> str:
    """A tick or a cross, in front of a line."""
    return "✓" if passed else "✗"


@dataclass(frozen=True)
class Limits:
    """Limits of a tensor's error: `largest` for any element, `rms` for the root mean square; if rtol is given, atol +
    rtol · |truth| for each element.
    """

    largest: float = math.inf
    rms: float = math.inf
    rtol: float | None = None
    atol: float = 0.0


def rounding_floor(dtype: torch.dtype, device: torch.device) -> float:
    """The relative error that rounding alone may cost.

    Two roundings in `dtype`, half an ulp each: of an operand, and of the result; plus those in fp32 on the way.
    """
    inner = INNER_ROUNDINGS + (THREE_TF32_ROUNDINGS if device.type == "cuda" and dtype == torch.float32 else 0)
    return torch.finfo(dtype).eps + inner * torch.finfo(torch.float32).eps


def limits_from_eager(
    truth: torch.Tensor,
    eager: torch.Tensor,
    *,
    gradient: bool = False,
    floor: float = 0.0,
    further: torch.Tensor | None = None,
    alike: bool = False,
) -> Limits:
    """Limits from what `eager` torch makes of `truth` in its precision, and from a `further` error that the contract
    itself costs.

    The largest error and the root mean square error may be 2 times eager's (3 times for gradients), each with a floor:
    what rounding alone may cost the largest value, and `floor` times that value. Where the truth is zero everywhere by
    definition, only eager's own error is allowed. Numbers that are all `alike` are all rounded alike.
    """
    expected = truth[truth.isfinite()].double()
    if expected.numel() == 0:
        return Limits(0.0, 0.0)
    error = (eager[truth.isfinite()].double() - expected).abs()
    if further is not None:
        error += further[truth.isfinite()].abs()
    floor = floor + rounding_floor(eager.dtype, eager.device)
    factor = GRADIENT_FACTOR if gradient else OUTPUT_FACTOR
    return Limits(
        max(factor * error.max().item(), floor * expected.abs().max().item()),
        # Unless all errors are the same, their root mean square is well below half of the worst case.
        max(factor * _rms(error), floor / (1 if alike else 2) * _rms(expected)),
    )


def is_telling(truth: torch.Tensor, limits: Limits) -> bool:
    """Whether a wrong result could fail these limits; true for a truth that is zero by definition, where the floor
    alone is the limit.
    """
    expected = truth[truth.isfinite()].double()
    return expected.numel() == 0 or expected.abs().max().item() <= ZERO or _rms(expected) >= TELLING * limits.rms


def compare(
    name: str,
    actual: torch.Tensor,
    truth: torch.Tensor,
    dtype: torch.dtype,
    limits: Limits,
    axes: str,
    others: Mapping[str, torch.Tensor] | None = None,
) -> Comparison:
    """Judge `actual` against fp64 `truth`; it must have `truth`'s shape and `dtype`. -inf must be exactly where the
    truth has it.

    `axes` and `others` (the truth of the operator's other results) are for the diagnosis of what fails.
    """
    if actual.shape != truth.shape:
        return Comparison(name, failure=Failure(SHAPE, f"shape {list(actual.shape)}, expected {list(truth.shape)}"))
    if actual.dtype != dtype:
        return Comparison(name, failure=Failure(DTYPE, f"dtype {actual.dtype}, expected {dtype}"))
    if bool(truth.isnan().any()) or bool((truth[truth.isfinite()].abs() > torch.finfo(dtype).max).any()):
        return Comparison(name, failure=Failure(UNFIT, f"the inputs, or the truth itself, overflow {dtype}"))
    bad = (~actual.isfinite() & truth.isfinite()) | (~truth.isfinite() & (actual != truth))
    finite = truth.isfinite()
    expected = truth[finite].double()
    diff = (actual[finite].double() - expected).abs()
    if diff.numel() == 0 and not bool(bad.any()):
        return Comparison(name, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, share=0.0)
    allowed = limits.largest if limits.rtol is None else limits.atol + limits.rtol * expected.abs()
    status, problem = _verdict(actual, truth, bad, diff, expected, limits, allowed)
    failure = _failure(status, problem, actual, truth, limits, axes, others or {}) if status else None
    relative = diff / expected.abs().clamp(min=torch.finfo(torch.float32).tiny)
    if diff.numel() == 0:
        return Comparison(name, failure=failure)
    largest = allowed if isinstance(allowed, float) else allowed.max().item()
    measures = (diff.max(), diff.mean(), diff.std(correction=0), relative.max(), relative.mean())
    max_diff, mean_diff, std_diff, max_rel_diff, mean_rel_diff = (float(x) for x in measures)
    share = _share(diff, allowed)
    if limits.rtol is None:
        share = max(share, _share(torch.tensor(_rms(diff)), limits.rms))
    statistics = max_diff, mean_diff, std_diff, max_rel_diff, mean_rel_diff
    return Comparison(name, *statistics, largest, failure, share, signed_error(actual[finite], expected))


def compare_tensors(
    a: torch.Tensor, b: torch.Tensor, name: str = "tensor", rtol: float = RTOL, atol: float = ATOL, verbose: bool = True
) -> Comparison:
    """Compare `a` with `b`, taken as the truth, like torch.allclose, with statistics and a diagnosis; `verbose` prints
    them.
    """
    a = a if a.is_floating_point() else a.double()
    comparison = compare(name, a, b.double(), a.dtype, Limits(rtol=rtol, atol=atol), "?" * b.ndim)
    if verbose:
        print("\n".join(comparison.lines()))
    return comparison


def _share(error: torch.Tensor, allowed: float | torch.Tensor) -> float:
    """The largest error as a share of what is allowed; no error is none of nothing."""
    return torch.where(error == 0, 0.0, error / allowed).nan_to_num(nan=math.inf).max().item()


def _verdict(
    actual: torch.Tensor,
    truth: torch.Tensor,
    bad: torch.Tensor,
    diff: torch.Tensor,
    expected: torch.Tensor,
    limits: Limits,
    allowed: float | torch.Tensor,
) -> tuple[str, str]:
    """Status and a sentence on what is wrong; empty if nothing is."""
    if limits.rtol is None and not is_telling(truth, limits):
        return (
            UNFIT,
            (
                f"the reference, {_rms(expected):.2e} in the mean square, is not large against the {limits.rms:.2e}"
                " allowed: nothing could fail"
            ),
        )
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        return (
            NON_FINITE,
            (
                f"{actual[at].item():.6g} at {list(at)}, expected {truth[at].item():.6g} ({int(bad.sum())} of"
                f" {bad.numel()} elements)"
            ),
        )
    if bool((diff > allowed).any()):
        at = tuple(int(i) for i in truth.isfinite().nonzero()[(diff - allowed).argmax()])
        return WRONG, f"worst at {list(at)}: {actual[at].item():.6g}, expected {truth[at].item():.6g}"
    if _rms(diff) > limits.rms:
        return WRONG, f"root mean square error {_rms(diff):.2e}, allowed {limits.rms:.2e}"
    return "", ""


def _failure(
    status: str,
    problem: str,
    actual: torch.Tensor,
    truth: torch.Tensor,
    limits: Limits,
    axes: str,
    others: Mapping[str, torch.Tensor],
) -> Failure:
    rtol, atol = (0.0, limits.largest) if limits.rtol is None else (limits.rtol, limits.atol)
    actual, truth = actual.detach().double().cpu(), truth.cpu()
    # Matching infinities differ by 0.
    diff = torch.where(actual == truth, 0.0, (actual - truth).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    largest = atol + rtol * max(map(abs, _range(truth)), default=0.0)
    largest = largest if math.isfinite(largest) else ATOL
    # If only the mean square is too large, the elements that exceed it are diagnosed.
    largest = min(largest, max(limits.rms, _rms(diff) / 2)) if diff.max().item() <= largest else largest
    worst = tuple(int(i) for i in torch.unravel_index(diff.argmax(), diff.shape)) if diff.numel() else ()
    return Failure(
        status,
        problem,
        tuple(diagnose(actual, truth, largest, axes, {name: x.cpu() for name, x in others.items()})),
        _range(actual),
        _range(truth),
        int((diff > atol + rtol * truth.abs()).sum()),
        rtol,
        atol,
        diff.numel(),
        worst,
        actual[worst].item(),
        truth[worst].item(),
        heat_map(
            diff / (atol + rtol * truth.abs() if rtol else largest or torch.finfo(torch.float32).tiny),
            axes,
        ),
    )


def _range(x: torch.Tensor) -> tuple[float, float]:
    finite = x[x.isfinite()]
    return (finite.min().item(), finite.max().item()) if finite.numel() else (math.nan, math.nan)


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def compare_choices(indices: torch.Tensor, scores: torch.Tensor, eager_scores: torch.Tensor) -> str:
    """What is wrong with `indices` [..., S] and where; empty where nothing is.

    `scores` [..., blocks] are fp64 truth, +inf where a block is forced and -inf where it may not be chosen;
    `eager_scores` are eager torch's in the precision under test. Indices ascend, with -1 after the last; forced blocks
    are present and forbidden ones absent; as many as possible are chosen; and among the others the i-th best chosen
    score is below the true i-th best by at most twice eager's error in the scores.
    """
    if indices.shape[:-1] != scores.shape[:-1]:
        return f"shape {list(indices.shape)}, expected {[*scores.shape[:-1], indices.shape[-1]]}"
    if scores.numel() == 0 and not bool((indices != -1).any()):
        return ""
    indices, scores = indices.long(), scores.double()
    blocks = scores.shape[-1]
    return (
        _malformed(indices, blocks)
        or _forced_or_forbidden(indices, scores)
        or _too_low(indices, scores, _allowed_error(scores, eager_scores))
    )


def _allowed_error(scores: torch.Tensor, eager_scores: torch.Tensor) -> float:
    """Twice eager's largest error, but at least what fp32 rounding may cost the largest score."""
    # Where eager overflows, it says nothing about rounding.
    finite = scores.isfinite() & eager_scores.isfinite()
    truth = scores[finite]
    if truth.numel() == 0:
        return 0.0
    error = (eager_scores.to(scores)[finite] - truth).abs().max().item()
    return max(OUTPUT_FACTOR * error, rounding_floor(torch.float32, scores.device) * truth.abs().max().item())


def _first(wrong: torch.Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in wrong.nonzero()[0])


def _says(at: tuple[int, ...], what: str, wrong: torch.Tensor) -> str:
    """One sentence: the first bad place, what is wrong there, and how many rows have a similar error."""
    rows = wrong.any(-1)
    return f"at {list(at)} {what} ({int(rows.sum())} of {rows.numel()} rows)"


def _malformed(indices: torch.Tensor, blocks: int) -> str:
    """Errors that need no scores: what can never be a choice."""
    outside = (indices < -1) | (indices >= blocks)
    if bool(outside.any()):
        *at, slot = _first(outside)
        return _says(tuple(at), f"index {int(indices[(*at, slot)])} is no block: there are {blocks}", outside)
    padding = indices == -1
    gap = padding[..., :-1] & ~padding[..., 1:]
    if bool(gap.any()):
        *at, _ = _first(gap)
        return _says(tuple(at), f"{indices[tuple(at)].tolist()} has -1 before the last block", gap)
    twice = _taken(indices, blocks) > 1
    if bool(twice.any()):
        *at, block = _first(twice)
        return _says(tuple(at), f"block {block} is chosen twice: {indices[tuple(at)].tolist()}", twice)
    falling = (indices[..., 1:] < indices[..., :-1]) & ~padding[..., 1:]
    if bool(falling.any()):
        *at, _ = _first(falling)
        return _says(tuple(at), f"{indices[tuple(at)].tolist()} does not ascend", falling)
    return ""


def _taken(indices: torch.Tensor, blocks: int) -> torch.Tensor:
    """How often each block is chosen, [..., blocks]."""
    # -1 is counted in an extra bin, which is then dropped.
    counts = torch.zeros((*indices.shape[:-1], blocks + 1), dtype=torch.int64, device=indices.device)
    return counts.scatter_add_(-1, indices.where(indices >= 0, blocks), torch.ones_like(indices))[..., :blocks]


def _forced_or_forbidden(indices: torch.Tensor, scores: torch.Tensor) -> str:
    taken = _taken(indices, scores.shape[-1]) > 0
    missing = (scores == torch.inf) & ~taken
    if bool(missing.any()):
        *at, block = _first(missing)
        return _says(
            tuple(at), f"block {block}, which is always chosen, is not in {indices[tuple(at)].tolist()}", missing
        )
    forbidden = (scores == -torch.inf) & taken
    if bool(forbidden.any()):
        *at, block = _first(forbidden)
        return _says(
            tuple(at), f"block {block}, which may not be chosen, is in {indices[tuple(at)].tolist()}", forbidden
        )
    wanted = (scores != -torch.inf).sum(-1).clamp(max=indices.shape[-1])
    short = (taken.sum(-1) < wanted)[..., None]
    if bool(short.any()):
        *at, _ = _first(short)
        return _says(
            tuple(at), f"{int(wanted[tuple(at)])} blocks can be chosen, and {indices[tuple(at)].tolist()} are", short
        )
    return ""


def _too_low(indices: torch.Tensor, scores: torch.Tensor, allowed: float) -> str:
    """The chosen scores and the best ones, both sorted from the best down; forced blocks, correct by now, come first in
    both and cancel.
    """
    count = min(indices.shape[-1], scores.shape[-1])
    best = scores.sort(dim=-1, descending=True).values[..., :count]
    taken = (
        scores.gather(-1, indices.clamp(min=0))
        .masked_fill(indices == -1, -torch.inf)
        .sort(dim=-1, descending=True)
        .values[..., :count]
    )
    # inf - inf is NaN, which does not exceed the limit.
    low = best - taken > allowed
    if not bool(low.any()):
        return ""
    *at, i = _first(low)
    row = tuple(at)
    chosen = indices[row][indices[row] >= 0].tolist()
    wanted = sorted(scores[row].argsort(descending=True, stable=True)[: len(chosen)].tolist())
    gap = (best - taken)[(*row, i)].item()
    return _says(
        row,
        f"blocks {chosen} are chosen, the best are {wanted}: a score {gap:.3g} below what it should be, where"
        f" {allowed:.3g} is allowed",
        low,
    )
