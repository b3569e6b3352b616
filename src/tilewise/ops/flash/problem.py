"""One call of flash attention: its tensors and numbers, and which family of kernels runs it: Hopper's own, in Gluon, or
the portable ones; and why.
"""

from typing import NamedTuple

import torch

from tilewise.ops._host import backend, gluon
from tilewise.ops._host.launching import fits_descriptor, why_unreadable
from tilewise.ops.flash.configs import Problem
from tilewise.ops.flash.hopper import configs as hopper_configs
from tilewise.ops.flash.hopper.configs import Direction

if gluon.AVAILABLE:
    from tilewise.ops._host.hopper import fits_tiles


class Inputs(NamedTuple):
    """One call's tensors and numbers: packed where cu_q is given, window limits None or >= 0 (causal is right = 0),
    softcap 0 for none.

    With a key_stride, key j stands at `j * key_stride` and query i sees it where that is `<= i + right`; left is None
    then, and right may be < 0.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    cu_q: torch.Tensor | None
    cu_k: torch.Tensor | None
    left: int | None
    right: int | None
    scale: float
    softcap: float
    key_stride: int | None = None

    @property
    def heads(self) -> int:
        """Rows of the grid besides its tiles: query heads, of every batch entry where dense."""
        return self.q.shape[-2] * (self.q.shape[0] if self.cu_q is None else 1)

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.q.shape[-2] // self.k.shape[-2]

    def problem(self, *gradients: torch.Tensor) -> Problem:
        """What decides the tiles of a kernel that reads q, k, v and `gradients`."""
        readable = all(fits_descriptor(x) for x in (self.q, self.k, self.v, *gradients))
        return Problem(self.q.shape[-1], self.v.shape[-1], self.k.shape[-3], self.q.element_size(), readable)


def make_inputs(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    causal: bool,
    left: int,
    right: int,
    scale: float,
    softcap: float,
) -> Inputs:
    """Inputs from the public arguments. A limit that cuts nothing is dropped, so that it cannot overflow and lengths
    share a kernel.

    The last query stands at the last key, and sees all keys before it where left is as many; the first sees all after
    it where right has as many as there are queries after it.
    """
    right = 0 if causal else right
    left_cuts, right_cuts = 0 <= left < k.shape[-3] - 1, 0 <= right < q.shape[-3] - 1
    return Inputs(q, k, v, cu_q, cu_k, left if left_cuts else None, right if right_cuts else None, scale, softcap)


def why_not_hopper(direction: Direction, inputs: Inputs, *gradients: torch.Tensor) -> str | None:
    """Why the Hopper kernels do not take this call, which also reads `gradients`; None where they do."""
    q, k, v = inputs.q, inputs.k, inputs.v
    if inputs.key_stride is not None:
        return "keys at a stride"
    if q.element_size() != 2:
        return "fp32"
    if not backend.compiles_for(q.device):
        return "Gluon has no interpreter"
    architecture = backend.architecture(q.device)
    if architecture != hopper_configs.ARCHITECTURE:
        return f"sm_{architecture} is not sm_{hopper_configs.ARCHITECTURE}"
    if not gluon.usable():
        return gluon.why_off()
    unreadable = next(((i, x) for i, x in enumerate((q, k, v, *gradients)) if not fits_tiles(x)), None)
    problem = Problem(q.shape[-1], v.shape[-1], k.shape[-3], q.element_size(), unreadable is None)
    reason = hopper_configs.why_not(direction, problem)
    if reason is None and unreadable is not None:
        i, x = unreadable
        return why_unreadable(("q", "k", "v", *("do",) * len(gradients))[i], x)
    return reason


def takes(direction: Direction, inputs: Inputs, *gradients: torch.Tensor) -> bool:
    """Whether the Hopper kernels run this call, which also reads `gradients`."""
    return why_not_hopper(direction, inputs, *gradients) is None
