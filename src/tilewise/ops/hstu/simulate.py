"""HSTU attention tile by tile in torch, exactly as the kernels do it: the same tiles in the same order, the same state,
the same casts.

One program at a time, of one sequence and one head: a query tile (forward, dQ) or a key tile (dK and dV). Values come
as (name, tensor), step by step; a number at the end of a name is its step. State is fp32, or fp64 for fp64 inputs;
tiles are padded with zeros as loads pad them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tilewise.ops.flash.simulate import LOG2E, Named, dot, state_dtype, tile


@dataclass(frozen=True)
class Tiling:
    """Tiles of block_m queries and block_n keys."""

    block_m: int
    block_n: int


@dataclass(frozen=True)
class Options:
    """What is computed, as in the public call; `targets` are the last tokens of this sequence.

    Weights are `gain · s · sigmoid(alpha · s)`, which is what products take: the kernels' gain is alpha in fp16, where
    a weight without it might be too large a number, else 1. What is missing to `SiLU(alpha · s) / max_seq_len` is
    multiplied at the end.
    """

    alpha: float
    max_seq_len: int
    causal: bool = True
    targets: int = 0
    max_attn_len: int = 0
    contextual_seq_len: int = 0
    gain: float = 1.0

    @property
    def _before(self) -> int:
        """Tokens that stand where a later one does: of the context all but the last."""
        return max(self.contextual_seq_len - 1, 0)

    def end(self, tokens: int) -> int:
        """Where the targets stand."""
        return tokens - self._before - self.targets

    def position(self, token: torch.Tensor, tokens: int) -> torch.Tensor:
        """Where tokens stand: those of the context together at 0, targets together at the end."""
        return (token - self._before).clamp(min=0).clamp(max=self.end(tokens))

    def stands(self, token: int, tokens: int) -> int:
        """Where one token does."""
        return min(max(token - self._before, 0), self.end(tokens))

    def first_at(self, position: int) -> int:
        """The first token that stands at `position` or later, up to the end."""
        return position + self._before if position > 0 else 0

    @property
    def output_factor(self) -> float:
        """What the sum of weights and values is multiplied by."""
        return self.alpha / (self.gain * self.max_seq_len)


def keep(i_m: int, i_n: int, tokens: int, tiling: Tiling, options: Options, device: torch.device) -> torch.Tensor:
    """[M, N], True where the key takes part for the query."""
    query = i_m + torch.arange(tiling.block_m, device=device)[:, None]
    key = i_n + torch.arange(tiling.block_n, device=device)[None, :]
    at_query, at_key = options.position(query, tokens), options.position(key, tokens)
    distance = at_query - at_key if options.causal else (at_query - at_key).abs()
    kept = (query == key) | (distance > 0)
    if options.max_attn_len:
        kept = kept & (distance <= options.max_attn_len)
    if options.contextual_seq_len:
        kept = kept | ((at_query == 0) & (at_key < options.end(tokens)))
    return kept & (key < tokens)


def _first_tile(low: int, high: int, block: int) -> int:
    """The tile of row `low`, or of `high` where that comes before it."""
    return min(max(low, 0), max(high, 0)) // block * block


def key_blocks(i_m: int, tokens: int, tiling: Tiling, options: Options) -> list[int]:
    """First keys of the tiles that query tile `i_m` reaches, in the order in which they are walked."""
    end, reach = options.end(tokens), options.max_attn_len
    first, last = options.stands(i_m, tokens), options.stands(min(i_m + tiling.block_m, tokens) - 1, tokens)
    low, high = 0, tokens
    if reach:
        low = options.first_at(first - reach)
        if not options.causal and last + reach < end:
            high = options.first_at(last + reach + 1)
    if options.causal:
        high = min(tokens, i_m + tiling.block_m)
    if options.contextual_seq_len and first == 0:
        # The context sees every key but targets.
        high = max(high, min(end + options.contextual_seq_len - 1, tokens))
    return list(range(_first_tile(low, high, tiling.block_n), high, tiling.block_n))


def query_blocks(i_n: int, tokens: int, tiling: Tiling, options: Options) -> list[int]:
    """First queries of the tiles that reach key tile `i_n`, in the order in which they are walked: those that only the
    context brings come last.
    """
    end, reach = options.end(tokens), options.max_attn_len
    first, last = options.stands(i_n, tokens), options.stands(min(i_n + tiling.block_n, tokens) - 1, tokens)
    low, high = 0, tokens
    if reach:
        if last + reach < end:
            high = options.first_at(last + reach + 1)
        if not options.causal:
            low = min(i_n, options.first_at(first - reach))
    if options.causal:
        low, high = i_n, max(high, min(i_n + tiling.block_n, tokens))
    start = _first_tile(low, high, tiling.block_m)
    # Targets are not seen from the context.
    context = min(options.contextual_seq_len, start) if i_n < end + options.contextual_seq_len - 1 else 0
    return [*range(start, high, tiling.block_m), *range(0, context, tiling.block_m)]


def _sigmoid(scores: torch.Tensor, options: Options) -> torch.Tensor:
    root = torch.rsqrt(1.0 + torch.exp2(scores * -(options.alpha * LOG2E)))
    return root * root


def _weights(scores: torch.Tensor, kept: torch.Tensor, options: Options) -> torch.Tensor:
    return (scores * _sigmoid(scores, options) * options.gain).masked_fill(~kept, 0.0)


def _slopes(scores: torch.Tensor, kept: torch.Tensor, options: Options) -> torch.Tensor:
    """The weights' derivative by the score, but for the gain."""
    sigmoid = _sigmoid(scores, options)
    return (scores * sigmoid * (options.alpha - options.alpha * sigmoid) + sigmoid).masked_fill(~kept, 0.0)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, i_m: int, tiling: Tiling, options: Options
) -> Iterator[Named]:
    """Query tile `i_m`: q, k [T, D], v [T, Dv].

    Q; for each key tile i: K_i, S_i, P_i (masked weights), V_i, O_i; then O_final.
    """
    tokens, state = q.shape[0], state_dtype(q)
    b_q = tile(q, i_m, tiling.block_m)
    yield "Q", b_q
    acc = torch.zeros(tiling.block_m, v.shape[1], dtype=state, device=q.device)
    for step, i_n in enumerate(key_blocks(i_m, tokens, tiling, options)):
        b_k = tile(k, i_n, tiling.block_n)
        yield f"K_{step}", b_k
        scores = dot(b_q, b_k.T, state)
        yield f"S_{step}", scores
        p = _weights(scores, keep(i_m, i_n, tokens, tiling, options, q.device), options)
        yield f"P_{step}", p
        b_v = tile(v, i_n, tiling.block_n)
        yield f"V_{step}", b_v
        acc = acc + dot(p.to(v.dtype), b_v, state)
        yield f"O_{step}", acc
    yield "O_final", acc * options.output_factor


def backward_dq(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, i_m: int, tiling: Tiling, options: Options
) -> Iterator[Named]:
    """Query tile `i_m`: Q, dO; for each key tile i: K_i, S_i, V_i, dP_i, dS_i (masked), dQ_i; then dQ_final."""
    tokens, state = q.shape[0], state_dtype(q)
    b_q, b_do = tile(q, i_m, tiling.block_m), tile(do, i_m, tiling.block_m)
    yield from (("Q", b_q), ("dO", b_do))
    acc = torch.zeros(tiling.block_m, q.shape[1], dtype=state, device=q.device)
    for step, i_n in enumerate(key_blocks(i_m, tokens, tiling, options)):
        b_k, b_v = tile(k, i_n, tiling.block_n), tile(v, i_n, tiling.block_n)
        yield f"K_{step}", b_k
        scores = dot(b_q, b_k.T, state)
        yield f"S_{step}", scores
        yield f"V_{step}", b_v
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        ds = dp * _slopes(scores, keep(i_m, i_n, tokens, tiling, options, q.device), options)
        yield f"dS_{step}", ds
        acc = acc + dot(ds.to(k.dtype), b_k, state)
        yield f"dQ_{step}", acc
    yield "dQ_final", acc * (options.output_factor * options.gain)


def backward_dkdv(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor, i_n: int, tiling: Tiling, options: Options
) -> Iterator[Named]:
    """Key tile `i_n`: K, V; for each query tile i: Q_i, S_i, P_i, dO_i, dV_i, dP_i, dS_i, dK_i; then dK_final and
    dV_final.

    Scores and their like are [M, N] here, and transposed in the kernel.
    """
    tokens, state = q.shape[0], state_dtype(q)
    b_k, b_v = tile(k, i_n, tiling.block_n), tile(v, i_n, tiling.block_n)
    yield from (("K", b_k), ("V", b_v))
    acc_dk, acc_dv = (torch.zeros(x.shape, dtype=state, device=q.device) for x in (b_k, b_v))
    for step, i_m in enumerate(query_blocks(i_n, tokens, tiling, options)):
        b_q, b_do = tile(q, i_m, tiling.block_m), tile(do, i_m, tiling.block_m)
        yield f"Q_{step}", b_q
        scores = dot(b_q, b_k.T, state)
        yield f"S_{step}", scores
        kept = keep(i_m, i_n, tokens, tiling, options, q.device)
        p = _weights(scores, kept, options)
        yield f"P_{step}", p
        yield f"dO_{step}", b_do
        acc_dv = acc_dv + dot(p.to(do.dtype).T, b_do, state)
        yield f"dV_{step}", acc_dv
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        ds = dp * _slopes(scores, kept, options)
        yield f"dS_{step}", ds
        acc_dk = acc_dk + dot(ds.to(q.dtype).T, b_q, state)
        yield f"dK_{step}", acc_dk
    yield "dK_final", acc_dk * (options.output_factor * options.gain)
    yield "dV_final", acc_dv * options.output_factor
