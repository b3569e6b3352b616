"""`HSTULayer`: norm, one projection, attention dense or block-sparse, gating by u, and a residual, over packed
sequences.

`GateModel`: the three gates of block-sparse attention, computed from its queries.
"""

from typing import Any, cast

import torch
from torch import nn

from tilewise.ops._host import checks
from tilewise.ops.bsa.api import block_sparse_attn
from tilewise.ops.hstu.api import hstu_attention

ATTENTIONS = ("dense", "block-sparse")
# As block_sparse_attn has it.
EPS = 1e-6


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


class HSTULayer(nn.Module):
    """A layer of HSTU (arXiv 2402.17152) over packed sequences: x `[N, width]` -> `[N, width]`.

    `u, v, q, k = SiLU(projection of LN(x))`, then `x + dropout(projection of (LN(attention) · u))`. Block-sparse
    attention norms and multiplies by u itself, each of its branches by its own norm without weights; gates come from a
    GateModel of q. The layer knows no positions but by the mask: add embeddings of them to x where order matters.

    Args:
        width: channels of x and of the result.
        heads: how many heads. With block-sparse attention they share blocks in pairs where there is an even number of
            them.
        attention_dim: channels of q and k in a head, by default `width // heads`.
        linear_dim: channels of u and v in a head, by default attention_dim.
        attention: `dense`, which is hstu_attention, or `block-sparse`, which is block_sparse_attn.
        causal, max_attn_len, contextual_seq_len: as in hstu_attention. Block-sparse attention is causal, and takes
            neither of the others.
        block_counts, block_size, window_size: as in block_sparse_attn; dense attention does not use them.
        gate_hidden: the hidden layer of the GateModel, by default the GateModel's own; dense attention has no gates.
        dropout: how much of the result is dropped in training, before the residual.
        bias: whether the two projections have a bias.
        backend: as in hstu_attention.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        attention_dim: int | None = None,
        linear_dim: int | None = None,
        *,
        attention: str = "dense",
        causal: bool = True,
        max_attn_len: int = 0,
        contextual_seq_len: int = 0,
        block_counts: int = 4,
        block_size: int = 32,
        window_size: int = 0,
        gate_hidden: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_whole(width, "width", 1)
        checks.check_whole(heads, "heads", 1)
        if attention_dim is None and width % heads:
            raise ValueError(
                f"width is {width} and heads is {heads}: give attention_dim where width is no multiple of heads"
            )
        attention_dim = width // heads if attention_dim is None else attention_dim
        linear_dim = attention_dim if linear_dim is None else linear_dim
        for name, value in {"attention_dim": attention_dim, "linear_dim": linear_dim}.items():
            checks.check_whole(value, name, 1)
            if value > checks.MAX_CHANNELS:
                raise ValueError(f"{name} is {value}: expected 1 to {checks.MAX_CHANNELS}")
        if attention not in ATTENTIONS:
            raise ValueError(f"attention is {attention!r}: expected one of {', '.join(ATTENTIONS)}")
        checks.check_whole(max_attn_len, "max_attn_len", 0)
        checks.check_whole(contextual_seq_len, "contextual_seq_len", 0)
        checks.check_whole(block_counts, "block_counts", 1)
        checks.check_whole(block_size, "block_size", 1)
        checks.check_whole(window_size, "window_size", 0)
        checks.check_number(dropout, "dropout", minimum=0.0)
        if dropout >= 1:
            raise ValueError(
                f"dropout is {dropout}: expected a number below 1, for nothing else of the layer would reach its result"
            )
        sparse = attention == "block-sparse"
        if sparse and (not causal or max_attn_len or contextual_seq_len):
            raise ValueError(
                f"causal is {causal}, max_attn_len is {max_attn_len} and contextual_seq_len is {contextual_seq_len}:"
                " block-sparse attention is causal and has neither limit nor context; leave them at their defaults, or"
                " use attention='dense'"
            )
        self.width, self.heads, self.attention_dim, self.linear_dim = width, heads, attention_dim, linear_dim
        self.attention = attention
        self.options: dict[str, Any] = (
            {"block_counts": block_counts, "block_size": block_size, "window_size": window_size}
            if sparse
            else {"causal": causal, "max_attn_len": max_attn_len, "contextual_seq_len": contextual_seq_len}
        )
        self.backend = backend
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.norm_in = nn.LayerNorm(width, eps=EPS, **place)
        self.to_uvqk = nn.Linear(width, 2 * heads * (linear_dim + attention_dim), bias=bias, **place)
        self.gate_model = GateModel(attention_dim, gate_hidden, **place) if sparse else None
        self.norm_out = None if sparse else nn.LayerNorm(heads * linear_dim, eps=EPS, **place)
        self.to_out = nn.Linear(heads * linear_dim, width, bias=bias, **place)
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Reinitialise the weights: the projections by Xavier's rule, their biases 0; norms that change nothing."""
        for projection in (self.to_uvqk, self.to_out):
            nn.init.xavier_uniform_(projection.weight)
            if projection.bias is not None:
                nn.init.zeros_(projection.bias)
        self.norm_in.reset_parameters()
        if self.norm_out is not None:
            self.norm_out.reset_parameters()
        if self.gate_model is not None:
            self.gate_model.reset_parameters()

    def forward(
        self, x: torch.Tensor, seq_offsets: torch.Tensor, *, max_seq_len: int, num_targets: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x `[N, width]`, all sequences end to end, with offsets `[B + 1]`; returns the same shape.

        No sequence may be longer than max_seq_len, by which dense attention divides its weights. num_targets `[B]`, for
        dense attention alone, says how many tokens at each sequence's end are targets, as in hstu_attention. Values are
        checked as there.
        """
        self._check(x, seq_offsets, max_seq_len, num_targets)
        uvqk = nn.functional.silu(self.to_uvqk(self.norm_in(x)))
        channels = self.linear_dim, self.linear_dim, self.attention_dim, self.attention_dim
        u, v, q, k = (
            part.unflatten(-1, (self.heads, -1)) for part in uvqk.split([self.heads * c for c in channels], dim=-1)
        )
        if self.gate_model is not None:
            interleave = self.heads % 2 == 0
            named: dict[str, Any] = {
                **self.options,
                "interleave": interleave,
                "seq_offsets": seq_offsets,
                "backend": self.backend,
            }
            o, _ = block_sparse_attn(q, k, v, u, *self.gate_model(q), **named)
            attended = o.flatten(-2)
        else:
            o = hstu_attention(
                q,
                k,
                v,
                seq_offsets,
                max_seq_len=max_seq_len,
                num_targets=num_targets,
                **self.options,
                backend=self.backend,
            )
            attended = cast(nn.LayerNorm, self.norm_out)(o.flatten(-2)) * u.flatten(-2)
        return cast(torch.Tensor, x + self.dropout(self.to_out(attended)))

    def extra_repr(self) -> str:
        """The sizes, for repr."""
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return (
            f"width={self.width}, heads={self.heads}, attention_dim={self.attention_dim}, linear_dim={self.linear_dim},"
            f" attention={self.attention!r}, {options}"
        )

    def _check(
        self, x: torch.Tensor, seq_offsets: torch.Tensor, max_seq_len: int, num_targets: torch.Tensor | None
    ) -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}: expected a torch.Tensor")
        if x.dim() != 2 or x.shape[-1] != self.width:
            raise ValueError(f"x has shape {list(x.shape)}: expected [N, {self.width}], all sequences end to end")
        if self.gate_model is None:
            return
        # What follows dense attention checks itself.
        if num_targets is not None:
            raise ValueError(
                "num_targets is given and attention is 'block-sparse', which knows no targets: leave it out, or use"
                " attention='dense'"
            )
        checks.check_whole(max_seq_len, "max_seq_len", 0)
        checks.check_offsets_tensor(seq_offsets, "seq_offsets", x.device, x.shape[0])
        # torch.compile cannot look at values.
        if not torch.compiler.is_compiling():
            checks.check_offset_values(seq_offsets, "seq_offsets", x.shape[0], max_seq_len, "max_seq_len")
