"""Which calls Hopper's own kernels take."""

import torch

from tilewise.ops._host import backend, gluon
from tilewise.ops._host.launching import why_unreadable
from tilewise.ops.flash.configs import Inputs, Problem
from tilewise.ops.flash.hopper import configs as hopper_configs
from tilewise.ops.flash.hopper.configs import Direction

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch


def why_not_hopper(
    direction: Direction, inputs: Inputs, *gradients: torch.Tensor, keys: int | None = None
) -> str | None:
    """Why the Hopper kernels do not take this call, which also reads `gradients`; None where they do. `keys`: of a
    sequence, by default as many as k has rows.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.key_stride is not None:
        return "keys at a stride"
    if q.element_size() != 2:
        return "fp32"
    if not backend.compiles_for(q.device):
        return "kernels are interpreted"
    architecture = backend.architecture(q.device)
    if architecture != hopper_configs.ARCHITECTURE:
        return f"sm_{architecture} is not sm_{hopper_configs.ARCHITECTURE}"
    if not gluon.usable():
        return gluon.why_off()
    unreadable = next(((i, x) for i, x in enumerate((q, k, v, *gradients)) if not hopper_launch.fits_tiles(x)), None)
    problem = Problem(
        q.shape[-1], v.shape[-1], k.shape[-3] if keys is None else keys, q.element_size(), unreadable is None
    )
    reason = hopper_configs.why_not(direction, problem, bool(inputs.softcap))
    if reason is None and unreadable is not None:
        i, x = unreadable
        return why_unreadable(("q", "k", "v", *("do",) * len(gradients))[i], x)
    return reason


def portable_instead(why_not: str) -> str:
    """The same in a note about what a call launches."""
    return f"{why_not}: portable kernels"


def takes(direction: Direction, inputs: Inputs, *gradients: torch.Tensor) -> bool:
    """Whether the Hopper kernels run this call, which also reads `gradients`."""
    return why_not_hopper(direction, inputs, *gradients) is None
