"""Block-sparse attention on the CPU: a chunk of queries at a time, so that no score matrix is ever whole. The same
functions as in `launch`.

Heads lie in front. A value that is not finite reaches what sees it, and nothing else.
"""

from collections.abc import Iterator

import torch

from tilewise.ops.bsa.configs import LAYER_NORM_EPS, Options, Results, branch_dtype
from tilewise.ops.nsa import cpu_tiles as tiles
from tilewise.ops.nsa.cpu import compress
from tilewise.ops.nsa.cpu_tiles import STATE
from tilewise.ops.nsa.problem import mean_windows

Gates = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[rows, H, D] -> fp32 [H, rows, D], in its own memory: a product's last bit may depend on where its operands
    lie.
    """
    return x.float().transpose(0, 1).contiguous()


def _scaled(q: torch.Tensor, k: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """What SiLU is taken of, [.., M, N]; 0 where a pair takes no part, which SiLU leaves 0."""
    return (q @ k.mT * scale).masked_fill(~keep, 0.0)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [.., M, D], k [.., N, D], v [.., N, Dv], keep [M, N] -> the output [.., M, Dv], and the weights A(q·k) [.., M,
    N].
    """
    weights = torch.nn.functional.silu(_scaled(q, k, keep, scale)) / scale
    return tiles.weighted(weights, keep, v), weights


def _attend_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, keep: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv of `_attend`."""
    z = _scaled(q, k, keep, scale)
    # The derivative of A by q·k: that of SiLU, for the scale inside and the one outside cancel. sigmoid(-z) and not 1 -
    # sigmoid(z), which cancels.
    slope = z.sigmoid() * (1 + z * (-z).sigmoid())
    ds = (do @ v.mT * slope).masked_fill(~keep, 0.0)
    weights = torch.nn.functional.silu(z) / scale
    return tiles.weighted(ds, keep, k), tiles.weighted(ds.mT, keep.mT, q), tiles.weighted(weights.mT, keep.mT, do)


def _ended(rows: slice, block_size: int) -> torch.Tensor:
    """[rows, whole blocks up to the last query], True where the block ends no later than the query."""
    last = torch.arange(1, rows.stop // block_size + 1, device="cpu") * block_size - 1
    return last <= tiles.positions(rows)


def _near(rows: slice, window_size: int) -> tuple[slice, torch.Tensor]:
    """The keys that a chunk's queries reach together by the window, and which query keeps which."""
    keys = slice(max(rows.start - window_size + 1, 0), rows.stop)
    back = tiles.positions(rows) - torch.arange(keys.start, keys.stop, device="cpu")
    return keys, (back >= 0) & (back < window_size)


def _chosen(
    block_indices: torch.Tensor, rows: slice, tokens: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys [n] that a chunk's queries reach together by their blocks [rows, S], and which query keeps which, [rows,
    n].
    """
    indices = block_indices.long()
    blocks = indices[indices >= 0].unique()
    keys = (blocks[:, None] * block_size + torch.arange(block_size, device="cpu")).flatten()
    keys = keys[keys < tokens]
    takes = (indices[:, :, None] == blocks).any(1)
    return keys, takes[:, torch.searchsorted(blocks, keys // block_size)] & (keys <= tiles.positions(rows))


def _choose(weights: torch.Tensor, rows: slice, slots: int, block_size: int) -> torch.Tensor:
    """The best blocks by the weights of those that have ended, [H, rows, whole blocks] -> int32 [H, rows, slots]:
    ascending, -1 at the end.
    """
    blocks = -(-rows.stop // block_size)
    # Infinities are markers, so a score that overflowed or is NaN must be made finite: the query's own block stays the
    # best and a later one the worst.
    scores = torch.nn.functional.pad(
        weights.nan_to_num(nan=torch.finfo(torch.float32).min), (0, blocks - weights.shape[-1])
    )
    block, current = torch.arange(blocks, device="cpu"), tiles.positions(rows) // block_size
    scores = scores.masked_fill(block > current, -torch.inf).masked_fill(block == current, torch.inf)
    best, order = scores.sort(dim=-1, descending=True, stable=True)
    # What may not be chosen is numbered past the last block, so that it ends up behind what is.
    taken = order.masked_fill(best == -torch.inf, blocks)[..., :slots].sort(dim=-1).values
    taken = taken.masked_fill(taken == blocks, -1)
    return torch.nn.functional.pad(taken, (0, slots - taken.shape[-1]), value=-1).to(torch.int32)


def _alike(heads: int, interleave: bool) -> Iterator[slice]:
    """The heads that take the same blocks, together."""
    step = 2 if interleave else 1
    yield from (slice(h, h + step) for h in range(0, heads, step))


def _gated_norm(o: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """LN(gate · o) over the heads and channels of a token together, [rows, H, Dv]."""
    gated = o if gate is None else gate.float()[..., None] * o
    return torch.nn.functional.layer_norm(gated, gated.shape[-2:], eps=LAYER_NORM_EPS)


def _gated_norm_backward(
    dy: torch.Tensor, o: torch.Tensor, gate: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """LN(gate · o) again, and the gradients of o and of the gate."""
    factor = None if gate is None else gate.float()[..., None]
    gated = o if factor is None else factor * o
    axes = (-2, -1)
    centred = gated - gated.mean(axes, keepdim=True)
    slope = (centred.square().mean(axes, keepdim=True) + LAYER_NORM_EPS).rsqrt()
    normed = centred * slope
    dgated = slope * (dy - dy.mean(axes, keepdim=True) - normed * (dy * normed).mean(axes, keepdim=True))
    if factor is None:
        return normed, dgated, None
    return normed, factor * dgated, (dgated * o).sum(-1)


def _rows(gates: Gates, at: tiles.Place, rows: slice) -> Gates:
    g_cmp, g_slc, g_swa = (None if gate is None else gate[at][rows] for gate in gates)
    return g_cmp, g_slc, g_swa


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: Gates,
    cu: torch.Tensor | None,
    options: Options,
) -> Results:
    """All branches, the choice between the first two, and their sum; in q's dtype."""
    count, block_size, window_size, scale, interleave = options
    tokens, heads = q.shape[-3], q.shape[-2]
    slots = min(count, -(-tokens // block_size)) if cu is None else count
    windows = mean_windows(cu, tokens, block_size)
    k_cmp, v_cmp = (compress(x, cu, windows, block_size, block_size) for x in (k, v))
    o, kept = torch.empty(v.shape, dtype=q.dtype, device="cpu"), branch_dtype(q.dtype)
    o_cmp, o_slc = (torch.empty(v.shape, dtype=kept, device="cpu") for _ in range(2))
    o_swa = torch.empty(v.shape if window_size > 0 else (0,), dtype=kept, device="cpu")
    block_indices = torch.empty(*q.shape[:-3], heads, tokens, slots, dtype=torch.int32, device="cpu")
    for at, by_head, room in tiles.sequences(q.shape[0], cu, windows):
        one_q, one_k, one_v = q[at], k[at], v[at]
        length = one_q.shape[0]
        for rows in tiles.chunks(length):
            seen = rows.stop // block_size
            b_q, b_kc, b_vc = (_heads_first(x) for x in (one_q[rows], k_cmp[room][:seen], v_cmp[room][:seen]))
            by_blocks, weights = _attend(b_q, b_kc, b_vc, _ended(rows, block_size), scale)
            choosing = weights[::2].repeat_interleave(2, dim=0) if interleave else weights
            chosen = _choose(choosing, rows, slots, block_size)
            block_indices[by_head][:, rows] = chosen
            by_choice = torch.empty(heads, rows.stop - rows.start, v.shape[-1], **STATE)
            for h in _alike(heads, interleave):
                keys, keep = _chosen(chosen[h.start], rows, length, block_size)
                b_k, b_v = (_heads_first(x[keys, h]) for x in (one_k, one_v))
                by_choice[h] = _attend(b_q[h], b_k, b_v, keep, scale)[0]
            outputs = [(by_blocks, o_cmp), (by_choice, o_slc)]
            if window_size > 0:
                near, keep = _near(rows, window_size)
                b_k, b_v = (_heads_first(x[near]) for x in (one_k, one_v))
                outputs.append((_attend(b_q, b_k, b_v, keep, scale)[0], o_swa))
            total = torch.zeros(rows.stop - rows.start, heads, v.shape[-1], **STATE)
            for (output, stored), gate in zip(outputs, _rows(gates, at, rows), strict=False):
                stored[at][rows] = output.transpose(0, 1).to(kept)
                total += _gated_norm(output.transpose(0, 1), gate)
            o[at][rows] = (u[at][rows].float() * total).to(q.dtype)
    return Results(o, block_indices, k_cmp, v_cmp, o_cmp, o_slc, o_swa)


def _sum_backward(
    do: torch.Tensor,
    u: torch.Tensor,
    gates: Gates,
    outputs: list[torch.Tensor],
    dgates: list[torch.Tensor | None],
    at: tiles.Place,
    rows: slice,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A chunk of du [rows, H, Dv], and each branch's do [H, rows, Dv]; fills the same rows of dgates."""
    b_do = do[at][rows].float()
    dy, total, each = b_do * u[at][rows].float(), torch.zeros(b_do.shape, **STATE), []
    for output, gate, dgate in zip(outputs, _rows(gates, at, rows), dgates, strict=False):
        normed, d_output, d_gate = _gated_norm_backward(dy, output[at][rows].float(), gate)
        total += normed
        each.append(d_output.transpose(0, 1))
        if dgate is not None and d_gate is not None:
            dgate[at][rows] = d_gate.to(dgate.dtype)
    return b_do * total, each


def backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    u: torch.Tensor,
    gates: Gates,
    block_indices: torch.Tensor,
    k_cmp: torch.Tensor,
    v_cmp: torch.Tensor,
    o_cmp: torch.Tensor,
    o_slc: torch.Tensor,
    o_swa: torch.Tensor,
    cu: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor | None, ...]:
    """dq, dk, dv, du and the gates' gradients, each in its input's dtype and contiguous; dk and dv are summed over
    chunks in fp32, in order.
    """
    _, block_size, window_size, scale, interleave = options
    heads, windows = q.shape[-2], mean_windows(cu, q.shape[-3], block_size)
    dq, dk, dv, du = (torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v, u))
    dgates = [None if gate is None else torch.zeros(gate.shape, dtype=gate.dtype, device="cpu") for gate in gates]
    outputs = [o_cmp, o_slc, o_swa] if window_size > 0 else [o_cmp, o_slc]
    for at, by_head, room in tiles.sequences(q.shape[0], cu, windows):
        one_q, one_k, one_v, one_chosen = q[at], k[at], v[at], block_indices[by_head]
        length = one_q.shape[0]
        whole = length // block_size
        acc_dk, acc_dv = (torch.zeros(heads, length, x.shape[-1], **STATE) for x in (k, v))
        acc_dkc, acc_dvc = (torch.zeros(heads, whole, x.shape[-1], **STATE) for x in (k, v))
        for rows in tiles.chunks(length):
            du[at][rows], (do_cmp, do_slc, *do_swa) = _sum_backward(do, u, gates, outputs, dgates, at, rows)
            seen = rows.stop // block_size
            b_q, b_kc, b_vc = (_heads_first(x) for x in (one_q[rows], k_cmp[room][:seen], v_cmp[room][:seen]))
            acc_dq, b_dk, b_dv = _attend_backward(b_q, b_kc, b_vc, do_cmp, _ended(rows, block_size), scale)
            acc_dkc[:, :seen] += b_dk
            acc_dvc[:, :seen] += b_dv
            for h in _alike(heads, interleave):
                keys, keep = _chosen(one_chosen[h.start, rows], rows, length, block_size)
                b_k, b_v = (_heads_first(x[keys, h]) for x in (one_k, one_v))
                b_dq, b_dk, b_dv = _attend_backward(b_q[h], b_k, b_v, do_slc[h], keep, scale)
                acc_dq[h] += b_dq
                # No key comes twice.
                acc_dk[h].index_add_(1, keys, b_dk)
                acc_dv[h].index_add_(1, keys, b_dv)
            for do_near in do_swa:
                near, keep = _near(rows, window_size)
                b_k, b_v = (_heads_first(x[near]) for x in (one_k, one_v))
                b_dq, b_dk, b_dv = _attend_backward(b_q, b_k, b_v, do_near, keep, scale)
                acc_dq += b_dq
                acc_dk[:, near] += b_dk
                acc_dv[:, near] += b_dv
            dq[at][rows] = acc_dq.transpose(0, 1).to(dq.dtype)
        for total, of_blocks, gradient in ((acc_dk, acc_dkc, dk), (acc_dv, acc_dvc, dv)):
            # A block's mean takes an equal part of each of its tokens.
            total[:, : whole * block_size] += (of_blocks / block_size).repeat_interleave(block_size, dim=1)
            gradient[at] = total.transpose(0, 1).to(gradient.dtype)
    return dq, dk, dv, du, *dgates
