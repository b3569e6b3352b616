"""What was timed, and what comes of it. Everything here can be written as JSON."""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tilewise.bench.timing import Times

MODES = ("fwd", "bwd", "fwd+bwd")
# A ratio this near to 1 is no difference.
EVEN = 0.02
# What a series of lengths varies.
VARIED = ("B", "T", "Tk", "lengths", "lengths_k", "max_seq_len", "targets")


@dataclass(frozen=True)
class Verified:
    """What verify said of an implementation on a case: `problem` is the case itself or, where the fp64 truth of that
    would not fit, a shorter one.
    """

    problem: str
    same: bool
    passed: bool
    why: str = ""
    command: str = ""


@dataclass(frozen=True)
class Row:
    """One implementation on one case in one mode: its times, or the reason why there are none."""

    case: str
    problem: str
    tokens: int
    total_tokens: int
    mode: str
    implementation: str
    times: Times | None = None
    reason: str = ""
    operations: int = 0
    bytes: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    # None for a baseline, which is compared with the operator's output alone.
    verified: Verified | None = None

    @property
    def kind(self) -> str:
        """The problem without what a series of lengths varies; sequences of different lengths are a kind
        of their own.
        """
        parts = dict(part.partition("=")[::2] for part in self.problem.split(","))
        jagged = len(set(parts.get("lengths", "").split("/"))) > 1
        return ", ".join(
            [f"{name}={value}" for name, value in parts.items() if name not in VARIED] + ["lengths differ"] * jagged
        )

    @property
    def tflops(self) -> float:
        """By the median."""
        return self.operations / self.times.median / 1e9 if self.times else 0.0

    @property
    def gbps(self) -> float:
        """By the median."""
        return self.bytes / self.times.median / 1e6 if self.times else 0.0


@dataclass(frozen=True)
class Ceiling:
    """What the machine did in the same run: TFLOP/s of a large product in `dtype`, and GB/s of a large copy, bytes read
    and bytes written both counted; the best of several tries.
    """

    tflops: float
    gbps: float
    dtype: str


@dataclass
class Report:
    """Everything that one run of bench found.

    Ratios are of `subject`, the implementation in question, to the others.
    """

    operator: str
    dtype: str
    subject: str
    # The baselines that do dense work beside a sparse operator.
    dense: Sequence[str]
    # Asked for: then nothing was verified.
    unverified: bool
    ceiling: Ceiling
    # By implementation: what it is.
    about: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    def groups(self) -> Iterator[list[Row]]:
        """Rows of one case and mode each."""
        for case, mode in dict.fromkeys((row.case, row.mode) for row in self.rows):
            yield [row for row in self.rows if (row.case, row.mode) == (case, mode)]

    def ratios(self) -> dict[str, dict[str, list[float]]]:
        """By mode and baseline: how often the subject runs while the baseline runs once, of every case that both were
        timed on.
        """
        found: dict[str, dict[str, list[float]]] = {}
        for group in self.groups():
            for name, ratio in ratios_of(group, self.subject).items():
                found.setdefault(group[0].mode, {}).setdefault(name, []).append(ratio)
        return found

    @property
    def complete(self) -> bool:
        """Whether the subject has times throughout, and nothing failed verify."""
        return all(row.times for row in self.rows if row.implementation == self.subject or row.verified)


def ratios_of(group: Sequence[Row], subject: str) -> dict[str, float]:
    """By baseline, its median time over the subject's: above 1, the subject is faster."""
    times = {row.implementation: row.times.median for row in group if row.times}
    return (
        {name: value / times[subject] for name, value in times.items() if name != subject} if subject in times else {}
    )


def verdict(group: Sequence[Row], subject: str) -> str:
    """One line on one case and mode; empty where the subject was not timed, or nothing beside it."""
    ratios = ratios_of(group, subject)
    if not ratios:
        return ""
    name, ratio = min(ratios.items(), key=lambda item: item[1])
    if abs(ratio - 1) <= EVEN:
        return f"{subject} is even with {name}, the fastest of the others"
    return (
        f"{subject} is the fastest: {as_ratio(ratio)} × {name}"
        if ratio > 1
        else f"{subject} runs at {as_ratio(ratio)} of {name}"
    )


def as_ratio(ratio: float) -> str:
    """With two digits at least."""
    return f"{ratio:.2f}" if ratio >= 0.1 else f"{ratio:.2g}"


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of at least one."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def overtakes(report: Report, mode: str, baseline: str) -> dict[str, float | None]:
    """By kind of problem, the sequence length from which the subject beats a baseline; kinds of one length tell
    nothing.
    """
    points: dict[str, list[tuple[int, float]]] = {}
    for group in report.groups():
        ratio = ratios_of(group, report.subject).get(baseline)
        if group[0].mode == mode and ratio is not None:
            points.setdefault(group[0].kind, []).append((group[0].tokens, ratio))
    return {kind: _crossing(sorted(found)) for kind, found in points.items() if len(found) > 1}


def _crossing(points: Sequence[tuple[int, float]]) -> float | None:
    """Where ratios rise over 1 for good, between measured lengths on log axes.

    None where the longest is below 1; the shortest where none is.
    """
    if points[-1][1] < 1:
        return None
    last = max((i for i, (_, ratio) in enumerate(points) if ratio < 1), default=None)
    if last is None:
        return points[0][0]
    (short, before), (long, after) = points[last : last + 2]
    share = -math.log(before) / (math.log(after) - math.log(before))
    return short * (long / short) ** share
