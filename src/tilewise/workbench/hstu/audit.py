"""HSTU attention's calls that are audited."""

from collections.abc import Iterator
from functools import partial

import torch

from tilewise.inspect.audit import FAR, HEADS, LENGTHS, TOKENS, Case, in_words, rows
from tilewise.ops.hstu import launch as hstu


def cases() -> Iterator[Case]:
    """Under each of its masks."""
    cu, targets = torch.tensor([0, *LENGTHS]).cumsum(0), torch.tensor([0, 1000, 2_000_000])

    def call(x: torch.Tensor, targets: torch.Tensor | None, causal: bool, reach: int, context: int) -> None:
        inputs = hstu.make_inputs(x, x, x, cu, targets, TOKENS, 0.1, causal, reach, context)
        hstu.forward(inputs)
        hstu.backward(inputs, x)

    near, far = (rows(HEADS, packed=True, stride=stride) for stride in (0, FAR))
    yield Case(f"{in_words(True)}, causal", 90, partial(call, near, None, True, 0, 0))
    yield Case(f"{in_words(True, True)}, a wide reach both ways", 80, partial(call, far, None, False, 6_000_000, 0))
    yield Case(
        f"{in_words(True, True)}, targets, context and a wide reach",
        90,
        partial(call, far, targets, True, 5_000_000, 1_000_000),
    )
