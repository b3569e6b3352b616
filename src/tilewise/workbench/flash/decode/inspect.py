"""What attention over a cache launches: for usual problems, and at 10 million tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured
from tilewise.ops.flash.decode import launch
from tilewise.workbench.flash.decode.configs import Entry
from tilewise.workbench.operator import Launches

BATCH, TOKENS, HEADS, KV_HEADS, PAGE = 4, 32768, 32, 8, 64
# By what a call is called: tokens, KV heads and what else it has.
VARIANTS: dict[str, dict[str, Any]] = {
    "step": {},
    "step-paged": {"paged": True},
    "mqa": {"heads": 128, "kv_heads": 1},
    "prefill": {"queries": 512},
    "prefill-paged": {"queries": 512, "paged": True},
    "all": {"queries": 4, "paged": True, "page": 16, "packed": True, "softcap": 30.0, "scale": -0.5, "left": 100},
}


def launches(architecture: int, dtype: torch.dtype, channels: int, variant: str) -> list[Labelled]:
    """One of VARIANTS: append, splits and merge."""
    inputs, k, v = _call(dtype, channels, **VARIANTS[variant])
    run = partial(launch.append_forward, inputs, k, v)
    if inputs.cu_q is not None:
        run = partial(launch.forward, inputs)
    return captured(architecture, f"D {channels} {variant}", "forward", run)


def _call(
    dtype: torch.dtype,
    channels: int,
    batch: int = BATCH,
    queries: int = 1,
    tokens: int = TOKENS,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    paged: bool = False,
    page: int = PAGE,
    packed: bool = False,
    softcap: float = 0.0,
    scale: float = 0.125,
    left: int = -1,
) -> tuple[launch.Inputs, torch.Tensor, torch.Tensor]:
    """A call on tensors without memory, and the new keys and values."""

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = (batch * tokens // page, page) if paged else (batch, tokens)
    cache = made(*rows, kv_heads, channels)
    numbers = made(batch, dtype=torch.int32)
    table = made(batch, tokens // page, dtype=torch.int32) if paged else None
    q = made(*((batch * queries,) if packed else (batch, queries)), heads, channels)
    cu = made(batch + 1, dtype=torch.int32) if packed else None
    sinks = made(heads, dtype=torch.float32) if softcap else None
    options = (0, True, left, -1, scale, softcap, 0)
    new = made(batch, queries, kv_heads, channels)
    return launch.make_inputs(q, cache, cache, cu, numbers, None, table, sinks, *options), new, new


def defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems."""
    return [
        one
        for channels in (64, 128)
        for variant in ("step", "step-paged", "prefill")
        for one in launches(architecture, dtype, channels, variant)
    ]


def configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration, for a step that fills its rows."""
    queries = max(1, entry.config.block_m * KV_HEADS // HEADS)
    inputs, _, _ = _call(dtype, entry.channels, queries=queries)
    found = captured(architecture, label, "forward", partial(launch.forward, inputs, entry.config))
    return [one for one in found if one.name == "flash_decode_kernel"]


LAUNCHES = Launches(defaults, configuration)


def audit_cases() -> Iterator[audit.Case]:
    """One long entry and many short ones, dense and paged, and a long prefill."""

    def call(**options: Any) -> None:
        inputs, k, v = _call(torch.bfloat16, audit.CHANNELS, heads=audit.HEADS, kv_heads=audit.KEY_HEADS, **options)
        launch.append_forward(inputs, k, v)

    long = {"batch": 1, "tokens": audit.TOKENS // 64 * 64}
    for words, options in {
        "one entry": long,
        "one entry of pages": {**long, "paged": True},
        "one entry of pages of 16 rows": {**long, "paged": True, "page": 16},
        "a prefill of 10,000 tokens": {**long, "queries": 10_000},
        "100,000 entries": {"batch": 100_000, "tokens": 96},
    }.items():
        yield audit.Case(f"{audit.TOKENS:,} keys, {words}", 90, partial(call, **options))
