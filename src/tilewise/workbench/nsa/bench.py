"""Native sparse attention's cases, compared with dense causal attention over the same q, k and v."""

from typing import Any

import torch

from tilewise.bench.dense import Dense, baselines, ended_windows, in_blocks, in_window
from tilewise.verify.suite import Case, Problem, Tensors
from tilewise.workbench.nsa.base import Sequences
from tilewise.workbench.nsa.cases import Nsa
from tilewise.workbench.nsa.cases_compressed import NsaCompressed
from tilewise.workbench.nsa.cases_selected import NsaSelected
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
    """Windows that have ended, keys of the chosen blocks, and keys in the sliding window, of the branches that have a
    gate.

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
NSA = Benchmark(
    tuple(_case(tokens, **GPU) for tokens in (4096, 8192, 16384, 32768, 65536)),
    tuple(_case(tokens, **CPU) for tokens in (512, 1024, 2048)),
    pairs,
    baselines(describe, dense=True),
)


def compressed_pairs(problem: Problem, _tensors: Tensors, _outputs: Tensors) -> int:
    """Windows that have ended."""
    assert isinstance(problem, NsaCompressed)
    return (
        batch(problem)
        * problem.H
        * sum(ended_windows(tokens, problem.compress, problem.stride) for tokens in problem.tokens())
    )


def _compressed_cases(sizes: dict[str, Any], lengths: tuple[int, ...]) -> tuple[Case, ...]:
    wanted = {name: sizes[name] for name in ("H", "Hk", "D", "compress", "stride")}
    return tuple(Case(f"tokens-{tokens}", f"T {tokens}", NsaCompressed(T=tokens, **wanted)) for tokens in lengths)


COMPRESSED = Benchmark(
    _compressed_cases(GPU, (4096, 16384, 65536)), _compressed_cases(CPU, (512, 2048)), compressed_pairs, ()
)


def selected_pairs(problem: Problem, tensors: Tensors, _outputs: Tensors) -> int:
    """Keys of the blocks that are named, up to the query's own."""
    assert isinstance(problem, NsaSelected)
    indices = tensors["block_indices"]
    return problem.H // problem.kv_heads * in_blocks(positions(problem, indices.device), indices, problem.block)


def _selected_cases(lengths: tuple[int, ...], patterns: tuple[str, ...], **sizes: Any) -> tuple[Case, ...]:
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


SELECTED = Benchmark(
    (
        *_selected_cases((8192, 16384, 32768), ("random", "smooth"), H=64, Hk=4, D=128, block=64, count=16),
        *_selected_cases((8192, 16384, 32768), ("random", "smooth"), H=16, Hk=4, D=128, block=64, count=16),
        *_selected_cases((16384,), ("random",), H=16, Hk=16, D=128, block=64, count=16),
    ),
    _selected_cases((512, 1024, 2048), ("random",), H=8, Hk=2, D=64, block=32, count=8),
    selected_pairs,
    baselines(describe, dense=True),
)
