"""What a check is, and its result. Everything here can be pickled and written as JSON."""

import shlex
from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.verify.compare import ATOL, RTOL, Comparison

SEED = 42
FAILURE, WARNING, NOTE = "failure", "warning", "note"
# What can be found besides a tensor's own statuses (compare.py).
ERROR, CRASH, HANG = "error", "crash", "hang"
# Verify's own failure: our bug, not the implementation's.
INTERNAL = "verify itself failed"
UNWRITTEN, MODIFIED, OVERRUN = "left unwritten", "inputs modified", "out-of-bounds write"
UPDATE = "wrong update"
UNREPEATABLE, BATCH_ORDER = "differs between runs", "depends on the batch order"
SCHEDULE = "depends on the schedule"
PADDING, STRIDED, MEMORY, NO_GRADIENT, CHOICE = (
    "reads padding",
    "fails on strided inputs",
    "memory grows as T²",
    "no gradient",
    "wrong choice",
)
NOT_JUDGED = "not judged"
CHANGES_SETTINGS = "changes global settings"
# How tokens are divided, and keys travel, where a check over ranks has failed.
PLAN = "plan"
# Not run; the message says why.
SKIPPED = "skipped"


# The backend that runs an operator's kernels for Hopper, in Gluon, simulated on the CPU.
HOPPER = "hopper"


class Implementation(NamedTuple):
    """What is checked: one of the operator's backends, or `FILE.py:FUNCTION` / `package.module:function`,
    on a device.
    """

    name: str
    device: str
    external: bool = False
    interpreted: bool = False
    # Over how many processes (over_ranks.py); 0: in one, without a plan.
    ranks: int = 0

    def __str__(self) -> str:
        name = f"{self.name} (interpreted)" if self.interpreted else self.name
        return f"{name} × {self.ranks}" if self.ranks else name


@dataclass(frozen=True)
class Settings:
    """How checks are made: the same settings give the same inputs."""

    seed: int = SEED
    fill: str = "random"
    gradients: bool = True
    repeat: int | None = None
    rtol: float | None = None
    atol: float | None = None
    # Seeds of interleavings that simulated kernels run under besides their own.
    schedules: tuple[int, ...] = ()

    def tolerances(self) -> tuple[float, float] | None:
        """rtol and atol where either was given."""
        if self.rtol is None and self.atol is None:
            return None
        return (RTOL if self.rtol is None else self.rtol, ATOL if self.atol is None else self.atol)

    def arguments(self) -> list[str]:
        """As the command line takes them."""
        words = ["--seed", str(self.seed)] if self.seed != SEED else []
        if self.fill != "random":
            words += [f"--{self.fill}"] if self.fill in ("range", "range-raw") else ["--fill", self.fill]
        words += [] if self.gradients else ["--no-grad"]
        for name in ("repeat", "rtol", "atol"):
            words += [f"--{name}", str(getattr(self, name))] if getattr(self, name) is not None else []
        if self.schedules == tuple(range(len(self.schedules))):
            return words + (["--schedules", str(len(self.schedules))] if self.schedules else [])
        return words + [word for seed in self.schedules for word in ("--schedule", str(seed))]


@dataclass(frozen=True)
class Check:
    """One case of one implementation in one dtype; `case` is a name or a problem written out.

    With a `use` (uses.py), the case is used in that way, and compared with the ordinary one.
    """

    operator: str
    implementation: Implementation
    case: str
    dtype: str
    settings: Settings = Settings()
    use: str = ""

    @property
    def written_out(self) -> bool:
        """Whether the case is a problem written out, and not one that an operator names."""
        return "=" in self.case

    def command(self) -> str:
        """The command that repeats this check."""
        words = ["tilewise", "verify", self.operator, "--config", self.case, "--dtype", self.dtype]
        words += ["--use", self.use] if self.use else []
        words += ["--parallel", str(self.implementation.ranks)] if self.implementation.ranks else []
        words += ["--impl", self.implementation.name] if self.implementation.external else []
        backend = "" if self.implementation.external else f"TILEWISE_BACKEND={self.implementation.name} "
        return backend + shlex.join(words + self.settings.arguments())


class Finding(NamedTuple):
    """Something that is not one tensor's error: its status, what was seen, and whether it fails the check, warns, or
    notes what was not judged.
    """

    status: str
    message: str
    severity: str = FAILURE


@dataclass(frozen=True)
class Result:
    """The result of one check."""

    check: Check
    comparisons: tuple[Comparison, ...] = ()
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    # Whether Triton interpreted kernels of it.
    interpreted: bool = False

    @property
    def skipped(self) -> bool:
        """Whether it was not run."""
        return any(finding.status == SKIPPED for finding in self.findings)

    @property
    def passed(self) -> bool:
        """Whether it was run, every tensor is right and nothing else was found that fails."""
        return (
            not self.skipped
            and all(c.passed for c in self.comparisons)
            and all(finding.severity != FAILURE for finding in self.findings)
        )

    @property
    def statuses(self) -> tuple[str, ...]:
        """Why it failed."""
        found = [finding.status for finding in self.findings if finding.severity == FAILURE]
        return tuple(dict.fromkeys(found + [c.failure.status for c in self.comparisons if c.failure]))

    @property
    def worst(self) -> Comparison | None:
        """The first tensor that failed, else the one closest to its limit."""
        failed = [c for c in self.comparisons if not c.passed]
        return failed[0] if failed else max(self.comparisons, key=lambda c: c.share, default=None)


@dataclass(frozen=True)
class MutantResult:
    """Whether a planted bug was caught, and by which check; of one that was skipped, `status` says why."""

    operator: str
    name: str
    about: str
    caught_by: str
    status: str
    skipped: bool = False

    @property
    def caught(self) -> bool:
        """Whether any check failed."""
        return bool(self.caught_by)


@dataclass
class Report:
    """Everything that one run of verify found."""

    results: list[Result] = field(default_factory=list)
    mutants: list[MutantResult] = field(default_factory=list)
    # How many further cases were drawn, by operator.
    searched: dict[str, int] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was checked, all of it passed, and no planted bug was missed."""
        return (
            bool(self.results or self.mutants)
            and all(result.passed for result in self.results)
            and all(mutant.caught for mutant in self.mutants)
        )

    @property
    def failures(self) -> list[Result]:
        """The checks that failed."""
        return [result for result in self.results if not result.passed and not result.skipped]

    @property
    def skipped(self) -> list[Result]:
        """The checks that were not run."""
        return [result for result in self.results if result.skipped]
