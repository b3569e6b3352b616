"""Block-sparse attention written once more, one tile of queries at a time, and three mistakes that `tilewise verify`
catches.

    tilewise verify bsa --impl examples/bsa_implementations.py:correct
    tilewise verify bsa --impl examples/bsa_implementations.py:shared_indices --config small

A tile is the queries of one block. That makes the choice simple, for all of them have the same own block, and it is how
a kernel goes about it: what belongs to a tile is computed, used and forgotten, so memory does not grow with the square
of the sequence.
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

EPS = 1e-6


def gate_each_branch(branches: list[Tensor], gates: list[Tensor | None]) -> list[Tensor]:
    """Each branch [T, H, Dv] times its own gate [T, H]; a gate of None is 1."""
    return [branch if gate is None else gate[..., None] * branch for branch, gate in zip(branches, gates, strict=True)]


def normalise_token(x: Tensor) -> Tensor:
    """Layer norm of [T, H, Dv] over all heads and channels of a token together."""
    centred = x - x.mean((-2, -1), keepdim=True)
    return centred * torch.rsqrt(centred.square().mean((-2, -1), keepdim=True) + EPS)


def share_even(chosen: Tensor) -> Tensor:
    """Blocks [H, T, S] of heads 0, 0, 2, 2, 4, 4, ..."""
    return chosen[torch.arange(len(chosen)) // 2 * 2]


class Steps(NamedTuple):
    """The steps that the mistakes below replace."""

    gate: Callable[[list[Tensor], list[Tensor | None]], list[Tensor]] = gate_each_branch
    normalise: Callable[[Tensor], Tensor] = normalise_token
    share: Callable[[Tensor], Tensor] = share_even


RIGHT = Steps()


class Sizes(NamedTuple):
    """The arguments that are numbers."""

    block_counts: int
    block_size: int
    window_size: int
    scale: float
    interleave: bool


def weigh(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """A(q·k) of queries [H, M, D] and keys [H, N, D]."""
    return functional.silu(q @ k.transpose(-1, -2) * scale) / scale


def choose(weights: Tensor, count: int) -> Tensor:
    """The `count` blocks of each query, given the weights [H, M, own] of those before its own: that one, and the best
    of the others.

    Ascending, so the own block comes last; then -1.
    """
    heads, queries, own = weights.shape
    # A stable sort leaves equal weights in order: the lower index wins.
    best = weights.sort(dim=-1, descending=True, stable=True).indices[..., : count - 1].sort(dim=-1).values
    chosen = torch.cat([best, torch.full((heads, queries, 1), own, device=best.device)], dim=-1)
    return functional.pad(chosen, (0, count - chosen.shape[-1]), value=-1)


def attend_tile(
    i: int, q: Tensor, k: Tensor, v: Tensor, k_cmp: Tensor, v_cmp: Tensor, sizes: Sizes, steps: Steps
) -> tuple[Tensor, ...]:
    """The branches [H, M, Dv] of the queries of block i, and their blocks [H, M, S]; q, k, v are the whole sequence's,
    [H, T, ...].
    """
    start, end = i * sizes.block_size, min((i + 1) * sizes.block_size, q.shape[1])
    q, k, v = q[:, start:end], k[:, :end], v[:, :end]
    rows, keys = torch.arange(start, end, device=q.device)[:, None], torch.arange(end, device=q.device)

    # Every block before the own one is seen by all queries of the tile; the own one, where it is whole, by its last
    # query.
    weights = weigh(q, k_cmp[:, : i + 1], sizes.scale)
    ended = (torch.arange(weights.shape[-1], device=q.device) + 1) * sizes.block_size - 1 <= rows
    compressed = weights.where(ended, 0.0) @ v_cmp[:, : i + 1]

    chosen = choose(weights[..., :i].detach(), sizes.block_counts)
    chosen = steps.share(chosen) if sizes.interleave else chosen
    # -1 is counted as one block more than the tile can see, which no key lies in.
    taken = torch.zeros((*chosen.shape[:2], i + 2), dtype=torch.bool, device=q.device).scatter(
        -1, chosen.where(chosen >= 0, i + 1), True
    )
    near = weigh(q, k, sizes.scale).where(keys <= rows, 0.0)
    selected = near.where(taken[..., keys // sizes.block_size], 0.0) @ v
    branches = [compressed, selected]
    if sizes.window_size > 0:
        branches.append(near.where(keys > rows - sizes.window_size, 0.0) @ v)
    return *branches, chosen


def attend_sequence(
    tensors: list[Tensor], gates: list[Tensor | None], sizes: Sizes, steps: Steps
) -> tuple[Tensor, Tensor]:
    """One sequence, q [T, H, D] and so on: its output [T, H, Dv] and blocks [H, T, S]."""
    # Heads first, so that one product of matrices does all heads.
    q, k, v, u = (x.float().transpose(0, 1) for x in tensors)
    heads, tokens = v.shape[:2]
    whole = tokens // sizes.block_size
    k_cmp, v_cmp = (x[:, : whole * sizes.block_size].unflatten(1, (whole, sizes.block_size)).mean(2) for x in (k, v))
    tiles = range(-(-tokens // sizes.block_size))
    # A tile's weights are computed again in the backward rather than kept.
    parts = [
        checkpoint(attend_tile, i, q, k, v, k_cmp, v_cmp, sizes, steps, use_reentrant=False, preserve_rng_state=False)
        for i in tiles
    ]
    if not parts:
        return (u * v).transpose(0, 1), torch.empty((heads, 0, sizes.block_counts), device=q.device, dtype=torch.int32)
    *branches, chosen = (torch.cat(pieces, dim=1) for pieces in zip(*parts, strict=True))
    branches = [branch.transpose(0, 1) for branch in branches]
    gated = steps.gate(branches, [None if gate is None else gate.float() for gate in gates[: len(branches)]])
    return u.transpose(0, 1) * sum(steps.normalise(branch) for branch in gated), chosen.to(torch.int32)


def attend(
    tensors: list[Tensor], gates: list[Tensor | None], seq_offsets: Tensor | None, sizes: Sizes, steps: Steps
) -> tuple[Tensor, Tensor]:
    """Every sequence for itself: entries of a batch, or what lies between two offsets."""
    dtype = tensors[0].dtype
    if seq_offsets is None:
        tokens = tensors[0].shape[1]
        sizes = sizes._replace(block_counts=min(sizes.block_counts, -(-tokens // sizes.block_size)))
        entries = range(len(tensors[0]))
        pairs = [
            attend_sequence([x[b] for x in tensors], [None if g is None else g[b] for g in gates], sizes, steps)
            for b in entries
        ]
        return torch.stack([o for o, _ in pairs]).to(dtype), torch.stack([chosen for _, chosen in pairs])
    rows = [slice(*ends) for ends in itertools.pairwise(seq_offsets.tolist())]
    pairs = [
        attend_sequence([x[r] for x in tensors], [None if g is None else g[r] for g in gates], sizes, steps)
        for r in rows
    ]
    return torch.cat([o for o, _ in pairs]).to(dtype), torch.cat([chosen for _, chosen in pairs], dim=1)


def correct(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    u: Tensor,
    g_cmp: Tensor | None,
    g_slc: Tensor | None,
    g_swa: Tensor | None,
    block_counts: int,
    block_size: int,
    window_size: int = 0,
    *,
    scale: float | None = None,
    interleave: bool = True,
    seq_offsets: Tensor | None = None,
    steps: Steps = RIGHT,
) -> tuple[Tensor, Tensor]:
    """Block-sparse attention: the output and the chosen blocks. `steps` is for the wrong ones below."""
    sizes = Sizes(block_counts, block_size, window_size, q.shape[-1] ** -0.5 if scale is None else scale, interleave)
    return attend([q, k, v, u], [g_cmp, g_slc, g_swa], seq_offsets, sizes, steps)


def wrong_gate(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Wrong: the compressed branch, the first, is not gated."""

    def gate(branches: list[Tensor], gates: list[Tensor | None]) -> list[Tensor]:
        return gate_each_branch(branches, [None, *gates[1:]])

    return correct(*arguments, **options, steps=Steps(gate=gate))


def approximate_norm(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Wrong: layer norm of each head by itself, which needs no sum over heads, rather than of all heads of a token
    together.
    """

    def normalise(x: Tensor) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], eps=EPS)

    return correct(*arguments, **options, steps=Steps(normalise=normalise))


def shared_indices(*arguments: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Wrong: with interleave, the heads of a pair share the blocks of the odd one rather than of the even one."""

    def share(chosen: Tensor) -> Tensor:
        return chosen[torch.arange(len(chosen)) // 2 * 2 + 1]

    return correct(*arguments, **options, steps=Steps(share=share))
