"""Optimisers' steps, in place."""

from typing import Any

import torch

from mytorch.backends.base import Shape
from mytorch.backends.gpu.kernels_optimiser import mytorch_adam_kernel, mytorch_sgd_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array, Plan, plan_elements, planned
from mytorch.backends.gpu.memory import Memory

KERNELS = {"sgd": mytorch_sgd_kernel, "adam": mytorch_adam_kernel}


@planned
def plan_step(name: str, shape: Shape, dtype: torch.dtype) -> Plan:
    """For an optimiser's step on a parameter."""
    return plan_elements(KERNELS[name], shape, dtype, ACC=ACCUMULATORS[dtype])


class Optimiser(Memory):
    """The protocol's optimisers."""

    def sgd_(
        self, x: Array, grad: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float
    ) -> None:
        self._step(
            "sgd",
            {"x": x, "velocity": velocity},
            grad,
            lr=float(lr),
            momentum=float(momentum),
            weight_decay=float(weight_decay),
        )

    def adam_(
        self,
        x: Array,
        grad: Array,
        first: Array,
        second: Array,
        step: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        decoupled: bool,
    ) -> None:
        self._step(
            "adam",
            {"x": x, "first": first, "second": second},
            grad,
            rate=lr / (1 - betas[0] ** step),
            correction=1 / (1 - betas[1] ** step),
            share_1=1.0 - betas[0],
            share_2=1.0 - betas[1],
            eps=float(eps),
            shrink=1.0 - lr * weight_decay if decoupled else 1.0,
            weight_decay=0.0 if decoupled else float(weight_decay),
        )

    def _step(self, name: str, changed: dict[str, Any], grad: Array, **numbers: float) -> None:
        """Launch a kernel on memory in C order; what is not so is copied, and the result copied back."""
        copies = {where: self.copy(x) for where, x in changed.items() if x is not None and not x.is_contiguous()}
        self._launch(
            plan_step(name, grad.shape, grad.dtype), grad=self.contiguous(grad), **(changed | copies), **numbers
        )
        for where, found in copies.items():
            self.copy_(changed[where], found)
