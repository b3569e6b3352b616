"""The branches of native sparse attention over a rank's queries and the keys that were fetched for them, and their
gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise.ops.nsa import steps
from tilewise.ops.nsa.branches import KERNELS, Options, without_autocast
from tilewise.ops.nsa.problem import given_windows
from tilewise.parallel import flash, parts
from tilewise.parallel.assignment import numbers, planning
from tilewise.parallel.calls import Call, Part, queries
from tilewise.parallel.exchange import Once
from tilewise.parallel.flash import Fetching, Heads, Homing, calls_of, heads_at_a_time
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.plan import ContextPlan

Tensor = torch.Tensor
Gates = tuple[Tensor | None, Tensor | None, Tensor | None]

# A window of every key up to a query: what windows' means and the choice of blocks may lead to.
BEFORE = -1, 0


@planning
def queries_of(plan: ContextPlan, batch: int, device: torch.device) -> list[Part]:
    """This rank's queries, in parts of which one call computes each."""
    key = "nsa queries", batch, device
    if key not in plan.kept:
        sequences = len(plan.offsets) - 1 if plan.packed else batch
        plan.kept[key] = list(queries(plan.segments(plan.rank), sequences, plan.packed, device))
    return plan.kept[key]


class Keys(NamedTuple):
    """Packed sequences among the keys that BEFORE fetches: their offsets, where their means begin, with room for one a
    stride, both int32, and the rows that hold a mean. None where dense.
    """

    cu: Tensor | None
    room: Tensor | None
    means: Tensor | None


@planning
def keys_of(plan: ContextPlan, size: int, stride: int, device: torch.device) -> Keys:
    """Those of this rank."""
    key = "nsa keys", size, stride, device
    if key not in plan.kept:
        cu = room = means = None
        if plan.packed:
            lengths = torch.zeros(len(plan.offsets) - 1, dtype=torch.int64)
            for one in plan.needs(BEFORE):
                lengths[one.sequence] = one.stop
            offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
            first = offsets // stride
            means = numbers(first[:-1], first[:-1] + ((lengths - size) // stride + 1).clamp(min=0)).to(device)
            cu, room = (x.to(device, torch.int32) for x in (offsets, first))
        plan.kept[key] = Keys(cu, room, means)
    return plan.kept[key]


@planning
def whole_offsets(plan: ContextPlan, device: torch.device) -> Tensor | None:
    """Of whole packed sequences, int32."""
    key = "nsa offsets", device
    if key not in plan.kept:
        plan.kept[key] = torch.tensor(plan.offsets, dtype=torch.int32, device=device) if plan.packed else None
    return plan.kept[key]


class Branch(NamedTuple):
    """A branch's output and LSE of all local queries."""

    o: Tensor
    lse: Tensor

    def of(self, heads: Heads) -> Branch:
        """Those of some heads."""
        return Branch(self.o[..., heads.queries, :], self.lse[..., heads.queries, :])

    def put(self, rows: Rows, where: slice | Tensor, o: Tensor, lse: Tensor) -> None:
        """Write some rows."""
        rows.put(self.o, where, o)
        rows.put_lse(self.lse, where, lse)


class Problem:
    """A call's plan and options, and what follows from them."""

    def __init__(
        self, plan: ContextPlan, options: Options, q: Tensor, gates: Gates, k_cmp: Tensor | None, indices: Tensor | None
    ) -> None:
        self.plan, self.options = plan, options
        self.rows, self.kernels = Rows(plan.packed), KERNELS[options.backend]
        self.compresses, self.selects, self.slides = (gate is not None for gate in gates)
        self.chooses = self.selects and indices is None
        self.learned = k_cmp is not None
        self.sliding = flash.Options((options.window_size - 1, 0), options.scale, 0.0, True, options.backend)
        # By which window keys are fetched: learned compression reads none, the sliding window those next to a rank.
        self.reach = self.sliding.window if self.slides else (0, 0)
        if self.selects or (self.compresses and not self.learned):
            self.reach = BEFORE
        self.parts = queries_of(plan, q.shape[0], q.device)
        self.keys = keys_of(plan, *options.compression, q.device)
        # Windows that are given are those of whole sequences.
        self.cu_windows = whole_offsets(plan, q.device) if self.learned else self.keys.cu

    def fetching(self, q: Tensor, k: Tensor, v: Tensor) -> Fetching:
        """K and V of some heads after others."""
        return Fetching(self.plan, self.reach, k, v, heads_at_a_time(self.plan, q, k, v))

    def windows(self, heads: Heads, here: list[Tensor], k_cmp: Tensor | None, v_cmp: Tensor | None) -> list[Tensor]:
        """Compressed keys and values of some heads; where only scores are wanted the keys stand in for the values."""
        if k_cmp is not None and v_cmp is not None:
            made = [x[..., heads.keys, :] for x in (k_cmp, v_cmp if self.compresses else k_cmp)]
        elif self.compresses:
            made = [self._means(x) for x in here]
        else:
            made = [self._means(here[0])] * 2
        return made

    def _means(self, x: Tensor) -> Tensor:
        """Those of its windows, without room between sequences."""
        made = self.kernels.compress(x, self.keys.cu, self.keys.room, *self.options.compression)
        return made if self.keys.means is None else made.index_select(0, self.keys.means)

    def means_backward(self, dx: Tensor, tokens: int) -> Tensor:
        """The gradient of what means were taken of."""
        if self.keys.means is not None:
            room = dx.new_zeros((tokens // self.options.sizes.compress_stride, *dx.shape[1:]))
            dx = room.index_copy_(0, self.keys.means, dx)
        return self.kernels.compress_backward(dx, tokens, self.keys.cu, self.keys.room, *self.options.compression)

    def compressed(self, q: Tensor, windows: list[Tensor], part: Part) -> tuple[Tensor, Tensor]:
        """Attention of a part's queries to windows: output and LSE."""
        given = q, *windows, part.cu_q, self.cu_windows, part.first
        return steps.compressed_forward.call_checked(given, self.of_compressed())

    def of_compressed(self) -> tuple[Any, ...]:
        """The numbers of attention to windows."""
        return *self.options.compression, self.options.scale, self.options.backend

    def choose(self, q: Tensor, k_cmp: Tensor, lse: Tensor, part: Part) -> Tensor:
        """Blocks of a part's queries, by their scores of windows."""
        windows = given_windows(self.cu_windows, k_cmp.shape[-3], *self.options.compression)
        sizes, scale = self.options.sizes, self.options.scale
        return self.kernels.choose(q, k_cmp, lse, part.cu_q, windows, sizes, scale, part.first)

    def selected(self, q: Tensor, here: list[Tensor], indices: Tensor, part: Part) -> tuple[Tensor, Tensor]:
        """Attention to these blocks: output and LSE."""
        given = q, *here, indices, part.cu_q, self.keys.cu, part.first
        return steps.selected_forward.call_checked(given, self.of_selected())

    def of_selected(self) -> tuple[Any, ...]:
        """The numbers of attention to blocks."""
        return self.options.sizes.block_size, self.options.scale, self.options.backend

    def sliding_calls(self, here: list[Tensor]) -> list[Call]:
        """The calls of the sliding window."""
        return calls_of(self.plan, self.sliding.window, self.rows.count(here[0]), here[0].device, self.reach)


class Incoming(NamedTuple):
    """Of a branch and some heads: its output and LSE, and its output's gradient."""

    o: Tensor
    lse: Tensor
    do: Tensor

    def take(self, rows: Rows, where: slice | Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(do, o, lse) of some rows, contiguous."""
        do, o = (rows.take(x, where).contiguous() for x in (self.do, self.o))
        return do, o, rows.take_lse(self.lse, where)


class Gathered(torch.autograd.Function):
    """Keys and values come here, some heads at a time; their gradients go home."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g_cmp: Tensor | None,
        g_slc: Tensor | None,
        g_swa: Tensor | None,
        k_cmp: Tensor | None,
        v_cmp: Tensor | None,
        indices: Tensor | None,
        plan: ContextPlan,
        options: Options,
    ) -> tuple[Tensor, Tensor | None]:
        """Output of local queries, and the blocks that they chose."""
        ctx.set_materialize_grads(False)
        gates = g_cmp, g_slc, g_swa
        problem = ctx.problem = Problem(plan, options, q, gates, k_cmp, indices)
        rows = problem.rows
        if indices is not None:
            # Later blocks than a query's own take no part, and may lie behind what is fetched.
            own = plan.position_ids.to(q.device)[:, None, None] // options.sizes.block_size
            indices = torch.where(indices <= own, indices, -1)
        elif problem.chooses:
            indices = q.new_empty((*q.shape[:-2], k.shape[-2], options.sizes.block_count), dtype=torch.int32)
        cmp, slc, swa = branches = [None if gate is None else _empty(q, v) for gate in gates]
        for heads, here in problem.fetching(q, k, v):
            some_q = q[..., heads.queries, :]
            chosen = None if indices is None else indices[..., heads.keys, :]
            windows = None
            if problem.compresses or problem.chooses:
                windows = problem.windows(heads, here, k_cmp, v_cmp)
            for part in problem.parts:
                q_rows = rows.take(some_q, part.rows)
                if windows is not None:
                    made = problem.compressed(q_rows, windows, part)
                    if cmp is not None:
                        cmp.of(heads).put(rows, part.rows, *made)
                    if problem.chooses and chosen is not None:
                        rows.put(chosen, part.rows, problem.choose(q_rows, windows[0], made[1], part))
                if slc is not None and chosen is not None:
                    named = rows.take(chosen, part.rows).contiguous()
                    slc.of(heads).put(rows, part.rows, *problem.selected(q_rows, here, named, part))
            if swa is not None:
                for call in problem.sliding_calls(here):
                    swa.of(heads).put(rows, call.rows, *parts.attend(call, rows, problem.sliding, some_q, here))
        o = problem.kernels.combine(
            [branch.o for branch in branches if branch is not None], [gate for gate in gates if gate is not None]
        )
        each = [x for branch in branches for x in branch or (None, None)]
        ctx.save_for_backward(q, k, v, *gates, k_cmp, v_cmp, indices, *each)
        if not problem.chooses or indices is None:
            return o, None
        ctx.mark_non_differentiable(indices)
        return o, indices

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of local q, k, v and gates; this rank's part of those of k_cmp and v_cmp."""
        with without_autocast(ctx.problem.options.backend):
            found = Once.apply(Gathered.differentiate, ctx.problem, gradients[0], *ctx.saved_tensors)
        return *found, None, None, None

    @staticmethod
    def differentiate(problem: Problem, do: Tensor | None, *saved: Any) -> tuple[Tensor | None, ...]:
        """The backward."""
        q, k, v, g_cmp, g_slc, g_swa, k_cmp, v_cmp, indices, *each = saved
        if do is None:
            do = q.new_zeros((*q.shape[:-1], v.shape[-1]))
        gates = [g_cmp, g_slc, g_swa]
        dq = torch.zeros_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        dgates = [None if x is None else torch.empty_like(x, memory_format=torch.contiguous_format) for x in gates]
        # Parts of many calls are summed up.
        dwindows = [torch.zeros_like(x, dtype=torch.float32) for x in (k_cmp, v_cmp) if x is not None]
        homing = Homing(problem.plan, problem.reach, dk, dv)

        def of_some(heads: Heads, here: list[Tensor]) -> list[Tensor]:
            """Writes all gradients of some heads but those of the keys and values that are here, which it returns."""
            some_q, some_dq = q[..., heads.queries, :], dq[..., heads.queries, :]
            totals = [torch.zeros_like(x, dtype=torch.float32) for x in here]
            for name, gate, dgate, o, lse in zip(
                ("cmp", "slc", "swa"), gates, dgates, each[::2], each[1::2], strict=True
            ):
                if gate is None or dgate is None:
                    continue
                incoming = _incoming(problem, do, o, lse, gate, dgate, heads)
                if name == "cmp":
                    windows = problem.windows(heads, here, k_cmp, v_cmp)
                    found = _compressed_backward(problem, incoming, some_q, some_dq, windows)
                    if problem.learned:
                        _add([x[..., heads.keys, :] for x in dwindows], found)
                    else:
                        _add(totals, [problem.means_backward(x, totals[0].shape[-3]) for x in found])
                elif name == "slc":
                    chosen = indices[..., heads.keys, :]
                    _selected_backward(problem, incoming, some_q, some_dq, here, chosen, totals)
                else:
                    given = some_dq, incoming.do, some_q, incoming.o, None, incoming.lse
                    calls = problem.sliding_calls(here)
                    _add(totals, parts.differentiate(calls, problem.rows, problem.sliding, given, here))
            return [total.to(x.dtype) for total, x in zip(totals, here, strict=True)]

        for heads, here in problem.fetching(q, k, v):
            homing.send(heads, of_some(heads, here))
        homing.arrive()
        learned = [x.to(k_cmp.dtype) for x in dwindows] if problem.compresses and dwindows else (None, None)
        return dq, dk, dv, *dgates, *learned


def _empty(q: Tensor, v: Tensor) -> Branch:
    lse = q.new_empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), dtype=torch.float32)
    return Branch(q.new_empty((*q.shape[:-1], v.shape[-1])), lse)


def _add(totals: list[Tensor], found: Sequence[Tensor]) -> None:
    for total, x in zip(totals, found, strict=True):
        total += x


def _incoming(
    problem: Problem, do: Tensor, o: Tensor, lse: Tensor, gate: Tensor, dgate: Tensor, heads: Heads
) -> Incoming:
    """The gradients of some heads' output in one branch, and of its gate, which is written."""
    some_do, some_o = (x[..., heads.queries, :].contiguous() for x in (do, o))
    of_branch, of_gate = problem.kernels.combine_backward(some_do, some_o, gate[..., heads.queries].contiguous())
    dgate[..., heads.queries] = of_gate
    return Incoming(some_o, lse[..., heads.queries, :], of_branch)


def _compressed_backward(
    problem: Problem, incoming: Incoming, q: Tensor, dq: Tensor, windows: list[Tensor]
) -> list[Tensor]:
    """Adds to dq; gradients of compressed keys and values, fp32."""
    totals = [torch.zeros_like(x, dtype=torch.float32) for x in windows]
    for part in problem.parts:
        do, o, lse = incoming.take(problem.rows, part.rows)
        q_rows = problem.rows.take(q, part.rows)
        given = do, None, q_rows, *windows, o, lse, part.cu_q, problem.cu_windows, part.first
        of_q, *found = steps.compressed_backward.call_checked(given, problem.of_compressed())
        problem.rows.add(dq, part.rows, of_q)
        _add(totals, found)
    return totals


def _selected_backward(
    problem: Problem,
    incoming: Incoming,
    q: Tensor,
    dq: Tensor,
    here: list[Tensor],
    indices: Tensor,
    totals: list[Tensor],
) -> None:
    """Adds to dq and to the gradients of keys and values."""
    for part in problem.parts:
        do, o, lse = incoming.take(problem.rows, part.rows)
        q_rows, named = (problem.rows.take(x, part.rows) for x in (q, indices))
        given = do, None, q_rows, *here, named.contiguous(), o, lse, part.cu_q, problem.keys.cu, part.first
        of_q, *found = steps.selected_backward.call_checked(given, problem.of_selected())
        problem.rows.add(dq, part.rows, of_q)
        _add(totals, found)
