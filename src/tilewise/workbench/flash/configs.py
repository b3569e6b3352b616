"""Flash attention's tile configurations, each run on its own problem."""

from functools import partial

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import SHORT, TABLE, WIDTHS, Config, Family, Kernel
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.every_config import Outcome, Reference, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.operator import Configurations
from tilewise.workbench.tiles import TiledEntry, entries_of

HEADS = 2


Entry = TiledEntry[Config]


def _row(family: Family, element_size: int, kernel: Kernel, channels: int) -> tuple[Config, ...]:
    """All tiles for this width, those for short sequences included."""
    key = family, element_size, kernel
    short = SHORT.get(key, {})
    return TABLE[key][WIDTHS.index(channels)] + ((short[channels],) if channels in short else ())


def entries() -> list[Entry]:
    """Every configuration of the table, once."""
    return entries_of(TABLE, WIDTHS, _row)


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration computes; `small` is two tiles each way, else 37 tokens more."""
    tokens = 2 * max(entry.config.block_m, entry.config.block_n) + (0 if small else 37)
    shape = (1, tokens, HEADS, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=shape, k=shape, v=shape, do=shape)
    inputs = launch.make_inputs(q, k, v, None, None, True, -1, -1, entry.channels**-0.5, 0.0)
    return outcomes(entry, inputs, do, partial(flash_attention, causal=True))


def outcomes(entry: Entry, inputs: launch.Inputs, do: torch.Tensor, reference: Reference) -> list[Outcome]:
    """The tensors that this configuration computes from `inputs`, next to fp64 truth and eager torch's."""
    q, k, v, config, device = inputs.q, inputs.k, inputs.v, entry.config, inputs.q.device
    if config.tma and (device.type != "cuda" or architecture(device) < 90):
        config = config._replace(tma=False)
    if entry.kernel == "fwd":
        return output_outcomes(launch.forward(inputs, config), reference, q, k, v)
    o, lse = launch.forward(inputs, configs.choose("fwd", launch.problem_of(inputs), architecture(device)))
    gradients = launch.backward(
        inputs, o, lse, do, None, config if entry.kernel == "dkdv" else None, config if entry.kernel == "dq" else None
    )
    made = gradient_outcomes(gradients, reference, q, k, v, do)
    return made[:1] if entry.kernel == "dq" else made[1:]


CONFIGURATIONS = Configurations(entries, run)
