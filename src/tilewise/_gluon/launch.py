"""Gluon kernels launched on CPU tensors."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.backends.nvidia.compiler import CUDAOptions

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.leaving_out import studied
from tilewise._gluon.machine import Machine
from tilewise._gluon.watching import watched

# Of a launch on an NVIDIA GPU.
OPTIONS = {*CUDAOptions.__dataclass_fields__, "debug", "instrumentation_mode"}
# CTAs that a cluster of Hopper can have.
CLUSTERS = (1, 2, 4, 8, 16)


class Launched:
    """What a launch returns, in place of the compiled kernel: there is none."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        message = f"{name} of a launch: the kernel ran without being compiled"
        raise KernelFaultError("not simulated", message, executed())


def launch(
    kernel: Any,
    grid: Sequence[int] | Callable[[dict[str, Any]], Sequence[int]],
    positional: Sequence[Any],
    named: dict[str, Any],
    seed: int | None,
    compiler_barriers: bool,
) -> Launched:
    """Run a launch as `kernel[grid](*positional, **named)` asks for it; what is no parameter is an option."""
    names = [parameter.name for parameter in kernel.params]
    unknown = [key for key in named if key not in names and key not in OPTIONS]
    if unknown:
        raise TypeError(f"{kernel.fn.__name__} has no parameter {', '.join(unknown)}, and a launch no such option")
    ctas = named.get("num_ctas", 1)
    if ctas not in CLUSTERS:
        raise KernelFaultError("arguments", f"num_ctas is {ctas}: expected one of {', '.join(map(str, CLUSTERS))}")
    if len(positional) > len(names):
        raise TypeError(f"{kernel.fn.__name__} takes {len(names)} arguments: got {len(positional)}")
    given = dict(zip(names, positional, strict=False)) | {key: x for key, x in named.items() if key in names}
    given = {p.name: p.default for p in kernel.params if p.has_default} | given
    missing = [name for name in names if name not in given]
    if missing:
        raise TypeError(f"{kernel.fn.__name__} needs {', '.join(missing)}")
    sizes = grid(given) if callable(grid) else grid
    with torch.no_grad():
        machine = Machine(seed, studied(), watched(), compiler_barriers)
        machine.launch(kernel, sizes, given, named.get("num_warps", 4), ctas)
    return Launched()
