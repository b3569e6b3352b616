"""Rotary position embedding."""

import torch


def rotate(x: torch.Tensor, positions: torch.Tensor, base: float) -> torch.Tensor:
    """Turn channel i of x [.., T, H, D] and channel i + D / 2 by `position · base ** (-2i / D)`; positions [.., T]; D
    even.

    The angles are computed when they are needed, in fp32 at least: a table kept with 16-bit weights would be rounded
    with them.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    half = x.shape[-1] // 2
    frequencies = base ** (-torch.arange(half, dtype=wide, device=x.device) / half)
    angles = positions.to(wide)[..., None, None] * frequencies
    first, second = x.to(wide).split(half, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).to(x.dtype)


def packed_positions(cu_seqlens: torch.Tensor, tokens: int) -> torch.Tensor:
    """Each token's position in its own sequence, [N], from offsets [B + 1]."""
    token = torch.arange(tokens, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens.long(), token, right=True) - 1
    # Unchecked offsets must not lead out of bounds.
    return token - cu_seqlens[sequence.clamp(0, cu_seqlens.shape[0] - 1)]
