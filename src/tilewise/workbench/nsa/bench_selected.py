"""Attention to given blocks: its cases, beside dense causal attention over the same q, k and v."""

from typing import Any

from tilewise.bench.dense import baselines
from tilewise.bench.pairs import in_blocks
from tilewise.verify.problem import Problem, Tensors
from tilewise.verify.suite import Case
from tilewise.workbench.nsa.bench import describe, positions
from tilewise.workbench.nsa.cases_selected import NsaSelected
from tilewise.workbench.operator import Benchmark


def pairs(problem: Problem, tensors: Tensors, _outputs: Tensors) -> int:
    """Keys of the blocks that are named, up to the query's own."""
    assert isinstance(problem, NsaSelected)
    indices = tensors["block_indices"]
    return problem.H // problem.kv_heads * in_blocks(positions(problem, indices.device), indices, problem.block)


def _cases(lengths: tuple[int, ...], patterns: tuple[str, ...], **sizes: Any) -> tuple[Case, ...]:
    group = sizes["H"] // sizes["Hk"]
    return tuple(
        Case(
            f"{pattern}-{group}-{tokens}",
            f"{pattern} blocks, groups of {group}, T {tokens}",
            NsaSelected(T=tokens, pattern=pattern, **sizes),
        )
        for pattern in patterns
        for tokens in lengths
    )


BENCHMARK = Benchmark(
    (
        *_cases((8192, 16384, 32768), ("random", "smooth"), H=64, Hk=4, D=128, block=64, count=16),
        *_cases((8192, 16384, 32768), ("random", "smooth"), H=16, Hk=4, D=128, block=64, count=16),
        *_cases((16384,), ("random",), H=16, Hk=16, D=128, block=64, count=16),
    ),
    _cases((512, 1024, 2048), ("random",), H=8, Hk=2, D=64, block=32, count=8),
    pairs,
    baselines(describe, dense=True),
)
