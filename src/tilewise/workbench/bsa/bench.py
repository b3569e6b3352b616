"""Block-sparse attention's cases, compared with dense HSTU attention over the same q, k and v."""

import torch

import tilewise
from tilewise.bench.contender import Baseline, Call, floating_leaves
from tilewise.bench.dense import in_blocks, in_window
from tilewise.verify.suite import Case, Problem, Tensors, cumulative
from tilewise.workbench.bsa.cases import Bsa
from tilewise.workbench.hstu.bench import LONG, SHORT
from tilewise.workbench.operator import Benchmark


def pairs(problem: Problem, _tensors: Tensors, outputs: Tensors) -> int:
    """Blocks that have ended, keys of the chosen blocks, and near keys where there is a window."""
    assert isinstance(problem, Bsa)
    batch = 1 if problem.lengths else problem.B
    indices = outputs["block_indices"]
    # [B, H, T, S], or packed [H, N, S].
    position = torch.cat([torch.arange(tokens, device=indices.device) for tokens in problem.tokens()])[:, None]
    found = in_blocks(position, indices, problem.block)
    for tokens in problem.tokens():
        ended = int(((torch.arange(tokens) + 1) // problem.block).sum())
        near = in_window(tokens, tokens, problem.window - 1, 0) if problem.window else 0
        found += batch * problem.H * (ended + near)
    return found


def dense(problem: Problem, tensors: Tensors) -> Call:
    """tilewise's own HSTU attention, causal."""
    assert isinstance(problem, Bsa)
    lengths = problem.lengths or (problem.T,) * problem.B
    q, k, v = floating_leaves({name: tensors[name].reshape(-1, *tensors[name].shape[-2:]) for name in "qkv"}).values()
    offsets = cumulative(lengths).to(tensors["q"].device)
    work = problem.H * sum(in_window(tokens, tokens, -1, 0) for tokens in lengths)

    def run() -> tuple[torch.Tensor]:
        return (tilewise.hstu_attention(q, k, v, offsets, max_seq_len=max(lengths)),)

    return Call(run, [q, k, v], pairs=work)


def _cases(shapes: tuple[tuple[int, int, int, int, int], ...]) -> tuple[Case, ...]:
    return tuple(
        Case(
            f"{b}x{n}-{d}",
            f"B {b}, N {n}, D {d}, Dv {dv}",
            Bsa(lengths=(n,) * b, H=h, D=d, Dv=dv, count=4, block=32, gates="cmp+slc"),
        )
        for b, n, h, d, dv in shapes
    )


BENCHMARK = Benchmark(
    _cases((*SHORT, *LONG)),
    _cases(SHORT[:4]),
    pairs,
    (Baseline("dense-hstu", "dense HSTU attention, tilewise's own", dense, dense=True),),
)
