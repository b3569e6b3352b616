"""Rows that ranks need of one another: fetched, and their gradients brought home."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tilewise.ops._host.register import uncompiled
from tilewise.parallel.assignment import Ranges, Runs, gathers_all, meet, numbers, sums

Tensor = torch.Tensor
# Its name since torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Pending:
    """What is on its way; `wait` returns it."""

    def __init__(self, work: Any, finish: Callable[[], Tensor], kept: Tensor) -> None:
        # What is sent must live until it has been.
        self._work, self._finish, self._kept = work, finish, kept

    def wait(self) -> Tensor:
        """Until it is here."""
        with explained():
            self._work.wait()
        finish = self._finish
        # Neither is kept beyond this: what was sent, and what was received.
        del self._work, self._kept, self._finish
        return finish()


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Inside, a failure of communication says what it may come from."""
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            "communication between the ranks of a ContextPlan failed: a rank may have stopped, or made another call"
            f" than this one; see its own output first. Here: {error}"
        ) from error


class Exchange:
    """For one set of tokens that each rank needs. Tensors have their tokens in the first axis, local ones in the order
    of the plan, fetched ones ascending.

    Where ranks need half of each other's tokens or more, all are gathered, and what is not needed is left out: to send
    each rank its own would take a copy for each.
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        counts: Sequence[int],
        runs: Runs,
        needs: Ranges,
        device: torch.device,
    ) -> None:
        self._group, self._rank, self._world = group, rank, len(counts)
        self._count, self._most = counts[rank], max(counts)
        # Rows of this rank that each other one needs.
        sent = meet(runs.on(rank), needs)
        self._sent = numbers(sent.rows, sent.rows + sent.counts).to(device)
        self._sends: list[int] = sums(sent.counts, sent.ranks, self._world).tolist()
        # Where in what this rank needs those are that it gets from each.
        here = meet(runs, needs.of(rank))
        order = torch.argsort(here.owners, stable=True)
        stops = here.counts.cumsum(0)
        came = numbers((stops - here.counts)[order], stops[order])
        self._came = came.to(device)
        self._receives: list[int] = sums(here.counts, here.owners, self._world).tolist()
        self._gathers = gathers_all(needs, sum(counts), self._world)
        if self._gathers:
            rows = here.owners * self._most + here.rows
            place = numbers(rows, rows + here.counts)
        else:
            place = torch.empty_like(came)
            place[came] = torch.arange(len(came))
        self._place = place.to(device)

    def fetch(self, x: Tensor) -> Pending:
        """The needed rows of all ranks' x."""
        if self._gathers:
            received = x.new_empty((self._world * self._most, *x.shape[1:]))
            # In its own place, so that it is not there twice.
            sent = received[self._rank * self._most :][: self._most]
            sent[: self._count] = x
            with explained():
                work = _all_gather(received, sent, group=self._group, async_op=True)
        else:
            sent = x.index_select(0, self._sent)
            received = x.new_empty((sum(self._receives), *x.shape[1:]))
            work = self._send(received, sent, self._receives, self._sends)
        return Pending(work, lambda: received.index_select(0, self._place), sent)

    def bring_home(self, gradient: Tensor) -> Pending:
        """The gradient of this rank's x: the sum of all ranks' gradients of what they fetched, in rank order."""
        dtype, wide = gradient.dtype, torch.promote_types(gradient.dtype, torch.float32)
        sent = gradient.index_select(0, self._came)
        received = gradient.new_empty((sum(self._sends), *gradient.shape[1:]))
        work = self._send(received, sent, self._sends, self._receives)

        def add() -> Tensor:
            total = received.new_zeros((self._count, *received.shape[1:]), dtype=wide)
            for rows, part in zip(self._sent.split(self._sends), received.split(self._sends), strict=True):
                # No row twice: the order within a part does not matter.
                total.index_add_(0, rows, part.to(wide))
            return total.to(dtype)

        return Pending(work, add, sent)

    def _send(self, received: Tensor, sent: Tensor, receives: list[int], sends: list[int]) -> Any:
        with explained():
            return dist.all_to_all_single(received, sent, receives, sends, group=self._group, async_op=True)


class Fetch(torch.autograd.Function):
    """`Exchange.fetch`, differentiable."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        """The rows that are needed here."""
        ctx.exchange = exchange
        return exchange.fetch(x).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Summed at home."""
        return BringHome.apply(gradients[0], ctx.exchange), None


class BringHome(torch.autograd.Function):
    """`Exchange.bring_home`, differentiable: each is the other's backward."""

    @staticmethod
    @uncompiled
    def forward(ctx: Any, gradient: Tensor, exchange: Exchange) -> Tensor:
        """The sum of all ranks' gradients of this rank's rows."""
        ctx.exchange = exchange
        return exchange.bring_home(gradient).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Those of the rows that are needed here."""
        return Fetch.apply(gradients[0], ctx.exchange), None


class Once(torch.autograd.Function):
    """A backward, `differentiate(*given)`, that has no derivative of its own, and says so. torch's once_differentiable
    says nothing in torch.autograd.grad.
    """

    @staticmethod
    @uncompiled
    def forward(_ctx: Any, differentiate: Callable[..., tuple[Tensor | None, ...]], *given: Any) -> Any:
        """Its gradients."""
        return differentiate(*given)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> Any:
        """There is none."""
        raise NotImplementedError(
            "attention over a ContextPlan has no derivative of its own (double backward): call it with"
            " backend='reference', which torch can differentiate any number of times"
        )
