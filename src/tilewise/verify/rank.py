"""What one rank does of a call over a ContextPlan."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from tilewise import workbench
from tilewise.parallel import ContextPlan
from tilewise.verify.attempt import memory_of
from tilewise.verify.implementation import flat_outputs, laid_out
from tilewise.verify.suite import Tensors, place
from tilewise.verify.watch import Watch

Tensor = torch.Tensor


class Call:
    """The last call, kept for its backward."""

    def forward(
        self,
        operator: str,
        plan: dict[str, Any],
        expected: tuple[Tensor, Tensor],
        tensors: Tensors,
        shared: list[str],
        strided: list[str],
        wanted: list[str],
        options: dict[str, Any],
    ) -> list[Tensor]:
        """The whole outputs, which every rank has.

        `tensors` are whole; of those that are `shared` this rank has its tokens, which are to be those `expected`, at
        the positions next to them. Local tensors are strided where `strided` says so, in memory full of NaN.
        """
        self._plan = ContextPlan(dist.group.WORLD, **plan)
        axis = 0 if self._plan.packed else 1
        held = self._plan.shard(torch.arange(self._plan.tokens), 0), self._plan.position_ids
        if not all(map(torch.equal, held, expected)):
            raise ValueError(f"{self._plan!r} has other tokens than it should, or has them at other positions")
        self._whole = {name: x.requires_grad_(name in wanted) for name, x in tensors.items()}
        self._here = {name: self._plan.shard(x, axis) if name in shared else x for name, x in self._whole.items()}
        self._leaves = {
            name: place(laid_out(x.detach(), name in strided), x.dtype, x.device, torch.nan).requires_grad_(
                name in wanted
            )
            for name, x in self._here.items()
        }
        function = workbench.find(operator).load("function")

        def run() -> list[Tensor]:
            outputs = flat_outputs(function(**self._leaves, **options, parallel=self._plan))
            # An output of one axis less, an LSE, has its tokens last.
            self._axes = [axis if x.dim() == tensors["q"].dim() else x.dim() - 1 for x in outputs]
            return [self._plan.unshard(x, at) for x, at in zip(outputs, self._axes, strict=True)]

        self._outputs: list[Tensor] = self._watched(run)
        return [x.detach() for x in self._outputs]

    def backward(self, gradients: list[Tensor | None]) -> dict[str, Tensor | None]:
        """This rank's partial gradient of each whole tensor, from those of the outputs; None where none reaches it."""
        found = list(zip(self._outputs, gradients, self._axes, strict=True))
        outputs = [x for x, gradient, _ in found if gradient is not None]
        names = [name for name, x in self._leaves.items() if x.requires_grad]

        def run() -> tuple[Tensor | None, ...]:
            # Of each token on one rank, mostly not its own: unshard's backward adds them up.
            parts = [gradient * self._arriving(gradient, at) for _, gradient, at in found if gradient is not None]
            return torch.autograd.grad(outputs, [self._leaves[name] for name in names], parts, allow_unused=True)

        return {name: self._partial(name, x) for name, x in zip(names, self._watched(run), strict=True)}

    def _arriving(self, gradient: Tensor, axis: int) -> Tensor:
        """Which tokens' gradients arrive here."""
        here = torch.arange(gradient.shape[axis]) % self._plan.world == self._plan.rank
        return here.to(gradient.dtype).view(-1, *(1 for _ in gradient.shape[axis + 1 :]))

    def _partial(self, name: str, gradient: Tensor | None) -> Tensor | None:
        here, whole = self._here[name], self._whole[name]
        if gradient is None or here is whole:
            return gradient
        return torch.autograd.grad(here, whole, gradient)[0]

    def _watched(self, run: Callable[[], Any]) -> Any:
        """What `run` gives; its fresh memory holds NaN, and it may write neither inputs nor beside anything."""
        before = {name: memory_of(x).clone() for name, x in self._leaves.items()}
        with Watch() as watch:
            found = run()
        changed = [name for name, x in self._leaves.items() if not torch.equal(memory_of(x), before[name])]
        if changed:
            raise ValueError(f"the call has written {', '.join(changed)}, or memory next to it")
        if watch.overrun():
            raise ValueError(watch.overrun())
        return found
