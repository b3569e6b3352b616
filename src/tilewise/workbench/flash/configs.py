"""Flash attention's tile configurations, each run on its own problem.

`TiledEntry` serves every operator whose kernels walk tiles of keys, or of queries for dK and dV.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch

from tilewise.ops._host.backend import architecture
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import SHORT, TABLE, WIDTHS, Config, Family, Kernel
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.every_config import Outcome, Reference, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.operator import Configurations

HEADS = 2


class Tiles(Protocol):
    """What every such configuration has."""

    @property
    def block_m(self) -> int:
        """Queries per tile."""

    @property
    def block_n(self) -> int:
        """Keys per tile."""

    @property
    def num_warps(self) -> int:
        """Warps per program."""

    @property
    def num_stages(self) -> int:
        """Stages of its pipeline."""

    @property
    def tma(self) -> bool:
        """Whether tiles are loaded through tensor descriptors."""


Tiled = TypeVar("Tiled", bound=Tiles)


@dataclass(frozen=True)
class TiledEntry(Generic[Tiled]):
    """One configuration: the kernel it is for, bytes per element, channels, the tiles, and the families of GPUs that it
    is chosen for.
    """

    kernel: Kernel
    element_size: int
    channels: int
    config: Tiled
    families: tuple[Family, ...]

    @property
    def short(self) -> str:
        """One word."""
        dtype = "bf16" if self.element_size == 2 else "fp32"
        config = self.config
        tiles = (
            f"{config.block_m}x{config.block_n}-w{config.num_warps}-s{config.num_stages}{'-tma' if config.tma else ''}"
        )
        # Not every operator's configurations have a limit of registers.
        registers = getattr(config, "registers", None)
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}{f'-r{registers}' if registers else ''}"

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its products."""
        products = {"fwd": 2, "dkdv": 4, "dq": 3}[self.kernel]
        return 2 * products * self.config.block_m * self.config.block_n * self.channels

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: two tiles."""
        rows = self.config.block_m if self.kernel == "dkdv" else self.config.block_n
        return 2 * rows * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: resident ones, and those in flight (a pipeline of n stages
        holds n - 1 ahead).
        """
        block_d, block_dv = tile_widths(self.channels, self.channels, self.element_size)
        stay, stream = (
            (self.config.block_n, self.config.block_m)
            if self.kernel == "dkdv"
            else (self.config.block_m, self.config.block_n)
        )
        kept = stay * (block_d if self.kernel == "fwd" else block_d + block_dv)
        return (kept + max(1, self.config.num_stages - 1) * stream * (block_d + block_dv)) * self.element_size

    def fits(self) -> list[str]:
        """Those families by name."""
        return list(self.families)


def entries_of(
    keys: Iterable[tuple[Family, int, Kernel]],
    widths: Sequence[int],
    row: Callable[[Family, int, Kernel, int], Sequence[Tiled]],
) -> list[TiledEntry[Tiled]]:
    """Every configuration of a table, once: `row` gives those of a family, bytes an element, kernel and width."""
    families: dict[tuple[Kernel, int, int, Tiled], list[Family]] = {}
    for family, size, kernel in keys:
        for channels in widths:
            for config in dict.fromkeys(row(family, size, kernel, channels)):
                families.setdefault((kernel, size, channels, config), []).append(family)
    return [TiledEntry(*entry, tuple(found)) for entry, found in families.items()]


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
