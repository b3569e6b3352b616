"""What native sparse attention launches, branch by branch: for usual problems, and with each tile configuration.

Calls of native sparse attention that are audited, part by part.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured
from tilewise.ops._host.backend import as_if_on
from tilewise.ops.flash.configs import Inputs as FlashInputs
from tilewise.ops.flash.configs import family
from tilewise.ops.nsa import launch
from tilewise.ops.nsa import launch as nsa
from tilewise.ops.nsa.choose import launch as choose
from tilewise.ops.nsa.compress import launch as compressed
from tilewise.ops.nsa.problem import Sizes, mean_windows, window_count
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import Inputs, make_inputs
from tilewise.workbench.flash import inspect as flash
from tilewise.workbench.flash.configs import Entry as FlashEntry
from tilewise.workbench.nsa.configs import BLOCK, CARDS, Entry
from tilewise.workbench.nsa.decode import inspect as decode
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
_WHOLE, _DECODE = _usual(launches, BLOCK, GROUP), _usual(decode.both)
WHOLE = Launches(lambda architecture, dtype: [*_WHOLE(architecture, dtype), *_DECODE(architecture, dtype)])
ATTEND = Launches(lambda architecture, dtype: attend_launches(architecture, dtype, 128))


def _compressed_call(
    q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, size: int = 32, stride: int = 16
) -> None:
    windows = mean_windows(cu, q.shape[-3], stride)
    k_cmp = nsa.compress(k, cu, windows, size, stride)
    o, lse = nsa.compressed_forward(q, k_cmp, k_cmp, cu, windows, size, stride, 0.1)
    nsa.compressed_backward(q, k_cmp, k_cmp, o, lse, q, None, cu, windows, size, stride, 0.1)
    nsa.compress_backward(k_cmp, q.shape[-3], cu, windows, size, stride)


def _selected_call(
    q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor, cu: torch.Tensor | None, block: int
) -> None:
    o, lse = nsa.selected_forward(q, k, k, indices, cu, block, 0.1)
    nsa.selected_backward(q, k, k, indices, o, lse, q, None, cu, block, 0.1)


def _audited_rows(packed: bool, stride: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Queries, keys and offsets of an audited layout."""
    heads, key_heads = (audit.rows(n, packed=packed, stride=stride) for n in (audit.HEADS, audit.KEY_HEADS))
    return heads, key_heads, audit.offsets(packed)


def audit_compressed() -> Iterator[audit.Case]:
    """Means of windows, and attention to them."""
    for words, architecture, packed, stride in audit.layouts():
        q, k, cu = _audited_rows(packed, stride)
        yield audit.Case(f"{words}, windows of 32 every 16", architecture, partial(_compressed_call, q, k, cu))


def audit_choose() -> Iterator[audit.Case]:
    """The choice of blocks."""
    sizes = Sizes(32, 16, 64, 16, 1, 2)
    for packed, stride in ((False, 0), (True, audit.FAR)):
        # One sequence: chunks of sequences this long hold one tile each.
        q, cu = audit.rows(audit.HEADS, packed=packed, batch=1, stride=stride), audit.offsets(packed)
        k_cmp, lse = (
            audit.rows(audit.KEY_HEADS, packed=packed, batch=1, tokens=audit.TOKENS // 16 - (not packed)),
            torch.empty(audit.HEADS, audit.TOKENS, device="meta"),
        )
        windows = mean_windows(cu, audit.TOKENS, 16)
        yield audit.Case(
            f"{audit.in_words(packed, packed, 1)}, 16 blocks of 64",
            90,
            partial(nsa.choose, q, k_cmp, lse, cu, windows, sizes, 0.1),
        )


def audit_selected() -> Iterator[audit.Case]:
    """Attention to named blocks."""
    for words, architecture, packed, stride in audit.layouts():
        q, k, cu = _audited_rows(packed, stride)
        indices, block = audit.named(16, packed=packed), 16 if packed else 64
        yield audit.Case(
            f"{words}, 16 blocks of {block}", architecture, partial(_selected_call, q, k, indices, cu, block)
        )


def audit_attend() -> Iterator[audit.Case]:
    """native_sparse_attend."""
    q, k, indices = audit.rows(audit.HEADS), audit.rows(audit.KEY_HEADS), audit.named(8, packed=False)
    scale = torch.empty(indices.shape, device="meta")

    def call() -> None:
        o, lse = nsa.attend_forward(q, k, k, indices, scale, True, 64, 0.1)
        nsa.attend_backward(q, k, k, indices, scale, o, lse, q, None, True, 64, 0.1)

    yield audit.Case(f"{audit.in_words(False)}, 8 blocks of 64 and the own one", 90, call)


def audit_combine() -> Iterator[audit.Case]:
    """The gated sum."""
    o, gate = audit.rows(audit.HEADS), audit.gates(packed=False)

    def combine() -> None:
        nsa.combine([o, o, o], [gate, gate, gate])
        nsa.combine_backward(o, o, gate)

    yield audit.Case(f"{audit.in_words(False)}, three branches", 90, combine)
