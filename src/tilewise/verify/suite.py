"""What an operator declares to be verified: its problem, named cases, planted bugs, and how to draw further cases.

`plant` rewrites the source of one module of tilewise.ops as it is imported.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tilewise.verify.problem import Problem

# Sizes that every operator has, in order; other cases are the edge battery.
NAMED = ("small", "medium", "large", "xl", "xxl", "nsa-507")
# Interpreted kernels run cases up to this many channels by default.
INTERPRETED_WIDTH = 64
# Seconds that one check may take before it counts as a hang.
TIME_LIMIT = 120.0
LONG_TIME_LIMIT = 1800.0
# The check that is not a case: how memory grows with the sequence.
GROWTH = "memory-growth"


@dataclass(frozen=True)
class Case:
    """One problem with a name."""

    name: str
    about: str
    problem: Problem

    @property
    def time_limit(self) -> float:
        """Seconds it may take."""
        return LONG_TIME_LIMIT if self.name in ("xl", "xxl") else TIME_LIMIT


@dataclass(frozen=True)
class Mutant:
    """A planted bug: in the source of `module` (under tilewise.ops), every `old` is replaced by `new`.

    With a `capability`, its kernels run only on GPUs of that compute capability.
    """

    name: str
    about: str
    module: str
    old: str
    new: str
    capability: tuple[int, int] | None = None

    def plant(self, source: str) -> str:
        """The source with the bug; a ValueError if `old` is not in it, since then nothing would be planted."""
        # Differences in whitespace and trailing commas are ignored, so that reformatting a kernel does not disarm a
        # mutant.
        pattern = r"\s+".join(re.escape(word) for word in self.old.split())
        pattern = re.sub(r"(\\[(\[])", r"\1\\s*", pattern)
        pattern = re.sub(r"(\\[)\]])", r",?\\s*\1", pattern)
        planted, count = re.subn(pattern, lambda _: self.new, source)
        if count == 0:
            raise ValueError(
                f"the planted bug {self.name!r} finds no {self.old!r} in tilewise.ops.{self.module}: bring it up to"
                " date"
            )
        return planted


@dataclass(frozen=True)
class Suite:
    """All that verify needs of one operator.

    `draw` builds a problem from hypothesis's draw function; `growth` is the problem that memory is measured on.
    """

    problem: type[Problem]
    cases: tuple[Case, ...]
    growth: Problem
    draw: Callable[[Callable[[Any], Any]], Problem]
    mutants: tuple[Mutant, ...] = ()

    def find(self, text: str) -> Case:
        """The case called `text`, or the problem that it writes out."""
        for case in self.cases:
            if case.name == text:
                return case
        if "=" in text:
            problem = self.problem.parse(text)
            problem.check()
            return Case(text, "", problem)
        raise ValueError(
            f"there is no case {text!r}: expected one of {', '.join(case.name for case in self.cases)}, or a problem"
            " such as T=65,D=16"
        )

    def planted(self, capability: tuple[int, int] | None) -> tuple[Mutant, ...]:
        """The bugs in kernels that run on a GPU of this compute capability; None where kernels are interpreted."""
        return tuple(mutant for mutant in self.mutants if mutant.capability in (None, capability))

    def standard(self, device: str, interpreted: bool) -> tuple[Case, ...]:
        """The cases that run by default: all on a GPU; elsewhere no larger than `large`; interpreted, `small` and the
        narrow edge battery.
        """

        def runs(case: Case) -> bool:
            if interpreted:
                return case.name == "small" or (case.name not in NAMED and case.problem.width <= INTERPRETED_WIDTH)
            return device != "cpu" or case.name not in ("xl", "xxl")

        return tuple(case for case in self.cases if runs(case))


def plant(mutant: Mutant) -> None:
    """From now on this process imports `mutant.module` with its bug; nothing of tilewise.ops may have been imported
    before.
    """
    imported = [name for name in sys.modules if name.startswith("tilewise.ops")]
    if imported:
        raise RuntimeError(
            f"{imported[0]} is already imported, so {mutant.name!r} cannot be planted: plant in a fresh process"
        )
    sys.meta_path.insert(0, _Finder(mutant))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"tilewise.ops.{self._mutant.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(fullname)
        with open(spec.origin, encoding="utf-8") as file:
            source = self._mutant.plant(file.read())
        loader = _Loader(f"<{self._mutant.name} in {self._mutant.module}>", source)
        return importlib.util.spec_from_loader(fullname, loader)


class _Loader(importlib.abc.SourceLoader):
    def __init__(self, filename: str, source: str) -> None:
        self._filename, self._source = filename, source
        # Triton finds a kernel's source by its file name.
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)

    def get_filename(self, _fullname: str) -> str:
        return self._filename

    def get_data(self, _path: str) -> bytes:
        return self._source.encode()
