"""torch.autocast, as torch's own scaled_dot_product_attention treats it."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from tilewise.ops._host.backend import actual

Function = TypeVar("Function", bound=Callable[..., Any])


def autocasting(function: Function) -> Function:
    """Inside torch.autocast, call `function` with its floating tensors in autocast's dtype (fp64 ones stay) and with
    autocast off.

    So what an operator computes in fp32 stays in fp32. The first tensor tells the device.
    """

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if not (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
            return function(*arguments, **named)
        device = next((actual(x.device).type for x in (*arguments, *named.values()) if isinstance(x, torch.Tensor)), "")
        # torch.compile before torch 2.12 cannot trace torch.amp.is_autocast_available.
        if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
            return function(*arguments, **named)
        dtype = torch.get_autocast_dtype(device)

        def cast(x: Any) -> Any:
            return (
                x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
            )

        with torch.autocast(device, enabled=False):
            return function(*map(cast, arguments), **{name: cast(x) for name, x in named.items()})

    return call  # type: ignore[return-value]
