"""Decoding with native sparse attention: the attention of new tokens over a cache of those before them."""

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops._host.register import autocasting, uncompiled
from tilewise.ops.nsa.cache import NSACache
from tilewise.ops.nsa.cached import steps
from tilewise.ops.nsa.cached.checks import autocasts, check_new

__all__ = ["NSACache", "nsa_decode_step"]


@uncompiled
@torch.no_grad()
def nsa_decode_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache: NSACache,
    *,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    scale: float | None = None,
    counts: torch.Tensor | None = None,
    return_indices: bool = False,
    backend: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Add new tokens to the cache and attend from them: what native_sparse_attention gives at their positions of the
    whole sequence.

    A sequence's result depends on nothing but that sequence: neither on the batch, nor on its pages, nor on the steps
    that it comes in. In 16 bits compressed keys and values are rounded to the cache's dtype, as the kernels of
    native_sparse_attention do.

    Args:
        q: queries `[B, n, Hq, D]` of n new tokens, n >= 0, in the cache's dtype.
        k, v: their keys `[B, n, Hk, D]` and values `[B, n, Hk, Dv]`.
        cache: the tokens before; it takes up the new ones.
        g_cmp, g_slc, g_swa: gates `[B, n, Hq]` in q's dtype or fp32; None leaves a branch out, and one must be there.
        scale: any finite number, by default `D ** -0.5`.
        counts: int `[B]`: how many of the n tokens are real in each sequence, the first ones; all by default. See
            NSACache.append.
        return_indices: also return the chosen blocks.
        backend: `triton`, `cpu` or `reference`; by default TILEWISE_BACKEND, else by the tensors' device. The last two
            are one in torch's own operators, which also takes fp64 as `reference`, and waits for a GPU.

    Returns:
        The output `[B, n, Hq, Dv]` in q's dtype; 0 for tokens that are not real. With return_indices also int32
        `[B, n, Hk, block_count]`, ascending, padded at the end with -1.

    Decoding passes no gradient, whatever its inputs require; train with native_sparse_attention. With `triton` the host
    waits for nothing, and a step of a few tokens is seven launches, so that it can be captured in a CUDA graph: replay
    it with new tokens in the same tensors, and the cache goes on. A learned compression adds its own launches. Inside
    torch.compile it runs as it stands, between two graphs.

    A token that comes to a full sequence is a ValueError, and the cache stays as it was, where values are checked: on
    the CPU always, on a GPU with TILEWISE_CHECK=1. Elsewhere it is not stored, its output is 0, and `cache.check()`
    raises from then on.
    """
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    backend = _check_step(q, k, cache, gates, scale, return_indices, backend)
    counts = check_new(cache.stored, k, v, counts)
    scale = q.shape[-1] ** -0.5 if scale is None else checks.as_float(scale)
    steps.write(cache.stored, cache.sizes, cache.compress, k, v, counts, backend)
    o, indices = _attend(q, g_cmp, g_slc, g_swa, cache, scale, counts, backend)
    # Last, so that a compression that raises leaves the cache as it was.
    steps.commit(cache.stored, q.shape[1], counts, backend)
    return (o, indices) if return_indices and indices is not None else o


@autocasting
def _attend(
    q: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    cache: NSACache,
    scale: float,
    counts: torch.Tensor | None,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    gates = (g_cmp, g_slc, g_swa)
    return steps.attend(q, gates, cache.stored, cache.sizes, cache.window_size, scale, counts, backend)


def _check_step(
    q: torch.Tensor,
    k: torch.Tensor,
    cache: NSACache,
    gates: dict[str, torch.Tensor | None],
    scale: float | None,
    return_indices: bool,
    backend: str | None,
) -> str:
    """All about q and the gates; the cache checks k, v and counts. Returns the backend to use."""
    if not isinstance(cache, NSACache):
        raise TypeError(f"cache is a {type(cache).__name__}: expected an NSACache")
    if scale is not None:
        checks.check_number(scale, "scale")
    for name, x in {"q": q, "k": k}.items():
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}: expected a torch.Tensor")
    if q.dim() != 4 or (q.shape[0], q.shape[3]) != (cache.batch, cache.D):
        raise ValueError(
            f"q has shape {list(q.shape)}: the cache expects [{cache.batch}, n, Hq, {cache.D}], for n new tokens"
        )
    if k.dim() == 4 and k.shape[1] != q.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} new tokens and k has {k.shape[1]}: they must be equal (got shapes"
            f" {checks.shapes_of({'q': q, 'k': k})})"
        )
    if q.shape[2] == 0 or q.shape[2] % cache.kv_heads != 0:
        raise ValueError(
            f"q has {q.shape[2]} heads and the cache has {cache.kv_heads}: q's heads must be a multiple of the cache's"
        )
    if q.dtype != cache.dtype and not autocasts(cache.device):
        raise TypeError(
            f"q is {q.dtype} and the cache holds {cache.dtype}: convert it, or make the cache with dtype={q.dtype}"
        )
    if q.device != cache.device:
        raise ValueError(f"q is on {q.device} and the cache is on {cache.device}: move it there")
    checks.check_last_axis(q, "q")
    if all(gate is None for gate in gates.values()):
        raise ValueError("g_cmp, g_slc and g_swa are all None: give the gates of one branch at least")
    if return_indices and gates["g_slc"] is None:
        raise ValueError(
            "return_indices is set and g_slc is None: without the selected branch no blocks are chosen; give g_slc, or"
            " leave it out"
        )
    for name, gate in gates.items():
        if gate is not None:
            # Inside autocast the caller does not choose a dtype.
            chosen = gate.to(q.dtype) if autocasts(cache.device) and isinstance(gate, torch.Tensor) else gate
            checks.check_beside(chosen, name, q, tuple(q.shape[:3]), "[B, n, Hq]")
    backend = resolve_backend(backend, q.device)
    if backend != "reference":
        checks.check_not_fp64(q, "q", backend)
    return backend
