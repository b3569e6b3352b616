"""Block-sparse attention's calls that are audited."""

from collections.abc import Iterator
from functools import partial

import torch

from tilewise.inspect.audit import HEADS, Case, gates, layouts, offsets, rows
from tilewise.ops.bsa import launch as bsa
from tilewise.ops.bsa.configs import Options


def cases() -> Iterator[Case]:
    """All of it, with a window."""

    def call(x: torch.Tensor, gate: torch.Tensor, cu: torch.Tensor | None, options: Options) -> None:
        gates = (gate, gate, gate)
        results = bsa.forward(x, x, x, x, gates, cu, options)
        bsa.backward(x, x, x, x, x, gates, *results[1:], cu, options)

    for words, architecture, packed, stride in layouts():
        x, gate, cu = rows(HEADS, packed=packed, stride=stride), gates(packed=packed), offsets(packed)
        options = Options(4, 64 if packed else 32, 3_000_000, 0.1, packed)
        yield Case(
            f"{words}, 4 blocks of {options.block_size} and a wide window",
            architecture,
            partial(call, x, gate, cu, options),
        )
