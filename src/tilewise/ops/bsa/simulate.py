"""Block-sparse attention's selected branch and layer norm in torch, exactly as the kernels do it: one sequence, one
head, one program.

Tensors are q [T, D], k [T, D], v [T, Dv] of one head, and the blocks [T, S] that its tokens chose. Blocks are grouped
into lists, and what programs leave by entry is added, as in native sparse attention's selected branch: `segments`,
`Tiling` and `Results` are those of `ops.nsa.simulate`, with one head to a row. Values come as (name, tensor), step by
step; a number at the end of a name is its step. State is fp32, or fp64 for fp64 inputs; tiles of keys are padded with
zeros as loads pad them, tiles of queries hold the rows that exist.

The compressed and the window branch are HSTU attention's kernels.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch

from tilewise.ops.bsa.configs import LAYER_NORM_EPS
from tilewise.ops.flash.simulate import LOG2E, Named, dot, state_dtype
from tilewise.ops.nsa.simulate import (
    Entry,
    Results,
    Tiling,
    block_keys,
    by_entry,
    entry_steps,
    keys_kept,
    lists,
    stepped,
    sum_gradients,
)


def _sigmoid(scores: torch.Tensor, scale: float) -> torch.Tensor:
    root = torch.rsqrt(1.0 + torch.exp2(scores * -(scale * LOG2E)))
    return root * root


def _tokens(part: Sequence[Entry], device: torch.device) -> torch.Tensor:
    return torch.tensor([t for t, _ in part], device=device)


def forward_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    entries: Sequence[Entry],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """`entries` of one block's list: K, V; for each step Q_i, P_full_i (weights of all pairs), P_i (masked), O_i, the
    sum over this block alone.
    """
    state = state_dtype(q)
    b_k, b_v = block_keys(k, block, tiling), block_keys(v, block, tiling)
    yield from (("K", b_k), ("V", b_v))
    for step, part in enumerate(entry_steps(entries, 1, tiling)):
        token = _tokens(part, q.device)
        b_q = q[token]
        yield f"Q_{step}", b_q
        scores = dot(b_q, b_k.T, state)
        p = scores * _sigmoid(scores, scale)
        yield f"P_full_{step}", p
        p = p.masked_fill(~keys_kept(token, block, k.shape[0], tiling), 0.0)
        yield f"P_{step}", p
        yield f"O_{step}", dot(p.to(v.dtype), b_v, state)


def partial_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, tiling: Tiling, scale: float
) -> Results:
    """What the programs leave by entry, [T, S, 1, Dv] in q's dtype."""
    by_block = enumerate(lists(indices, tiling.block_size))
    found = [stepped(dict(forward_lists(q, k, v, entries, block, tiling, scale)), "O") for block, entries in by_block]
    return by_entry(indices, found, (1, v.shape[1]), q.dtype, tiling)


def add_slots(x: torch.Tensor, present: torch.Tensor, name: str, base: torch.Tensor | None = None) -> Iterator[Named]:
    """Rows of tokens over their slots, x [R, S, D] and present [R, S]: for each slot i `name`_part_i, `name`_i; then
    `name`_final.

    Where sums begin with a `base` [R, D], that comes first, as `name`_base.
    """
    for full, value in sum_gradients(x, present, base):
        yield name + full.removeprefix("dQ"), value


def backward_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    entries: Sequence[Entry],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """`entries` of one block's list, do [T, Dv].

    K, V; for each step Q_i, dO_i, P_full_i (weights of all pairs), slope_i, dP_i, P_i and dS_i (masked, as products
    take them), dV_i, dK_i, dQ_i.
    """
    state = state_dtype(q)
    b_k, b_v = block_keys(k, block, tiling), block_keys(v, block, tiling)
    yield from (("K", b_k), ("V", b_v))
    acc_dk, acc_dv = (torch.zeros(x.shape, dtype=state, device=q.device) for x in (b_k, b_v))
    for step, part in enumerate(entry_steps(entries, 1, tiling)):
        token = _tokens(part, q.device)
        b_q, b_do = q[token], do[token]
        yield from ((f"Q_{step}", b_q), (f"dO_{step}", b_do))
        scores = dot(b_q, b_k.T, state)
        sigmoid = _sigmoid(scores, scale)
        p = scores * sigmoid
        yield f"P_full_{step}", p
        slope = p * (scale - scale * sigmoid) + sigmoid
        yield f"slope_{step}", slope
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        hidden = ~keys_kept(token, block, k.shape[0], tiling)
        p = p.masked_fill(hidden, 0.0).to(do.dtype)
        yield f"P_{step}", p
        ds = (dp * slope).masked_fill(hidden, 0.0).to(q.dtype)
        yield f"dS_{step}", ds
        acc_dv = acc_dv + dot(p.T, b_do, state)
        yield f"dV_{step}", acc_dv
        acc_dk = acc_dk + dot(ds.T, b_q, state)
        yield f"dK_{step}", acc_dk
        yield f"dQ_{step}", dot(ds, b_k, state)


def backward_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    parts: Sequence[Sequence[Entry]],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """dK_final and dV_final of one block, from the `parts` of its list that programs own, added in order."""
    sums: dict[str, torch.Tensor] = {}
    for entries in parts:
        values = dict(backward_lists(q, k, v, do, entries, block, tiling, scale))
        last = {name: stepped(values, name)[-1] for name in ("dK", "dV")}
        sums = {name: sums[name] + x for name, x in last.items()} if sums else last
    yield from ((f"{name}_final", x) for name, x in sums.items())


def partial_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    indices: torch.Tensor,
    tiling: Tiling,
    scale: float,
) -> Results:
    """What the programs leave of dQ by entry, [T, S, 1, D] in q's dtype."""
    by_block = enumerate(lists(indices, tiling.block_size))
    found = [
        stepped(dict(backward_lists(q, k, v, do, entries, block, tiling, scale)), "dQ") for block, entries in by_block
    ]
    return by_entry(indices, found, (1, q.shape[1]), q.dtype, tiling)


def norm(branches: Mapping[str, tuple[torch.Tensor, torch.Tensor | None]], u: torch.Tensor) -> Iterator[Named]:
    """One token: for each branch by name its output [H, Dv] and gates [H], None for 1; u [H, Dv].

    For each branch n: X_n_0, G_n_0, Y_n_0 (after layer norm); then Y_0, their sum, U_0, and O_final. All of it is one
    step.
    """
    state = state_dtype(u)
    total = torch.zeros(u.shape, dtype=state, device=u.device)
    for name, (x, gate) in branches.items():
        x = x.to(state)
        yield f"X_{name}_0", x
        gate = torch.ones(x.shape[0], dtype=state, device=x.device) if gate is None else gate.to(state)
        yield f"G_{name}_0", gate
        deviation = x * gate[:, None]
        deviation = deviation - deviation.mean()
        y = deviation * (1.0 / torch.sqrt((deviation * deviation).mean() + LAYER_NORM_EPS))
        yield f"Y_{name}_0", y
        total = total + y
    yield "Y_0", total
    yield "U_0", u.to(state)
    yield "O_final", u.to(state) * total
