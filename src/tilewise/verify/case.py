"""What a verification case is: an operator's inputs, made anew from a seed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Case:
    """One named problem. `make` gives the inputs by argument name: floating tensors are differentiated and cast, the rest stays as it is.

    `outputs` names what the operator returns, in order; `exact` are those kept in fp32 whatever the inputs' dtype.
    `huge_lse` marks logits so large that an LSE in fp32, which the backward starts from, is itself a rounding that shows: `exp(s - lse)` is off by
    eps · |lse| whatever the implementation, while eager torch, which keeps its probabilities, does not pay it.
    """

    name: str
    about: str
    make: Callable[[torch.Generator], dict[str, torch.Tensor]]
    options: dict[str, Any] = field(default_factory=dict)
    outputs: tuple[str, ...] = ("o", "lse")
    exact: tuple[str, ...] = ("lse",)
    huge_lse: bool = False

    def inputs(self, seed: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        """The inputs in `dtype` on `device`, the same for the same seed on every machine. Strides survive."""
        tensors = self.make(torch.Generator().manual_seed(seed))
        return {name: _convert(x, device, dtype if x.is_floating_point() else x.dtype) for name, x in tensors.items()}


def _convert(x: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """`x.to(device, dtype)` with its strides and what lies around it: an expanded or cut tensor stays one."""
    around = x.as_strided((x.untyped_storage().nbytes() // x.element_size(),), (1,), 0)
    return around.to(device, dtype).as_strided(x.shape, x.stride(), x.storage_offset())
