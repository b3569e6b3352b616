"""Decoding with native sparse attention: the attention of new tokens over a cache of those before them.

One implementation in torch's own operators serves every backend and device: a new token reads each of its keys once, so
that gathers and small products are all there is to do.
"""

import torch

from tilewise.ops._host import checks
from tilewise.ops._host.backend import resolve_backend
from tilewise.ops._host.register import autocasting
from tilewise.ops.nsa.cache import NSACache, autocasts, wide

__all__ = ["NSACache", "nsa_decode_step"]

# Gathered keys and scores are held for this many elements at a time; more new tokens are processed in chunks.
MOST_ELEMENTS = 2**26


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

    However a sequence is split into steps, outputs and choices are the same up to rounding. In 16 bits compressed keys
    and values are rounded to the cache's dtype, as the kernels of native_sparse_attention do.

    Args:
        q: queries `[B, n, Hq, D]` of n new tokens, n >= 0, in the cache's dtype.
        k, v: their keys `[B, n, Hk, D]` and values `[B, n, Hk, Dv]`.
        cache: the tokens before; it takes up the new ones.
        g_cmp, g_slc, g_swa: gates `[B, n, Hq]` in q's dtype or fp32; None leaves a branch out, and one must be there.
        scale: any finite number, by default `D ** -0.5`.
        counts: int `[B]`: how many of the n tokens are real in each sequence, the first ones; all by default. See
            NSACache.append.
        return_indices: also return the chosen blocks.
        backend: one implementation serves all. `reference` widens everything to fp32 (fp64 for fp64); `triton` on a GPU
            multiplies 16-bit keys and values as they are and accumulates in fp32, as the kernels do; `cpu` and `triton`
            want tensors where they run.

    Returns:
        The output `[B, n, Hq, Dv]` in q's dtype; 0 for tokens that are not real. With return_indices also int32
        `[B, n, Hk, block_count]`, ascending, padded at the end with -1.

    Decoding passes no gradient, whatever its inputs require; train with native_sparse_attention. On a GPU the host
    waits for nothing, except where counts come on the GPU and the cache may be full.
    """
    gates = {"g_cmp": g_cmp, "g_slc": g_slc, "g_swa": g_swa}
    backend = _check_step(q, k, cache, gates, scale, return_indices, backend)
    start = cache.lengths
    cache.append(k, v, counts)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    o, indices = _attend(q, g_cmp, g_slc, g_swa, cache, start, scale, backend)
    return (o, indices) if return_indices else o


@autocasting
def _attend(
    q: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    cache: NSACache,
    start: torch.Tensor,
    scale: float,
    backend: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from tokens that the cache holds, those of q [B, n, Hq, D] beginning at `start` [B]; o [B, n, Hq, Dv] and
    the chosen blocks.
    """
    batch, new, heads, _ = q.shape
    # 16-bit operands, fp32 sums; elsewhere products are in fp32, or fp64, throughout.
    narrow = backend == "triton" and q.device.type == "cuda" and cache.dtype.itemsize == 2
    o = torch.empty(batch, new, heads, cache.Dv, dtype=q.dtype, device=q.device)
    indices = torch.full((batch, new, cache.kv_heads, cache.block_count), -1, dtype=torch.int32, device=q.device)
    keys = max(cache.block_count * cache.block_size, cache.window_size)
    held = batch * (cache.kv_heads * keys * max(cache.D, cache.Dv) + heads * cache.windows(cache.longest))
    piece = max(1, MOST_ELEMENTS // held)
    for first in range(0, new, piece):
        rows = slice(first, first + piece)
        # [B, piece, Hk, group, D]
        b_q = q[:, rows].unflatten(2, (cache.kv_heads, -1))
        t = start[:, None] + torch.arange(first, first + b_q.shape[1], device=q.device)
        # A token that is not real sees nothing.
        t = torch.where(t < cache.lengths[:, None], t, -1)
        acc = torch.zeros(*b_q.shape[:-1], cache.Dv, dtype=wide(cache.dtype), device=q.device)
        if g_cmp is not None or g_slc is not None:
            probabilities = _window_probabilities(b_q, cache, t, scale, narrow)
        if g_cmp is not None:
            acc += _gate(g_cmp[:, rows], acc) * _sum_windows(probabilities, cache, narrow)
        if g_slc is not None:
            blocks = _choose(probabilities.sum(3), cache, t)
            position = (blocks[..., None] * cache.block_size + torch.arange(cache.block_size, device=q.device)).flatten(
                -2
            )
            acc += _gate(g_slc[:, rows], acc) * _attend_keys(
                b_q, cache, position, position <= t[..., None, None], scale, narrow
            )
            indices[:, rows, :, : blocks.shape[-1]] = blocks.masked_fill(
                blocks * cache.block_size > t[..., None, None], -1
            )
        if g_swa is not None:
            position = t[..., None, None] - torch.arange(min(cache.window_size, cache.longest), device=q.device)
            acc += _gate(g_swa[:, rows], acc) * _attend_keys(b_q, cache, position, position >= 0, scale, narrow)
        # The result for a token that is not real may be NaN.
        o[:, rows] = acc.flatten(2, 3).masked_fill((t < 0)[..., None, None], 0.0)
    return o, indices


def _gate(gate: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """[B, n, Hq] -> [B, n, Hk, group, 1] in o's dtype."""
    return gate.to(o.dtype).view(*o.shape[:-1], 1)


def _window_probabilities(
    q: torch.Tensor, cache: NSACache, t: torch.Tensor, scale: float, narrow: bool
) -> torch.Tensor:
    """q [B, n, Hk, group, D] at t [B, n] over the windows that have ended: [B, Hk, n, group, C]."""
    k, _ = cache.compressed()
    rows = q.transpose(1, 2)
    scores = _product(rows.flatten(0, 1).flatten(1, 2), k.mT, narrow) * scale
    last = torch.arange(k.shape[1], device=q.device) * cache.compress_stride + cache.compress_size - 1
    return _softmax(scores.view(*rows.shape[:4], k.shape[1]), last <= t[:, None, :, None, None])


def _sum_windows(probabilities: torch.Tensor, cache: NSACache, narrow: bool) -> torch.Tensor:
    """The compressed values by [B, Hk, n, group, C]: [B, n, Hk, group, Dv]."""
    _, v = cache.compressed()
    o = _product(probabilities.flatten(0, 1).flatten(1, 2), v, narrow)
    return o.view(*probabilities.shape[:4], cache.Dv).transpose(1, 2)


def _choose(probabilities: torch.Tensor, cache: NSACache, t: torch.Tensor) -> torch.Tensor:
    """The best blocks of each kv head by [B, Hk, n, C], summed over its query heads: [B, n, Hk, S], ascending; at the
    end blocks after t, if any.
    """
    blocks = max(1, -(-cache.longest // cache.block_size))
    strides, windows = blocks * cache.block_size // cache.compress_stride, probabilities.shape[-1]
    # A window's share in a block is counted in strides: each window is added to the strides that it covers, then each
    # block's strides are summed.
    covered = cache.compress_size // cache.compress_stride
    room = max(strides, windows + covered - 1)
    by_stride = torch.stack(
        [torch.nn.functional.pad(probabilities, (i, room - windows - i)) for i in range(covered)]
    ).sum(0)[..., :strides]
    scores = by_stride.unflatten(-1, (blocks, -1)).sum(-1).transpose(1, 2)
    # Infinities are markers, so a NaN row must be made finite: a forced block stays the best and a later one the worst.
    scores = scores.masked_fill(scores.isnan().any(-1, keepdim=True), torch.finfo(scores.dtype).min)
    block, current = torch.arange(blocks, device=t.device), (t // cache.block_size)[..., None, None]
    forced = (block < cache.init_blocks) | (block > current - cache.local_blocks)
    scores = scores.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return order.masked_fill(best == -torch.inf, blocks)[..., : cache.block_count].sort(dim=-1).values


def _attend_keys(
    q: torch.Tensor, cache: NSACache, position: torch.Tensor, keep: torch.Tensor, scale: float, narrow: bool
) -> torch.Tensor:
    """q [B, n, Hk, group, D] over the keys at position [B, n, Hk or 1, K] where kept: [B, n, Hk, group, Dv]."""
    k, v = cache.gather(position, keep)
    scores = _product(q.flatten(0, 2), k.mT, narrow) * scale
    probabilities = _softmax(scores, keep.expand(*q.shape[:3], -1).flatten(0, 2)[:, None])
    return _product(probabilities, v, narrow).view(*q.shape[:4], cache.Dv)


def _softmax(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Probabilities over what is kept, 0 elsewhere and in a row that sees nothing."""
    return torch.softmax(scores.masked_fill(~keep, -torch.inf), -1).masked_fill(~keep.any(-1, keepdim=True), 0.0)


def _product(a: torch.Tensor, b: torch.Tensor, narrow: bool) -> torch.Tensor:
    """[P, M, K] @ [P, K, N], summed in fp32 (fp64 for fp64); with the operands in b's 16 bits where `narrow`."""
    if narrow:
        return torch.bmm(a.to(b.dtype), b, out_dtype=torch.float32)
    return torch.bmm(a.to(wide(b.dtype)), b.to(wide(b.dtype)))


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
