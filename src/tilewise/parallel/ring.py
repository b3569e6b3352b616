"""flash_attention over a ring: every rank's keys and values are passed on, rank by rank, and parts merged by their LSE.

In step t a rank computes with what began t ranks before it, while the next is on its way, and sends the gradients of
these keys to their own rank. Beside results it holds two ranks' K and V.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tilewise.parallel import parts
from tilewise.parallel.assignment import planning
from tilewise.parallel.calls import Call, calls, met
from tilewise.parallel.exchange import Once, explained
from tilewise.parallel.rows import Rows

if TYPE_CHECKING:
    from tilewise.parallel.flash import Options
    from tilewise.parallel.plan import ContextPlan

Tensor = torch.Tensor


class Passing:
    """Tensors sent to one rank while others come from another."""

    def __init__(self, plan: ContextPlan, sent: list[Tensor], to: int, received: list[Tensor], source: int) -> None:
        peers = [dist.get_global_rank(plan.group, rank) for rank in (to, source)]
        # Empty ones are not sent: both sides know.
        sends = [dist.P2POp(dist.isend, x, peers[0], plan.group) for x in sent if x.numel()]
        receives = [dist.P2POp(dist.irecv, x, peers[1], plan.group) for x in received if x.numel()]
        self.received = received
        self._kept = sent
        with explained():
            self._work = dist.batch_isend_irecv([*sends, *receives]) if sends or receives else []

    def wait(self) -> list[Tensor]:
        """What came."""
        with explained():
            for work in self._work:
                work.wait()
        self._kept = []
        return self.received


@planning
def _calls(plan: ContextPlan, options: Options, source: int, device: torch.device) -> list[Call]:
    key = "ring", options.window, source, device
    if key not in plan.kept:
        lists = met(plan.segments(plan.rank), plan.segments(source), options.window)
        plan.kept[key] = list(calls(lists, plan.packed, plan.counts[source], device))
    return plan.kept[key]


def _sized(plan: ContextPlan, like: list[Tensor], rank: int, axis: int) -> list[Tensor]:
    """Room for another rank's tensors."""
    return [x.new_empty((*x.shape[:axis], plan.counts[rank], *x.shape[axis + 1 :])) for x in like]


def passed_round(plan: ContextPlan, k: Tensor, v: Tensor, axis: int) -> Any:
    """(rank, k, v) of this rank, then of the one before it, and so on."""
    here, before = [k.contiguous(), v.contiguous()], (plan.rank - 1) % plan.world
    for step in range(plan.world):
        source = (plan.rank - step) % plan.world
        coming = None
        if step + 1 < plan.world:
            room = _sized(plan, here, (source - 1) % plan.world, axis)
            coming = Passing(plan, here, (plan.rank + 1) % plan.world, room, before)
        yield source, *here
        if coming is not None:
            here = coming.wait()


class Ring(torch.autograd.Function):
    """All keys pass by; their gradients go straight home."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: ContextPlan, options: Options
    ) -> tuple[Tensor, Tensor]:
        """Output and LSE of local queries."""
        ctx.plan, ctx.options = plan, options
        ctx.set_materialize_grads(False)
        rows = Rows(plan.packed)
        o = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float32)
        lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), -torch.inf, dtype=torch.float32)
        for source, keys, values in passed_round(plan, k, v, rows.axis):
            for call in _calls(plan, options, source, q.device):
                part = parts.attend(call, rows, options, q, (keys, values))
                merged = merge(rows.take(o, call.rows), rows.take_lse(lse, call.rows), *part)
                rows.put(o, call.rows, merged[0])
                rows.put_lse(lse, call.rows, merged[1])
        if sinks is not None:
            with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
            o *= _weights(lse, with_sinks)
            lse = with_sinks
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        return o, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of local q, k and v; this rank's part of dsinks."""
        return *Once.apply(Ring.differentiate, ctx.plan, ctx.options, *gradients, *ctx.saved_tensors), None, None

    @staticmethod
    def differentiate(
        plan: ContextPlan,
        options: Options,
        do: Tensor | None,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        o: Tensor,
        lse: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """The backward."""
        do = torch.zeros_like(o) if do is None else do
        rows = Rows(plan.packed)
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        homing: Passing | None = None

        def arrive() -> None:
            if homing is not None:
                for total, part in zip((dk, dv), homing.wait(), strict=True):
                    total.add_(part)

        for step, (source, keys, values) in enumerate(passed_round(plan, k, v, rows.axis)):
            found = _calls(plan, options, source, q.device)
            sent = parts.differentiate(found, rows, options, (dq, do, q, o, dlse, lse), (keys, values))
            arrive()
            # In this step rank + step has computed with this rank's keys.
            homing = Passing(plan, sent, source, _like(k, v), (plan.rank + step) % plan.world) if step else None
            if not step:
                for total, part in zip((dk, dv), sent, strict=True):
                    total.add_(part)
        arrive()
        dsinks = None if sinks is None else _of_sinks(sinks, o, lse, do, dlse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _like(*tensors: Tensor) -> list[Tensor]:
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in tensors]


def _weights(lse: Tensor, total: Tensor) -> Tensor:
    """What an output of this LSE counts in one of that, `[..., T, H, 1]`; 0 where it has seen nothing."""
    return torch.where(lse == -torch.inf, 0.0, torch.exp(lse - total)).transpose(-1, -2)[..., None]


def merge(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> tuple[Tensor, Tensor]:
    """One output and LSE from two over different keys."""
    total = torch.logaddexp(lse, lse_part)
    return o * _weights(lse, total) + o_part * _weights(lse_part, total), total


def _of_sinks(sinks: Tensor, o: Tensor, lse: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """A sink is one more logit without a value, so that of its softmax's gradient only the row's mean is left."""
    mean = (do.float() * o.float()).sum(-1).transpose(-1, -2)
    share = _weights(sinks.float()[:, None].expand_as(lse), lse)[..., 0].transpose(-1, -2)
    of_rows = share * ((0.0 if dlse is None else dlse) - mean)
    return of_rows.sum(-1).reshape(-1, sinks.shape[0]).sum(0).to(sinks.dtype)
