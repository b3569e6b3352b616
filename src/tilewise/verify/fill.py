"""What inputs are filled with: seeded random numbers, or numbers by a fixed rule that every machine computes alike."""

import math

import torch

from tilewise.verify.problem import Fill

FILLS = ("random", "range", "range-raw")
# Inputs that the rule negates, so that k = -q where the shapes agree.
NEGATED = ("k",)


def make_fill(rule: str, seed: int) -> Fill:
    """The fill called `rule`: `random`, `range` (element i of n is i/n) or `range-raw` (element i is i)."""
    generator = torch.Generator().manual_seed(seed)

    def random(_name: str, shape: tuple[int, ...], size: float) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * size).double()

    def by_range(name: str, shape: tuple[int, ...], _size: float) -> torch.Tensor:
        count = math.prod(shape)
        values = torch.arange(count, dtype=torch.float64) / (count if rule == "range" and count else 1)
        return (-values if name in NEGATED else values).reshape(shape)

    if rule not in FILLS:
        raise ValueError(f"there is no fill {rule!r}: expected one of {', '.join(FILLS)}")
    return random if rule == "random" else by_range
