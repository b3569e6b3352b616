"""`GateModel`: the three gates of block-sparse attention, made of its queries."""

import torch
from torch import nn

from tilewise.ops._host import checks


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
        """Draw the weights anew."""
        self.to_hidden.reset_parameters()
        self.to_gates.reset_parameters()
