"""What was timed, and the results. Everything here can be written as JSON.

Runs as JSON: written, read back, and compared with an earlier one.

`tilewise bench` and the scripts in benchmarks/ save the same document: schema and version, the command, where it ran,
and rows. `report.schema.json` next to this file describes every field; its version changes when readers have to change.
"""

import dataclasses
import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tilewise.bench.timing import Times
from tilewise.workbench.operator import UsageError

MODES = ("fwd", "bwd", "fwd+bwd")
# A ratio this close to 1 counts as equal.
EVEN = 0.02
# What a series of lengths varies.
VARIED = ("B", "T", "Tk", "lengths", "lengths_k", "max_seq_len", "targets")


@dataclass(frozen=True)
class Verified:
    """Verify's result for an implementation on a case: `problem` is the case itself or, if its fp64 truth would not
    fit, a shorter one.
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
        """The problem without what a series of lengths varies; sequences of different lengths are a separate kind."""
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
    """What the machine achieved in the same run: TFLOP/s of a large matmul in `dtype`, and GB/s of a large copy,
    counting both bytes read and bytes written; the best of several tries.
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
    # Baselines that do dense work, for a sparse operator.
    dense: Sequence[str]
    # On request: then nothing was verified.
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
        """By mode and baseline: the subject's speedup over the baseline, for every case that both were timed on."""
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
    """One line on one case and mode; empty if the subject, or all else, was not timed."""
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
    """Where ratios rise above 1 for good, interpolated between measured lengths on log axes.

    None if the longest is below 1; the shortest if none is.
    """
    if points[-1][1] < 1:
        return None
    last = max((i for i, (_, ratio) in enumerate(points) if ratio < 1), default=None)
    if last is None:
        return points[0][0]
    (short, before), (long, after) = points[last : last + 2]
    share = -math.log(before) / (math.log(after) - math.log(before))
    return short * (long / short) ** share


SCHEMA = "tilewise.bench"
VERSION = 1


def as_json(report: Report, environment: Mapping[str, str], doctor: Sequence[Mapping[str, str]], command: str) -> str:
    """The report as JSON text: times in milliseconds, rates by the median."""
    rows = []
    for group in report.groups():
        ratios = ratios_of(group, report.subject)
        rows += [
            dataclasses.asdict(row) | {"tflops": row.tflops, "gbps": row.gbps, "ratio": ratios.get(row.implementation)}
            for row in group
        ]
    document = {
        "schema": SCHEMA,
        "version": VERSION,
        "operator": report.operator,
        "dtype": report.dtype,
        "subject": report.subject,
        "implementations": report.about,
        "unverified": report.unverified,
        "command": command,
        "environment": environment,
        "doctor": doctor,
        "ceiling": dataclasses.asdict(report.ceiling),
        "rows": rows,
        "summary": [
            _summary(report, mode, name, ratios)
            for mode, by_name in report.ratios().items()
            for name, ratios in by_name.items()
        ],
    }
    return as_text(document)


def script_document(
    benchmark: str, command: str, environment: Mapping[str, str], about: Mapping[str, Any]
) -> dict[str, Any]:
    """What a script in benchmarks/ saves, without rows yet; `about` is what holds for all of them."""
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "benchmark": benchmark,
        "command": command,
        "environment": dict(environment),
        "about": dict(about),
        "rows": [],
    }


def as_text(document: Mapping[str, Any]) -> str:
    """A document as it is written."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)


def load(path: Path) -> dict[str, Any]:
    """A saved document; a UsageError where the file is none."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: expected a file that `tilewise bench` saved: {error}") from None
    if (
        not isinstance(document, dict)
        or (document.get("schema"), document.get("version")) != (SCHEMA, VERSION)
        or "rows" not in document
    ):
        raise UsageError(
            f"{path}: expected a file that `tilewise bench` saved, with schema {SCHEMA!r} and version {VERSION}"
        )
    return document


def _summary(report: Report, mode: str, name: str, ratios: Sequence[float]) -> dict[str, Any]:
    found = {
        "mode": mode,
        "baseline": name,
        "geometric_mean": geometric_mean(ratios),
        "best": max(ratios),
        "worst": min(ratios),
        "cases": len(ratios),
    }
    return found | ({"overtakes_at": overtakes(report, mode, name)} if name in report.dense else {})


def from_json(document: Mapping[str, Any]) -> Report:
    """The report that a document was made from."""
    names = {field.name for field in dataclasses.fields(Row)}
    rows = []
    for saved in document["rows"]:
        row = Row(**{name: value for name, value in saved.items() if name in names})
        times, verified = saved["times"], saved["verified"]
        rows.append(
            dataclasses.replace(row, times=times and Times(**times), verified=verified and Verified(**verified))
        )
    # Those that the subject may overtake.
    dense = list(dict.fromkeys(line["baseline"] for line in document["summary"] if "overtakes_at" in line))
    same = {name: document[name] for name in ("operator", "dtype", "subject", "unverified")}
    return Report(
        **same, dense=dense, ceiling=Ceiling(**document["ceiling"]), about=document["implementations"], rows=rows
    )


class Change(NamedTuple):
    """Median milliseconds of the same implementation, case and mode, then and now."""

    case: str
    mode: str
    implementation: str
    before: float
    after: float

    @property
    def growth(self) -> float:
        """Of the time: 0.1 is a tenth slower."""
        return self.after / self.before - 1

    def regressed(self, tolerance: float) -> bool:
        """Whether it is slower by more than that."""
        return self.growth > tolerance


def parse_tolerance(text: str) -> float:
    """`5%` or `0.05`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise UsageError(f"--tolerance {text}: expected a share such as 5% or 0.05")
    return value


def check_same(operator: str, dtype: str, earlier: dict[str, Any]) -> None:
    """A UsageError where the earlier run is of something else."""
    if "operator" not in earlier:
        raise UsageError(f"--compare: that is a run of benchmarks/{earlier['benchmark']}.py, this one of {operator}")
    if (earlier["operator"], earlier["dtype"]) != (operator, dtype):
        raise UsageError(
            f"--compare: that is a run of {earlier['operator']} in {earlier['dtype']}, this one of {operator} in"
            f" {dtype}"
        )


def changes(report: Report, earlier: dict[str, Any]) -> list[Change]:
    """The subject's rows that the earlier run timed, on the same problem; `after` is infinite where this
    run did not.
    """
    before = {
        (row["problem"], row["mode"], row["implementation"]): row["times"]["median"]
        for row in earlier["rows"]
        if row["times"] is not None
    }
    return [
        Change(row.case, row.mode, row.implementation, before[key], row.times.median if row.times else math.inf)
        for row in report.rows
        if row.implementation == report.subject and (key := (row.problem, row.mode, row.implementation)) in before
    ]


def other_device(environment: dict[str, str], earlier: dict[str, Any]) -> str:
    """A note if the two runs are from different machines; else empty."""
    then, now = earlier["environment"].get("device"), environment["device"]
    return "" if then == now else f"the earlier run was on {then}, this one on {now}: their times do not compare"
