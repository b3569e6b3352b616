"""What an operator declares to be verified over the ranks of a ContextPlan (over_ranks.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilewise.verify.suite import Mutant


@dataclass(frozen=True)
class OverRanks:
    """Those of the operator's cases whose problem it `takes`, and `cases` besides, problems written out.

    Arguments that are `offsets` go into the plan. Of `shared` tensors each rank has its tokens, of others all. A plan
    may have any of `methods`; `mutants` are planted in tilewise.parallel. Where kernels are interpreted the cases `few`
    run by default.
    """

    takes: Callable[[Any], bool]
    offsets: tuple[str, ...]
    shared: tuple[str, ...]
    methods: tuple[str, ...]
    mutants: tuple[Mutant, ...]
    cases: tuple[str, ...]
    few: tuple[str, ...]
