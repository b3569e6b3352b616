"""Reductions by the tensor memory accelerator: a tile is added to a tensor in global memory, or combined with it in
another way, each number by an atomic that orders nothing.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.hopper import copy_out
from tilewise._gluon.shared import Descriptor, Shared

Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
HALVES = (torch.float16, torch.bfloat16)
# By their names, which Triton has from 3.8 on: what they do, and which dtypes Hopper does it in. Whole numbers of
# 64 bits, which torch has with a sign, are not among those that it adds.
KINDS: dict[str, tuple[Function, tuple[torch.dtype, ...]]] = {
    "add": (operator.add, (torch.int32, torch.float32, *HALVES)),
    "min": (torch.fmin, (torch.int32, torch.int64, *HALVES)),
    "max": (torch.fmax, (torch.int32, torch.int64, *HALVES)),
    "and": (operator.and_, (torch.int32, torch.int64)),
    "or": (operator.or_, (torch.int32, torch.int64)),
    "xor": (operator.xor, (torch.int32, torch.int64)),
}


def _reduction(name: str, function: Function, dtypes: tuple[torch.dtype, ...]) -> Callable[..., None]:
    def call(tensor_desc: Descriptor, coord: Any, src: Shared) -> None:
        kind = tensor_desc.memory.flat.dtype
        if kind not in dtypes:
            expected = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            message = f"{name} of {tensor_desc.dtype}: the copy engine takes {expected}"
            raise KernelFaultError("operand", message, executed())
        copy_out(name, tensor_desc, coord, src, function)

    return call


REDUCTIONS: dict[str, Any] = {
    name: _reduction(name, function, dtypes)
    for name, (function, dtypes) in ((f"async_atomic_{kind}", found) for kind, found in KINDS.items())
}
