"""`NativeSparseAttention`: projections, rotary positions, compression and gates around native_sparse_attention.

`WindowCompression`: learned compression of windows of keys and values.
"""

import itertools
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from tilewise.nn.rotary import packed_positions, rotate
from tilewise.ops._host import checks
from tilewise.ops.nsa.api import native_sparse_attention
from tilewise.ops.nsa.decode import NSACache, nsa_decode_step
from tilewise.ops.nsa.problem import Sizes, check_sizes

if TYPE_CHECKING:
    from tilewise.parallel import ContextPlan
    from tilewise.parallel.windows import Windows

COMPRESSIONS = ("mean", "learned")


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


class NativeSparseAttention(nn.Module):
    """Causal self-attention of arXiv 2502.11089 as a layer: x `[B, T, dim]` -> `[B, T, dim]`.

    Keys are turned by their rotary positions before they are compressed, in training and in decoding alike, so that the
    cache holds turned keys.

    Args:
        dim: channels of x and of the result.
        heads: query heads.
        kv_heads: key and value heads, a divisor of heads; by default heads.
        head_dim: channels of a query and a key, by default `dim // heads`.
        value_dim: channels of a value, by default head_dim.
        compress_size, compress_stride, block_size, block_count, window_size, init_blocks, local_blocks: as in
            native_sparse_attention.
        compression: `mean`, or `learned`, which is a WindowCompression.
        rotary: turn queries and keys by their positions; head_dim must be even.
        rotary_base: the base of the rotary wavelengths.
        bias: whether the projections of x, the gates' too, and of the result have a bias.
        backend: as in native_sparse_attention.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        value_dim: int | None = None,
        *,
        compress_size: int = 32,
        compress_stride: int = 16,
        block_size: int = 64,
        block_count: int = 16,
        window_size: int = 512,
        init_blocks: int = 1,
        local_blocks: int = 2,
        compression: str = "mean",
        rotary: bool = True,
        rotary_base: float = 10000.0,
        bias: bool = False,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        checks.check_whole(dim, "dim", 1)
        checks.check_whole(heads, "heads", 1)
        kv_heads = heads if kv_heads is None else kv_heads
        checks.check_whole(kv_heads, "kv_heads", 1)
        if heads % kv_heads:
            raise ValueError(f"heads is {heads} and kv_heads is {kv_heads}: heads must be a multiple of kv_heads")
        if head_dim is None and dim % heads:
            raise ValueError(f"dim is {dim} and heads is {heads}: give head_dim where dim is no multiple of heads")
        head_dim = dim // heads if head_dim is None else head_dim
        value_dim = head_dim if value_dim is None else value_dim
        for name, value in {"head_dim": head_dim, "value_dim": value_dim}.items():
            checks.check_whole(value, name, 1)
            if value > checks.MAX_CHANNELS:
                raise ValueError(f"{name} is {value}: expected 1 to {checks.MAX_CHANNELS}")
        if rotary and head_dim % 2:
            raise ValueError(
                f"head_dim is {head_dim}: rotary positions turn pairs of channels; make it even, or set rotary=False"
            )
        checks.check_number(rotary_base, "rotary_base", minimum=1.0)
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is {compression!r}: expected one of {', '.join(COMPRESSIONS)}")
        check_sizes(Sizes(compress_size, compress_stride, block_size, block_count, init_blocks, local_blocks))
        checks.check_whole(window_size, "window_size", 1)
        self.dim, self.heads, self.kv_heads, self.head_dim, self.value_dim = dim, heads, kv_heads, head_dim, value_dim
        self.sizes: dict[str, Any] = {
            "compress_size": compress_size,
            "compress_stride": compress_stride,
            "block_size": block_size,
            "block_count": block_count,
            "window_size": window_size,
            "init_blocks": init_blocks,
            "local_blocks": local_blocks,
        }
        self.rotary_base = rotary_base if rotary else None
        self.backend = backend
        self.to_q = nn.Linear(dim, heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.to_k = nn.Linear(dim, kv_heads * head_dim, bias=bias, device=device, dtype=dtype)
        self.to_v = nn.Linear(dim, kv_heads * value_dim, bias=bias, device=device, dtype=dtype)
        self.to_gates = nn.Linear(dim, 3 * heads, bias=bias, device=device, dtype=dtype)
        self.to_out = nn.Linear(heads * value_dim, dim, bias=bias, device=device, dtype=dtype)
        self.compression = (
            WindowCompression(compress_size, head_dim, value_dim, device=device, dtype=dtype)
            if compression == "learned"
            else None
        )

    def forward(
        self,
        x: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor | None = None,
        return_indices: bool = False,
        parallel: "ContextPlan | None" = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """x `[B, T, dim]`, or packed `[N, dim]` with offsets cu_seqlens `[B + 1]`, positions counting from each
        sequence's start. With a tilewise.parallel.ContextPlan x holds this rank's tokens, `[B, T_local, dim]` or
        `[N_local, dim]`, and offsets and positions are the plan's.

        Returns the same shape, and with return_indices also the chosen blocks, as native_sparse_attention gives them.
        """
        packed = cu_seqlens is not None or (parallel is not None and parallel.packed)
        self._check_x(x, packed, "the plan is packed" if cu_seqlens is None else "cu_seqlens is given")
        if parallel is not None:
            checks.check_none_given("parallel", cu_seqlens=cu_seqlens)
            parallel.check_local(x, "x", 0 if packed else 1)
            positions = parallel.position_ids.to(x.device)
        elif cu_seqlens is None:
            positions = torch.arange(x.shape[1], device=x.device)
        else:
            checks.check_offsets_tensor(cu_seqlens, "cu_seqlens", x.device, x.shape[0])
            positions = packed_positions(cu_seqlens, x.shape[0])
        q, k, v, gates = self._project(x, positions)
        compressed: dict[str, Any] = {}
        if self.compression is not None:
            size, stride = self.sizes["compress_size"], self.sizes["compress_stride"]
            if parallel is not None:
                k_cmp, v_cmp = self._compress_parallel(k, v, parallel.windows(size, stride))
            else:
                k_cmp, v_cmp = self.compression(*(windows_of(part, size, stride, cu_seqlens) for part in (k, v)))
                if cu_seqlens is not None:
                    k_cmp, v_cmp = k_cmp[0], v_cmp[0]
            compressed = {"k_cmp": k_cmp, "v_cmp": v_cmp}
        options: dict[str, Any] = {"cu_seqlens": cu_seqlens, "return_indices": return_indices, "backend": self.backend}
        result = native_sparse_attention(q, k, v, **gates, **compressed, **self.sizes, **options, parallel=parallel)
        if isinstance(result, tuple):
            o, indices = result
            return self.to_out(o.flatten(-2)), indices
        return cast(torch.Tensor, self.to_out(result.flatten(-2)))

    def init_cache(
        self,
        batch: int,
        max_len: int,
        *,
        dtype: torch.dtype | None = None,
        page_table: torch.Tensor | None = None,
        k_pages: torch.Tensor | None = None,
        v_pages: torch.Tensor | None = None,
    ) -> NSACache:
        """An empty cache for `step`, for `batch` sequences of up to `max_len` tokens; in the dtype of the weights, or
        autocast's inside autocast.

        page_table, k_pages `[pages, page_size, kv_heads, head_dim]` and v_pages `[.., value_dim]` are as in NSACache:
        keys and values are kept in these pools. Layers may share a table, not a pool.
        """
        weight = self.to_k.weight
        if dtype is None:
            casts = weight.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(weight.device.type)
            dtype = torch.get_autocast_dtype(weight.device.type) if casts else weight.dtype
        shape = batch, max_len, self.kv_heads, self.head_dim, self.value_dim
        return NSACache(
            *shape,
            **self.sizes,
            compress=self.compression,
            dtype=dtype,
            device=weight.device,
            page_table=page_table,
            k_pages=k_pages,
            v_pages=v_pages,
        )

    @torch.no_grad()
    def step(self, x: torch.Tensor, cache: NSACache, *, counts: torch.Tensor | None = None) -> torch.Tensor:
        """What forward gives at the positions of new tokens x `[B, n, dim]`, which the cache takes up; no gradient
        passes.

        counts, int `[B]`, says how many of the n are real in each sequence, as in nsa_decode_step.
        """
        self._check_x(x)
        if not isinstance(cache, NSACache):
            raise TypeError(f"cache is a {type(cache).__name__}: expected what init_cache returns")
        if cache.compress is not self.compression or any(
            getattr(cache, name) != value for name, value in self.sizes.items()
        ):
            raise ValueError(
                "the cache was made for another layer, with other sizes or another compression: make one with this"
                " layer's init_cache"
            )
        if x.shape[0] != cache.batch:
            raise ValueError(
                f"x has batch {x.shape[0]} and the cache has {cache.batch}: they must be equal (got shape"
                f" {list(x.shape)})"
            )
        if x.device != cache.device:
            raise ValueError(
                f"x is on {x.device} and the cache is on {cache.device}: move it there, or make a new cache where the"
                " layer is now"
            )
        positions = cache.lengths[:, None] + torch.arange(x.shape[1], device=x.device)
        q, k, v, gates = self._project(x, positions)
        o = cast(torch.Tensor, nsa_decode_step(q, k, v, cache, **gates, counts=counts, backend=self.backend))
        return cast(torch.Tensor, self.to_out(o.flatten(-2)))

    def extra_repr(self) -> str:
        """The sizes, for repr."""
        sizes = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        compression = "mean" if self.compression is None else "learned"
        return (
            f"dim={self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim},"
            f" value_dim={self.value_dim}, {sizes}, compression={compression!r}, rotary={self.rotary_base is not None}"
        )

    def _project(
        self, x: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
        """q [.., T, heads, head_dim], k, v, and the gates [.., T, heads] of x [.., T, dim]; q and k turned by positions
        [.., T].
        """
        q = self.to_q(x).unflatten(-1, (self.heads, self.head_dim))
        k = self.to_k(x).unflatten(-1, (self.kv_heads, self.head_dim))
        v = self.to_v(x).unflatten(-1, (self.kv_heads, self.value_dim))
        if self.rotary_base is not None:
            q, k = (rotate(part, positions, self.rotary_base) for part in (q, k))
        gates = torch.sigmoid(self.to_gates(x)).unflatten(-1, (3, self.heads)).unbind(-2)
        return q, k, v, dict(zip(("g_cmp", "g_slc", "g_swa"), gates, strict=True))

    def _compress_parallel(
        self, k: torch.Tensor, v: torch.Tensor, windows: "Windows"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all windows, from local tokens: k's and v's travel together."""
        channels = self.head_dim, self.value_dim
        of_k, of_v = windows.of(torch.cat((k, v), -1)).split(channels, -1)
        k_cmp, v_cmp = windows.whole(torch.cat(cast(nn.Module, self.compression)(of_k, of_v), -1)).split(channels, -1)
        return k_cmp, v_cmp

    def _check_x(self, x: torch.Tensor, packed: bool = False, why: str = "") -> None:
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x is a {type(x).__name__}: expected a torch.Tensor")
        if x.dim() != (2 if packed else 3) or x.shape[-1] != self.dim:
            expected = f"[N, {self.dim}], packed, since {why}" if packed else f"[B, T, {self.dim}]"
            raise ValueError(f"x has shape {list(x.shape)}: expected {expected}")
