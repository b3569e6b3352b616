"""Native sparse attention's cases, beside dense causal attention over the same q, k and v."""

from typing import Any

import torch

from tilewise.bench.dense import Dense, baselines
from tilewise.bench.pairs import ended_windows, in_blocks, in_window
from tilewise.verify.problem import Problem, Tensors
from tilewise.verify.suite import Case
from tilewise.workbench.nsa.base import Sequences
from tilewise.workbench.nsa.cases import Nsa
from tilewise.workbench.operator import Benchmark


def describe(problem: Problem) -> Dense:
    """Causal."""
    assert isinstance(problem, Sequences)
    return Dense(right=0, scale=problem.scale, lengths=problem.lengths)


def batch(problem: Sequences) -> int:
    """Sequences of each of the problem's lengths."""
    return 1 if problem.lengths else problem.B


def positions(problem: Sequences, device: torch.device) -> torch.Tensor:
    """Each token's place in its own sequence, to broadcast against `[B, T, Hk, S]`, or packed."""
    return torch.cat([torch.arange(tokens, device=device) for tokens in problem.tokens()])[:, None, None]


def pairs(problem: Problem, _tensors: Tensors, outputs: Tensors) -> int:
    """Windows that have ended, keys of the chosen blocks, and near keys, of the branches that have a gate.

    The choice uses the windows' scores.
    """
    assert isinstance(problem, Nsa)
    found = 0
    gates = problem.gates.replace("all", "cmp+slc+swa").split("+")
    if "cmp" in gates:
        found += (
            batch(problem)
            * problem.H
            * sum(ended_windows(tokens, problem.compress, problem.stride) for tokens in problem.tokens())
        )
    if "slc" in gates:
        indices = outputs["block_indices"]
        found += problem.H // problem.kv_heads * in_blocks(positions(problem, indices.device), indices, problem.block)
    if "swa" in gates:
        found += (
            batch(problem)
            * problem.H
            * sum(in_window(tokens, tokens, problem.window - 1, 0) for tokens in problem.tokens())
        )
    return found


def _case(tokens: int, **sizes: Any) -> Case:
    return Case(f"tokens-{tokens}", f"T {tokens}", Nsa(T=tokens, **sizes))


GPU: dict[str, Any] = {
    "H": 64,
    "Hk": 4,
    "D": 128,
    "compress": 32,
    "stride": 16,
    "block": 64,
    "count": 16,
    "window": 512,
}
CPU: dict[str, Any] = {"H": 8, "Hk": 2, "D": 64, "compress": 32, "stride": 16, "block": 32, "count": 8, "window": 128}
BENCHMARK = Benchmark(
    tuple(_case(tokens, **GPU) for tokens in (4096, 8192, 16384, 32768, 65536)),
    tuple(_case(tokens, **CPU) for tokens in (512, 1024, 2048)),
    pairs,
    baselines(describe, dense=True),
)
