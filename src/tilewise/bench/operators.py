"""Operators that can be timed, by name: each has a module of its own here, imported when it is asked for."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tilewise.bench.baseline import Baseline
from tilewise.verify.problem import Problem, Tensors
from tilewise.verify.suite import Case
from tilewise.workbench.operator import UsageError

# Each of these has an OPERATOR.
MODULES = {
    "flash": "tilewise.bench.flash",
    "nsa": "tilewise.bench.nsa",
    "nsa-compressed": "tilewise.bench.nsa_compressed",
    "nsa-selected": "tilewise.bench.nsa_selected",
    "hstu": "tilewise.bench.hstu",
    "bsa": "tilewise.bench.bsa",
}


@dataclass(frozen=True)
class Benchmark:
    """How an operator is timed.

    `gpu_cases` and `cpu_cases` are the standard set of each kind of machine. `pairs` counts, from inputs and outputs by
    name, the pairs of a query and a key, over all heads, that the definition multiplies: a score of D channels and a
    sum of Dv.
    """

    gpu_cases: tuple[Case, ...]
    cpu_cases: tuple[Case, ...]
    pairs: Callable[[Problem, Tensors, Tensors], int]
    baselines: tuple[Baseline, ...]

    def cases(self, device: str) -> tuple[Case, ...]:
        """The standard set."""
        return self.gpu_cases if device == "cuda" else self.cpu_cases


def find(name: str) -> Benchmark:
    """The operator called `name`; a UsageError lists the names there are."""
    if name not in MODULES:
        raise UsageError(f"there is no benchmark of {name!r}: expected one of {', '.join(MODULES)}")
    operator = importlib.import_module(MODULES[name]).OPERATOR
    assert isinstance(operator, Benchmark)
    return operator
