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


class Layout:
    """Which rank makes which windows, of which tokens."""

    @planning
    def __init__(self, plan: ContextPlan, runs: Runs, bounds: Tensor, size: int, stride: int) -> None:
        self._group, self._rank = plan.group, plan.rank
        self._token_runs, self._token_counts = runs, plan.counts
        counts = ((bounds.diff() - size) // stride + 1).clamp(min=0)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        sequences = torch.arange(len(counts)).repeat_interleave(counts)
        first = bounds[sequences] + (torch.arange(len(sequences)) - offsets[sequences]) * stride
        ranks = runs.ranks[torch.searchsorted(runs.stops, first, right=True)] if len(first) else first
        self._runs = assign(offsets, plan.world, ranks)
        self.counts: list[int] = sums(self._runs.stops - self._runs.starts, self._runs.ranks, plan.world).tolist()
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
        first_rows = here - mine.starts[at] + before[at]
        self._rows = numbers(first_rows, first_rows + size).view(-1, size)
        self._kept: dict[torch.device, tuple[Exchange, Exchange, Tensor]] = {}

    @planning
    def on(self, device: torch.device) -> tuple[Exchange, Exchange, Tensor]:
        """The exchange of tokens, that of windows, and the rows `[C_local, size]` of this rank's windows in what it
        fetches.
        """
        if device not in self._kept:
            group = self._group, self._rank
            every = everything(sum(self.counts), len(self.counts))
            self._kept[device] = (
                Exchange(*group, self._token_counts, self._token_runs, self._tokens, device),
                Exchange(*group, self.counts, self._runs, every, device),
                self._rows.to(device),
            )
        return self._kept[device]


class Windows:
    """The windows of a plan's sequences, for a compression of one's own: made by `plan.windows`.

    `of` takes this rank's out of local tensors, with the tokens of other ranks that lie in them; `whole` gives what a
    module makes of them to all ranks. Both are differentiable: gradients of both go home.
    """

    # Made anew for each use: kept with the plan, it would keep the plan.
    def __init__(self, plan: ContextPlan, layout: Layout, described: str) -> None:
        self._plan, self._layout, self._described = plan, layout, described
        self._rows = Rows(plan.packed)

    @uncompiled
    def of(self, x: Tensor) -> Tensor:
        """This rank's windows of local x: `[B, T_local, ...]` -> `[B, C_local, size, ...]`; packed `[N_local, ...]` ->
        `[C_local, size, ...]`.
        """
        axis = self._rows.axis
        self._plan.check_local(x, "x", axis)
        self._agree("windows", x)
        tokens, _, rows = self._layout.on(x.device)
        fetched = self._rows.back(Fetch.apply(self._rows.first(x), tokens))
        # A token lies in several windows: the gradient of index_select would add them up in any order on a GPU.
        return fetched[rows] if axis == 0 else fetched[:, rows]

    @uncompiled
    def whole(self, x: Tensor) -> Tensor:
        """All windows on every rank, sequence after sequence, from what each has made of its own."""
        axis = self._rows.axis
        expected = self._layout.counts[self._plan.rank]
        if x.shape[axis] != expected:
            raise ValueError(f"x has {x.shape[axis]} windows in axis {axis}: expected the {expected} that begin here")
        self._agree("whole windows", x)
        return self._rows.back(Fetch.apply(self._rows.first(x), self._layout.on(x.device)[1]))

    def _agree(self, what: str, x: Tensor) -> None:
        shape = [*x.shape[: self._rows.axis], "windows", *x.shape[self._rows.axis + 1 :]]
        differentiated = ", differentiated" if torch.is_grad_enabled() and x.requires_grad else ""
        call = f"{what} of {self._described}: {shape} {x.dtype}{differentiated}"
        self._plan.agree(call, x.device)
