"""Diagnoses an error: the one mistake that explains all of it, or else where it is; and a map of it.

For debugging a kernel; pass or fail is decided by `compare`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

NOUNS = {
    "B": ("batch entry", "batch entries"),
    "T": ("row", "rows"),
    "H": ("head", "heads"),
    "D": ("channel", "channels"),
}
TILES = (128, 64, 32, 16)
# With fewer elements, a factor or another head fits by chance.
MIN_ELEMENTS = 8
# A mistake explains an error if it leaves this many times less of it. A factor near 1 or an offset near 0 has little to
# gain.
BETTER = 10.0
BETTER_CONSTANT = 5.0
# With more heads than this, heads are not searched for each other's values.
MAX_SEARCHED = 64
MAX_LISTED = 4
# How close a factor must be to a number with a name.
NAME_TOLERANCE = 5e-3
# Of a heat map.
MOST_TILES = 64
SMALLEST_TILE = 16


def diagnose(
    actual: torch.Tensor,
    expected: torch.Tensor,
    allowed: float,
    axes: str,
    others: Mapping[str, torch.Tensor] | None = None,
) -> list[str]:
    """Describe in short sentences, most telling first, how `actual` differs from `expected`, the fp64 truth; empty if
    no error is above `allowed`.

    `axes` has one letter per axis: B batch, T tokens, H heads, D channels, any other stands for itself. `others` are
    the truths of the operator's other results by name: a kernel may have stored one in place of another.
    """
    if actual.shape != expected.shape:
        return [f"has shape {list(actual.shape)} in place of {list(expected.shape)}"]
    truth = expected.detach().double()
    got = actual.detach().to(truth.device, torch.float64)
    letters = (axes + "?" * truth.dim())[: truth.dim()]
    comparable = got.isfinite() & truth.isfinite()
    # Equal infinities match, and so does NaN where NaN is expected.
    bad = ~((comparable & ((got - truth).abs() <= allowed)) | (got == truth) | (got.isnan() & truth.isnan()))
    if not bad.any():
        return []
    whole = _whole(got, truth, allowed, letters, others or {})
    # A slice whose truth is about zero, or infinite, is often right by chance: that it is right tells nothing.
    telling = truth.isfinite() & (truth.abs() > allowed)
    where = _where(bad, telling if telling.any() else ~telling, letters)
    spread = None if whole or where else _spread(got, truth, bad & comparable, comparable)
    return ([whole] if whole else []) + _non_finite(got, truth) + where + ([spread] if spread else [])


def _whole(
    got: torch.Tensor, truth: torch.Tensor, allowed: float, letters: str, others: Mapping[str, torch.Tensor]
) -> str | None:
    """The first mistake that explains all finite elements, or whole heads or batch entries of them."""
    if not got.any():
        return "all zero"
    plain = _error(got, truth)
    limit = max(4 * allowed, 1e-2 * _largest(truth[truth.isfinite()]))
    return (
        _constant(got, truth, allowed, letters)
        or _other(got, plain, limit, others)
        or _shifted(got, truth, plain, limit, letters)
        or _transposed(got, truth, plain, limit, letters)
        or _exchanged(got, truth, plain, allowed, limit, letters)
    )


def _error(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Absolute error: 0 where `got` is not finite (reported separately), infinite where only `wanted` is not."""
    return (got - wanted).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).masked_fill(~got.isfinite(), 0.0)


def _largest(x: torch.Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def _rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def _explains(
    got: torch.Tensor, candidate: torch.Tensor, plain: torch.Tensor, limit: float, better: float = BETTER
) -> bool:
    """Whether `got` is `candidate` rather than the truth; `plain` is its error from the truth."""
    # One channel is enough to rule most candidates out, and costs little.
    if got.numel() < MIN_ELEMENTS or not _error(got[..., :1], candidate[..., :1]).max() <= limit:
        return False
    rest = _error(got, candidate)
    if not rest.max() <= limit:
        return False
    both = got.isfinite() & plain.isfinite()
    if both.sum() < MIN_ELEMENTS:
        return False
    rest, plain = rest[both], plain[both]
    # The median: a few far larger elements would dominate the mean square, and the rest must fit too.
    return better * _rms(rest) < _rms(plain) and bool(rest.median() <= plain.median())


def _constant(got: torch.Tensor, truth: torch.Tensor, allowed: float, letters: str) -> str | None:
    """A factor or an offset, by least squares: whichever leaves less (values that hardly vary are close to both)."""
    comparable = got.isfinite() & truth.isfinite()
    channels = truth.shape[-1] if letters and letters[-1] not in "BTH" else 1
    got, truth = got[comparable], truth[comparable]
    factor = ((got * truth).sum() / truth.square().sum()).item()
    offset = (got - truth).mean().item()
    candidates = (
        (
            factor * truth,
            allowed * (1 + abs(factor)),
            f"off by a constant factor: {factor:.4g}{_factor_name(factor, channels)}",
        ),
        (truth + offset, allowed * 2, f"off by a constant offset: {offset:+.4g}"),
    )
    fits = []
    for candidate, slack, sentence in candidates:
        limit = max(slack, 1e-2 * _largest(candidate))
        rest = _rms(got - candidate)
        # Values near zero fit any small factor: the candidate must make up most of what is there.
        if BETTER_CONSTANT * rest <= _rms(candidate) and _explains(
            got, candidate, (got - truth).abs(), limit, BETTER_CONSTANT
        ):
            fits.append((rest, sentence))
    return min(fits)[1] if fits else None


def _factor_name(factor: float, channels: int) -> str:
    root = math.sqrt(channels)
    known = [(math.log(2), "ln 2 (base 2 in place of e)"), (1 / math.log(2), "1/ln 2 (base 2 in place of e)")]
    if channels > 1:
        known += [(root, f"sqrt({channels}) of the last axis"), (1 / root, f"1/sqrt({channels}) of the last axis")]
    for n in range(2, 17):
        known += [(n, f"{n}"), (1 / n, f"1/{n}")]
    named = " or ".join(name for value, name in known if math.isclose(abs(factor), value, rel_tol=NAME_TOLERANCE))
    signed = factor < 0 and (bool(named) or math.isclose(factor, -1, rel_tol=NAME_TOLERANCE))
    parts = (["the sign"] if signed else []) + ([named] if named else [])
    return f", that is {' and '.join(parts)}" if parts else ""


def _other(got: torch.Tensor, plain: torch.Tensor, limit: float, others: Mapping[str, torch.Tensor]) -> str | None:
    for name, other in others.items():
        if other.shape == got.shape and _explains(got, other.detach().to(got), plain, limit):
            return f"holds what {name} should hold"
    return None


def _shifted(got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, limit: float, letters: str) -> str | None:
    for axis, letter in enumerate(letters):
        overlap = got.shape[axis] - 1
        # With two positions only one overlaps: that is one head with the values of another, reported as such.
        if letter not in "THB" or overlap < 2:
            continue
        one = NOUNS[letter][0]
        for to, since, step in ((1, 0, 1), (0, 1, -1)):
            here = got.narrow(axis, to, overlap)
            if _explains(here, truth.narrow(axis, since, overlap), plain.narrow(axis, to, overlap), limit):
                return f"shifted by {step:+d} along {letter}: {one} i holds what {one} i{-step:+d} should hold"
    return None


def _transposed(got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, limit: float, letters: str) -> str | None:
    for i in range(truth.dim()):
        for j in range(i + 1, truth.dim()):
            if min(truth.shape[i], truth.shape[j]) < 2:
                continue
            # Where both sizes are equal, the swapped memory order is the transpose.
            if _explains(got, truth.transpose(i, j).reshape(truth.shape), plain, limit):
                how = "" if truth.shape[i] == truth.shape[j] else " in the order of memory"
                return f"transposed: axes {letters[i]} and {letters[j]} are swapped{how}"
    return None


def _exchanged(
    got: torch.Tensor, truth: torch.Tensor, plain: torch.Tensor, allowed: float, limit: float, letters: str
) -> str | None:
    for axis, letter in enumerate(letters):
        if letter not in "HB" or not 2 <= got.shape[axis] <= MAX_SEARCHED:
            continue
        one = NOUNS[letter][0]
        a, e, error = (x.movedim(axis, 0).reshape(got.shape[axis], -1) for x in (got, truth, plain))
        # One matrix product finds each slice's nearest truth, over the slice's finite elements; only that one is
        # checked closely.
        a0, e0 = a.nan_to_num(0.0, 0.0, 0.0), e.nan_to_num(0.0, 0.0, 0.0)
        nearest = (a.isfinite().double() @ e0.square().T - 2 * a0 @ e0.T).argmin(1).tolist()
        wrong = (error.amax(1) > allowed).tolist()
        pairs = [
            f"{one} {i} holds {one} {j}'s values"
            for i, j in enumerate(nearest)
            if i != j and wrong[i] and _explains(a[i], e[j], error[i], limit)
        ]
        if pairs:
            more = f" and {len(pairs) - MAX_LISTED} more" if len(pairs) > MAX_LISTED else ""
            return ", ".join(pairs[:MAX_LISTED]) + more
    return None


def _non_finite(got: torch.Tensor, truth: torch.Tensor) -> list[str]:
    """How many elements are finite, or not, against the truth."""
    total = truth.numel()
    counts = (
        ("NaN in", got.isnan() & ~truth.isnan(), "elements, where the truth has none"),
        ("Inf in", got.isinf() & (got != truth), "elements, where the truth has none"),
        ("finite in", got.isfinite() & ~truth.isfinite(), "elements, where the truth is not"),
    )
    return [f"{what} {int(mask.sum())} of {total} {why}" for what, mask, why in counts if mask.any()]


def _where(bad: torch.Tensor, telling: torch.Tensor, letters: str) -> list[str]:
    """A sentence for each axis that is only partly bad, the smallest fraction first."""
    return [sentence for _, sentence in sorted(_parts(bad, telling, letters), key=lambda part: part[0])]


def _parts(bad: torch.Tensor, telling: torch.Tensor, letters: str) -> Iterator[tuple[float, str]]:
    total = int(bad.sum())
    for axis, letter in enumerate(letters):
        size = bad.shape[axis]
        hit, judged = (x.movedim(axis, 0).reshape(size, -1).any(1) for x in (bad, bad | telling))
        hits, count = int(hit.sum()), int(judged.sum())
        if hits == count:
            continue
        # Bad elements at random places miss some slices too: say nothing if chance explains it. If there are only a
        # few, name their places anyway.
        missed_by_chance = count * (1 - total * size / (bad.numel() * count)) ** (bad.numel() / size)
        if total <= MAX_LISTED or count - hits > 10 * missed_by_chance or 2 * hits <= count - missed_by_chance:
            yield hits / count, _positions(hit.nonzero().flatten().tolist(), size, letter)


def _positions(hit: list[int], size: int, letter: str) -> str:
    one, many = NOUNS.get(letter, (letter, letter))
    first, last = hit[0], hit[-1]
    span = f"{one} {first}" if first == last else f"{many} {first} to {last}"
    if letter == "T":
        if last == 0:
            return "only in the first row"
        if first == size - 1:
            return "only in the last row"
        if tile := _last_tile(first, size):
            return f"only in the last tile of {tile}: {span} of {size}"
    step = hit[1] - first if len(hit) > 1 else 1
    even = hit == list(range(first, last + 1, step))
    if even and step == 1:
        return f"only from {one} {first} on, of {size}" if first < last == size - 1 else f"only in {span} of {size}"
    if even and len(hit) > 2:
        return f"only in every {({2: '2nd', 3: '3rd'}).get(step, f'{step}th')} {one}, from {first} to {last} of {size}"
    if len(hit) <= 2 * MAX_LISTED:
        return f"only in {many} {', '.join(map(str, hit))} of {size}"
    return f"only in {len(hit)} of {size} {many}, within {span}"


def _last_tile(first: int, size: int) -> int | None:
    """The largest tile size whose last tile, full or partial, starts at the first bad row, else whose last tile holds
    all bad rows.
    """
    starts = {tile: (size - 1) // tile * tile for tile in TILES}
    holds = [tile for tile in TILES if 0 < starts[tile] <= first]
    return next((tile for tile in holds if starts[tile] == first), holds[0] if holds else None)


def _spread(got: torch.Tensor, truth: torch.Tensor, bad: torch.Tensor, comparable: torch.Tensor) -> str | None:
    count, total = int(bad.sum()), truth.numel()
    if count == 0:
        return None
    sentence = f"spread over all elements: {count} of {total} ({count / total:.1%}) are bad"
    error = (got - truth)[comparable]
    if error.numel() < MIN_ELEMENTS:
        return sentence
    mean, rms = error.mean().item(), _rms(error)
    # A mean that is neither small compared with the error nor explained by chance for this many elements.
    biased = abs(mean) > max(0.2, 4 / math.sqrt(error.numel())) * rms
    return sentence + (
        f"; the error leans to one side, its mean is {mean:+.2g}"
        if biased
        else "; the error looks like noise, its mean is about 0"
    )


@dataclass(frozen=True)
class HeatMap:
    """The largest error of each head (rows) and tile of `tile` tokens (columns), as a multiple of the limit; `worst` is
    its position.
    """

    tile: int
    cells: tuple[tuple[float, ...], ...]
    worst: tuple[int, int]


def heat_map(excess: torch.Tensor, axes: str) -> HeatMap | None:
    """The largest elements of `excess` (errors as multiples of the limit) by head and tile; None if the tensor has no
    tokens.
    """
    if "T" not in axes or excess.numel() == 0:
        return None
    kept = [axes.index(letter) for letter in "HT" if letter in axes]
    rest = [axis for axis in range(excess.ndim) if axis not in kept]
    by_token = (
        excess.nan_to_num(nan=math.inf, posinf=math.inf).permute(*kept, *rest).unsqueeze(-1).flatten(len(kept)).amax(-1)
    )
    by_token = by_token.reshape(-1, by_token.shape[-1])
    tile = SMALLEST_TILE
    while -(-by_token.shape[1] // tile) > MOST_TILES:
        tile *= 2
    padded = torch.nn.functional.pad(by_token, (0, -by_token.shape[1] % tile))
    cells = padded.unflatten(1, (-1, tile)).amax(-1)
    at = int(cells.argmax())
    return HeatMap(tile, tuple(tuple(row) for row in cells.tolist()), (at // cells.shape[1], at % cells.shape[1]))
