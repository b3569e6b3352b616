"""Learned compression of windows of keys and values, and the windows themselves.

`GateModel`: the three gates of block-sparse attention, computed from its queries.
"""

import itertools

import torch
from torch import nn

from tilewise.ops._host import checks


class WindowCompression(nn.Module):
    """Maps each window of keys to one key, and each window of values to one value: φ of arXiv 2502.11089.

    A learned embedding of the place in the window is added to its tokens, which then go side by side through an MLP of
    one hidden layer, twice as wide as the result. Keys and values have weights of their own; the kv heads share them,
    so that the size does not grow with the heads.

    Args:
        size: tokens in a window.
        key_dim, value_dim: channels of a key and of a value.
    """

    def __init__(
        self,
        size: int,
        key_dim: int,
        value_dim: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size, self.key_dim, self.value_dim = size, key_dim, value_dim
        self.k_position, self.v_position = (
            nn.Parameter(torch.empty(size, d, device=device, dtype=dtype)) for d in (key_dim, value_dim)
        )
        self.k_mlp, self.v_mlp = (
            nn.Sequential(
                nn.Linear(size * d, 2 * d, device=device, dtype=dtype),
                nn.GELU(),
                nn.Linear(2 * d, d, device=device, dtype=dtype),
            )
            for d in (key_dim, value_dim)
        )
        for position in (self.k_position, self.v_position):
            nn.init.normal_(position, std=0.02)

    def forward(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v `[.., size, kv_heads, channels]` -> `[.., kv_heads, channels]`, every window and head for itself."""
        k_cmp, v_cmp = (
            mlp((x + position[:, None]).transpose(-3, -2).flatten(-2))
            for x, position, mlp in ((k, self.k_position, self.k_mlp), (v, self.v_position, self.v_mlp))
        )
        return k_cmp, v_cmp

    def extra_repr(self) -> str:
        """The sizes, for repr."""
        return f"size={self.size}, key_dim={self.key_dim}, value_dim={self.value_dim}"


def windows_of(x: torch.Tensor, size: int, stride: int, cu_seqlens: torch.Tensor | None) -> torch.Tensor:
    """The whole windows: [B, T, H, D] -> [B, C, size, H, D]; packed [N, H, D] -> [1, C of all sequences, size, H, D].

    How many windows packed sequences have is a shape, so the host reads their offsets.
    """
    if cu_seqlens is None:
        if x.shape[1] < size:
            return x[:, :0, None].expand(-1, -1, size, -1, -1)
        return x.unfold(1, size, stride).movedim(-1, 2)
    # Only indices inside x, for any offsets: values are checked later.
    ends = [min(max(end, 0), x.shape[0]) for end in cu_seqlens.tolist()]
    starts = [start for begin, end in itertools.pairwise(ends) for start in range(begin, end - size + 1, stride)]
    token = torch.tensor(starts, dtype=torch.int64, device=x.device)[:, None] + torch.arange(size, device=x.device)
    return x[token][None]


class GateModel(nn.Module):
    """Maps queries `[.., H, channels]` to three gates `[.., H]` between 0 and 1: g_cmp, g_slc and g_swa, as
    hstu_attention_with_bsa wants them.

    An MLP of one hidden layer with SiLU, and a sigmoid. The heads share its weights, so that the size does not grow
    with them.

    Args:
        channels: channels of a query.
        hidden: channels of the hidden layer, by default twice as many.
    """

    def __init__(
        self,
        channels: int,
        hidden: int | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_whole(channels, "channels", 1)
        hidden = 2 * channels if hidden is None else hidden
        checks.check_whole(hidden, "hidden", 1)
        self.channels = channels
        self.to_hidden = nn.Linear(channels, hidden, device=device, dtype=dtype)
        self.to_gates = nn.Linear(hidden, 3, device=device, dtype=dtype)

    def forward(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Q `[.., H, channels]` -> three gates `[.., H]`, every token and head for itself."""
        if not isinstance(q, torch.Tensor):
            raise TypeError(f"q is a {type(q).__name__}: expected a torch.Tensor")
        if q.dim() < 2 or q.shape[-1] != self.channels:
            raise ValueError(f"q has shape {list(q.shape)}: expected [.., H, {self.channels}]")
        g_cmp, g_slc, g_swa = torch.sigmoid(self.to_gates(nn.functional.silu(self.to_hidden(q)))).unbind(-1)
        return g_cmp, g_slc, g_swa

    def reset_parameters(self) -> None:
        """Reinitialise the weights."""
        self.to_hidden.reset_parameters()
        self.to_gates.reset_parameters()
