"""Eager torch in 16 bits, the yardstick of every check, without what is slow and loud about it on a CPU."""

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
