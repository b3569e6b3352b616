"""Learned compression of windows that straddle ranks: each rank makes the windows that begin with a token of its own,
and all ranks get all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tilewise.ops._host.register import uncompiled
from tilewise.parallel.assignment import Ranges, Runs, assign, everything, numbers, planning, sums
from tilewise.parallel.exchange import Exchange, Fetch
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.plan import ContextPlan

Tensor = torch.Tensor


class Windows:
    """Those of a plan's sequences, numbered over the whole batch.

    `of` takes this rank's out of local tensors, with the tokens of other ranks that lie in them; `whole` gives what a
    module makes of them to all ranks. Both are differentiable: gradients of both go home.
    """

    @planning
    def __init__(self, plan: ContextPlan, runs: Runs, bounds: Tensor, size: int, stride: int) -> None:
        self._plan, self._size, self._stride = plan, size, stride
        self._rows = Rows(plan.packed)
        counts = ((bounds.diff() - size) // stride + 1).clamp(min=0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        sequences = torch.arange(len(counts)).repeat_interleave(counts)
        first = bounds[sequences] + (torch.arange(len(sequences)) - offsets[sequences]) * stride
        ranks = runs.ranks[torch.searchsorted(runs.stops, first, right=True)] if len(first) else first
        self._runs = assign(offsets, plan.world, ranks)
        self._counts: list[int] = sums(self._runs.stops - self._runs.starts, self._runs.ranks, plan.world).tolist()
        # The tokens of each rank's windows, in ranges that do not touch.
        order = torch.argsort(ranks, stable=True)
        starts, of, owners = first[order], sequences[order], ranks[order]
        begins = torch.ones_like(starts, dtype=torch.bool)
        begins[1:] = (owners[1:] != owners[:-1]) | (of[1:] != of[:-1]) | (starts[1:] > starts[:-1] + size)
        ends = torch.cat((begins[1:], begins[:1]))
        self._tokens = Ranges(starts[begins], starts[ends] + size, of[begins], owners[begins])
        mine = self._tokens.of(plan.rank)
        before = (mine.stops - mine.starts).cumsum(0) - (mine.stops - mine.starts)
        here = starts[owners == plan.rank]
        at = torch.searchsorted(mine.starts, here, right=True) - 1
        # Where in what this rank fetches its windows begin.
        self._first = here - mine.starts[at] + before[at]
        self._token_runs = runs
        self._exchanges: dict[torch.device, tuple[Exchange, Exchange, Tensor]] = {}

    @planning
    def _on(self, device: torch.device) -> tuple[Exchange, Exchange, Tensor]:
        if device not in self._exchanges:
            plan = self._plan
            group = plan.group, plan.rank
            every = everything(sum(self._counts), plan.world)
            rows = numbers(self._first, self._first + self._size).view(-1, self._size).to(device)
            self._exchanges[device] = (
                Exchange(*group, plan.counts, self._token_runs, self._tokens, device),
                Exchange(*group, self._counts, self._runs, every, device),
                rows,
            )
        return self._exchanges[device]

    @uncompiled
    def of(self, x: Tensor) -> Tensor:
        """This rank's windows of local x: `[B, T_local, ...]` -> `[B, C_local, size, ...]`; packed `[N_local, ...]` ->
        `[C_local, size, ...]`.
        """
        axis = self._rows.axis
        self._plan.check_local(x, "x", axis)
        self._agree("windows", x)
        tokens, _, rows = self._on(x.device)
        fetched = self._rows.back(Fetch.apply(self._rows.first(x), tokens))
        return fetched.index_select(axis, rows.flatten()).unflatten(axis, rows.shape)

    @uncompiled
    def whole(self, x: Tensor) -> Tensor:
        """All windows on every rank, sequence after sequence, from what each has made of its own."""
        axis = self._rows.axis
        expected = self._counts[self._plan.rank]
        if x.shape[axis] != expected:
            raise ValueError(f"x has {x.shape[axis]} windows in axis {axis}: expected the {expected} that begin here")
        self._agree("whole windows", x)
        return self._rows.back(Fetch.apply(self._rows.first(x), self._on(x.device)[1]))

    def _agree(self, what: str, x: Tensor) -> None:
        shape = [*x.shape[: self._rows.axis], "windows", *x.shape[self._rows.axis + 1 :]]
        differentiated = ", differentiated" if torch.is_grad_enabled() and x.requires_grad else ""
        call = f"{what} of {self._size} tokens every {self._stride}: {shape} {x.dtype}{differentiated}"
        self._plan.agree(call, x.device)
