"""The steps of decoding over an NSACache, by backend. Until `commit` its lengths are those before the new tokens."""

import torch

from tilewise.ops._host.backend import HAS_TRITON
from tilewise.ops.nsa.cached import reference
from tilewise.ops.nsa.cached.reference import Compress as Compress
from tilewise.ops.nsa.cached.stored import Stored
from tilewise.ops.nsa.problem import Sizes

if HAS_TRITON:
    from tilewise.ops.nsa.cached import launch

Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def write(
    stored: Stored,
    sizes: Sizes,
    compress: Compress | None,
    k: torch.Tensor,
    v: torch.Tensor,
    counts: torch.Tensor | None,
    backend: str,
) -> None:
    """Store new tokens behind those there are, and the windows that they complete."""
    new = k.shape[1]
    if new == 0:
        return
    k, v = k.to(stored.k.dtype), v.to(stored.v.dtype)
    if backend != "triton":
        reference.write(stored, k, v, counts)
        reference.compress_new(stored, sizes, new, counts, compress)
        return
    launch.write(stored, k, v, counts, sizes, compress is None)
    if compress is not None and stored.k_cmp.numel():
        # As many as may become whole: how many do, the host does not know.
        row = torch.arange(len(stored.lengths), device=k.device)[:, None]
        first, end = (reference.whole_windows(x, sizes) for x in (stored.lengths, reference.ends(stored, new, counts)))
        window = first[:, None] + torch.arange(-(-new // sizes.compress_stride), device=k.device)
        windows = reference.windows_of(stored, sizes, row, window, window < end[:, None])
        k_cmp, v_cmp = (x.contiguous() for x in reference.checked(compress, *windows))
        launch.store_windows(stored, k_cmp, v_cmp, counts, sizes, new)


def attend(
    q: torch.Tensor,
    gates: Gates,
    stored: Stored,
    sizes: Sizes,
    window_size: int,
    scale: float,
    counts: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """From new tokens that are written: o [B, n, Hq, Dv] in q's dtype, 0 for those that are not there, and the chosen
    blocks, where there is a gate for them.
    """
    if backend != "triton":
        return reference.attend(q, *gates, stored, sizes, window_size, scale, counts)
    batch, new, heads, _ = q.shape
    o = q.new_empty((batch, new, heads, stored.v.shape[-1]))
    indices = None
    if gates[1] is not None:
        indices = q.new_empty((batch, new, stored.k.shape[2], sizes.block_count), dtype=torch.int32)
    if new:
        # Inside autocast q's dtype may be another than the cache's.
        q = q.to(stored.k.dtype)
        chunk = launch.chunk_of(stored, gates, q, sizes, window_size)
        for first in range(0, new, chunk):
            piece = min(chunk, new - first)
            launch.attend(stored, q, gates, counts, o, indices, sizes, window_size, scale, first, piece)
    return o, indices


def commit(stored: Stored, new: int, counts: torch.Tensor | None, backend: str) -> None:
    """Count the new tokens in, and flag what could not be stored."""
    if backend == "triton":
        launch.commit(stored, counts, new)
    else:
        reference.commit(stored, new, counts)
