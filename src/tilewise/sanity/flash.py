"""Flash attention's tile configurations, each run on a problem of its own."""

from functools import partial
from typing import NamedTuple

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import SHARED_MEMORY, SHORT, TABLE, WIDTHS, Config, Family, Kernel
from tilewise.ops.flash.reference import flash_attention
from tilewise.sanity.operators import Operator
from tilewise.sanity.outcome import Outcome, Reference, filled, gradient_outcomes, output_outcomes

HEADS = 2


class Entry(NamedTuple):
    """One configuration: the kernel it is for, bytes an element, channels, and the tiles."""

    kernel: Kernel
    element_size: int
    channels: int
    config: Config

    @property
    def short(self) -> str:
        """One word."""
        dtype = "bf16" if self.element_size == 2 else "fp32"
        tiles = f"{self.config.block_m}x{self.config.block_n}"
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}-w{self.config.num_warps}-s{self.config.num_stages}{'-tma' if self.config.tma else ''}"

    @property
    def operations(self) -> int:
        """Of one step: 2 for each multiplication and addition of its products."""
        products = {"fwd": 2, "dkdv": 4, "dq": 3}[self.kernel]
        return 2 * products * self.config.block_m * self.config.block_n * self.channels

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: two tiles."""
        rows = self.config.block_m if self.kernel == "dkdv" else self.config.block_n
        return 2 * rows * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: those that stay, and those in flight (a pipeline of n stages holds n - 1 ahead)."""
        block_d, block_dv = tile_widths(self.channels, self.channels, self.element_size)
        stay, stream = (self.config.block_n, self.config.block_m) if self.kernel == "dkdv" else (self.config.block_m, self.config.block_n)
        kept = stay * (block_d if self.kernel == "fwd" else block_d + block_dv)
        return (kept + max(1, self.config.num_stages - 1) * stream * (block_d + block_dv)) * self.element_size

    def fits(self) -> list[str]:
        """Families of GPUs that it is chosen for."""
        return [family for family in SHARED_MEMORY if self.config in _row(family, self.element_size, self.kernel, self.channels)]


def _row(family: Family, element_size: int, kernel: Kernel, channels: int) -> tuple[Config, ...]:
    """All tiles for this width, those for short sequences included."""
    key = family, element_size, kernel
    short = SHORT.get(key, {})
    return TABLE[key][WIDTHS.index(channels)] + ((short[channels],) if channels in short else ())


def entries() -> list[Entry]:
    """Every configuration of the table, once."""
    rows = ((*key, channels) for key in TABLE for channels in WIDTHS)
    return list(
        dict.fromkeys(
            Entry(kernel, size, channels, config) for family, size, kernel, channels in rows for config in _row(family, size, kernel, channels)
        )
    )


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration makes; `small` is two tiles each way, else 37 tokens more."""
    tokens = 2 * max(entry.config.block_m, entry.config.block_n) + (0 if small else 37)
    shape = (1, tokens, HEADS, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=shape, k=shape, v=shape, do=shape)
    inputs = launch.make_inputs(q, k, v, None, None, True, -1, -1, entry.channels**-0.5, 0.0)
    return outcomes(entry, inputs, do, partial(flash_attention, causal=True))


def outcomes(entry: Entry, inputs: launch.Inputs, do: torch.Tensor, reference: Reference) -> list[Outcome]:
    """The tensors that this configuration makes of `inputs`, beside fp64 truth and eager torch's."""
    q, k, v, config, device = inputs.q, inputs.k, inputs.v, entry.config, inputs.q.device
    if config.tma and (device.type != "cuda" or architecture(device) < 90):
        config = config._replace(tma=False)
    if entry.kernel == "fwd":
        return output_outcomes(launch.forward(inputs, config), reference, q, k, v)
    o, lse = launch.forward(inputs, configs.choose("fwd", inputs.problem(), architecture(device)))
    gradients = launch.backward(inputs, o, lse, do, None, config if entry.kernel == "dkdv" else None, config if entry.kernel == "dq" else None)
    made = gradient_outcomes(gradients, reference, q, k, v, do)
    return made[:1] if entry.kernel == "dq" else made[1:]


OPERATOR = Operator(entries, run)
