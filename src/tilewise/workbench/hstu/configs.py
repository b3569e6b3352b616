"""HSTU attention's tile configurations, each run on two problems of its own: with the plain causal mask, and with
targets and a context.
"""

from dataclasses import replace
from typing import Any

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops.flash.configs import Family, Kernel
from tilewise.ops.hstu import launch
from tilewise.ops.hstu.configs import TABLE, WIDTHS, Config
from tilewise.ops.hstu.reference import hstu_attention
from tilewise.verify.every_config import Outcome, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.flash.configs import TiledEntry, entries_of
from tilewise.workbench.operator import Configurations

HEADS = 2
# A short sequence before the long one; how many tokens of the long one are targets, and how many of either are context.
LEAD, TARGETS, CONTEXT = 5, 9, 3

Entry = TiledEntry[Config]


def _row(family: Family, element_size: int, kernel: Kernel, channels: int) -> tuple[Config, ...]:
    """All tiles for q and v of this width."""
    return TABLE[family, element_size, kernel][WIDTHS.index(2 * channels)]


def entries() -> list[Entry]:
    """Every configuration of the table, once."""
    return entries_of(TABLE, [width // 2 for width in WIDTHS], _row)


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration computes; `small` is two tiles each way, else 37 tokens more."""
    tokens = 2 * max(entry.config.block_m, entry.config.block_n) + (0 if small else 37)
    shape = (LEAD + tokens, HEADS, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=shape, k=shape, v=shape, do=shape)
    targets = torch.tensor([1, TARGETS], device=device)
    plain = _outcomes(entry, tokens, None, 0, q, k, v, do)
    return plain + [
        replace(one, name=f"{one.name} with targets") for one in _outcomes(entry, tokens, targets, CONTEXT, q, k, v, do)
    ]


def _outcomes(
    entry: Entry,
    tokens: int,
    targets: torch.Tensor | None,
    context: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
) -> list[Outcome]:
    config, device = entry.config, q.device
    if config.tma and (device.type != "cuda" or architecture(device) < 90):
        config = config._replace(tma=False)
    offsets = torch.tensor([0, LEAD, LEAD + tokens], device=device)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **precision: Any) -> tuple[torch.Tensor]:
        return (
            hstu_attention(
                q, k, v, offsets, max_seq_len=tokens, num_targets=targets, contextual_seq_len=context, **precision
            ),
        )

    inputs = launch.make_inputs(q, k, v, offsets, targets, tokens, entry.channels**-0.5, True, 0, context)
    if entry.kernel == "fwd":
        return output_outcomes([launch.forward(inputs, config)], reference, q, k, v)
    gradients = launch.backward(
        inputs, do, config if entry.kernel == "dkdv" else None, config if entry.kernel == "dq" else None
    )
    made = gradient_outcomes(gradients, reference, q, k, v, do)
    return made[:1] if entry.kernel == "dq" else made[1:]


CONFIGURATIONS = Configurations(entries, run)
