"""One source of random numbers, on the host: the same seed gives the same tensors on every device, but for what dropout
drops.
"""

import numpy as np

_generator = np.random.default_rng()


def manual_seed(seed: int) -> None:
    """Start the sequence that randn, initial weights and dropout draw from."""
    global _generator
    _generator = np.random.default_rng(seed)


def generator() -> np.random.Generator:
    """The current source."""
    return _generator


def next_seed() -> int:
    """A seed for a device's own generator."""
    return int(_generator.integers(2**31))
