"""Flash attention tile by tile in torch, exactly as the kernels do it: the same tiles in the same order, the same
state, the same casts.

One program at a time: a query tile of one head (forward, dQ) or a key tile (dK and dV). Values come as (name, tensor),
step by step; a number at the end of a name is its step. State is fp32, or fp64 for fp64 inputs; tiles are padded with
zeros as loads pad them.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tilewise.ops.flash.hopper.configs import sweeps_heads

Named = tuple[str, torch.Tensor]
# One of the simulations below.
Program = Callable[..., Iterator[Named]]
LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Tiling:
    """Tiles of block_m queries and block_n keys; `fused_softmax` is base 2 with scale · log2(e) folded in, else base e.

    `reverse` walks from the last tile to the first; for dK and dV where `sweeps_heads` says no (causal), in each tile
    over a group's heads, from the last on too. The kernels for Hopper do, in the forward and for dK and dV; their dQ
    takes blocks of keys from the first on. With `rounded_p` dS comes from probabilities in the inputs' precision, as
    those kernels hand them over where warpgroups share keys.
    """

    block_m: int
    block_n: int
    fused_softmax: bool = True
    reverse: bool = False
    rounded_p: bool = False


@dataclass(frozen=True)
class Options:
    """What is computed: window limits None for none (causal is right = 0), softcap 0 for none.

    With a key_stride, key j stands at `j * key_stride` and query i sees it where that is `<= i + right`; left is None
    then, and right may be < 0.
    """

    scale: float
    left: int | None = None
    right: int | None = None
    softcap: float = 0.0
    key_stride: int | None = None

    def diagonal(self, queries: int, keys: int) -> int:
        """Where query 0 stands among the keys' positions."""
        return keys - queries if self.key_stride is None else 0


def state_dtype(x: torch.Tensor) -> torch.dtype:
    """What sums are kept in."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tile(x: torch.Tensor, start: int, rows: int) -> torch.Tensor:
    """Rows `start .. start + rows`, zeros where there are none."""
    part = x[start : start + rows]
    return torch.cat([part, part.new_zeros(rows - part.shape[0], *part.shape[1:])])


def dot(a: torch.Tensor, b: torch.Tensor, state: torch.dtype) -> torch.Tensor:
    """A product of tiles in their own precision, summed in `state`."""
    return a.to(state) @ b.to(state)


def keep(
    i_m: int, i_n: int, queries: int, keys: int, tiling: Tiling, options: Options, device: torch.device
) -> torch.Tensor:
    """[M, N], True where the key takes part for the query."""
    position = i_m + torch.arange(tiling.block_m, device=device)[:, None] + options.diagonal(queries, keys)
    key = i_n + torch.arange(tiling.block_n, device=device)[None, :]
    kept = (key < keys).expand(tiling.block_m, -1)
    if options.right is not None:
        kept = kept & (key * (options.key_stride or 1) <= position + options.right)
    if options.left is not None:
        kept = kept & (key >= position - options.left)
    return kept


def key_blocks(i_m: int, queries: int, keys: int, tiling: Tiling, options: Options) -> list[int]:
    """First keys of the tiles that query tile `i_m` reaches, in the order in which they are walked."""
    off = options.diagonal(queries, keys)
    low, high = 0, keys
    if options.right is not None:
        # Keys that stand before what the last query sees no more, rounded up.
        high = max(0, min(keys, -(-(i_m + tiling.block_m + off + options.right) // (options.key_stride or 1))))
    if options.left is not None:
        low = min(max(0, i_m + off - options.left), high)
    blocks = list(range(low // tiling.block_n * tiling.block_n, high, tiling.block_n))
    return blocks[::-1] if tiling.reverse else blocks


def query_blocks(i_n: int, queries: int, keys: int, tiling: Tiling, options: Options) -> list[int]:
    """First queries of the tiles that reach key tile `i_n`."""
    off = options.diagonal(queries, keys)
    low, high = 0, queries
    if options.left is not None:
        high = max(0, min(queries, i_n + tiling.block_n - off + options.left))
    if options.right is not None:
        low = min(max(0, i_n * (options.key_stride or 1) - off - options.right), high)
    return list(range(low // tiling.block_m * tiling.block_m, high, tiling.block_m))


def _exponential(tiling: Tiling, x: torch.Tensor) -> torch.Tensor:
    return torch.exp2(x) if tiling.fused_softmax else torch.exp(x)


def _units(tiling: Tiling, options: Options) -> tuple[float, float]:
    """The sign that goes into q, and what a score is multiplied by in the exponent; both as the kernel has them, whose
    factor must be positive.
    """
    sign = 1.0 if options.softcap or options.scale > 0 else -1.0 if options.scale < 0 else 0.0
    factor = options.softcap or abs(options.scale) or 1.0
    return sign, factor * (LOG2E if tiling.fused_softmax else 1.0)


def _cap(scores: torch.Tensor, options: Options) -> torch.Tensor:
    """Scores in units of softcap, where there is one."""
    return torch.tanh(scores * (options.scale / options.softcap)) if options.softcap else scores


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i_m: int, tiling: Tiling, options: Options
) -> Iterator[Named]:
    """Query tile `i_m` of one head: q [Tq, D], k [Tk, D], v [Tk, Dv].

    Q; for each key tile i: K_i, S_pre_scaling_i, S_i (masked), M_i, L_i, P_i, V_i, O_scale_i, O_i; then O_final and
    LSE.
    """
    queries, keys = q.shape[0], k.shape[0]
    blocks = key_blocks(i_m, queries, keys, tiling, options)
    kept = partial(keep, i_m, queries=queries, keys=keys, tiling=tiling, options=options, device=q.device)
    yield from attend(tile(q, i_m, tiling.block_m), k, v, blocks, kept, tiling, options)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Iterable[int],
    kept: Callable[[int], torch.Tensor],
    tiling: Tiling,
    options: Options,
) -> Iterator[Named]:
    """A tile of queries [M, D] over key tiles that start at `blocks`, with the pairs [M, N] that are `kept` there:
    what `forward` yields.
    """
    state = state_dtype(q)
    sign, factor = _units(tiling, options)
    b_q = q * sign
    yield "Q", b_q
    m = torch.full(q.shape[:1], -math.inf, dtype=state, device=q.device)
    l = torch.zeros_like(m)
    acc = torch.zeros(q.shape[0], v.shape[1], dtype=state, device=q.device)
    for step, i_n in enumerate(blocks):
        b_k = tile(k, i_n, tiling.block_n)
        yield f"K_{step}", b_k
        scores = dot(b_q, b_k.T, state)
        yield f"S_pre_scaling_{step}", scores
        scores = _cap(scores, options).masked_fill(~kept(i_n), -math.inf)
        yield f"S_{step}", scores
        m_new = torch.maximum(m, scores.amax(1) * factor)
        yield f"M_{step}", m_new
        # A row that has seen nothing yet is shifted by 0, so that its terms are 0 and not NaN.
        shift = m_new.masked_fill(m_new == -math.inf, 0.0)
        p = _exponential(tiling, scores * factor - shift[:, None])
        rescale = _exponential(tiling, m - shift)
        l, m = l * rescale + p.sum(1), m_new
        yield f"L_{step}", l
        yield f"P_{step}", p
        b_v = tile(v, i_n, tiling.block_n)
        yield f"V_{step}", b_v
        acc = acc * rescale[:, None]
        yield f"O_scale_{step}", acc
        acc = acc + dot(p.to(v.dtype), b_v, state)
        yield f"O_{step}", acc
    seen = l != 0
    total = torch.where(seen, l, 1.0)
    yield "O_final", acc / total[:, None]
    logarithm = (m + torch.log2(total)) / LOG2E if tiling.fused_softmax else m + torch.log(total)
    yield "LSE", torch.where(seen, logarithm, -math.inf)


def prepare(
    o: torch.Tensor, do: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """delta = rowsum(o · do) - dlse, and the LSE in base 2, +inf for a row that saw nothing, so that its probabilities
    are 0.
    """
    state = state_dtype(o)
    delta = (o.to(state) * do.to(state)).sum(-1)
    delta = delta if dlse is None else delta - dlse.to(state)
    return delta, torch.where(lse == -math.inf, math.inf, lse.to(state) * LOG2E)


def _probabilities(scores: torch.Tensor, lse_log2: torch.Tensor, kept: torch.Tensor, options: Options) -> torch.Tensor:
    factor = (options.softcap or options.scale) * LOG2E
    return torch.exp2(scores * factor - lse_log2[:, None]).masked_fill(~kept, 0.0)


def _score_gradient(
    p: torch.Tensor, dp: torch.Tensor, delta: torch.Tensor, scores: torch.Tensor, options: Options
) -> torch.Tensor:
    ds = p * (dp - delta[:, None])
    return ds * (1.0 - scores * scores) if options.softcap else ds


def _of_scores(p: torch.Tensor, like: torch.Tensor, tiling: Tiling) -> torch.Tensor:
    """The probabilities that scores' gradients come from."""
    return p.to(like.dtype).to(p.dtype) if tiling.rounded_p else p


def backward_dq(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    i_m: int,
    tiling: Tiling,
    options: Options,
) -> Iterator[Named]:
    """Query tile `i_m` of one head: Q, dO, LSE2, delta; for each key tile i: K_i, S_i, V_i, dP_i, P_i, dS_i, dQ_i; then
    dQ_final.
    """
    queries, keys, state = q.shape[0], k.shape[0], state_dtype(q)
    b_q, b_do = tile(q, i_m, tiling.block_m), tile(do, i_m, tiling.block_m)
    b_lse = torch.cat(
        [lse_log2[i_m : i_m + tiling.block_m], lse_log2.new_full((max(0, i_m + tiling.block_m - queries),), math.inf)]
    )
    b_delta = tile(delta, i_m, tiling.block_m)
    yield from (("Q", b_q), ("dO", b_do), ("LSE2", b_lse), ("delta", b_delta))
    acc = torch.zeros(tiling.block_m, q.shape[1], dtype=state, device=q.device)
    for step, i_n in enumerate(key_blocks(i_m, queries, keys, tiling, options)):
        b_k, b_v = tile(k, i_n, tiling.block_n), tile(v, i_n, tiling.block_n)
        yield f"K_{step}", b_k
        scores = _cap(dot(b_q, b_k.T, state), options)
        yield f"S_{step}", scores
        yield f"V_{step}", b_v
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        p = _probabilities(scores, b_lse, keep(i_m, i_n, queries, keys, tiling, options, q.device), options)
        yield f"P_{step}", p
        ds = _score_gradient(_of_scores(p, q, tiling), dp, b_delta, scores, options)
        yield f"dS_{step}", ds
        acc = acc + dot(ds.to(k.dtype), b_k, state)
        yield f"dQ_{step}", acc
    yield "dQ_final", acc * options.scale


def backward_dkdv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    do: torch.Tensor,
    lse_log2: torch.Tensor,
    delta: torch.Tensor,
    i_n: int,
    tiling: Tiling,
    options: Options,
) -> Iterator[Named]:
    """Key tile `i_n` of one KV head, for its group's query heads or one chunk of them: q [G, Tq, D], do [G, Tq, Dv],
    lse_log2 and delta [G, Tq].

    K, V; for each head and query tile, in the tiling's order and counted on as i: Q_i, S_i, P_i, dO_i, dV_i, dP_i,
    dS_i, dK_i; then dK_final and dV_final. Scores and their like are [M, N] here, and transposed in the kernel.
    """
    queries, keys, state = q.shape[1], k.shape[0], state_dtype(q)
    b_k, b_v = tile(k, i_n, tiling.block_n), tile(v, i_n, tiling.block_n)
    yield from (("K", b_k), ("V", b_v))
    acc_dk = torch.zeros(tiling.block_n, k.shape[1], dtype=state, device=q.device)
    acc_dv = torch.zeros(tiling.block_n, v.shape[1], dtype=state, device=q.device)
    blocks, heads = query_blocks(i_n, queries, keys, tiling, options), range(q.shape[0])
    if tiling.reverse:
        blocks = blocks[::-1]
    pairs = [(head, i_m) for head in heads for i_m in blocks]
    if tiling.reverse and not sweeps_heads(len(heads), options.left, options.right, keys):
        pairs = [(head, i_m) for i_m in blocks for head in heads[::-1]]
    for step, (head, i_m) in enumerate(pairs):
        b_q, b_do = tile(q[head], i_m, tiling.block_m), tile(do[head], i_m, tiling.block_m)
        yield f"Q_{step}", b_q
        scores = _cap(dot(b_q, b_k.T, state), options)
        yield f"S_{step}", scores
        past = max(0, i_m + tiling.block_m - queries)
        b_lse = torch.cat([lse_log2[head, i_m : i_m + tiling.block_m], lse_log2.new_full((past,), math.inf)])
        p = _probabilities(scores, b_lse, keep(i_m, i_n, queries, keys, tiling, options, q.device), options)
        yield f"P_{step}", p
        yield f"dO_{step}", b_do
        acc_dv = acc_dv + dot(p.to(do.dtype).T, b_do, state)
        yield f"dV_{step}", acc_dv
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        b_delta = tile(delta[head], i_m, tiling.block_m)
        ds = _score_gradient(_of_scores(p, q, tiling), dp, b_delta, scores, options)
        yield f"dS_{step}", ds
        acc_dk = acc_dk + dot(ds.to(q.dtype).T, b_q, state)
        yield f"dK_{step}", acc_dk
    yield "dK_final", acc_dk * options.scale
    yield "dV_final", acc_dv
