"""Flash attention on the CPU: tile by tile, so that no score matrix is ever whole; torch's own fused kernel where it
computes the same thing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

BLOCK_M = 128
BLOCK_N = 512
# The accumulators' dtype and device, independent of torch's defaults.
_STATE: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}


@dataclass(frozen=True)
class Options:
    """A call's options besides the tensors; window limits as in the public call. Sinks are [Hq]."""

    causal: bool
    window: tuple[int, int]
    scale: float
    softcap: float
    sinks: torch.Tensor | None = None


def _sequences(
    cu_q: torch.Tensor | None, cu_k: torch.Tensor | None, batch: int
) -> Iterator[tuple[int | slice, int | slice]]:
    """Indices that take one sequence, [T, H, D], out of the queries' and the keys' batch."""
    if cu_q is None or cu_k is None:
        yield from ((b, b) for b in range(batch))
        return
    ends_q, ends_k = cu_q.tolist(), cu_k.tolist()
    for b in range(len(ends_q) - 1):
        yield slice(ends_q[b], ends_q[b + 1]), slice(ends_k[b], ends_k[b + 1])


def _fusable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options) -> bool:
    """Whether torch's fused kernel computes the same: it has no window, softcap, sinks, bottom-right mask or second
    width, and needs scale > 0.
    """
    square = q.shape[-3] == k.shape[-3] or not options.causal
    plain = options.window == (-1, -1) and options.softcap == 0 and options.scale > 0 and options.sinks is None
    return plain and square and q.shape[-1] == v.shape[-1] and q.numel() > 0 and k.numel() > 0


def _heads_first(x: torch.Tensor, heads: int) -> torch.Tensor:
    """[..., T, H, D] -> [B, heads, T, D] for torch's kernel, KV heads repeated for their query heads.

    In fp32: in 16 bits that kernel uses an approximate exponential, and its LSE is off by 6e-5.
    """
    x = (x if x.dim() == 4 else x[None]).transpose(1, 2).float()
    return x.repeat_interleave(heads // x.shape[1], dim=1)


def _fused_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    q4, k4, v4 = (_heads_first(x, q.shape[-2]) for x in (q, k, v))
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q4, k4, v4, 0.0, options.causal, scale=options.scale
    )
    return o.transpose(1, 2).reshape(q.shape).to(q.dtype).contiguous(), lse.reshape(
        *q.shape[:-3], q.shape[-2], q.shape[-3]
    ).contiguous()


def _fused_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    options: Options,
) -> tuple[torch.Tensor, ...]:
    heads = q.shape[-2]
    q4, k4, v4, o4, do4 = (_heads_first(x, heads) for x in (q, k, v, o, do))
    lse = (lse if lse.dim() == 3 else lse[None]).contiguous()
    gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do4, q4, k4, v4, o4, lse, 0.0, options.causal, scale=options.scale
    )
    dq, dk, dv = (x.transpose(1, 2) for x in gradients)
    if heads != k.shape[-2]:
        dk, dv = (x.unflatten(2, (-1, heads // k.shape[-2])).sum(3) for x in (dk, dv))
    return tuple(grad.reshape(x.shape).to(x.dtype) for grad, x in ((dq, q), (dk, k), (dv, v)))


@dataclass(frozen=True)
class _Tile:
    """One tile of one sequence: its rows, its keys, scores as the softmax takes them, and the derivative by the plain
    scores.
    """

    keys: slice
    scores: torch.Tensor
    slope: torch.Tensor | None


def _rows(x: torch.Tensor, rows: slice, kv_heads: int) -> torch.Tensor:
    """Rows of [T, H, D] as fp32 [Hk, group, rows, D]."""
    return x[rows].float().transpose(0, 1).unflatten(0, (kv_heads, -1))


def _keep(rows: slice, keys: slice, off: int, options: Options) -> torch.Tensor:
    position = torch.arange(rows.start, rows.stop, device="cpu")[:, None] + off
    key = torch.arange(keys.start, keys.stop, device="cpu")[None, :]
    left, right = options.window
    keep = torch.ones(rows.stop - rows.start, keys.stop - keys.start, dtype=torch.bool, device="cpu")
    if options.causal:
        keep &= key <= position
    if left >= 0:
        keep &= key >= position - left
    if right >= 0:
        keep &= key <= position + right
    return keep


def _tiles(q: torch.Tensor, k: torch.Tensor, rows: slice, options: Options) -> Iterator[_Tile]:
    """The tiles of keys that the queries `rows` reach."""
    off = k.shape[0] - q.shape[0]
    left, right = options.window
    right = 0 if options.causal else right
    low = 0 if left < 0 else max(0, rows.start + off - left)
    high = k.shape[0] if right < 0 else min(k.shape[0], rows.stop + off + right)
    b_q = _rows(q, rows, k.shape[1])
    for start in range(low // BLOCK_N * BLOCK_N, high, BLOCK_N):
        keys = slice(start, min(start + BLOCK_N, k.shape[0]))
        scores = (b_q.flatten(1, 2) @ _rows(k, keys, k.shape[1])[:, 0].mT).unflatten(1, b_q.shape[1:3]) * options.scale
        slope = None
        if options.softcap > 0:
            capped = torch.tanh(scores / options.softcap)
            scores, slope = capped * options.softcap, 1 - capped * capped
        scores = scores.masked_fill(~_keep(rows, keys, off, options), -torch.inf)
        yield _Tile(keys, scores, slope)


def _query_tiles(queries: int) -> Iterator[slice]:
    yield from (slice(start, min(start + BLOCK_M, queries)) for start in range(0, queries, BLOCK_M))


def _forward_sequence(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, options: Options
) -> None:
    """Fill o [Tq, Hq, Dv] and lse [Hq, Tq] of one sequence by online softmax, which a sink begins."""
    kv_heads = k.shape[1]
    for rows in _query_tiles(q.shape[0]):
        shape = (kv_heads, q.shape[1] // kv_heads, rows.stop - rows.start)
        m = torch.full(shape, -torch.inf, **_STATE)
        if options.sinks is not None:
            m = options.sinks.float().unflatten(0, (kv_heads, -1))[..., None].expand(shape)
        l = (m != -torch.inf).float()
        acc = torch.zeros(*shape, v.shape[-1], **_STATE)
        for tile in _tiles(q, k, rows, options):
            m_new = torch.maximum(m, tile.scores.amax(-1))
            shift = m_new.masked_fill(m_new == -torch.inf, 0.0)
            p = torch.exp(tile.scores - shift[..., None])
            rescale = torch.exp(m - shift)
            m, l = m_new, l * rescale + p.sum(-1)
            b_v = _rows(v, tile.keys, kv_heads)[:, 0]
            acc = acc * rescale[..., None] + (p.flatten(1, 2) @ b_v).unflatten(1, shape[1:])
        seen = l != 0
        out = acc / l.masked_fill(~seen, 1.0)[..., None]
        o[rows] = out.flatten(0, 1).transpose(0, 1).to(o.dtype)
        lse[:, rows] = torch.where(seen, m + torch.log(l), -torch.inf).flatten(0, 1)


def _backward_sequence(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    options: Options,
) -> None:
    """Fill dq, dk, dv of one sequence, each [T, H, D]; dk and dv are summed over query tiles in fp32, in order."""
    dq, dk, dv = gradients
    kv_heads = k.shape[1]
    acc_dk, acc_dv = (torch.zeros(kv_heads, x.shape[0], x.shape[-1], **_STATE) for x in (k, v))
    for rows in _query_tiles(q.shape[0]):
        b_do = _rows(do, rows, kv_heads)
        delta = (_rows(o, rows, kv_heads) * b_do).sum(-1)
        if dlse is not None:
            delta = delta - dlse[:, rows].unflatten(0, (kv_heads, -1))
        b_lse = lse[:, rows].unflatten(0, (kv_heads, -1))
        b_lse = b_lse.masked_fill(b_lse == -torch.inf, torch.inf)
        b_q, b_do = (x.flatten(1, 2) for x in (_rows(q, rows, kv_heads), b_do))
        acc_dq = torch.zeros_like(b_q)
        for tile in _tiles(q, k, rows, options):
            p = torch.exp(tile.scores - b_lse[..., None])
            dp = (b_do @ _rows(v, tile.keys, kv_heads)[:, 0].mT).view_as(p)
            ds = p * (dp - delta[..., None]) * options.scale
            ds = (ds if tile.slope is None else ds * tile.slope).flatten(1, 2)
            acc_dv[:, tile.keys] += p.flatten(1, 2).mT @ b_do
            acc_dk[:, tile.keys] += ds.mT @ b_q
            acc_dq += ds @ _rows(k, tile.keys, kv_heads)[:, 0]
        dq[rows] = acc_dq.unflatten(1, (-1, rows.stop - rows.start)).flatten(0, 1).transpose(0, 1).to(dq.dtype)
    dk.copy_(acc_dk.transpose(0, 1))
    dv.copy_(acc_dv.transpose(0, 1))


def _sink_gradient(
    sinks: torch.Tensor, o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """A sink's value is 0, so its score's gradient in a row is its probability times minus delta; summed over rows."""
    delta = (o.float() * do.float()).sum(-1).transpose(-1, -2)
    delta = delta if dlse is None else delta - dlse
    p = torch.exp(sinks.float()[:, None] - lse.masked_fill(lse == -torch.inf, torch.inf))
    return -(p * delta).transpose(0, -2).flatten(1).sum(1).to(sinks.dtype)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [..., Tq, Hq, Dv] in q's dtype and fp32 LSE [..., Hq, Tq]."""
    o = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="cpu")
    lse = torch.empty(*q.shape[:-3], q.shape[-2], q.shape[-3], **_STATE)
    if cu_q is None and _fusable(q, k, v, options):
        return _fused_forward(q, k, v, options)
    for at_q, at_k in _sequences(cu_q, cu_k, q.shape[0]):
        part = q[at_q], k[at_k], v[at_k]
        lse_part = lse[at_q] if cu_q is None else lse[:, at_q]
        if _fusable(*part, options):
            o[at_q], lse_part[:] = _fused_forward(*part, options)
        else:
            _forward_sequence(*part, o[at_q], lse_part, options)
    return o, lse


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    cu_q: torch.Tensor | None,
    cu_k: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv, and dsinks where there are sinks, in the inputs' dtypes and contiguous."""
    if cu_q is None and dlse is None and _fusable(q, k, v, options):
        return tuple(x.contiguous() for x in _fused_backward(q, k, v, o, lse, do, options))
    gradients = dq, dk, dv = tuple(torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in (q, k, v))
    for at_q, at_k in _sequences(cu_q, cu_k, q.shape[0]):
        part = q[at_q], k[at_k], v[at_k]
        by_head = at_q if cu_q is None else (slice(None), at_q)
        lse_part, dlse_part = lse[by_head], None if dlse is None else dlse[by_head]
        out = dq[at_q], dk[at_k], dv[at_k]
        if dlse is None and _fusable(*part, options):
            for grad, value in zip(out, _fused_backward(*part, o[at_q], lse_part, do[at_q], options), strict=True):
                grad.copy_(value)
        else:
            _backward_sequence(*part, o[at_q], lse_part, do[at_q], dlse_part, out, options)
    if options.sinks is not None:
        return *gradients, _sink_gradient(options.sinks, o, lse, do, dlse)
    return gradients
