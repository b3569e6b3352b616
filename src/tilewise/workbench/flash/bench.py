"""Flash attention's cases, and dense attention as torch offers it."""

from typing import Any

from tilewise.bench.dense import Dense, baselines, window_pairs
from tilewise.verify.suite import Case, Problem, Tensors
from tilewise.workbench.flash.cases import Flash
from tilewise.workbench.operator import Benchmark

TOKENS = 16384


def describe(problem: Problem) -> Dense:
    """The problem's mask and scores."""
    assert isinstance(problem, Flash)
    left, right = problem.window or (-1, -1)
    return Dense(
        left, 0 if problem.causal else right, problem.softcap, problem.scale, problem.lengths, problem.lengths_k
    )


def pairs(problem: Problem, tensors: Tensors, _outputs: Tensors) -> int:
    """The pairs that the mask keeps."""
    dense = describe(problem)
    return window_pairs(tensors["q"], tensors["k"], dense.lengths, dense.left, dense.right, dense.lengths_k)


def _case(name: str, about: str, **parameters: Any) -> Case:
    return Case(name, about, Flash(**parameters))


def _series(name: str, about: str, lengths: tuple[int, ...], **parameters: Any) -> tuple[Case, ...]:
    """The same number of tokens in ever fewer, longer sequences."""
    return tuple(
        _case(f"{name}-{tokens}", f"{about}, T {tokens}", B=TOKENS // tokens, T=tokens, **parameters)
        for tokens in lengths
    )


GPU_CASES = (
    *_series("causal-128", "D 128, causal", (512, 1024, 2048, 4096, 8192, 16384), H=16, D=128, causal=True),
    *_series("full-128", "D 128", (2048, 16384), H=16, D=128),
    *_series("causal-64", "D 64, causal", (2048, 16384), H=32, D=64, causal=True),
    *_series("full-64", "D 64", (2048, 16384), H=32, D=64),
    _case("gqa", "32 query heads, 4 KV heads, causal", B=4, T=4096, H=32, Hk=4, D=128, causal=True),
    _case(
        "packed",
        "8 sequences of 100 to 4096 tokens, causal",
        lengths=(4096, 100, 2048, 777, 1500, 3001, 512, 4000),
        H=16,
        D=128,
        causal=True,
    ),
)
CPU_CASES = tuple(
    _case(f"causal-64-{tokens}", f"D 64, causal, T {tokens}", T=tokens, H=4, D=64, causal=True)
    for tokens in (256, 1024, 4096)
)

BENCHMARK = Benchmark(GPU_CASES, CPU_CASES, pairs, baselines(describe, dense=False))
