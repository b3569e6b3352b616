"""native_sparse_attention over the ranks of a ContextPlan: keys and values up to a rank's last token of each sequence
come a few KV heads at a time; the rank makes their windows' means itself, scores them, chooses, and attends.

Blocks are selected from gathered keys, not fetched by name: thousands of queries with 16 blocks each name nearly all
there are, and to tell their owners which would take a message, and a wait, before each transfer.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.register import uncompiled
from tilewise.ops.nsa import api, reference
from tilewise.ops.nsa.branches import Options
from tilewise.ops.nsa.problem import Sizes, window_count
from tilewise.parallel.exchange import Fetch
from tilewise.parallel.nsa_branches import Gathered
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.plan import ContextPlan

Tensor = torch.Tensor
Gates = tuple[Tensor | None, Tensor | None, Tensor | None]


@uncompiled
def attend(
    plan: ContextPlan,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    gates: Gates,
    k_cmp: Tensor | None,
    v_cmp: Tensor | None,
    sizes: Sizes,
    window_size: int,
    scale: float | None,
    block_indices: Tensor | None,
    return_indices: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor | None]:
    """Output of this rank's queries, and the blocks that they chose."""
    if plan.method == "ring":
        raise ValueError("the plan's method is 'ring': native_sparse_attention takes a plan of method 'all_gather'")
    rows = Rows(plan.packed)
    checks.check_qkv(q, k, v, plan.packed)
    for name, x in (("q", q), ("k", k), ("v", v)):
        plan.check_local(x, name, rows.axis)
    cu = None if plan.local_cu_seqlens is None else plan.local_cu_seqlens.to(q.device)
    checked = api.check(
        q, k, v, gates, k_cmp, v_cmp, block_indices, cu, sizes, window_size, scale, return_indices, backend
    )
    options = Options(sizes, window_size, *checked)
    _check_whole_windows(plan, k_cmp, sizes)
    _check_blocks(plan, block_indices, sizes.block_size)
    given = dict(zip(("q", "k", "v", *api.GATES, "k_cmp", "v_cmp"), (q, k, v, *gates, k_cmp, v_cmp), strict=True))
    there = {name: x for name, x in given.items() if x is not None}
    shapes = [_described(x, rows.axis if name in ("q", "k", "v") else None) for name, x in there.items()]
    wanted = [name for name, x in there.items() if torch.is_grad_enabled() and x.requires_grad]
    named = "" if block_indices is None else f", {block_indices.dtype} block_indices"
    plan.agree(
        f"native_sparse_attention({', '.join(there)}{named}) of {shapes}, {options}, gradients {wanted}",
        q.device,
    )
    if options.backend == "reference":
        return _by_reference(plan, given, block_indices, options)
    return Gathered.apply(q, k, v, *gates, k_cmp, v_cmp, block_indices, plan, options)


def _described(x: Tensor, tokens: int | None) -> list[Any]:
    """Shape, without what differs between ranks, and dtype."""
    shape = [x.shape[-1]] if tokens is None else [*x.shape[:tokens], "tokens", *x.shape[tokens + 1 :]]
    return [*shape, x.dtype]


def _check_whole_windows(plan: ContextPlan, k_cmp: Tensor | None, sizes: Sizes) -> None:
    lengths = (end - start for start, end in itertools.pairwise(plan.offsets))
    expected = sum(window_count(length, sizes.compress_size, sizes.compress_stride) for length in lengths)
    if k_cmp is not None and k_cmp.shape[-3] != expected:
        raise ValueError(
            f"k_cmp has {k_cmp.shape[-3]} windows: expected {expected}, those of the plan's whole sequences, on every"
            " rank; `plan.windows` makes them"
        )


def _check_blocks(plan: ContextPlan, indices: Tensor | None, block_size: int) -> None:
    """Numbers of blocks of whole sequences."""
    if indices is None or not checks.values_are_checked(indices):
        return
    lengths = torch.tensor(plan.offsets).diff()
    blocks = -(-lengths // block_size)
    if plan.local_cu_seqlens is not None:
        of_tokens = blocks.repeat_interleave(plan.local_cu_seqlens.cpu().diff())[:, None, None]
        checks.check_index_values(indices, "block_indices", of_tokens.to(indices.device))
    else:
        checks.check_index_values(indices, "block_indices", int(blocks))


def _by_reference(
    plan: ContextPlan, given: dict[str, Tensor | None], indices: Tensor | None, options: Options
) -> tuple[Tensor, Tensor | None]:
    """The definition: the whole batch on every rank, and its own tokens of the result."""
    rows = Rows(plan.packed)
    local = {name: x for name, x in given.items() if x is not None and name not in ("k_cmp", "v_cmp")}
    wide = max((x.dtype for x in local.values()), key=lambda dtype: dtype.itemsize)
    # As one tensor, so that gradients of all go home, on every rank, whatever the loss reads.
    together = torch.cat([x.flatten(rows.axis + 1).to(wide) for x in local.values()], -1)
    exchange = plan.exchange(None, together.device)
    whole = rows.back(Fetch.apply(rows.first(together), exchange))
    found: dict[str, Any] = {name: given[name] for name in ("k_cmp", "v_cmp")} | dict.fromkeys(api.GATES)
    for (name, x), part in zip(
        local.items(), whole.split([x.shape[rows.axis + 1 :].numel() for x in local.values()], -1), strict=True
    ):
        found[name] = part.to(x.dtype).unflatten(-1, x.shape[rows.axis + 1 :])
    if indices is not None:
        indices = rows.back(exchange.fetch(rows.first(indices)).wait())
    o, chosen = reference.native_sparse_attention(
        **found,
        **options.sizes._asdict(),
        window_size=options.window_size,
        scale=options.scale,
        cu_seqlens=torch.tensor(plan.offsets, device=together.device) if plan.packed else None,
        block_indices=indices,
    )
    return plan.shard(o, rows.axis), None if chosen is None else plan.shard(chosen, rows.axis)
