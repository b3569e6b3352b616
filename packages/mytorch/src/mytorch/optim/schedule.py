"""The learning rate over time."""

import math

from mytorch.optim.optimizers import Optimizer


class CosineSchedule:
    """Sets an optimiser's lr: up to what it is now in `warmup_steps` equal steps, then down half a cosine to a minimum,
    which is kept.

    Make it before the first step of training and call `step()` after each: the lr of step t (from 0) is `at(t)`.
    """

    def __init__(self, optimizer: Optimizer, total_steps: int, warmup_steps: int = 0, minimum: float = 0.0) -> None:
        if not 0 <= warmup_steps < total_steps:
            raise ValueError(
                f"expected 0 <= warmup_steps < total_steps, got warmup_steps {warmup_steps} and total_steps"
                f" {total_steps}"
            )
        if not 0 <= minimum <= optimizer.lr:
            raise ValueError(f"the minimum is between 0 and the optimiser's lr, {optimizer.lr}, not {minimum!r}")
        self.optimizer, self.total_steps, self.warmup_steps = optimizer, total_steps, warmup_steps
        self.peak, self.minimum = optimizer.lr, minimum
        self.steps = 0
        optimizer.lr = self.at(0)

    def at(self, step: int) -> float:
        """The learning rate at a step."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / (self.warmup_steps + 1)
        share = min(1.0, (step - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return self.minimum + (self.peak - self.minimum) * (1 + math.cos(math.pi * share)) / 2

    def step(self) -> None:
        """Go on to the next step's learning rate."""
        self.steps += 1
        self.optimizer.lr = self.at(self.steps)
