"""What flash attention launches: for usual problems, and with each tile configuration.

Flash attention's calls that are audited.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, get_args

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured
from tilewise.ops._host import gluon
from tilewise.ops._host.backend import as_if_on
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash import launch as flash
from tilewise.ops.flash.configs import Config
from tilewise.ops.flash.hopper.configs import ARCHITECTURE, Order
from tilewise.ops.flash.route import takes
from tilewise.workbench.flash.configs import Entry
from tilewise.workbench.flash.configs_hopper import SOFTCAP, ForwardEntry
from tilewise.workbench.flash.configs_hopper import Entry as HopperEntry
from tilewise.workbench.operator import Launches

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch

BATCH, TOKENS, HEADS = 2, 2048, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal-long": {"causal": True, "tokens": 2 * TOKENS},
    "plain": {},
    "packed": {"causal": True, "packed": True},
    "windowed": {"left": 100, "right": 20, "packed": True},
    "uncapped": {"left": 100, "right": 20, "scale": -0.5, "packed": True, "heads_k": 2, "sinks": True},
    "all": {"left": 100, "right": 20, "softcap": 30.0, "scale": -0.5, "packed": True, "sinks": True},
    "compressed-packed": {"strided": True, "packed": True},
}


def launches(architecture: int, dtype: torch.dtype, channels: int, variant: str) -> list[Labelled]:
    """Forward and backward of one of VARIANTS by the portable kernels, with the tiles that configs choose."""
    inputs = _inputs(dtype, channels, channels, variant)
    # Strided: for groups of 4 heads, one program each in dK/dV.
    chunks = inputs.group if inputs.key_stride else 1
    fwd = configs.choose("fwd", launch.problem_of(inputs), architecture)
    dkdv = configs.choose("dkdv", launch.problem_of(inputs), architecture)._replace(chunks=chunks)
    return both(architecture, f"D {channels} {variant}", inputs, fwd=fwd, dkdv=dkdv)


def hopper(architecture: int, dtype: torch.dtype, channels: int, values: int, variant: str) -> list[Labelled]:
    """The same by the kernels for Hopper: the backward in every order; those that do not serve the problem are left
    out.
    """
    inputs = _inputs(dtype, channels, values, variant)
    o, lse = _results(inputs)
    label = f"D {channels} {'' if channels == values else f'Dv {values} '}{variant} hopper"
    found: list[Labelled] = []
    with as_if_on(architecture):
        if takes("forward", inputs):
            found += captured(architecture, label, "forward", lambda: launch.forward(inputs))
        if takes("backward", inputs):
            orders = get_args(Order) if inputs.left is None else ("fixed",)
            found += captured(
                architecture,
                label,
                "backward",
                lambda: [hopper_launch.backward(inputs, o, lse, o, None, order) for order in orders],
            )
    return found


def _inputs(dtype: torch.dtype, channels: int, values: int, variant: str) -> launch.Inputs:
    """One of VARIANTS."""
    options = dict(VARIANTS[variant])
    packed, strided, tokens = options.pop("packed", False), options.pop("strided", False), options.pop("tokens", TOKENS)
    sinks = torch.empty(HEADS, dtype=dtype, device="meta") if options.pop("sinks", False) else None
    # Strided: one key per 16 queries, as in compressed attention, for groups of 4 heads.
    keys, heads_k = (tokens // 4, 2) if strided else (tokens, options.pop("heads_k", HEADS))
    q = _rows(packed, tokens, HEADS, channels, dtype)
    k, v = (_rows(packed, keys, heads_k, width, dtype) for width in (channels, values))
    offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
    defaults = {"causal": False, "left": -1, "right": -1, "scale": channels**-0.5, "softcap": 0.0}
    inputs = launch.make_inputs(q, k, v, offsets, offsets, **defaults | options, sinks=sinks)
    return inputs._replace(right=-31, key_stride=16) if strided else inputs


def _rows(packed: bool, tokens: int, heads: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, D], or as many rows packed."""
    return torch.empty(*((BATCH * tokens,) if packed else (BATCH, tokens)), heads, channels, dtype=dtype, device="meta")


def both(
    architecture: int,
    label: str,
    inputs: launch.Inputs,
    fwd: Config | None = None,
    dkdv: Config | None = None,
    dq: Config | None = None,
) -> list[Labelled]:
    """Forward and backward, with the given tiles or those that configs choose."""
    o, lse = _results(inputs)
    return [
        *captured(architecture, label, "forward", lambda: launch.forward(inputs, fwd)),
        *captured(architecture, label, "backward", lambda: launch.backward(inputs, o, lse, o, None, dkdv, dq)),
    ]


def _results(inputs: launch.Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Buffers for the output and its LSE."""
    shape = inputs.q.shape
    o = torch.empty(*shape[:-1], inputs.v.shape[-1], dtype=inputs.q.dtype, device="meta")
    return o, torch.empty((*shape[:-3], *shape[-2:-4:-1]), dtype=torch.float32, device="meta")


def with_tiles(entry: Entry, architecture: int, label: str, inputs: launch.Inputs) -> list[Labelled]:
    """The kernel that a configuration is for, with its tiles."""
    kernel = "flash_fwd_kernel" if entry.kernel == "fwd" else f"flash_bwd_{entry.kernel}_kernel"
    return [one for one in both(architecture, label, inputs, **{entry.kernel: entry.config}) if one.name == kernel]


def defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems, on Hopper with both kernel families."""
    return [
        *launches(architecture, dtype, 64, "causal"),
        *launches(architecture, dtype, 128, "causal"),
        *hopper_defaults(architecture, dtype),
    ]


def configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration, under a causal mask."""
    q = _rows(False, TOKENS, HEADS, entry.channels, dtype)
    return with_tiles(
        entry, architecture, label, launch.make_inputs(q, q, q, None, None, True, -1, -1, entry.channels**-0.5, 0.0)
    )


def hopper_defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems that the Hopper kernels serve: empty on another architecture."""
    # At 64 channels the forward has other tiles for many keys.
    many = [one for one in hopper(architecture, dtype, 64, 64, "causal-long") if one.direction == "forward"]
    widths = (128, 128), (192, 128), (256, 256)
    wider = [one for width in widths for one in hopper(architecture, dtype, *width, "causal")]
    return [*hopper(architecture, dtype, 64, 64, "causal"), *many, *wider]


def hopper_configuration(entry: HopperEntry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One of their tile configurations, under a causal mask; of the backward the kernel with the products."""
    if architecture != ARCHITECTURE or not gluon.AVAILABLE:
        return []
    q, v = (_rows(False, TOKENS, HEADS, width, dtype) for width in (entry.channels, entry.values))
    softcap = SOFTCAP if isinstance(entry, ForwardEntry) and entry.capped else 0.0
    inputs = launch.make_inputs(q, q, v, None, None, True, -1, -1, entry.channels**-0.5, softcap)
    o, lse = _results(inputs)
    if isinstance(entry, ForwardEntry):
        config = entry.config
        return captured(
            architecture,
            label,
            "forward",
            lambda: run_all([hopper_launch.forward_launch(inputs, o, lse, config)], q.device),
        )
    tiles, order = entry.config, entry.order
    found = captured(
        architecture, label, "backward", lambda: hopper_launch.backward(inputs, o, lse, o, None, order, tiles)
    )
    return [one for one in found if one.name == "flash_bwd_hopper_kernel"]


LAUNCHES = Launches(defaults, configuration)
HOPPER = Launches(hopper_defaults, hopper_configuration)


def audit_cases() -> Iterator[audit.Case]:
    """Under a causal mask and a window, on Hopper too, and many short sequences."""

    def call(
        q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None, deterministic: bool = True, **mask: Any
    ) -> None:
        options = {"causal": False, "left": -1, "right": -1, "scale": 0.1, "softcap": 0.0} | mask
        inputs = flash.make_inputs(q, k, k, cu, cu, **options)
        o, lse = flash.forward(inputs)
        flash.backward(inputs, o, lse, q, lse, deterministic=deterministic)

    def on_hopper(q: torch.Tensor, k: torch.Tensor, cu: torch.Tensor | None) -> None:
        call(q, k, cu, causal=True)
        call(q, k, cu, left=6_000_000, right=2_000_000)
        # In free order, sums are zeroed first; without groups and a mask, tile by tile.
        call(q, k, cu, deterministic=False, causal=True)
        call(q, q, cu, deterministic=False)

    for words, architecture, packed, stride in audit.layouts():
        q, k, cu = (
            audit.rows(audit.HEADS, packed=packed, stride=stride),
            audit.rows(audit.KEY_HEADS, packed=packed, stride=stride),
            audit.offsets(packed),
        )
        # Hopper has its own kernels, below; Blackwell loads through descriptors too.
        portable = 100 if architecture == 90 else architecture
        yield audit.Case(f"{words}, causal", portable, partial(call, q, k, cu, causal=True))
        yield audit.Case(f"{words}, a wide window", portable, partial(call, q, k, cu, left=6_000_000, right=2_000_000))
    for packed in (False, True):
        # The most heads that Hopper's backward takes for this many tokens.
        heads = 192 if packed else 96
        q, k, cu = audit.rows(heads, packed=packed), audit.rows(heads // 4, packed=packed), audit.offsets(packed)
        yield audit.Case(
            f"{audit.in_words(packed, heads=heads)}, Hopper's own kernels", 90, partial(on_hopper, q, k, cu)
        )
    short, batch = 16, audit.TOKENS // 16
    q, k = (audit.rows(heads, batch=batch, tokens=short) for heads in (audit.HEADS, audit.KEY_HEADS))
    yield audit.Case(
        f"{batch:,} sequences of {short} tokens, {audit.HEADS} heads of {audit.CHANNELS}", 90, partial(call, q, k, None)
    )
