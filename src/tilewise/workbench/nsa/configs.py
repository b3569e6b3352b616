"""The tile configurations of the choice of blocks and of attention to them, each run on its own problem."""

from functools import partial
from typing import NamedTuple

import torch

from tilewise.ops._host.backend import architecture, as_if_on
from tilewise.ops.flash.configs import Family
from tilewise.ops.nsa import configs
from tilewise.ops.nsa.choose.launch import choose
from tilewise.ops.nsa.compress import launch as compressed
from tilewise.ops.nsa.configs import TABLE, WIDTHS, Config, Kernel
from tilewise.ops.nsa.problem import Sizes, window_count
from tilewise.ops.nsa.reference import choice_scores, compressed_attention, selected_attention
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import make_inputs
from tilewise.verify.every_config import Choice, Outcome, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.flash import configs as flash_configs
from tilewise.workbench.nsa.base import block_pattern
from tilewise.workbench.operator import Configurations

# One card per family.
CARDS: dict[Family, int] = {"hopper": 90, "blackwell": 100, "medium": 80, "small": 86}
HEADS, BLOCK, SLOTS = 2, 64, 2
# In the defaults' proportions, at a stride of 1: so that few tokens make two tiles of windows.
SIZES = Sizes(compress_size=2, compress_stride=1, block_size=4, block_count=6, init_blocks=1, local_blocks=2)


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
        tiles = f"{self.config.block_m}x{self.config.block_n}" if self.kernel == "scores" else str(self.config.block_m)
        limit = f"-r{self.config.registers}" if self.config.registers else ""
        stages = f"w{self.config.num_warps}-s{self.config.num_stages}{'-tma' if self.config.tma else ''}{limit}"
        return f"{self.kernel}-{dtype}-d{self.channels}-{tiles}-{stages}"

    @property
    def _keys(self) -> int:
        """Keys per tile: windows, or a block of 64, or the parts it is split into on the first of its families."""
        if self.kernel == "scores":
            return self.config.block_n
        return BLOCK // configs.parts_of_block(BLOCK, self.channels, self.element_size, CARDS[self.families[0]])

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its products."""
        products = {"lists_fwd": 2, "lists_bwd": 5, "union_fwd": 2, "union_dq": 3, "scores": 1}[self.kernel]
        return 2 * products * self.config.block_m * self._keys * self.channels

    @property
    def _tiles(self) -> tuple[int, int]:
        """Rows of all resident tiles, and of all streamed tiles."""
        rows, keys = self.config.block_m, self._keys
        return {
            "lists_fwd": (2 * keys, rows),
            "lists_bwd": (2 * keys, 2 * rows),
            "union_fwd": (rows, 2 * keys),
            "union_dq": (2 * rows, 2 * keys),
            "scores": (keys, rows),
        }[self.kernel]

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: queries (and their gradients) in key order and for scores, a block of keys and
        values in query order.
        """
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
        found: list[Family] = []
        for family, card in CARDS.items():
            cut = (
                1 if self.kernel == "scores" else configs.parts_of_block(BLOCK, self.channels, self.element_size, card)
            )
            if cut and configs.choose(self.kernel, self.channels, self.element_size, card) == self.config:
                found.append(family)
        return found

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
    """The tensors that this configuration computes; `small` is two blocks of keys, or two tiles of windows, else 37
    tokens more.
    """
    card = CARDS[entry.families[0]]
    if entry.config.tma and device.type == "cuda" and architecture(device) < 90:
        # A GPU without descriptors uses its own tiles instead of those that need them.
        card = architecture(device)
    with as_if_on(card):
        return (
            _choose(entry, small, fill_rule, device)
            if entry.kernel == "scores"
            else _attend(entry, small, fill_rule, device)
        )


def _attend(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    tokens = 2 * BLOCK + (0 if small else 37)
    queries, keys = (1, tokens, HEADS, entry.channels), (1, tokens, 1, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=queries, k=keys, v=keys, do=queries)
    indices = block_pattern("holes", (1, tokens, 1, SLOTS), BLOCK, torch.Generator().manual_seed(0)).to(device)
    inputs = make_inputs(q, k, v, indices, None, BLOCK, entry.channels**-0.5)
    reference = partial(selected_attention, block_indices=indices, block_size=BLOCK)
    order: selected.Order = "union" if entry.kernel.startswith("union") else "lists"
    o, lse = selected.forward(inputs, order)
    if entry.kernel.endswith("fwd"):
        return output_outcomes((o, lse), reference, q, k, v)
    made = gradient_outcomes(selected.backward(inputs, o, lse, do, None, order)[:3], reference, q, k, v, do)
    return made[:1] if entry.kernel == "union_dq" else made


def _choose(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Choice]:
    tokens = 2 * max(entry.config.block_m, entry.config.block_n) + (0 if small else 37)
    size, stride = SIZES.compress_size, SIZES.compress_stride
    queries, windows = (1, tokens, HEADS, entry.channels), (1, window_count(tokens, size, stride), 1, entry.channels)
    q, k = filled(entry.element_size, fill_rule, device, q=queries, k=windows)
    _, lse = compressed.compressed_forward(q, k, k, None, None, size, stride, entry.channels**-0.5)
    indices = choose(q, k, lse, None, None, SIZES, entry.channels**-0.5)
    sizes = SIZES._asdict()
    del sizes["block_count"]
    truth, eager = choice_scores(q.double(), k.double(), **sizes), choice_scores(q, k, **sizes, compute_dtype=q.dtype)
    return [Choice(indices, truth, eager)]


SELECTED = Configurations(entries, run)


# Of the windows that the compressed branch runs with.
SIZE, STRIDE = 32, 16


def run_compressed(entry: flash_configs.Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration computes; `small` is two tiles of windows, one of them full, else 37 tokens
    more.
    """
    tokens = max(2 * entry.config.block_m, STRIDE * (entry.config.block_n + 8)) + (0 if small else 37)
    windows = (1, window_count(tokens, SIZE, STRIDE), 1, entry.channels)
    queries = (1, tokens, HEADS, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=queries, k=windows, v=windows, do=queries)
    inputs = compressed.make_inputs(q, k, v, None, None, SIZE, STRIDE, entry.channels**-0.5)
    return flash_configs.outcomes(
        entry, inputs, do, partial(compressed_attention, compress_size=SIZE, compress_stride=STRIDE)
    )


COMPRESSED = Configurations(flash_configs.entries, run_compressed)
