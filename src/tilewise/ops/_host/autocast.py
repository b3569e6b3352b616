"""torch.autocast, as torch's own scaled_dot_product_attention treats it."""

import torch


def cast_for_autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Inside torch.autocast, floating tensors in its dtype (fp64 ones stay); elsewhere unchanged."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
