"""Attention to compressed windows: flash's tile configurations, each run with windows for keys."""

from functools import partial

import torch

from tilewise.ops.nsa.compress import launch as compressed
from tilewise.ops.nsa.problem import window_count
from tilewise.ops.nsa.reference import compressed_attention
from tilewise.verify.every_config import Outcome, filled
from tilewise.workbench.flash.configs import HEADS, Entry, entries, outcomes
from tilewise.workbench.operator import Configurations

SIZE, STRIDE = 32, 16


def run(entry: Entry, small: bool, fill_rule: str, device: torch.device) -> list[Outcome]:
    """The tensors that this configuration makes; `small` is two tiles of windows, one of them whole, else 37 tokens
    more.
    """
    tokens = max(2 * entry.config.block_m, STRIDE * (entry.config.block_n + 8)) + (0 if small else 37)
    windows = (1, window_count(tokens, SIZE, STRIDE), 1, entry.channels)
    queries = (1, tokens, HEADS, entry.channels)
    q, k, v, do = filled(entry.element_size, fill_rule, device, q=queries, k=windows, v=windows, do=queries)
    inputs = compressed.make_inputs(q, k, v, None, None, SIZE, STRIDE, entry.channels**-0.5)
    return outcomes(entry, inputs, do, partial(compressed_attention, compress_size=SIZE, compress_stride=STRIDE))


CONFIGURATIONS = Configurations(entries, run)
