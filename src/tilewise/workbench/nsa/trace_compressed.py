"""Attention to compressed windows, which is flash attention with keys one stride apart: the same kernels, taps and
simulation.
"""

from functools import partial

from tilewise.ops.nsa.problem import window_count
from tilewise.ops.nsa.reference import compressed_attention
from tilewise.ops.nsa.simulate import compressed_options
from tilewise.trace.request import HSTU_MASK, Request, Traced
from tilewise.workbench.flash.programs import CHANNELS, Case
from tilewise.workbench.flash.trace import filled, programs, tile_words, tiles
from tilewise.workbench.operator import Tracing

# Tokens per window, and the stride between windows: short, so that few tokens have several tiles of them.
SIZE, STRIDE = 8, 4


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    config = tiles(request, 16)
    tokens = request.seq_blocks * config.block_m
    windows = window_count(tokens, SIZE, STRIDE)
    case = Case(*filled(request, tokens, windows), compressed_options(tokens, SIZE, STRIDE, CHANNELS**-0.5))
    about = {
        "tiles": tile_words(request, config),
        "tokens": str(tokens),
        "windows": f"{windows} of {SIZE} tokens, one each {STRIDE}",
    }
    return programs(
        request, case, config, partial(compressed_attention, compress_size=SIZE, compress_stride=STRIDE)
    ), about


TRACE = Tracing(trace, refuses=("order", "causal", *HSTU_MASK))
