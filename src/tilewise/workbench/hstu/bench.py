"""HSTU attention's cases, compared with what a user would write in torch for sequences of one length."""

import itertools

import torch

from tilewise.bench.contender import Baseline, Call, CannotRunError, as_leaf
from tilewise.verify.suite import Case, Problem, Tensors
from tilewise.workbench.hstu.cases import Hstu
from tilewise.workbench.operator import Benchmark


def pairs(problem: Problem, _tensors: Tensors, _outputs: Tensors) -> int:
    """The pairs that the mask keeps."""
    from tilewise.ops.hstu.reference import keep_mask

    assert isinstance(problem, Hstu)
    targets = problem.targets or (None,) * len(problem.lengths)
    found = {
        (tokens, number): int(
            keep_mask(tokens, problem.causal, number, problem.attn, problem.context, torch.device("cpu")).sum()
        )
        for tokens, number in set(zip(problem.lengths, targets, strict=True))
    }
    return problem.H * sum(found[one] for one in zip(problem.lengths, targets, strict=True))


def batched(problem: Problem, tensors: Tensors) -> Call:
    """Two batched products with SiLU and the causal mask between them."""
    assert isinstance(problem, Hstu)
    if len(set(problem.lengths)) != 1:
        raise CannotRunError("sequences of different lengths do not make a batch")
    if problem.targets or problem.attn or problem.context or not problem.causal:
        raise CannotRunError("written for the causal mask alone")
    length, longest = problem.lengths[0], int(problem.options()["max_seq_len"])
    leaves = [as_leaf(tensors[name].unflatten(0, (-1, length)).transpose(1, 2)) for name in "qkv"]
    q, k, v = leaves
    alpha = problem.D**-0.5 if problem.alpha is None else problem.alpha
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)

    def run() -> tuple[torch.Tensor]:
        weights = torch.nn.functional.silu(q @ k.mT * alpha) / longest
        return (weights.masked_fill(later, 0.0) @ v,)

    return Call(run, leaves, lambda o: o.transpose(1, 2).flatten(0, 1))


def jagged(longest: int, number: int) -> tuple[int, ...]:
    """Lengths drawn evenly from 1 to the longest, the same ones always."""
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randint(1, longest + 1, (number,), generator=generator).tolist())


# (batch, tokens, heads, channels of q and k, of v).
SHORT = ((1, 64, 4, 16, 32), (2, 128, 8, 32, 64), (4, 256, 8, 32, 64), (8, 512, 8, 32, 64), (16, 1024, 8, 32, 64))
LONG = ((8, 4096, 4, 128, 128), (8, 8192, 4, 128, 128))
FULL = ((32, 1024, 8, 32, 64), (8, 4096, 8, 32, 64), (32, 2048, 4, 128, 128))


def _cases() -> tuple[Case, ...]:
    shapes = (*SHORT, *FULL, *LONG)
    full = [(f"{b}x{n}-{d}", f"B {b}, N {n}, D {d}, Dv {dv}", (n,) * b, (h, d, dv)) for b, n, h, d, dv in shapes]
    uneven = [
        (f"jagged-{b}x{n}-{d}", f"B {b}, lengths 1 to {n}, D {d}, Dv {dv}", jagged(n, b), (h, d, dv))
        for b, n, h, d, dv in (*FULL, LONG[-1])
    ]
    return tuple(
        Case(name, about, Hstu(lengths=lengths, H=h, D=d, Dv=dv))
        for name, about, lengths, (h, d, dv) in itertools.chain(full, uneven)
    )


BENCHMARK = Benchmark(
    _cases(),
    tuple(
        Case(f"{b}x{n}-{d}", f"B {b}, N {n}, D {d}, Dv {dv}", Hstu(lengths=(n,) * b, H=h, D=d, Dv=dv))
        for b, n, h, d, dv in SHORT[:4]
    ),
    pairs,
    (Baseline("batched", "two batched products in torch, SiLU and the mask between them", batched),),
)
