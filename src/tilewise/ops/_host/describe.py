"""A template in words: its kernels with their tiles.

And TILEWISE_LOG=1, which logs these words once for each problem.
"""

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilewise.ops._host.backend import HAS_TRITON
from tilewise.ops._host.kept import Kept

if HAS_TRITON:
    from tilewise.ops._host import template
    from tilewise.ops._host.launching import Descriptor

LOGGER = logging.getLogger("tilewise")
# Read once: where it is off, it costs nothing.
LOGGING = os.environ.get("TILEWISE_LOG") == "1"
# Problems that are remembered as logged.
MOST_LOGGED = 4096
# Queries of a warpgroup. The Hopper forward is passed the number of warpgroups, not of rows.
WARPGROUP_ROWS = 64
DTYPES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


@dataclass(frozen=True)
class Kernel:
    """One kernel of a call.

    A number that a kernel does not have is None: a warp-specialised one has no single number of warps.
    """

    name: str
    grid: int
    """Programs (CTAs) launched."""
    block_m: int | None
    block_n: int | None
    warps: int | None
    stages: int | None
    tma: bool
    """Whether tiles come through the tensor memory accelerator; else through pointers."""
    gluon: bool
    """Whether it is one of Hopper's own kernels, warp-specialised and written in Gluon."""
    times: int = 1
    """How often it is launched like this in one call."""

    def __str__(self) -> str:
        tiles = [f"{name} {x}" for name, x in (("M", self.block_m), ("N", self.block_n)) if x is not None]
        tiles += [f"{x} {name}" for name, x in (("warps", self.warps), ("stages", self.stages)) if x is not None]
        words = [*tiles, "TMA" if self.tma else "pointers", *(("Gluon",) if self.gluon else ()), f"grid {self.grid:,}"]
        return f"{self.name}: {', '.join(words)}" + (f" (x{self.times})" if self.times > 1 else "")


def _kernel(launch: Any) -> Kernel:
    kernel, arguments = launch.kernel, dict(launch.arguments)
    # Constants are passed one by one, or in a record.
    for value in launch.arguments.values():
        arguments = {**getattr(value, "_asdict", dict)(), **arguments}
    groups = arguments.get("GROUPS")
    gluon = bool(getattr(kernel, "is_gluon", bool)())
    return Kernel(
        name=kernel.fn.__name__,
        grid=launch.grid,
        block_m=arguments.get("BLOCK_M") or (groups and groups * WARPGROUP_ROWS),
        block_n=arguments.get("BLOCK_N"),
        warps=None if gluon else arguments.get("num_warps"),
        stages=arguments.get("STAGES") or arguments.get("num_stages"),
        tma=any(isinstance(x, Descriptor) for x in arguments.values()),
        gluon=gluon,
    )


def kernels_of(made: Any) -> tuple[Kernel, ...]:
    """A template's kernels in order; identical launches are merged into the first."""
    counted = Counter(_kernel(launch) for launch in made.launches)
    return tuple(Kernel(**{**vars(kernel), "times": times}) for kernel, times in counted.items())


def shape_of(x: torch.Tensor) -> str:
    """`bf16[2, 128, 8, 64]`."""
    return f"{DTYPES.get(x.dtype, str(x.dtype).removeprefix('torch.'))}{list(x.shape)}"


def logged(name: str, names: Sequence[str], plan: Callable[..., Any] | None) -> Callable[..., None]:
    """Logs an operator's call, whose arguments are called `names`, in one line, once for each problem."""
    seen: Kept[bool] = Kept(MOST_LOGGED)

    def log(*arguments: Any) -> None:
        key: list[Any] = []
        for x in arguments:
            given = isinstance(x, torch.Tensor)
            key += (x.dtype, x.shape, x.stride(), x.device, x.data_ptr() % 16) if given else (x.__class__, x)
        if seen.get(tuple(key)):
            return
        seen.add(tuple(key), True)
        tensors = {word: x for word, x in zip(names, arguments, strict=True) if isinstance(x, torch.Tensor)}
        words = [" ".join((name, *(f"{word} {shape_of(x)}" for word, x in tensors.items())))]
        device = next(x.device for x in tensors.values())
        # The last argument of every operator is its backend.
        backend = arguments[-1]
        words.append(f"backend {backend} on {device}")
        if backend == "triton" and plan is not None:
            made = template.make(plan, arguments, device)
            words += map(str, (*kernels_of(made), *made.notes))
        LOGGER.info("; ".join(words))

    return log


if LOGGING and not LOGGER.handlers:
    _handler = logging.StreamHandler(sys.stderr)
    _handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
    LOGGER.addHandler(_handler)
    LOGGER.setLevel(logging.INFO)
