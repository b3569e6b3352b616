"""Is a choice of blocks right?

Judged by the scores of the chosen blocks: of two scores equal within rounding, either may be chosen.

Which checks a run consists of.
"""

import os
from collections.abc import Sequence

import torch

from tilewise.verify.compare import OUTPUT_FACTOR, rounding_floor
from tilewise.verify.result import Check, Implementation, Settings
from tilewise.verify.suite import GROWTH, Mutant, Suite
from tilewise.workbench.operator import Operator, UsageError


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


DTYPES = ("fp32", "fp16", "bf16")


def implementations(operator: Operator, external: str | None = None) -> list[Implementation]:
    """What can be checked here: `external` alone, or the operator's backends (TILEWISE_BACKEND chooses one of them)."""
    import torch

    gpu = torch.cuda.is_available()
    if external:
        return [Implementation(external, "cuda" if gpu else "cpu", external=True)]
    from tilewise.ops._host.backend import interpreting

    found = (
        [Implementation("triton", "cpu" if interpreting() else "cuda", interpreted=interpreting())]
        if interpreting() or gpu
        else []
    )
    found.append(Implementation("cpu", "cpu"))
    wanted = os.environ.get("TILEWISE_BACKEND")
    chosen = [implementation for implementation in found if wanted in (None, "", implementation.name)]
    if not chosen:
        raise UsageError(
            f"TILEWISE_BACKEND is {wanted!r}: expected one that runs here, {' or '.join(i.name for i in found)}"
        )
    return chosen


def planted(operator: Operator) -> tuple[Mutant, ...]:
    """The bugs whose kernels run here."""
    import torch

    from tilewise.ops._host.backend import interpreting

    suite: Suite = operator.load("suite")
    compiled = torch.cuda.is_available() and not interpreting()
    return suite.planted(torch.cuda.get_device_capability() if compiled else None)


def plan(
    operator: Operator, external: str | None, configs: Sequence[str], dtypes: Sequence[str], settings: Settings
) -> list[Check]:
    """The standard checks of an operator, or those of the cases in `configs`.

    Cases in `configs` are checked in every dtype, and so are the standard ones, except for our own backends without a
    GPU, where each check is slow: there only `small` is, and every other case runs in one dtype, in turn, and in
    another one on the next backend.
    """
    suite: Suite = operator.load("suite")
    unknown = [dtype for dtype in dtypes if dtype not in DTYPES]
    if not dtypes:
        raise UsageError(f"no dtype was given: expected some of {','.join(DTYPES)}")
    for name, tolerance in (("rtol", settings.rtol), ("atol", settings.atol)):
        if tolerance is not None and not 0 <= tolerance < float("inf"):
            raise UsageError(f"{name} is {tolerance}: expected a number from 0 on")
    if unknown:
        raise UsageError(f"there is no dtype {unknown[0]!r}: expected some of {','.join(DTYPES)}")
    try:
        chosen = [config if config == GROWTH else suite.find(config).name for config in configs]
    except ValueError as error:
        raise UsageError(f"{operator.name}: {error}") from None
    turns: dict[str, int] = {}
    checks = []
    for implementation in implementations(operator, external):
        names = chosen or [case.name for case in suite.standard(implementation.device, implementation.interpreted)]
        for i, name in enumerate(names):
            turns[name] = turns.get(name, i - 1) + 1
            one = implementation.device == "cpu" and not external and not chosen and name != "small"
            here = [dtypes[turns[name] % len(dtypes)]] if one else dtypes
            checks += [Check(operator.name, implementation, name, dtype, settings) for dtype in here]
        if not chosen:
            checks.append(Check(operator.name, implementation, GROWTH, dtypes[-1], settings))
    return checks
