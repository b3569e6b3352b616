"""What block-sparse attention launches: for usual problems, and with each tile configuration of its own kernels.

Block-sparse attention's calls that are audited.
"""

from collections.abc import Iterator
from functools import partial

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured
from tilewise.ops.bsa import launch
from tilewise.ops.bsa import launch as bsa
from tilewise.ops.bsa.configs import Options, Results
from tilewise.ops.flash.configs import family
from tilewise.workbench.bsa.configs import BLOCK, Entry
from tilewise.workbench.hstu.inspect import BATCH, HEADS, TOKENS, offsets, rows
from tilewise.workbench.nsa.configs import CARDS
from tilewise.workbench.operator import Launches

COUNT, WINDOW = 4, 100
# Which kernel each part of the table is for.
KERNELS = {
    "selected_fwd": "bsa_selected_fwd_kernel",
    "selected_bwd": "bsa_selected_bwd_kernel",
    "choose": "bsa_choose_kernel",
}


def _both(
    architecture: int, label: str, dtype: torch.dtype, channels: int, values: int, block: int, packed: bool
) -> list[Labelled]:
    q, v, gate = rows(channels, dtype), rows(values, dtype), torch.empty(TOKENS, HEADS, dtype=dtype, device="meta")
    cu = offsets(BATCH + 1) if packed else None
    if not packed:
        q, v, gate = q[None], v[None], gate[None]
    options, gates = Options(COUNT, block, WINDOW, 0.1, True), (gate, gate, None)
    results: list[Results] = []
    return [
        *captured(
            architecture, label, "forward", lambda: results.append(launch.forward(q, q, v, v, gates, cu, options))
        ),
        *captured(
            architecture, label, "backward", lambda: launch.backward(v, q, q, v, v, gates, *results[0][1:], cu, options)
        ),
    ]


def launches(architecture: int, dtype: torch.dtype, channels: int, values: int, block: int) -> list[Labelled]:
    """Packed sequences, with a window."""
    return _both(architecture, f"D {channels}", dtype, channels, values, block, packed=True)


def defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems."""
    return [*launches(architecture, dtype, 64, 64, BLOCK), *launches(architecture, dtype, 128, 128, BLOCK)]


def configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration of the choice of blocks or of attention to them."""
    # As launched on a card whose table has it.
    card = architecture if family(architecture) in entry.families else CARDS[entry.families[0]]
    found = _both(card, label, dtype, entry.channels, entry.channels, BLOCK, packed=False)
    return [one for one in found if one.launch.kernel.__name__ == KERNELS[entry.kernel]]


LAUNCHES = Launches(defaults, configuration)
# hstu_attention_with_bsa calls the same over packed sequences, and adds no kernel.
HSTU_BSA = Launches(defaults)


def audit_cases() -> Iterator[audit.Case]:
    """All of it, with a window."""

    def call(x: torch.Tensor, gate: torch.Tensor, cu: torch.Tensor | None, options: Options) -> None:
        gates = (gate, gate, gate)
        results = bsa.forward(x, x, x, x, gates, cu, options)
        bsa.backward(x, x, x, x, x, gates, *results[1:], cu, options)

    for words, architecture, packed, stride in audit.layouts():
        x, gate, cu = (
            audit.rows(audit.HEADS, packed=packed, stride=stride),
            audit.gates(packed=packed),
            audit.offsets(packed),
        )
        options = Options(4, 64 if packed else 32, 3_000_000, 0.1, packed)
        yield audit.Case(
            f"{words}, 4 blocks of {options.block_size} and a wide window",
            architecture,
            partial(call, x, gate, cu, options),
        )
