"""Tiles of flash attention's kernels for Hopper, each run on its own problem: on such a GPU, or simulated."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, get_args

import torch

from tilewise.ops._host import gluon
from tilewise.ops._host.backend import architecture, as_if_on, few_sms, interpreting
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch
from tilewise.ops.flash.configs import TINY_KEYS, Family
from tilewise.ops.flash.hopper import configs as hopper_configs
from tilewise.ops.flash.hopper.configs import (
    ARCHITECTURE,
    BACKWARD,
    FORWARD,
    FORWARD_CAPPED,
    FORWARD_SHORT,
    Backward,
    Forward,
    Order,
)
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify.every_config import Outcome, filled, gradient_outcomes, output_outcomes
from tilewise.workbench.operator import Configurations, UsageError

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch

# Enough that a program processes several key blocks: the third is the first to reuse a slot.
HEADS = 64
# Simulated, as many heads on as many SMs.
SIMULATED_HEADS, SIMULATED_SMS = 4, 2
SOFTCAP = 5.0
FAMILIES: tuple[Family, ...] = ("hopper",)


@dataclass(frozen=True)
class _Widths:
    """Channels of q and of v, in 16 bits."""

    families: ClassVar = FAMILIES
    element_size: ClassVar = 2
    channels: int
    values: int

    def fits(self) -> list[str]:
        """Hopper only."""
        return list(self.families)


@dataclass(frozen=True)
class ForwardEntry(_Widths):
    """The forward, with or without softcap."""

    capped: bool
    config: Forward

    @property
    def short(self) -> str:
        """One word."""
        tiles = f"{self.config.block_m}x{self.config.block_n}-g{self.config.groups}-s{self.config.stages}"
        return f"fwd-bf16-d{self.channels}-dv{self.values}-{tiles}{'-softcap' if self.capped else ''}"

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its two products."""
        return 2 * self.config.block_m * self.config.block_n * (self.channels + self.values)

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: a tile of K and one of V."""
        return self.element_size * self.config.block_n * (self.channels + self.values)

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles take."""
        return hopper_configs.shared_bytes(self.config, self.channels, self.values)

    @property
    def tokens(self) -> int:
        """Two tiles each way, and more than the sizes left to the portable kernels."""
        return 2 * max(self.config.block_m, self.config.block_n) + TINY_KEYS


@dataclass(frozen=True)
class BackwardEntry(_Widths):
    """The backward, with dQ summed in one of the orders."""

    config: Backward
    order: Order

    @property
    def short(self) -> str:
        """One word."""
        tiles = f"{self.config.block_m}x{self.config.block_n}-s{self.config.stages}"
        return f"bwd-bf16-d{self.channels}-dv{self.values}-{tiles}-{self.order}"

    @property
    def operations(self) -> int:
        """Of one step: 2 per multiply-add of its five products."""
        return 2 * self.config.block_m * self.config.block_n * (3 * self.channels + 2 * self.values)

    @property
    def step_bytes(self) -> int:
        """Read from memory in one step: a tile of Q and one of dO."""
        return self.element_size * self.config.block_m * (self.channels + self.values)

    @property
    def shared_memory(self) -> int:
        """Bytes that the tiles take, and dSᵀ twice, or Pᵀ and dSᵀ where warpgroups share the keys."""
        rows = self.config.slots * self.config.block_n + self.config.stages * self.config.block_m
        return self.element_size * (
            rows * (self.channels + self.values) + 2 * self.config.block_m * self.config.block_n
        )

    @property
    def tokens(self) -> int:
        """Two blocks of keys, and more than the sizes left to the portable kernels."""
        return 2 * self.config.block_n + TINY_KEYS


Entry = ForwardEntry | BackwardEntry


def entries() -> list[Entry]:
    """Every pair of widths: the forward's tiles, those under softcap and for few keys, and the backward in
    every order.
    """
    tables = (False, FORWARD), (True, FORWARD_CAPPED), (False, FORWARD_SHORT)
    return [
        *(ForwardEntry(*widths, capped, config) for capped, table in tables for widths, config in table.items()),
        *(BackwardEntry(*widths, config, order) for widths, config in BACKWARD.items() for order in get_args(Order)),
    ]


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration computes; `small` is some whole tiles each way, else 37 tokens more."""
    if not gluon.AVAILABLE:
        raise UsageError(f"these kernels are written in Gluon: {gluon.why_off()}")
    with _heads(device) as heads:
        return _run(entry, small, fill_rule, device, heads)


@contextmanager
def _heads(device: torch.device) -> Iterator[int]:
    """How many heads; inside, such a GPU is there or simulated."""
    if device.type == "cuda" and architecture(device) == ARCHITECTURE:
        yield HEADS
    elif interpreting():
        with as_if_on(ARCHITECTURE), few_sms(SIMULATED_SMS):
            yield SIMULATED_HEADS
    else:
        raise UsageError(
            "these kernels run on compute capability 9.0 alone, such as an H100's, or simulated where there is no GPU;"
            " --list works anywhere"
        )


def _run(entry: Entry, small: bool, fill_rule: str, device: torch.device, heads: int) -> list[Outcome]:
    lead = (1, entry.tokens + (0 if small else 37), heads)
    shapes = {
        "q": (*lead, entry.channels),
        "k": (*lead, entry.channels),
        "v": (*lead, entry.values),
        "do": (*lead, entry.values),
    }
    q, k, v, do = filled(entry.element_size, fill_rule, device, **shapes)
    softcap = SOFTCAP if isinstance(entry, ForwardEntry) and entry.capped else 0.0
    inputs = launch.make_inputs(q, k, v, None, None, True, -1, -1, entry.channels**-0.5, softcap)
    reference = partial(flash_attention, causal=True, softcap=softcap)
    if isinstance(entry, ForwardEntry):
        return output_outcomes(_forward(inputs, entry.config), reference, q, k, v)
    o, lse = _forward(inputs, FORWARD[entry.channels, entry.values])
    return gradient_outcomes(
        hopper_launch.backward(inputs, o, lse, do, None, entry.order, entry.config), reference, q, k, v, do
    )


def _forward(inputs: launch.Inputs, config: Forward) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty_like(inputs.v)
    lse = torch.empty(1, o.shape[2], o.shape[1], dtype=torch.float32, device=o.device)
    run_all([hopper_launch.forward_launch(inputs, o, lse, config)], o.device)
    return o, lse


CONFIGURATIONS = Configurations(entries, run)
