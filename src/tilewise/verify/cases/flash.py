"""Flash attention's verification cases."""

from collections.abc import Callable
from typing import Any

import torch

from tilewise.verify.case import Case

Make = Callable[[torch.Generator], dict[str, torch.Tensor]]


def dense(
    batch: int,
    queries: int,
    heads: int,
    channels: int,
    *,
    keys: int | None = None,
    kv_heads: int | None = None,
    values: int | None = None,
    size: float = 1.0,
) -> Make:
    """Normal q, k, v of dense shape; `size` multiplies q, and so the logits."""
    keys, kv_heads, values = (given if given is not None else default for given, default in ((keys, queries), (kv_heads, heads), (values, channels)))

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        q = torch.randn(batch, queries, heads, channels, generator=generator) * size
        k = torch.randn(batch, keys, kv_heads, channels, generator=generator)
        return {"q": q, "k": k, "v": torch.randn(batch, keys, kv_heads, values, generator=generator)}

    return make


def packed(lengths_q: list[int], heads: int, channels: int, *, lengths_k: list[int] | None = None, kv_heads: int | None = None) -> Make:
    """Packed q, k, v with offsets."""
    lengths_k = lengths_q if lengths_k is None else lengths_k

    def make(generator: torch.Generator) -> dict[str, torch.Tensor]:
        offsets = [torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32) for lengths in (lengths_q, lengths_k)]
        shapes = (sum(lengths_q), heads), (sum(lengths_k), kv_heads or heads), (sum(lengths_k), kv_heads or heads)
        q, k, v = (torch.randn(*shape, channels, generator=generator) for shape in shapes)
        return {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets[0], "cu_seqlens_k": offsets[1]}

    return make


def strided(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """q as a transposed [B, H, T, D] view, k expanded over the batch, v cut out of a wider tensor."""
    q = torch.randn(2, 4, 51, 16, generator=generator).transpose(1, 2)
    k = torch.randn(1, 51, 4, 16, generator=generator).expand(2, -1, -1, -1)
    v = torch.randn(2, 51, 4, 40, generator=generator)[..., 3:19]
    return {"q": q, "k": k, "v": v}


def strided_long(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """More keys than a descriptor is too dear for: q transposed and v cut on lines of 16 bytes, k expanded."""
    q = torch.randn(2, 2, 70, 64, generator=generator).transpose(1, 2)
    k = torch.randn(1, 300, 2, 64, generator=generator).expand(2, -1, -1, -1)
    v = torch.randn(2, 300, 3, 80, generator=generator)[:, :, :2, 8:72]
    return {"q": q, "k": k, "v": v}


def strided_aligned(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The same without the expanded k, so that descriptors can read all of it."""
    tensors = strided_long(generator)
    return tensors | {"k": torch.randn(2, 2, 300, 64, generator=generator).transpose(1, 2)}


def _case(name: str, about: str, make: Make, *, huge_lse: bool = False, **options: Any) -> Case:
    return Case(name, about, make, options, huge_lse=huge_lse)


CASES = (
    _case("small", "B 1, T 64, H 4, D 16, Dv 32", dense(1, 64, 4, 16, values=32)),
    _case("medium", "B 2, T 128, H 8, D 32, Dv 64, causal", dense(2, 128, 8, 32, values=64), causal=True),
    _case("large", "B 4, T 256, H 8, D 32, Dv 64, causal", dense(4, 256, 8, 32, values=64), causal=True),
    _case("one-key", "one query, one key", dense(1, 1, 2, 8)),
    _case("no-keys", "queries and not one key: output 0, LSE -inf", dense(1, 5, 2, 8, keys=0)),
    _case("no-queries", "keys and not one query: gradients 0", dense(1, 0, 2, 8, keys=5)),
    _case("odd-lengths", "T 129 past a tile's end", dense(1, 129, 2, 16)),
    _case("more-keys", "causal, Tq 33 < Tk 97: aligned at the bottom right", dense(1, 33, 2, 16, keys=97), causal=True),
    _case("sees-nothing", "causal, Tq 97 > Tk 33: the first rows see no key", dense(1, 97, 2, 16, keys=33), causal=True),
    _case("window", "causal window of 20 keys", dense(1, 150, 2, 16), causal=True, window_size=(19, 0)),
    _case("window-both", "10 keys before, 4 after", dense(1, 77, 2, 16), window_size=(10, 4)),
    _case("window-none", "a window that lies beyond the keys for some rows", dense(1, 40, 2, 16, keys=70), window_size=(3, 0)),
    _case("softcap", "scores capped at ±4", dense(1, 65, 2, 16), softcap=4.0, causal=True),
    _case("negative-scale", "scale -0.3", dense(1, 65, 2, 16), scale=-0.3, causal=True),
    _case("zero-scale", "scale 0: the mean of the values", dense(1, 65, 2, 16), scale=0.0, causal=True),
    _case("gqa-3", "6 query heads, 2 key heads", dense(1, 65, 6, 16, kv_heads=2), causal=True),
    _case("mqa-16", "16 query heads, one key head", dense(1, 33, 16, 16, kv_heads=1)),
    _case("odd-channels", "D 40, Dv 24", dense(1, 65, 2, 40, values=24), causal=True),
    _case("one-channel", "D 1, Dv 1", dense(1, 33, 2, 1)),
    _case("large-logits", "logits up to about ±1e4", dense(1, 65, 2, 16, size=2500.0), huge_lse=True, causal=True),
    _case("strided", "a transposed q, an expanded k, a cut v", strided, causal=True),
    _case("strided-long", "300 keys, a transposed q, an expanded k, a cut v", strided_long, causal=True),
    _case("strided-aligned", "300 keys, transposed q and k, a cut v, all on lines of 16 bytes", strided_aligned, causal=True),
    _case("packed", "lengths 0, 70, 1, 0, 33 of one batch", packed([0, 70, 1, 0, 33], 4, 16, kv_heads=2), causal=True),
    _case("packed-cross", "packed, queries and keys of different lengths", packed([5, 0, 66, 9], 2, 16, lengths_k=[70, 3, 0, 40]), causal=True),
    _case("packed-window", "packed, a window of 9 keys", packed([40, 0, 3, 71], 2, 16), window_size=(8, 0)),
)
