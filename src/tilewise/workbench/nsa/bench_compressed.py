"""Attention to compressed windows: its cases.

Nothing that torch offers computes it, so that plain torch stands beside it alone.
"""

from typing import Any

from tilewise.bench.pairs import ended_windows
from tilewise.verify.problem import Problem, Tensors
from tilewise.verify.suite import Case
from tilewise.workbench.nsa.bench import CPU, GPU, batch
from tilewise.workbench.nsa.cases_compressed import NsaCompressed
from tilewise.workbench.operator import Benchmark


def pairs(problem: Problem, _tensors: Tensors, _outputs: Tensors) -> int:
    """Windows that have ended."""
    assert isinstance(problem, NsaCompressed)
    return (
        batch(problem)
        * problem.H
        * sum(ended_windows(tokens, problem.compress, problem.stride) for tokens in problem.tokens())
    )


def _cases(sizes: dict[str, Any], lengths: tuple[int, ...]) -> tuple[Case, ...]:
    wanted = {name: sizes[name] for name in ("H", "Hk", "D", "compress", "stride")}
    return tuple(Case(f"tokens-{tokens}", f"T {tokens}", NsaCompressed(T=tokens, **wanted)) for tokens in lengths)


BENCHMARK = Benchmark(_cases(GPU, (4096, 16384, 65536)), _cases(CPU, (512, 2048)), pairs, ())
