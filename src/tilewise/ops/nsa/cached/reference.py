"""Decoding over an NSACache in plain torch, any dtype up to fp64: what comes is written, windows that become whole are
compressed, and each new token attends. Nothing is borrowed from the kernels; the CPU backend runs it too.
"""

from collections.abc import Callable

import torch

from tilewise.ops.nsa.cached.stored import ASTRAY, FULL, Stored
from tilewise.ops.nsa.problem import Sizes

Compress = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
# Gathered keys and scores are held for this many elements at a time; more new tokens are processed in chunks.
MOST_ELEMENTS = 2**26


def wide(dtype: torch.dtype) -> torch.dtype:
    """The accumulators' dtype: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def ends(stored: Stored, new: int, counts: torch.Tensor | None) -> torch.Tensor:
    """Each sequence's length once `new` tokens, or `counts` of them, have come, as far as there is room."""
    added = new if counts is None else counts.clamp(0, new)
    return (stored.lengths + added).clamp(max=stored.room)


def whole_windows(lengths: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Whole windows in so many tokens."""
    return ((lengths - sizes.compress_size) // sizes.compress_stride + 1).clamp(min=0)


def _locate(
    x: torch.Tensor, table: torch.Tensor | None, row: torch.Tensor, position: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entry and row of x for tokens at `position` of the sequences `row`, and which of those kept exist."""
    position = position.masked_fill(~keep, 0)
    if table is None:
        return row.expand_as(position), position, keep
    page = table[row, position // x.shape[1]].long()
    return page.clamp(0, len(x) - 1), position % x.shape[1], keep & (page >= 0) & (page < len(x))


def take(
    stored: Stored, row: torch.Tensor, position: torch.Tensor, head: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys and values of the sequences `row` at `position`, by head, zeros where not kept; and which exist. All four
    broadcast, and channels follow.
    """
    row, position, head, keep = torch.broadcast_tensors(row, position, head, keep)
    entry, slot, exists = _locate(stored.k, stored.table, row, position, keep)
    k, v = (x[entry, slot, head].masked_fill(~exists[..., None], 0.0) for x in (stored.k, stored.v))
    return k, v, exists


def write(stored: Stored, k: torch.Tensor, v: torch.Tensor, counts: torch.Tensor | None) -> None:
    """Copy new tokens behind those there are; lengths stay."""
    batch, new = k.shape[:2]
    position = stored.lengths[:, None] + torch.arange(new, device=k.device)
    row = torch.arange(batch, device=k.device)[:, None]
    keep = position < ends(stored, new, counts)[:, None]
    for cache, x in ((stored.k, k), (stored.v, v)):
        entry, slot, exists = _locate(cache, stored.table, row, position, keep)
        cache[entry[exists], slot[exists]] = x[exists].to(cache.dtype)


def completed(stored: Stored, sizes: Sizes, new: int, counts: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence and number of each window that becomes whole."""
    first, last = (whole_windows(x, sizes).tolist() for x in (stored.lengths, ends(stored, new, counts)))
    found = [(b, c) for b, (low, high) in enumerate(zip(first, last, strict=True)) for c in range(low, high)]
    row, window = torch.tensor(found, dtype=torch.int64, device=stored.k.device).view(-1, 2).unbind(1)
    return row, window


def windows_of(
    stored: Stored, sizes: Sizes, row: torch.Tensor, window: torch.Tensor, keep: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of windows of the sequences `row`: [.., size, Hk, D or Dv], zeros where not kept."""
    device = stored.k.device
    token = torch.arange(sizes.compress_size, device=device)[:, None]
    head = torch.arange(stored.k.shape[-2], device=device)
    row, keep = (x[..., None, None] for x in (row, keep))
    position = window[..., None, None] * sizes.compress_stride + token
    k, v, _ = take(stored, row, position, head, keep)
    return k, v


def compress_new(
    stored: Stored, sizes: Sizes, new: int, counts: torch.Tensor | None, compress: Compress | None
) -> None:
    """Compress the windows that the new tokens complete, and nothing where there are none."""
    row, window = completed(stored, sizes, new, counts)
    if len(row) == 0:
        return
    k, v = windows_of(stored, sizes, row, window, torch.ones_like(row, dtype=torch.bool))
    k_cmp, v_cmp = (_mean(k), _mean(v)) if compress is None else checked(compress, k[None], v[None])
    stored.k_cmp[row, window] = k_cmp.view(-1, *stored.k_cmp.shape[2:]).to(stored.k_cmp.dtype)
    stored.v_cmp[row, window] = v_cmp.view(-1, *stored.v_cmp.shape[2:]).to(stored.v_cmp.dtype)


def checked(compress: Compress, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What a learned compression makes of windows [B', C', size, Hk, ·]: one row each."""
    made = compress(k, v)
    for name, x, windows in zip(("k_cmp", "v_cmp"), made, (k, v), strict=True):
        expected = (*windows.shape[:2], *windows.shape[3:])
        if x.shape != expected:
            raise ValueError(
                f"compress returned {name} of shape {list(x.shape)}: expected {list(expected)}, one for each window"
                " and head"
            )
    return made


def commit(stored: Stored, new: int, counts: torch.Tensor | None) -> None:
    """The lengths after the new tokens, and the flags of sequences without room for all of them, or with pages out of
    range.
    """
    after = ends(stored, new, counts)
    added = new if counts is None else counts.clamp(0, new)
    stored.flags.bitwise_or_(torch.where(stored.lengths + added > after, FULL, 0).to(stored.flags.dtype))
    if stored.table is not None and new:
        row = torch.arange(len(after), device=after.device)[:, None]
        position = stored.lengths[:, None] + torch.arange(new, device=after.device)
        keep = position < after[:, None]
        *_, exists = _locate(stored.k, stored.table, row, position, keep)
        stored.flags.bitwise_or_(torch.where((keep & ~exists).any(1), ASTRAY, 0).to(stored.flags.dtype))
    stored.lengths.copy_(after)


def attend(
    q: torch.Tensor,
    g_cmp: torch.Tensor | None,
    g_slc: torch.Tensor | None,
    g_swa: torch.Tensor | None,
    stored: Stored,
    sizes: Sizes,
    window_size: int,
    scale: float,
    counts: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from new tokens that are written and compressed, those of q [B, n, Hq, D]; o [B, n, Hq, Dv] and the chosen
    blocks [B, n, Hk, block_count]; 0 and -1 for tokens that are not there.
    """
    batch, new, heads, _ = q.shape
    (kv_heads, channels), end = stored.k.shape[-2:], ends(stored, new, counts)
    values = stored.v.shape[-1]
    longest = int(end.max())
    o = torch.empty(batch, new, heads, values, dtype=q.dtype, device=q.device)
    indices = torch.full((batch, new, kv_heads, sizes.block_count), -1, dtype=torch.int32, device=q.device)
    k_cmp, v_cmp = compressed(stored, sizes, end, longest)
    keys = max(sizes.block_count * sizes.block_size, window_size)
    held = batch * (kv_heads * keys * max(channels, values) + heads * k_cmp.shape[1])
    piece = max(1, MOST_ELEMENTS // held)
    for first in range(0, new, piece):
        rows = slice(first, first + piece)
        # [B, piece, Hk, group, D]
        b_q = q[:, rows].unflatten(2, (kv_heads, -1))
        t = stored.lengths[:, None] + torch.arange(first, first + b_q.shape[1], device=q.device)
        # A token that is not there sees nothing.
        t = torch.where(t < end[:, None], t, -1)
        acc = torch.zeros(*b_q.shape[:-1], values, dtype=wide(stored.k.dtype), device=q.device)
        if g_cmp is not None or g_slc is not None:
            probabilities = _window_probabilities(b_q, k_cmp, sizes, t, scale)
        if g_cmp is not None:
            acc += _gate(g_cmp[:, rows], acc) * _sum_windows(probabilities, v_cmp)
        if g_slc is not None:
            blocks = _choose(probabilities.sum(3), sizes, t, longest)
            token = torch.arange(sizes.block_size, device=q.device)
            position = (blocks[..., None] * sizes.block_size + token).flatten(-2)
            keep = position <= t[..., None, None]
            acc += _gate(g_slc[:, rows], acc) * _attend_keys(b_q, stored, position, keep, scale)
            indices[:, rows, :, : blocks.shape[-1]] = blocks.masked_fill(
                blocks * sizes.block_size > t[..., None, None], -1
            )
        if g_swa is not None:
            position = t[..., None, None] - torch.arange(min(window_size, longest), device=q.device)
            acc += _gate(g_swa[:, rows], acc) * _attend_keys(b_q, stored, position, position >= 0, scale)
        # The result for a token that is not there may be NaN.
        o[:, rows] = acc.flatten(2, 3).masked_fill((t < 0)[..., None, None], 0.0)
    return o, indices


def _mean(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1, dtype=wide(x.dtype))


def _gate(gate: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
    """[B, n, Hq] -> [B, n, Hk, group, 1] in o's dtype."""
    return gate.to(o.dtype).reshape(*o.shape[:-1], 1)


def compressed(stored: Stored, sizes: Sizes, end: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Compressed keys and values up to the longest sequence's: [B · Hk, C, D or Dv], zeros behind a sequence's own."""
    most = max(0, (longest - sizes.compress_size) // sizes.compress_stride + 1)
    exists = torch.arange(most, device=end.device) < whole_windows(end, sizes)[:, None]
    k, v = (
        x[:, :most].masked_fill(~exists[..., None, None], 0.0).transpose(1, 2).flatten(0, 1)
        for x in (stored.k_cmp, stored.v_cmp)
    )
    return k, v


def _window_probabilities(
    q: torch.Tensor, k: torch.Tensor, sizes: Sizes, t: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, n, Hk, group, D] at t [B, n] over the windows that have ended: [B, Hk, n, group, C]."""
    rows = q.transpose(1, 2)
    scores = _product(rows.flatten(0, 1).flatten(1, 2), k.mT) * scale
    last = torch.arange(k.shape[1], device=q.device) * sizes.compress_stride + sizes.compress_size - 1
    return _softmax(scores.view(*rows.shape[:4], k.shape[1]), last <= t[:, None, :, None, None])


def _sum_windows(probabilities: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The compressed values by [B, Hk, n, group, C]: [B, n, Hk, group, Dv]."""
    o = _product(probabilities.flatten(0, 1).flatten(1, 2), v)
    return o.view(*probabilities.shape[:4], v.shape[-1]).transpose(1, 2)


def _choose(probabilities: torch.Tensor, sizes: Sizes, t: torch.Tensor, longest: int) -> torch.Tensor:
    """The best blocks of each kv head by [B, Hk, n, C], summed over its query heads: [B, n, Hk, S], ascending; at the
    end blocks after t, if any.
    """
    blocks = max(1, -(-longest // sizes.block_size))
    strides, windows = blocks * sizes.block_size // sizes.compress_stride, probabilities.shape[-1]
    # A window's share in a block is counted in strides: each window is added to the strides that it covers, then each
    # block's strides are summed.
    covered = sizes.compress_size // sizes.compress_stride
    room = max(strides, windows + covered - 1)
    by_stride = torch.stack(
        [torch.nn.functional.pad(probabilities, (i, room - windows - i)) for i in range(covered)]
    ).sum(0)[..., :strides]
    scores = by_stride.unflatten(-1, (blocks, -1)).sum(-1).transpose(1, 2)
    # Infinities are markers, so a NaN row must be made finite: a forced block stays the best and a later one the worst.
    scores = scores.masked_fill(scores.isnan().any(-1, keepdim=True), torch.finfo(scores.dtype).min)
    block, current = torch.arange(blocks, device=t.device), (t // sizes.block_size)[..., None, None]
    forced = (block < sizes.init_blocks) | (block > current - sizes.local_blocks)
    scores = scores.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)
    best, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    return order.masked_fill(best == -torch.inf, blocks)[..., : sizes.block_count].sort(dim=-1).values


def _attend_keys(
    q: torch.Tensor, stored: Stored, position: torch.Tensor, keep: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [B, n, Hk, group, D] over the keys at position [B, n, Hk or 1, K] where kept: [B, n, Hk, group, Dv]."""
    row, head = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2]))
    k, v, exists = (x.flatten(0, 2) for x in take(stored, row[:, None, None, None], position, head[:, None], keep))
    scores = _product(q.flatten(0, 2), k.mT) * scale
    probabilities = _softmax(scores, exists[:, None])
    return _product(probabilities, v).view(*q.shape[:4], v.shape[-1])


def _softmax(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    """Probabilities over what is kept, 0 elsewhere and in a row that sees nothing."""
    return torch.softmax(scores.masked_fill(~keep, -torch.inf), -1).masked_fill(~keep.any(-1, keepdim=True), 0.0)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """[P, M, K] @ [P, K, N] in fp32 (fp64 for fp64)."""
    return torch.bmm(a.to(wide(b.dtype)), b.to(wide(b.dtype)))
