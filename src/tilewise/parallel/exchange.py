"""Rows that ranks need of one another: fetched, and their gradients brought home."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

Tensor = torch.Tensor


class Pending:
    """What is on its way; `wait` returns it."""

    def __init__(self, work: Any, finish: Callable[[], Tensor], kept: Tensor) -> None:
        # What is sent must live until it has been.
        self._work, self._finish, self._kept = work, finish, kept

    def wait(self) -> Tensor:
        """Until it is here."""
        with explained():
            self._work.wait()
        del self._kept
        return self._finish()


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
    """

    def __init__(
        self,
        group: Any,
        rank: int,
        owner: Tensor,
        tokens: Sequence[Tensor],
        needs: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        world = len(tokens)
        self._group = group
        local = torch.full_like(owner, -1)
        local[tokens[rank]] = torch.arange(len(tokens[rank]))
        wanted = [local[need] for need in needs]
        sent = [rows[rows >= 0] for rows in wanted]
        self._sent = torch.cat(sent).to(device)
        self._sends = [len(rows) for rows in sent]
        of = owner[needs[rank]]
        # Received rank by rank; `_place[i]` is where the i-th row that is needed came to lie.
        came = torch.argsort(of, stable=True)
        self._came = came.to(device)
        self._place = torch.argsort(came).to(device)
        self._receives = [int((of == other).sum()) for other in range(world)]
        self._count = len(tokens[rank])

    def fetch(self, x: Tensor) -> Pending:
        """The needed rows of all ranks' x."""
        sent = x.index_select(0, self._sent)
        received = x.new_empty((sum(self._receives), *x.shape[1:]))
        work = self._send(received, sent, self._receives, self._sends)
        return Pending(work, lambda: received.index_select(0, self._place), sent)

    def bring_home(self, gradient: Tensor) -> Pending:
        """The gradient of this rank's x: the sum of all ranks' gradients of what they fetched, in rank order."""
        sent = gradient.index_select(0, self._came)
        received = gradient.new_empty((sum(self._sends), *gradient.shape[1:]))
        work = self._send(received, sent, self._sends, self._receives)

        def add() -> Tensor:
            wide = torch.promote_types(gradient.dtype, torch.float32)
            total = received.new_zeros((self._count, *gradient.shape[1:]), dtype=wide)
            for rows, part in zip(self._sent.split(self._sends), received.split(self._sends), strict=True):
                # No row twice: the order within a part does not matter.
                total.index_add_(0, rows, part.to(wide))
            return total.to(gradient.dtype)

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
        return ctx.exchange.bring_home(gradients[0]).wait(), None
