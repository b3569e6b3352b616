"""Eager torch, the yardstick of every check: in 16 bits without what is slow and loud about it on a CPU, and with the
rounding that a softcap's slope costs anyone.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_PRODUCTS = (torch.einsum, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)
_NARROW = (torch.float16, torch.bfloat16)


class ProductsThroughFp32(TorchFunctionMode):
    """While it is entered, products of 16-bit tensors on a CPU are computed in fp32 and rounded once, backward too.

    A product of two 16-bit numbers is exact in fp32, and torch adds them up in fp32 in any case. But a CPU without
    instructions for 16-bit products takes a hundred times as long for them, and on some torch warns with a C++ stack
    before it finds that out.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _PRODUCTS:
            return func(*args, **kwargs)
        operands = [x for x in args if isinstance(x, torch.Tensor)]
        dtype = operands[0].dtype
        if not all(x.device.type == "cpu" and x.dtype == dtype and dtype in _NARROW for x in operands):
            return func(*args, **kwargs)
        return func(*(x.float() if isinstance(x, torch.Tensor) else x for x in args), **kwargs).to(dtype)


class SlopesRounded(TorchFunctionMode):
    """While it is entered, the slope of tanh, 1 - tanh², is off by a rounding of 1 in fp32.

    Nobody's is better: tanh itself is rounded, next to 1 by up to half of that and in kernels by more, and where scores
    reach their cap little else is left of the slope. Torch on a CPU often happens to round it to the truth.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _RoundedTanh.apply(*args) if func is torch.tanh else func(*args, **(kwargs or {}))


class _RoundedTanh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        capped = torch.tanh(x)
        ctx.save_for_backward(capped)
        return capped

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (capped,) = ctx.saved_tensors
        # As torch computes it: in fp32, whatever the dtype.
        slope = 1 - capped.float().square() + torch.finfo(torch.float32).eps
        return (gradients[0] * slope).to(capped.dtype)
