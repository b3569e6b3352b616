"""What the workbench knows of an operator: one declaration, whose parts are imported on first use."""

import difflib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from tilewise.bench.contender import Baseline
    from tilewise.inspect.launches import Labelled
    from tilewise.trace.request import Request, Traced
    from tilewise.verify.every_config import Choice, Entry, Outcome
    from tilewise.verify.rank_suite import OverRanks
    from tilewise.verify.suite import Case, Problem, Suite, Tensors


# The check of verify that is not a case: how memory grows with the sequence.
GROWTH = "memory-growth"


class UsageError(Exception):
    """The request cannot be run; the message says what to do."""


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """A question after an unknown word: the name that it is closest to; empty where none is close."""
    close = difflib.get_close_matches(word, list(names), 1)
    return f"did you mean {close[0]}? " if close else ""


def place_and_name(impl: str) -> tuple[str, str]:
    """The file or module, and the function, that --impl names; a UsageError if that cannot be.

    A file must be there and be Python: that is found without importing it, or torch.
    """
    place, colon, name = impl.rpartition(":")
    if not colon or not place or not name:
        raise UsageError(f"--impl {impl}: expected FILE.py:FUNCTION or package.module:function")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"--impl {impl}: there is no file {place}")
        try:
            compile(Path(place).read_bytes(), place, "exec")
        except (SyntaxError, ValueError, OSError) as error:
            raise UsageError(f"--impl {impl}: {place} does not import: {type(error).__name__}: {error}") from None
    return place, name


@dataclass(frozen=True)
class Missing:
    """In place of a part that an operator does not have: why not, in words that fit after a colon."""

    why: str


@dataclass(frozen=True)
class Configurations:
    """Every tile configuration of an operator's table, once; and `run`, which returns the results of one on a problem,
    small or not, filled by a rule.
    """

    entries: "Callable[[], Sequence[Entry]]"
    run: "Callable[[Any, bool, str, torch.device], Sequence[Outcome | Choice]]"


@dataclass(frozen=True)
class Tracing:
    """How an operator is traced: `trace` gives its programs, and in words what they work on.

    `refuses` are the fields of a request that do not apply to it; without `taps` its kernels can be traced in the
    interpreter only.
    """

    trace: "Callable[[Request], tuple[list[Traced], dict[str, str]]]"
    refuses: tuple[str, ...] = ()
    taps: bool = True


@dataclass(frozen=True)
class Benchmark:
    """How an operator is timed.

    `gpu_cases` and `cpu_cases` are the standard set of each kind of machine. `pairs` counts, from inputs and outputs by
    name, the pairs of a query and a key, over all heads, that the definition multiplies: a score of D channels and a
    sum of Dv.
    """

    gpu_cases: "tuple[Case, ...]"
    cpu_cases: "tuple[Case, ...]"
    pairs: "Callable[[Problem, Tensors, Tensors], int]"
    baselines: "tuple[Baseline, ...]"

    def cases(self, device: str) -> "tuple[Case, ...]":
        """The standard set."""
        return self.gpu_cases if device == "cuda" else self.cpu_cases


@dataclass(frozen=True)
class Launches:
    """What is launched for usual problems on an architecture, and with one of its tile configurations."""

    defaults: "Callable[[int, torch.dtype], list[Labelled]]"
    configuration: "Callable[[Any, str, int, torch.dtype], list[Labelled]] | None" = None


# What a message says where a part is missing.
PARTS = {
    "suite": "are no cases",
    "configs": "are no tile configurations",
    "trace": "is no trace",
    "bench": "is no benchmark",
    "launches": "are no launches",
    "audit": "is no audit",
    "over_ranks": "is nothing over ranks",
}


@dataclass(frozen=True)
class Operator:
    """One operator: its public function and its reference, each as `module:name`, and its parts.

    A part is an object, or `module:NAME` of one, or says why it is Missing. Bugs are planted as tilewise.ops is
    imported: neither this declaration nor the suite may import it, other parts may.
    """

    name: str
    summary: str
    function: str
    reference: str
    # For verify: the problem, cases and planted bugs.
    suite: "Suite | str | Missing"
    # For verify --every-config.
    configs: Configurations | str | Missing
    trace: Tracing | str | Missing
    bench: Benchmark | str | Missing
    # For inspect: what is compiled; and launches at 10 million tokens, functions that are audited in a process each.
    launches: Launches | str | Missing
    audit: tuple[str, ...] | Missing
    # An operator that launches all kernels of this one too.
    part_of: str = ""
    # For verify --parallel.
    over_ranks: "OverRanks | str | Missing" = Missing("it takes no parallel=plan")

    def has(self, part: str) -> bool:
        """Whether it has this part."""
        return not isinstance(getattr(self, part), Missing)

    def load(self, field: str) -> Any:
        """The function, the reference or a part; a UsageError says why it is missing."""
        value = getattr(self, field)
        if isinstance(value, Missing):
            raise UsageError(f"there {PARTS[field]} of {self.name!r}: {value.why}")
        return load(value) if isinstance(value, str) else value


def load(place: str) -> Any:
    """What `module:name` names."""
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)
