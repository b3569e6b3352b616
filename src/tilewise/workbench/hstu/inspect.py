"""What HSTU attention launches: for usual problems, and with each tile configuration.

HSTU attention's calls that are audited.
"""

from collections.abc import Iterator
from functools import partial

import torch

from tilewise.inspect import audit
from tilewise.inspect.launches import Labelled, captured
from tilewise.ops.hstu import launch
from tilewise.ops.hstu import launch as hstu
from tilewise.ops.hstu.configs import Config
from tilewise.workbench.hstu.configs import Entry
from tilewise.workbench.operator import Launches

TOKENS, BATCH, HEADS, LONGEST = 16384, 4, 4, 4096
# Targets or none, the longest reach, and the context.
PLAIN, HISTORY = (False, 0, 0), (True, 50, 3)


def rows(channels: int, dtype: torch.dtype) -> torch.Tensor:
    """Packed [N, H, D]."""
    return torch.empty(TOKENS, HEADS, channels, dtype=dtype, device="meta")


def offsets(count: int) -> torch.Tensor:
    """int64."""
    return torch.empty(count, dtype=torch.int64, device="meta")


def _both(
    architecture: int,
    label: str,
    q: torch.Tensor,
    v: torch.Tensor,
    mask: tuple[bool, int, int],
    fwd: Config | None = None,
    dkdv: Config | None = None,
    dq: Config | None = None,
) -> list[Labelled]:
    """Forward and backward, with the given tiles or those that configs choose."""
    targets, reach, context = mask
    alpha = q.shape[-1] ** -0.5
    inputs = launch.make_inputs(
        q, q, v, offsets(BATCH + 1), offsets(BATCH) if targets else None, LONGEST, alpha, True, reach, context
    )
    return [
        *captured(architecture, label, "forward", lambda: launch.forward(inputs, fwd)),
        *captured(architecture, label, "backward", lambda: launch.backward(inputs, v, dkdv, dq)),
    ]


def launches(architecture: int, dtype: torch.dtype, channels: int, values: int) -> list[Labelled]:
    """Under the causal mask; and with targets, a context and limited reach."""
    q, v, label = rows(channels, dtype), rows(values, dtype), f"D {channels}"
    return [
        *_both(architecture, f"{label} causal", q, v, PLAIN),
        *_both(architecture, f"{label} targets", q, v, HISTORY),
    ]


def defaults(architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """The usual problems."""
    return [*launches(architecture, dtype, 64, 64), *launches(architecture, dtype, 128, 128)]


def configuration(entry: Entry, label: str, architecture: int, dtype: torch.dtype) -> list[Labelled]:
    """One tile configuration, under the causal mask."""
    x = rows(entry.channels, dtype)
    kernel = "hstu_fwd_kernel" if entry.kernel == "fwd" else f"hstu_bwd_{entry.kernel}_kernel"
    return [
        one for one in _both(architecture, label, x, x, PLAIN, **{entry.kernel: entry.config}) if one.name == kernel
    ]


LAUNCHES = Launches(defaults, configuration)


def audit_cases() -> Iterator[audit.Case]:
    """Under each of its masks."""
    cu, targets = torch.tensor([0, *audit.LENGTHS]).cumsum(0), torch.tensor([0, 1000, 2_000_000])

    def call(x: torch.Tensor, targets: torch.Tensor | None, causal: bool, reach: int, context: int) -> None:
        inputs = hstu.make_inputs(x, x, x, cu, targets, audit.TOKENS, 0.1, causal, reach, context)
        hstu.forward(inputs)
        hstu.backward(inputs, x)

    near, far = (audit.rows(audit.HEADS, packed=True, stride=stride) for stride in (0, audit.FAR))
    yield audit.Case(f"{audit.in_words(True)}, causal", 90, partial(call, near, None, True, 0, 0))
    yield audit.Case(
        f"{audit.in_words(True, True)}, a wide reach both ways", 80, partial(call, far, None, False, 6_000_000, 0)
    )
    yield audit.Case(
        f"{audit.in_words(True, True)}, targets, context and a wide reach",
        90,
        partial(call, far, targets, True, 5_000_000, 1_000_000),
    )
