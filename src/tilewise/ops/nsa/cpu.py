"""Native sparse attention on the CPU: a chunk of queries at a time, so that no score matrix is ever whole.

The same functions as in `launch`, with the same arguments. native_sparse_attend takes whole blocks, each as often as it
is named, with its own factor: the blocks that a chunk names are scored once, as a grid [queries, blocks, keys of a
block]; every naming then takes its block out of that grid (`take`), and what belongs to namings is summed back into it
(`give_back`).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.ops.nsa import cpu_tiles as tiles
from tilewise.ops.nsa.cpu_tiles import STATE
from tilewise.ops.nsa.problem import Sizes, window_count
from tilewise.ops.nsa.problem import mean_windows as mean_windows


def compress(
    x: torch.Tensor, cu: torch.Tensor | None, windows: torch.Tensor | None, size: int, stride: int
) -> torch.Tensor:
    """The windows' means in x's dtype: [B, T, H, D] -> [B, C, H, D]; packed [N, H, D] -> [N // stride, H, D], 0 where
    there is no window.
    """
    tokens = x.shape[-3]
    rows = window_count(tokens, size, stride) if cu is None else tokens // stride
    means = torch.zeros(*x.shape[:-3], rows, *x.shape[-2:], dtype=x.dtype, device="cpu")
    for at, _, room in tiles.sequences(x.shape[0], cu, windows):
        one = x[at]
        count = window_count(one.shape[0], size, stride)
        if count > 0:
            # A window is a run of strides, each summed once.
            strides = one[: (count - 1) * stride + size].unflatten(0, (-1, stride)).sum(1, dtype=torch.float32)
            means[room][:count] = strides.unfold(0, size // stride, 1).sum(-1) / size
    return means


def compress_backward(
    dx_cmp: torch.Tensor, tokens: int, cu: torch.Tensor | None, windows: torch.Tensor | None, size: int, stride: int
) -> torch.Tensor:
    """The gradient of what `compress` read, [B, tokens, H, D] or [tokens, H, D], in dx_cmp's dtype: each token's
    windows, summed in order.
    """
    dx = torch.zeros(*dx_cmp.shape[:-3], tokens, *dx_cmp.shape[-2:], dtype=dx_cmp.dtype, device="cpu")
    for at, _, room in tiles.sequences(dx.shape[0], cu, windows):
        one = dx[at]
        count = window_count(one.shape[0], size, stride)
        if count > 0:
            each = torch.nn.functional.pad(
                dx_cmp[room][:count].float() / size, (0, 0, 0, 0, size // stride - 1, size // stride - 1)
            )
            by_stride = each.unfold(0, size // stride, 1).sum(-1)
            one[: by_stride.shape[0] * stride] = by_stride.repeat_interleave(stride, dim=0).to(dx.dtype)
    return dx


def _ended(place: slice, windows: int, size: int, stride: int, group: int) -> torch.Tensor:
    """[group · rows, windows], True where the window ends no later than the query."""
    last = torch.arange(windows, device="cpu") * stride + size - 1
    return (last <= tiles.positions(place)).repeat(group, 1)


def _empty_outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    return o, torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], **STATE)


def compressed_forward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the windows that have ended: output in q's dtype, and LSE."""
    o, lse = _empty_outputs(q, v_cmp)
    heads, group = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
    for at, by_head, room, start in tiles.placed(q.shape[0], cu, windows, first):
        one_q, one_k, one_v, one_o, one_lse = q[at], k_cmp[room], v_cmp[room], o[at], lse[by_head]
        for rows, place in tiles.placed_chunks(one_q.shape[0], start):
            seen = min(window_count(place.stop, size, stride), one_k.shape[0])
            b_q, b_k, b_v = (tiles.heads_first(x, heads) for x in (one_q[rows], one_k[:seen], one_v[:seen]))
            b_o, b_lse = tiles.attend(b_q, b_k, b_v, _ended(place, seen, size, stride, group), scale)
            one_o[rows] = tiles.tokens_first(b_o, rows.stop - rows.start).to(o.dtype)
            one_lse[:, rows] = b_lse.reshape(heads * group, -1)
    return o, lse


def compressed_backward(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    size: int,
    stride: int,
    scale: float,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk_cmp and dv_cmp in the inputs' dtype and contiguous; what belongs to a window is summed over chunks in
    fp32, in order.
    """
    dq = torch.empty(q.shape, dtype=q.dtype, device="cpu")
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device="cpu") for x in (k_cmp, v_cmp))
    heads, group = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
    for at, by_head, room, start in tiles.placed(q.shape[0], cu, windows, first):
        one_q, one_k, one_v, one_do, one_lse = q[at], k_cmp[room], v_cmp[room], do[at], lse[by_head]
        acc_dk, acc_dv = (torch.zeros(heads, x.shape[0], x.shape[-1], **STATE) for x in (one_k, one_v))
        for rows, place in tiles.placed_chunks(one_q.shape[0], start):
            seen = min(window_count(place.stop, size, stride), one_k.shape[0])
            b_q, b_k, b_v, b_do = (
                tiles.heads_first(x, heads) for x in (one_q[rows], one_k[:seen], one_v[:seen], one_do[rows])
            )
            row_delta = tiles.delta(o[at], one_do, None if dlse is None else dlse[by_head], rows)
            b_lse, row_delta = (x.reshape(heads, -1) for x in (one_lse[:, rows], row_delta))
            b_dq, b_dk, b_dv = tiles.attend_backward(
                b_q, b_k, b_v, b_do, b_lse, row_delta, _ended(place, seen, size, stride, group), scale
            )
            acc_dk[:, :seen] += b_dk
            acc_dv[:, :seen] += b_dv
            dq[at][rows] = tiles.tokens_first(b_dq, rows.stop - rows.start).to(dq.dtype)
        dk[room] = acc_dk.transpose(0, 1).to(dk.dtype)
        dv[room] = acc_dv.transpose(0, 1).to(dv.dtype)
    return dq, dk, dv


def _block_scores(p: torch.Tensor, place: slice, sizes: Sizes) -> torch.Tensor:
    """[Hk, rows, windows] -> [Hk, rows, blocks up to the last query's]; +inf where a block is forced, -inf where it
    comes later than the query.
    """
    size, stride, block_size, _, init_blocks, local_blocks = sizes
    blocks = (place.stop - 1) // block_size + 1
    # What a window and a block share is whole strides: each stride takes the sum over the windows that hold it, a block
    # that over its strides.
    around = size // stride - 1
    by_stride = torch.nn.functional.pad(p, (around, around)).unfold(-1, size // stride, 1).sum(-1) if p.shape[-1] else p
    scores = (
        torch.nn.functional.pad(by_stride, (0, blocks * (block_size // stride) - by_stride.shape[-1]))
        .unflatten(-1, (blocks, -1))
        .sum(-1)
    )
    # Infinities are markers, so a NaN row must be made finite: a forced block stays the best and a later one the worst.
    scores = scores.masked_fill(scores.isnan().any(-1, keepdim=True), torch.finfo(torch.float32).min)
    block, current = torch.arange(blocks, device="cpu"), tiles.positions(place) // block_size
    forced = (block < init_blocks) | (block > current - local_blocks)
    return scores.masked_fill(forced, torch.inf).masked_fill(block > current, -torch.inf)


def choose(
    q: torch.Tensor,
    k_cmp: torch.Tensor,
    lse: torch.Tensor,
    cu: torch.Tensor | None,
    windows: torch.Tensor | None,
    sizes: Sizes,
    scale: float,
    first: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best blocks of each query and KV head, int32 [.., T, Hk, block_count]: ascending, -1 at the end; ties go to
    the lower index.
    """
    size, stride, count = sizes.compress_size, sizes.compress_stride, sizes.block_count
    heads, group = k_cmp.shape[-2], q.shape[-2] // k_cmp.shape[-2]
    chosen = torch.full((*q.shape[:-2], heads, count), -1, dtype=torch.int32, device="cpu")
    for at, by_head, room, start in tiles.placed(q.shape[0], cu, windows, first):
        one_q, one_k, one_lse, one_chosen = q[at], k_cmp[room], lse[by_head], chosen[at]
        for rows, place in tiles.placed_chunks(one_q.shape[0], start):
            seen = min(window_count(place.stop, size, stride), one_k.shape[0])
            b_q, b_k = tiles.heads_first(one_q[rows], heads), tiles.heads_first(one_k[:seen], heads)
            scores = (b_q @ b_k.mT * scale).masked_fill(~_ended(place, seen, size, stride, group), -torch.inf)
            p = tiles.probabilities(scores, one_lse[:, rows].reshape(heads, -1))
            best, order = _block_scores(p.unflatten(1, (group, -1)).sum(1), place, sizes).sort(
                dim=-1, descending=True, stable=True
            )
            # What may not be chosen is numbered past the last block, so that it ends up behind what is.
            blocks = order.shape[-1]
            taken = order.masked_fill(best == -torch.inf, blocks)[..., :count].sort(dim=-1).values
            one_chosen[rows, :, : taken.shape[-1]] = (
                taken.masked_fill(taken == blocks, -1).transpose(0, 1).to(torch.int32)
            )
    return chosen


def _chosen_keys(
    chosen: torch.Tensor, place: slice, tokens: int, block_size: int, group: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys [n] that a chunk's queries reach together, of their blocks [rows, S], and which query keeps which,
    [group · rows, n].
    """
    last = (place.stop - 1) // block_size
    chosen = chosen.long()
    blocks = chosen[(chosen >= 0) & (chosen <= last)].unique()
    keys = (blocks[:, None] * block_size + torch.arange(block_size, device="cpu")).flatten()
    keys = keys[keys < tokens]
    takes = (chosen[:, :, None] == blocks).any(1)
    keep = takes[:, torch.searchsorted(blocks, keys // block_size)] & (keys <= tiles.positions(place))
    return keys, keep.repeat(group, 1)


def selected_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
    cu_k: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention over the keys of the selected blocks, each key once: output in q's dtype, and LSE."""
    o, lse = _empty_outputs(q, v)
    heads, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    for at, by_head, room, start in tiles.placed(q.shape[0], cu, cu_k, first):
        one_q, one_k, one_v, one_indices, one_o, one_lse = q[at], k[room], v[room], indices[at], o[at], lse[by_head]
        for rows, place in tiles.placed_chunks(one_q.shape[0], start):
            b_q = tiles.heads_first(one_q[rows], heads)
            for h in range(heads):
                of_head = slice(h * group, (h + 1) * group)
                keys, keep = _chosen_keys(one_indices[rows, h], place, one_k.shape[0], block_size, group)
                b_o, b_lse = tiles.attend(b_q[h], one_k[keys, h].float(), one_v[keys, h].float(), keep, scale)
                one_o[rows, of_head] = tiles.tokens_first(b_o[None], rows.stop - rows.start).to(o.dtype)
                one_lse[of_head, rows] = b_lse.view(group, -1)
    return o, lse


def selected_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu: torch.Tensor | None,
    block_size: int,
    scale: float,
    cu_k: torch.Tensor | None = None,
    first: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in the inputs' dtype and contiguous; dk and dv are summed over chunks in fp32, in order."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v))
    heads, group = k.shape[-2], q.shape[-2] // k.shape[-2]
    for at, by_head, room, start in tiles.placed(q.shape[0], cu, cu_k, first):
        one_q, one_k, one_v, one_indices, one_do, one_lse = q[at], k[room], v[room], indices[at], do[at], lse[by_head]
        acc_dk, acc_dv = (torch.zeros(heads, x.shape[0], x.shape[-1], **STATE) for x in (one_k, one_v))
        for rows, place in tiles.placed_chunks(one_q.shape[0], start):
            b_q, b_do = tiles.heads_first(one_q[rows], heads), tiles.heads_first(one_do[rows], heads)
            row_delta = tiles.delta(o[at], one_do, None if dlse is None else dlse[by_head], rows)
            b_lse, row_delta = (x.reshape(heads, -1) for x in (one_lse[:, rows], row_delta))
            for h in range(heads):
                keys, keep = _chosen_keys(one_indices[rows, h], place, one_k.shape[0], block_size, group)
                b_k, b_v = one_k[keys, h].float(), one_v[keys, h].float()
                b_dq, b_dk, b_dv = tiles.attend_backward(b_q[h], b_k, b_v, b_do[h], b_lse[h], row_delta[h], keep, scale)
                # No key comes twice.
                acc_dk[h].index_add_(0, keys, b_dk)
                acc_dv[h].index_add_(0, keys, b_dv)
                dq[at][rows, h * group : (h + 1) * group] = tiles.tokens_first(b_dq[None], rows.stop - rows.start).to(
                    dq.dtype
                )
        dk[room] = acc_dk.transpose(0, 1).to(dk.dtype)
        dv[room] = acc_dv.transpose(0, 1).to(dv.dtype)
    return dq, dk, dv


@dataclass(frozen=True)
class _Namings:
    """What one chunk's queries name: keys [blocks · block_size] of the blocks together, and for each naming (the own
    block too) its block's place [rows, S], the keys that take part [rows, S, block_size] and the factor of its scores
    [rows, S].
    """

    keys: torch.Tensor
    place: torch.Tensor
    keep: torch.Tensor
    factor: torch.Tensor

    def _at(self, group: int) -> torch.Tensor:
        return self.place[None, :, :, None].expand(group, *self.keep.shape)

    def take(self, grid: torch.Tensor) -> torch.Tensor:
        """[group · rows, keys of all blocks] -> [group, rows, S, block_size]."""
        grid = grid.unflatten(0, (-1, self.keep.shape[0])).unflatten(2, (-1, self.keep.shape[2]))
        return grid.gather(2, self._at(grid.shape[0]))

    def give_back(self, x: torch.Tensor) -> torch.Tensor:
        """[group, rows, S, block_size] -> [group · rows, keys of all blocks], summed over the namings of a block."""
        blocks = self.keys.shape[0] // self.keep.shape[2]
        grid = torch.zeros(*x.shape[:2], blocks, x.shape[3], **STATE)
        return grid.scatter_add_(2, self._at(x.shape[0]), x).flatten(2, 3).flatten(0, 1)

    def seen(self, group: int) -> torch.Tensor:
        """[group · rows, keys of all blocks], True where any naming keeps the key."""
        return self.give_back(self.keep.float()[None]).repeat(group, 1) > 0


def _namings(
    chosen: torch.Tensor, factor: torch.Tensor | None, own: bool, rows: slice, tokens: int, block_size: int
) -> _Namings:
    """From a chunk's indices [rows, S], -1 where there is no block, and their factors."""
    query, inside = tiles.positions(rows), torch.arange(block_size, device="cpu")
    chosen = chosen.long()
    named = (chosen >= 0) & (chosen < -(-tokens // block_size))
    chosen = chosen.masked_fill(~named, 0)
    # The factor of a missing block may be NaN.
    factor = torch.ones(chosen.shape, **STATE) if factor is None else factor.float().masked_fill(~named, 0.0)
    keep = named[..., None] & (chosen[..., None] * block_size + inside < tokens)
    if own:
        current = query // block_size
        chosen, factor = torch.cat([chosen, current], 1), torch.cat([factor, torch.ones(current.shape, **STATE)], 1)
        keep = torch.cat([keep, (current * block_size + inside <= query)[:, None]], 1)
    # Block 0 stands for what is not named: nothing of it is kept.
    blocks = chosen.unique()
    keys = (blocks[:, None] * block_size + inside).flatten().clamp(max=tokens - 1)
    return _Namings(keys, torch.searchsorted(blocks, chosen), keep, factor)


def _chunks(
    q: torch.Tensor, k: torch.Tensor, indices: torch.Tensor, sel_scale: torch.Tensor | None, own: bool, block_size: int
) -> Iterator[tuple[int, slice, slice, int, int, _Namings]]:
    """Each batch entry, chunk of queries, the query heads that share indices, their KV head, their place among the
    indices, what they name.
    """
    tokens, index_heads = q.shape[1], indices.shape[2]
    group, repeats = q.shape[2] // index_heads, index_heads // k.shape[2]
    for b in range(q.shape[0]):
        for rows in tiles.chunks(tokens):
            for i in range(index_heads):
                factor = None if sel_scale is None else sel_scale[b, rows, i]
                yield (
                    b,
                    rows,
                    slice(i * group, (i + 1) * group),
                    i // repeats,
                    i,
                    _namings(indices[b, rows, i], factor, own, rows, tokens, block_size),
                )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """[rows, group, D] -> fp32 [group · rows, D]."""
    return tiles.heads_first(x, 1)[0]


def _scores(products: torch.Tensor, namings: _Namings, scale: float) -> torch.Tensor:
    """[group, rows, S, block_size], -inf where a key takes no part."""
    return (products * namings.factor[..., None] * scale).masked_fill(~namings.keep, -torch.inf)


def attend_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, T, Hq, D], indices and sel_scale [B, T, Hk or Hq, S] -> output in q's dtype, and LSE [B, Hq, T]."""
    o = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, **STATE)
    for b, rows, heads, h, _, namings in _chunks(q, k, indices, sel_scale, own, block_size):
        b_q, b_k, b_v = _rows(q[b, rows, heads]), k[b, namings.keys, h].float(), v[b, namings.keys, h].float()
        scores = _scores(namings.take(b_q @ b_k.T), namings, scale)
        p, b_lse = tiles.softmax(scores.flatten(2))
        weights = namings.give_back(p.view_as(scores).masked_fill(~namings.keep, 0.0))
        b_o = tiles.weighted(weights, namings.seen(scores.shape[0]), b_v)
        o[b, rows, heads] = tiles.tokens_first(b_o[None], rows.stop - rows.start).to(o.dtype)
        lse[b, heads, rows] = b_lse
    return o, lse


def attend_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    indices: torch.Tensor,
    sel_scale: torch.Tensor | None,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    own: bool,
    block_size: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """dq, dk, dv and sel_scale's gradient, each in its input's dtype and contiguous; sums over chunks in fp32, in
    order.
    """
    dq = torch.zeros(q.shape, dtype=q.dtype, device="cpu")
    acc_dk, acc_dv = (torch.zeros(x.shape, **STATE) for x in (k, v))
    dsel = None if sel_scale is None else torch.zeros(sel_scale.shape, dtype=sel_scale.dtype, device="cpu")
    for b, rows, heads, h, i, namings in _chunks(q, k, indices, sel_scale, own, block_size):
        b_q, b_do, b_k, b_v = (
            _rows(q[b, rows, heads]),
            _rows(do[b, rows, heads]),
            k[b, namings.keys, h].float(),
            v[b, namings.keys, h].float(),
        )
        row_delta = tiles.delta(o[b, :, heads], do[b, :, heads], None if dlse is None else dlse[b, heads], rows)
        products = namings.take(b_q @ b_k.T)
        p = tiles.probabilities(_scores(products, namings, scale), lse[b, heads, rows, None])
        ds = (p * (namings.take(b_do @ b_v.T) - row_delta[..., None, None])).masked_fill(~namings.keep, 0.0) * scale
        if dsel is not None:
            by_naming = (ds * products.masked_fill(~namings.keep, 0.0)).sum((0, 3))
            dsel[b, rows, i] = by_naming[:, : dsel.shape[-1]].to(dsel.dtype)
        seen, by_key = namings.seen(ds.shape[0]), namings.give_back(ds * namings.factor[..., None])
        dq[b, rows, heads] = tiles.tokens_first(tiles.weighted(by_key, seen, b_k)[None], rows.stop - rows.start).to(
            dq.dtype
        )
        # Keys past the last token stand for it, and add 0.
        acc_dk[b, :, h].index_add_(0, namings.keys, tiles.weighted(by_key.T, seen.T, b_q))
        acc_dv[b, :, h].index_add_(0, namings.keys, tiles.weighted(namings.give_back(p).T, seen.T, b_do))
    return dq, acc_dk.to(k.dtype), acc_dv.to(v.dtype), dsel


def combine(outputs: list[torch.Tensor], gates: list[torch.Tensor]) -> torch.Tensor:
    """The sum of gate · output in fp32, in the outputs' dtype."""
    total = torch.zeros(outputs[0].shape, **STATE)
    for output, gate in zip(outputs, gates, strict=True):
        total += gate.float()[..., None] * output
    return total.to(outputs[0].dtype)


def combine_backward(do: torch.Tensor, output: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One branch's part: gate · do in the output's dtype, and rowsum(do · output) in the gate's."""
    return (gate.float()[..., None] * do).to(output.dtype), (do.float() * output).sum(-1).to(gate.dtype)
