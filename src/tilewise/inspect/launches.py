"""What an operator launches, collected without a GPU: each launch once, with a name for the problem it belongs to."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from tilewise.ops._host.launching import Launch, capture

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Labelled:
    """A launch of one problem or configuration, `label`; the same kernel may be launched there in several ways, `name`
    tells them apart.
    """

    label: str
    direction: Direction
    launch: Launch
    name: str


def captured(architecture: int, label: str, direction: Direction, run: Callable[[], Any]) -> list[Labelled]:
    """What `run` would launch on an architecture."""
    with capture(architecture) as launches:
        run()
    return label_once(label, direction, launches)


def label_once(label: str, direction: Direction, launches: Iterable[Launch]) -> list[Labelled]:
    """Launches that the compiler can tell apart, each once; of one kernel the second is called `kernel (2)`."""
    found: list[Labelled] = []
    seen: dict[str, int] = {}
    unique: dict[Any, Launch] = {}
    for launch in launches:
        unique.setdefault(_specialised(launch), launch)
    for launch in unique.values():
        kernel = launch.kernel.__name__
        seen[kernel] = seen.get(kernel, 0) + 1
        found.append(Labelled(label, direction, launch, kernel if seen[kernel] == 1 else f"{kernel} ({seen[kernel]})"))
    return found


def _specialised(launch: Launch) -> tuple[Any, ...]:
    # Options of a launch, such as its warps, are no parameters: their values count, as those of constants do.
    traits = {parameter.name for parameter in launch.kernel.params if not parameter.is_constexpr}
    return launch.kernel.__name__, *(
        (name, _trait(value) if name in traits else repr(value)) for name, value in sorted(launch.arguments.items())
    )


def _trait(value: Any) -> Any:
    """What of an argument that is no constant Triton compiles a kernel for."""
    if isinstance(value, torch.Tensor):
        return value.dtype
    if hasattr(value, "block_shape"):
        # A tensor descriptor, Triton's or Gluon's.
        return value.base.dtype, *value.block_shape
    if isinstance(value, tuple):
        return tuple(map(_trait, value))
    if isinstance(value, int) and not isinstance(value, bool):
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    return "float" if isinstance(value, float) else repr(value)
