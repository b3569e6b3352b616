"""Attention over a cache: its tile configurations, each run on a problem that fills its rows, in two splits."""

from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash.configs import WIDTHS, Family
from tilewise.ops.flash.decode import launch
from tilewise.ops.flash.decode.configs import FEWEST_ROWS, TABLE, Config, tiles
from tilewise.ops.flash.decode.reference import attend_cached
from tilewise.verify.every_config import Outcome, filled, output_outcomes
from tilewise.workbench.operator import Configurations

KV_HEADS, GROUP = 2, 4
# A short entry before the long one.
LEAD = 5


@dataclass(frozen=True)
class Entry:
    """One configuration: bytes per element, channels, the tiles, and the families of GPUs that it is chosen for."""

    element_size: int
    channels: int
    config: Config
    families: tuple[Family, ...]

    @property
    def short(self) -> str:
        """One word."""
        m, n, warps, stages = self.config
        return f"step-{'bf16' if self.element_size == 2 else 'fp32'}-d{self.channels}-{m}x{n}-w{warps}-s{stages}"

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its two products."""
        return 4 * self.config.block_m * self.config.block_n * self.channels

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: a tile of keys and one of values."""
        return 2 * self.config.block_n * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: queries, and keys and values in flight."""
        block_d, block_dv = tile_widths(self.channels, self.channels, self.element_size)
        stream = max(1, self.config.num_stages - 1) * self.config.block_n * (block_d + block_dv)
        return (self.config.block_m * block_d + stream) * self.element_size

    def fits(self) -> list[str]:
        """Those families by name."""
        return list(self.families)


def entries() -> list[Entry]:
    """Every configuration of the table, once: for each width tiles of 16 rows to the most."""
    families: dict[tuple[int, int, Config], list[Family]] = {}
    for (family, size), rows in TABLE.items():
        for channels, row in zip(WIDTHS, rows, strict=True):
            block_m = FEWEST_ROWS
            while block_m <= row[0]:
                families.setdefault((size, channels, tiles(row, block_m)), []).append(family)
                block_m *= 2
    return [Entry(*entry, tuple(found)) for entry, found in families.items()]


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """Output and LSE of a tile of queries over four tiles of keys in two splits; unless `small` over 37 keys more."""
    keys = 4 * entry.config.block_n + (0 if small else 37)
    cache = (2, keys, KV_HEADS, entry.channels)
    tokens = entry.config.block_m // GROUP
    q, k, v = filled(
        entry.element_size, fill_rule, device, q=(2, tokens, KV_HEADS * GROUP, entry.channels), k=cache, v=cache
    )
    lengths = torch.tensor([LEAD, keys], device=device)

    def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **precision: Any) -> tuple[torch.Tensor, ...]:
        return attend_cached(q, k, v, causal=True, seqused_k=lengths, **precision)

    scale = entry.channels**-0.5
    inputs = launch.make_inputs(q, k, v, None, lengths, None, None, None, 0, True, -1, -1, scale, 0.0, 2)
    return output_outcomes(launch.forward(inputs, entry.config), reference, q, k, v)


CONFIGURATIONS = Configurations(entries, run)
