"""What native sparse attention launches, branch by branch: for usual problems, and with each tile configuration."""

from collections.abc import Callable

import torch

from tilewise.inspect.launches import Labelled, captured
from tilewise.ops._host.backend import as_if_on
from tilewise.ops.flash.configs import family
from tilewise.ops.flash.problem import Inputs as FlashInputs
from tilewise.ops.nsa import launch
from tilewise.ops.nsa.choose import launch as choose
from tilewise.ops.nsa.compress import launch as compressed
from tilewise.ops.nsa.problem import Sizes, window_count
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import Inputs, make_inputs
from tilewise.workbench.flash import inspect as flash
from tilewise.workbench.flash.configs import Entry as FlashEntry
from tilewise.workbench.nsa.configs import BLOCK, CARDS, Entry
from tilewise.workbench.operator import Launches

# Few enough tokens that the lists of a usual problem are still built in one piece.
TOKENS, KEY_HEADS, GROUP, SLOTS = 8192, 2, 16, 16
SIZE, STRIDE = 32, 16
# Which kernel each part of the table is for.
KERNELS = {
    "lists_fwd": "nsa_selected_fwd_lists_kernel",
    "lists_bwd": "nsa_selected_bwd_lists_kernel",
    "union_fwd": "nsa_selected_fwd_union_kernel",
    "union_dq": "nsa_selected_bwd_union_kernel",
    "scores": "nsa_choose_scores_kernel",
}


def _rows(heads: int, channels: int, dtype: torch.dtype, tokens: int = TOKENS) -> torch.Tensor:
    return torch.empty(1, tokens, heads, channels, dtype=dtype, device="meta")


def _windows(channels: int, dtype: torch.dtype) -> torch.Tensor:
    return _rows(KEY_HEADS, channels, dtype, window_count(TOKENS, SIZE, STRIDE))


def _lse(group: int) -> torch.Tensor:
    return torch.empty(1, KEY_HEADS * group, TOKENS, device="meta")


def _windowed(channels: int, dtype: torch.dtype, group: int) -> FlashInputs:
    q, k = _rows(KEY_HEADS * group, channels, dtype), _windows(channels, dtype)
    return compressed.make_inputs(q, k, k, None, None, SIZE, STRIDE, channels**-0.5)


def compressed_launches(architecture: int, dtype: torch.dtype, channels: int, group: int) -> list[Labelled]:
    """Attention to the means of windows."""
    return flash.both(architecture, f"compressed D {channels}", _windowed(channels, dtype, group))


def _attending(architecture: int, label: str, inputs: Inputs, order: selected.Order = "either") -> list[Labelled]:
    q, group = inputs.q, inputs.q.shape[-2] // KEY_HEADS
    o, lse = torch.empty_like(q), _lse(group)
    return [
        *captured(architecture, label, "forward", lambda: selected.forward(inputs, order)),
        *captured(architecture, label, "backward", lambda: selected.backward(inputs, o, lse, o, None, order)),
    ]


def _indices() -> torch.Tensor:
    return torch.empty(1, TOKENS, KEY_HEADS, SLOTS, dtype=torch.int32, device="meta")


def _named(architecture: int, dtype: torch.dtype, channels: int, block: int, group: int) -> Inputs:
    q, k = _rows(KEY_HEADS * group, channels, dtype), _rows(KEY_HEADS, channels, dtype)
    with as_if_on(architecture):
        return make_inputs(q, k, k, _indices(), None, block, channels**-0.5)


def selected_launches(architecture: int, dtype: torch.dtype, channels: int, block: int, group: int) -> list[Labelled]:
    """Attention to named blocks, in either loop order."""
    return _attending(architecture, f"selected D {channels}", _named(architecture, dtype, channels, block, group))


def _choosing(
    architecture: int, label: str, dtype: torch.dtype, channels: int, block: int, group: int
) -> list[Labelled]:
    q, k_cmp, sizes = (
        _rows(KEY_HEADS * group, channels, dtype),
        _windows(channels, dtype),
        Sizes(SIZE, STRIDE, block, SLOTS, 1, 2),
    )
    return captured(
        architecture, label, "forward", lambda: choose.choose(q, k_cmp, _lse(group), None, None, sizes, channels**-0.5)
    )


def around_launches(architecture: int, dtype: torch.dtype, channels: int, block: int, group: int) -> list[Labelled]:
    """What lies around the branches: means of windows, the choice of blocks, the gated sum."""
    label = f"around D {channels}"
    k, k_cmp, o = (
        _rows(KEY_HEADS, channels, dtype),
        _windows(channels, dtype),
        _rows(KEY_HEADS * group, channels, dtype),
    )
    gate = torch.empty(1, TOKENS, KEY_HEADS * group, dtype=dtype, device="meta")
    return [
        *captured(architecture, label, "forward", lambda: launch.compress(k, None, None, SIZE, STRIDE)),
        *_choosing(architecture, label, dtype, channels, block, group),
        *captured(architecture, label, "forward", lambda: launch.combine([o, o, o], [gate, gate, gate])),
        *captured(architecture, label, "backward", lambda: launch.combine_backward(o, o, gate)),
        *captured(
            architecture, label, "backward", lambda: launch.compress_backward(k_cmp, TOKENS, None, None, SIZE, STRIDE)
        ),
    ]


def launches(architecture: int, dtype: torch.dtype, channels: int, block: int, group: int) -> list[Labelled]:
    """All of it."""
    return [
        *around_launches(architecture, dtype, channels, block, group),
        *compressed_launches(architecture, dtype, channels, group),
        *selected_launches(architecture, dtype, channels, block, group),
    ]


def attend_launches(architecture: int, dtype: torch.dtype, channels: int) -> list[Labelled]:
    """native_sparse_attend: whole named blocks, scaled, and the token's own up to it."""
    q, k = _rows(KEY_HEADS * GROUP, channels, dtype), _rows(KEY_HEADS, channels, dtype)
    factor = torch.empty(1, TOKENS, KEY_HEADS, SLOTS, dtype=dtype, device="meta")
    with as_if_on(architecture):
        inputs = make_inputs(q, k, k, _indices(), None, BLOCK, channels**-0.5, factor, own=True, causal=False)
    return _attending(architecture, f"attend D {channels}", inputs)


def compressed_configuration(entry: FlashEntry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One of flash's tile configurations, with windows for keys."""
    return flash.with_tiles(entry, architecture, label, _windowed(entry.channels, dtype, GROUP))


def selected_configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration of the choice of blocks or of attention to them."""
    # As launched on a card whose table has it.
    card = architecture if family(architecture) in entry.families else CARDS[entry.families[0]]
    if entry.kernel == "scores":
        found = _choosing(card, label, dtype, entry.channels, BLOCK, GROUP)
    else:
        found = _attending(
            card,
            label,
            _named(card, dtype, entry.channels, BLOCK, GROUP),
            "union" if "union" in entry.kernel else "lists",
        )
    return [one for one in found if one.launch.kernel.__name__ == KERNELS[entry.kernel]]


def _usual(of_width: Callable[..., list[Labelled]], *numbers: int) -> Callable[[int, torch.dtype], list[Labelled]]:
    """Those of 64 and of 128 channels."""
    return lambda architecture, dtype: [
        one for width in (64, 128) for one in of_width(architecture, dtype, width, *numbers)
    ]


COMPRESSED = Launches(_usual(compressed_launches, GROUP), compressed_configuration)
SELECTED = Launches(_usual(selected_launches, BLOCK, GROUP), selected_configuration)
WHOLE = Launches(_usual(launches, BLOCK, GROUP))
ATTEND = Launches(lambda architecture, dtype: attend_launches(architecture, dtype, 128))
