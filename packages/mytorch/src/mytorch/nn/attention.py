"""Attention as a layer, and the block that transformers are made of."""

from mytorch.nn import initial
from mytorch.nn.layers import GELU, Dropout, LayerNorm, Linear, Sequential
from mytorch.nn.module import Module
from mytorch.tensor import Tensor


class MultiHeadAttention(Module):
    """Attention of `x [B, T, width]` to itself, or to a context `[B, Tk, width]`, in `heads` parts of the width.

    With fewer `kv_heads`, each head of keys and values serves as many of the queries'. `causal`: each place sees those
    up to its own; where the context is longer, x stands at its end. The [T, T] scores are never stored.
    """

    def __init__(
        self, width: int, heads: int, *, kv_heads: int | None = None, causal: bool = False, bias: bool = True
    ) -> None:
        kv_heads = heads if kv_heads is None else kv_heads
        initial.check_sizes("MultiHeadAttention", width=width, heads=heads, kv_heads=kv_heads)
        if width % heads or heads % kv_heads:
            raise ValueError(
                f"width must be a multiple of heads, and heads one of kv_heads, got width {width}, heads {heads},"
                f" kv_heads {kv_heads}"
            )
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        kv_width = width // heads * kv_heads
        self.to_q, self.to_k, self.to_v = (
            Linear(width, width, bias=bias),
            Linear(width, kv_width, bias=bias),
            Linear(width, kv_width, bias=bias),
        )
        self.to_out = Linear(width, width, bias=bias)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """As the class says."""
        source = x if context is None else context
        if len(x.shape) != 3 or len(source.shape) != 3:
            raise ValueError(
                f"attention wants [B, T, width], got {list(x.shape)}"
                + ("" if context is None else f" and {list(context.shape)}")
            )
        channels = self.to_q.weight.shape[1] // self.heads
        q = self.to_q(x).reshape(*x.shape[:2], self.heads, channels)
        k, v = (to(source).reshape(*source.shape[:2], self.kv_heads, channels) for to in (self.to_k, self.to_v))
        return self.to_out(q.attention(k, v, self.causal).flatten(2))

    def options(self) -> str:
        """Heads, and whether it is causal."""
        said = f"heads={self.heads}" + (f", kv_heads={self.kv_heads}" if self.kv_heads != self.heads else "")
        return said + (", causal=True" if self.causal else "")


class TransformerBlock(Module):
    """Attention, then two linear layers with GELU between them, each after a layer norm and with a residual;
    `[B, T, width]` in and out.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        causal: bool = False,
        hidden: int | None = None,
        dropout: float = 0.0,
    ) -> None:
        hidden = 4 * width if hidden is None else hidden
        self.norm_attention = LayerNorm(width)
        self.attention = MultiHeadAttention(width, heads, kv_heads=kv_heads, causal=causal)
        self.norm_mlp = LayerNorm(width)
        self.mlp = Sequential(Linear(width, hidden), GELU(), Linear(hidden, width))
        self.dropout = Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        x = x + self.dropout(self.attention(self.norm_attention(x)))
        return x + self.dropout(self.mlp(self.norm_mlp(x)))
