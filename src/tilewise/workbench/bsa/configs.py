"""The tile configurations of block-sparse attention's own kernels: of the selected branch, run in the whole operator,
and of the choice of blocks.
"""

from functools import partial
from typing import NamedTuple

import torch

from tilewise.ops._host.backend import as_if_on
from tilewise.ops.bsa import configs, launch
from tilewise.ops.bsa.choose import launch as choose
from tilewise.ops.bsa.configs import TABLE, WIDTHS, Config, Kernel, Options
from tilewise.ops.bsa.reference import block_sparse_attn, choice_scores
from tilewise.ops.flash.configs import Family
from tilewise.ops.nsa.compress.launch import compress
from tilewise.ops.nsa.configs import parts_of_block
from tilewise.verify.every_config import Choice, Outcome, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.nsa.configs import CARDS
from tilewise.workbench.operator import Configurations

# COUNT blocks of BLOCK keys are attended to; where blocks are chosen they have SMALL_BLOCK keys, so that few tokens
# make two tiles of them.
HEADS, BLOCK, COUNT, SMALL_BLOCK = 2, 32, 3, 4


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
        tiles = f"{self.config.block_m}x{self.config.block_n}" if self.kernel == "choose" else str(self.config.block_m)
        stages = f"w{self.config.num_warps}-s{self.config.num_stages}{'-ieee' if self.config.ieee else ''}"
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}-{stages}"

    @property
    def _keys(self) -> int:
        """Keys per tile: blocks, or a block of BLOCK, or the parts it is split into on the first of its families."""
        if self.kernel == "choose":
            return self.config.block_n
        return BLOCK // parts_of_block(BLOCK, self.channels, self.element_size, CARDS[self.families[0]])

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its products."""
        products = {"selected_fwd": 2, "selected_bwd": 5, "choose": 1}[self.kernel]
        return 2 * products * self.config.block_m * self._keys * self.channels

    @property
    def _tiles(self) -> tuple[int, int]:
        """Rows of all resident tiles, and of all streamed tiles."""
        rows, keys = self.config.block_m, self._keys
        return {"selected_fwd": (2 * keys, rows), "selected_bwd": (2 * keys, 2 * rows), "choose": (rows, keys)}[
            self.kernel
        ]

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: queries (and their gradients), or means of blocks for the choice."""
        return self._tiles[1] * self.channels * self.element_size

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles themselves take, by count: resident ones, and those in flight (a pipeline of n stages
        holds n - 1 ahead).
        """
        stay, stream = self._tiles
        return (stay + max(1, self.config.num_stages - 1) * stream) * self.channels * self.element_size

    @property
    def families(self) -> list[Family]:
        """GPU families that it is chosen for."""
        return [
            family
            for family, card in CARDS.items()
            if (self.kernel == "choose" or parts_of_block(BLOCK, self.channels, self.element_size, card))
            and configs.choose(self.kernel, self.channels, self.element_size, card) == self.config
        ]

    def fits(self) -> list[str]:
        """Those families by name."""
        return list(self.families)


def entries() -> list[Entry]:
    """Every configuration of the table as some card uses it, once."""
    rows = [(kernel, size, channels, card) for card in CARDS.values() for size, kernel in TABLE for channels in WIDTHS]
    found = dict.fromkeys(
        Entry(kernel, size, channels, configs.choose(kernel, channels, size, card))
        for kernel, size, channels, card in rows
    )
    return [entry for entry in found if entry.fits()]


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome] | list[Choice]:
    """The results of this configuration; `small` is two tiles of queries, else 37 tokens more."""
    with as_if_on(CARDS[entry.families[0]]):
        return (
            _choose(entry, small, fill_rule, device)
            if entry.kernel == "choose"
            else _attend(entry, small, fill_rule, device)
        )


def _attend(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    shape = (1, 2 * max(entry.config.block_m, BLOCK) + (0 if small else 37), HEADS, entry.channels)
    q, k, v, u, do = filled(entry.element_size, fill_rule, device, q=shape, k=shape, v=shape, u=shape, do=shape)
    options = Options(COUNT, BLOCK, 0, entry.channels**-0.5, interleave=True)
    # A compressed branch of 0 leaves only the selected one: the rounding of the former, which layer norm may magnify,
    # would hide errors.
    gates = (torch.zeros_like(q[..., 0]), None, None)
    made = launch.forward(q, k, v, u, gates, None, options)

    def reference(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, compute_dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor]:
        attend = partial(block_sparse_attn, block_indices=made.block_indices, compute_dtype=compute_dtype)
        return (attend(q, k, v, u.to(q.dtype), gates[0].to(q.dtype), None, None, COUNT, BLOCK)[0],)

    if entry.kernel == "selected_fwd":
        return output_outcomes([made.o], reference, q, k, v)
    gradients = [x for x in launch.backward(do, q, k, v, u, gates, *made[1:], None, options)[:3] if x is not None]
    return gradient_outcomes(gradients, reference, q, k, v, do)


def _choose(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Choice]:
    # Two tiles of blocks at least.
    tokens = max(2 * entry.config.block_m, SMALL_BLOCK * (entry.config.block_n + 2)) + (0 if small else 37)
    q, k = filled(
        entry.element_size,
        fill_rule,
        device,
        q=(1, tokens, HEADS, entry.channels),
        k=(1, tokens, HEADS, entry.channels),
    )
    k_cmp = compress(k, None, None, SMALL_BLOCK, SMALL_BLOCK)
    _, indices = choose.choose(q, k_cmp, None, None, COUNT, SMALL_BLOCK, 1, entry.channels**-0.5)
    truth, eager = (
        choice_scores(q.double(), k.double(), block_size=SMALL_BLOCK),
        choice_scores(q, k, block_size=SMALL_BLOCK, compute_dtype=q.dtype),
    )
    return [Choice(indices, truth, eager)]


CONFIGURATIONS = Configurations(entries, run)
