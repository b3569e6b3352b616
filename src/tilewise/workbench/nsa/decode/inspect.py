"""What a step of decoding over an NSACache launches: for usual problems, and at 10 million tokens."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured, label_once
from tilewise.ops.nsa.cached import launch, steps
from tilewise.ops.nsa.decode import NSACache, nsa_decode_step


def _first_rows(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A compression that launches nothing."""
    return k[:, :, 0], v[:, :, 0]


BATCH, TOKENS, HEADS, KV_HEADS, PAGE = 4, 32768, 64, 4, 64
# By what a call is called: what it has besides.
VARIANTS: dict[str, dict[str, Any]] = {
    "step": {},
    "step-paged": {"page": PAGE},
    "mqa": {"heads": 128, "kv_heads": 1},
    "long": {"tokens": 2**20},
    "learned": {"compress": _first_rows},
    "odd": {"page": 48, "heads": 6, "kv_heads": 2, "new": 3, "counted": True, "g_cmp": False, "block_size": 48},
}


def launches(architecture: int, dtype: torch.dtype, channels: int, variant: str) -> list[Labelled]:
    """One of VARIANTS: a step."""
    return captured(architecture, f"D {channels} {variant}", "forward", step_of(dtype, channels, **VARIANTS[variant]))


def both(architecture: int, dtype: torch.dtype, channels: int) -> list[Labelled]:
    """A step with means, and what a learned compression stores."""
    found = [one for variant in ("step", "learned") for one in launches(architecture, dtype, channels, variant)]
    return label_once(f"decode D {channels}", "forward", [one.launch for one in found])


def step_of(
    dtype: torch.dtype,
    channels: int,
    batch: int = BATCH,
    tokens: int = TOKENS,
    heads: int = HEADS,
    kv_heads: int = KV_HEADS,
    new: int = 1,
    page: int | None = None,
    counted: bool = False,
    g_cmp: bool = True,
    **sizes: Any,
) -> partial[Any]:
    """A step on tensors without memory."""

    def made(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    paged: dict[str, Any] = {}
    if page is not None:
        pages = -(-tokens // page)
        pool = made(batch * pages, page, kv_heads, channels)
        paged = {"page_table": made(batch, pages, dtype=torch.int32), "k_pages": pool, "v_pages": pool}
    cache = NSACache(batch, tokens, kv_heads, channels, channels, **sizes, **paged, dtype=dtype, device="meta")
    k, gate = made(batch, new, kv_heads, channels), made(batch, new, heads)
    return partial(
        nsa_decode_step,
        made(batch, new, heads, channels),
        k,
        k,
        cache,
        g_cmp=gate if g_cmp else None,
        g_slc=gate,
        g_swa=gate,
        counts=made(batch, dtype=torch.int64) if counted else None,
        backend="triton",
    )


def audit_steps() -> Iterator[audit.Case]:
    """One long sequence and many short ones, dense and paged, and a long prompt."""
    width: dict[str, Any] = {"channels": audit.CHANNELS, "heads": audit.HEADS, "kv_heads": audit.KEY_HEADS}
    long: dict[str, Any] = {"batch": 1, "tokens": audit.TOKENS}
    for words, options in {
        "one sequence": long,
        "one sequence of pages": {**long, "page": PAGE},
        "a prompt": {**long, "new": 100_000},
        "100,000 sequences": {"batch": 100_000, "tokens": 96, "page": 16},
    }.items():
        step = step_of(torch.bfloat16, **width | options)
        yield audit.Case(f"{audit.TOKENS:,} tokens, {words}", 90, partial(_at_the_end, *step.args, **step.keywords))


def _at_the_end(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cache: NSACache, g_cmp: torch.Tensor, **_: Any
) -> None:
    """A step that fills its cache, from lengths that have values; then what a learned compression stores."""
    sizes, new, gates = cache.sizes, k.shape[1], (g_cmp, g_cmp, g_cmp)
    stored = cache.stored._replace(lengths=torch.full((cache.batch,), cache.max_len - new))
    steps.write(stored, sizes, None, k, v, None, "triton")
    steps.attend(q, gates, stored, sizes, cache.window_size, 0.1, None, "triton")
    steps.commit(stored, new, None, "triton")
    launch.store_windows(stored, k, v, None, sizes, new)
