"""What flash attention launches: for usual problems, and with each tile configuration."""

from typing import Any

import torch

from tilewise.inspect.launches import Labelled, captured
from tilewise.inspect.operators import Operator
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.configs import Config
from tilewise.sanity.flash import Entry

BATCH, TOKENS, HEADS = 2, 2048, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "plain": {},
    "packed": {"causal": True, "packed": True},
    "all": {"left": 100, "right": 20, "softcap": 30.0, "scale": -0.5, "packed": True},
    "compressed-packed": {"strided": True, "packed": True},
}


def launches(architecture: int, dtype: torch.dtype, channels: int, variant: str) -> list[Labelled]:
    """Forward and backward of one of VARIANTS, with the tiles that configs choose."""
    options = dict(VARIANTS[variant])
    packed, strided = options.pop("packed", False), options.pop("strided", False)
    # Strided: a key every 16 queries, as compressed attention has them, for groups of 4 heads with a program each in dK/dV.
    keys, heads_k, parts = (TOKENS // 4, 2, 4) if strided else (TOKENS, HEADS, 1)
    q = _rows(packed, TOKENS, HEADS, channels, dtype)
    k, v = (_rows(packed, keys, heads_k, channels, dtype) for _ in range(2))
    offsets = torch.empty(5, dtype=torch.int32, device="meta") if packed else None
    defaults = {"causal": False, "left": -1, "right": -1, "scale": channels**-0.5, "softcap": 0.0}
    inputs = launch.make_inputs(q, k, v, offsets, offsets, **defaults | options)
    if strided:
        inputs = inputs._replace(right=-31, key_stride=16)
    dkdv = configs.choose("dkdv", inputs.problem(), architecture)._replace(parts=parts)
    return both(architecture, f"D {channels} {variant}", inputs, dkdv=dkdv)


def _rows(packed: bool, tokens: int, heads: int, channels: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, D], or as many rows packed."""
    return torch.empty(*((BATCH * tokens,) if packed else (BATCH, tokens)), heads, channels, dtype=dtype, device="meta")


def both(
    architecture: int, label: str, inputs: launch.Inputs, fwd: Config | None = None, dkdv: Config | None = None, dq: Config | None = None
) -> list[Labelled]:
    """Forward and backward, with the given tiles or those that configs choose."""
    o, lse = torch.empty_like(inputs.q), torch.empty((*inputs.q.shape[:-3], *inputs.q.shape[-2:-4:-1]), dtype=torch.float32, device="meta")
    return [
        *captured(architecture, label, "forward", lambda: launch.forward(inputs, fwd)),
        *captured(architecture, label, "backward", lambda: launch.backward(inputs, o, lse, o, None, dkdv, dq)),
    ]


def with_tiles(entry: Entry, architecture: int, label: str, inputs: launch.Inputs) -> list[Labelled]:
    """The kernel that a configuration is for, with its tiles."""
    kernel = "flash_fwd_kernel" if entry.kernel == "fwd" else f"flash_bwd_{entry.kernel}_kernel"
    return [one for one in both(architecture, label, inputs, **{entry.kernel: entry.config}) if one.name == kernel]


def defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems."""
    return [*launches(architecture, dtype, 64, "causal"), *launches(architecture, dtype, 128, "causal")]


def configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration, under a causal mask."""
    q = _rows(False, TOKENS, HEADS, entry.channels, dtype)
    return with_tiles(entry, architecture, label, launch.make_inputs(q, q, q, None, None, True, -1, -1, entry.channels**-0.5, 0.0))


OPERATOR = Operator(defaults, configuration)
