"""Optimisers' steps, in place."""

from typing import Any

from mytorch.backends.gpu.kernels_optimiser import mytorch_adam_kernel, mytorch_sgd_kernel
from mytorch.backends.gpu.launcher import ACCUMULATORS, Array
from mytorch.backends.gpu.memory import Memory


class Optimiser(Memory):
    """The protocol's optimisers."""

    def sgd_(self, x: Array, grad: Array, velocity: Array | None, lr: float, momentum: float, weight_decay: float) -> None:
        changed = {"x": x, "velocity": velocity}
        self._step(mytorch_sgd_kernel, changed, grad, lr=float(lr), momentum=float(momentum), weight_decay=float(weight_decay))

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
            mytorch_adam_kernel,
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

    def _step(self, kernel: Any, changed: dict[str, Array | None], grad: Array, **numbers: float) -> None:
        """Launch a kernel on memory in C order; what is not so is copied, and the result copied back."""
        ordered = {name: x if x is None else self._contiguous(x) for name, x in changed.items()}
        self._launch_by_elements(kernel, grad.numel(), grad=self._contiguous(grad), ACC=ACCUMULATORS[grad.dtype], **ordered, **numbers)
        for name, x in changed.items():
            found = ordered[name]
            if x is not None and found is not None and found is not x:
                self.copy_(x, found)
