"""The selected branch of native sparse attention tile by tile in torch, exactly as the kernels do it: one sequence, one
index head, one program.

A row is a token and one of the G query heads that share its choice, token by token: q [T, G, D], k [T, D], v [T, Dv],
indices [T, S]. What tokens name is grouped here from the indices alone. Values come as (name, tensor), step by step; a
number at the end of a name is its step. State is fp32, or fp64 for fp64 inputs; tiles of keys are padded with zeros as
loads pad them, tiles of queries hold the rows that exist.

The compressed branch is flash attention whose keys stand a stride apart: `compressed_options`, for the simulations of
`ops.flash.simulate`.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tilewise.ops.flash.simulate import LOG2E, Named, Options, dot, state_dtype, tile

# A token and which of its slots names the block.
Entry = tuple[int, int]


def compressed_options(tokens: int, size: int, stride: int, scale: float) -> Options:
    """The compressed branch as flash attention: window c is a key that stands at its last token,
    `c * stride + size - 1`.
    """
    return Options(scale, right=-min(size - 1, tokens), key_stride=stride)


@dataclass(frozen=True)
class Tiling:
    """Tiles of block_m rows, and blocks of block_size keys."""

    block_m: int
    block_size: int

    @property
    def block_n(self) -> int:
        """Keys a tile: a power of two, at least the 16 that a matrix product needs."""
        return max(16, 1 << (self.block_size - 1).bit_length())

    def tokens(self, group: int) -> int:
        """Tokens, or entries of a list, in a tile of rows: a token's rows are padded to a power of two."""
        return self.block_m // (1 << (group - 1).bit_length())


def first_slots(indices: torch.Tensor, block_size: int) -> list[dict[int, int]]:
    """For each token the blocks that it names and the slot that names each first; what is negative or lies past the
    sequence is no block.
    """
    blocks = -(-indices.shape[0] // block_size)
    result: list[dict[int, int]] = []
    for row in indices.tolist():
        named: dict[int, int] = {}
        for slot, block in enumerate(row):
            if 0 <= block < blocks:
                named.setdefault(block, slot)
        result.append(named)
    return result


def union(indices: torch.Tensor, i_tile: int, tokens: int, block_size: int) -> list[tuple[int, set[int]]]:
    """The blocks that any token of a tile of `tokens` names, from the last down, each with the tokens that do."""
    named = first_slots(indices, block_size)
    mine = range(i_tile * tokens, min((i_tile + 1) * tokens, len(named)))
    blocks = sorted({block for t in mine for block in named[t]}, reverse=True)
    return [(block, {t for t in mine if block in named[t]}) for block in blocks]


def lists(indices: torch.Tensor, block_size: int) -> list[list[Entry]]:
    """For each block the entries that name it, in the order of tokens, each token once."""
    named = first_slots(indices, block_size)
    return [
        [(t, slots[block]) for t, slots in enumerate(named) if block in slots]
        for block in range(-(-len(named) // block_size))
    ]


class Segment(NamedTuple):
    """What one program in key order owns: an index head, a block, and a segment of the block's list."""

    head: int
    block: int
    entries: list[Entry]


def segments(indices: torch.Tensor, block_size: int, most: int) -> list[Segment]:
    """Programs in key order, of indices [T, H, S]: lists by head and block, in parts of at most `most` entries."""
    return [
        Segment(head, block, entries[first : first + most])
        for head in range(indices.shape[1])
        for block, entries in enumerate(lists(indices[:, head], block_size))
        for first in range(0, len(entries), most)
    ]


def block_keys(x: torch.Tensor, block: int, tiling: Tiling) -> torch.Tensor:
    """The tile of one block, zeros behind its last key and behind the sequence."""
    start = block * tiling.block_size
    return tile(x[: start + tiling.block_size], start, tiling.block_n)


def keys_kept(tokens: torch.Tensor, block: int, keys: int, tiling: Tiling) -> torch.Tensor:
    """[M, N], True where the row's token sees the key."""
    within = torch.arange(tiling.block_n, device=tokens.device)
    key = block * tiling.block_size + within
    return ((within < tiling.block_size) & (key < keys))[None, :] & (key[None, :] <= tokens[:, None])


def _units(scale: float) -> tuple[float, float]:
    """A sign for the scores, and what they are multiplied by in the exponent: the forward's factor must be positive."""
    return (1.0 if scale > 0 else -1.0 if scale < 0 else 0.0), (abs(scale) or 1.0) * LOG2E


def _shift(m: torch.Tensor) -> torch.Tensor:
    """A row that has seen nothing is shifted by 0, so that its terms are 0 and not NaN."""
    return m.masked_fill(m == -math.inf, 0.0)


def _tile_tokens(
    i_tile: int, group: int, tokens: int, tiling: Tiling, device: torch.device
) -> tuple[slice, torch.Tensor]:
    """The tokens of a tile in query order, and that of each row."""
    each = tiling.tokens(group)
    rows = slice(i_tile * each, min((i_tile + 1) * each, tokens))
    return rows, torch.arange(tokens, device=device)[rows].repeat_interleave(group)


def forward_union(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, i_tile: int, tiling: Tiling, scale: float
) -> Iterator[Named]:
    """Query order, tile `i_tile` of tokens: Q; for each block i of its union K_i, S_i (masked), M_i, P_i, L_i, V_i,
    O_i; then O_final and LSE.
    """
    tokens, group, state = q.shape[0], q.shape[1], state_dtype(q)
    sign, factor = _units(scale)
    mine, token = _tile_tokens(i_tile, group, tokens, tiling, q.device)
    b_q = q[mine].flatten(0, 1) * sign
    yield "Q", b_q
    m = torch.full((b_q.shape[0],), -math.inf, dtype=state, device=q.device)
    l = torch.zeros_like(m)
    acc = torch.zeros(b_q.shape[0], v.shape[1], dtype=state, device=q.device)
    for step, (block, naming) in enumerate(union(indices, i_tile, tiling.tokens(group), tiling.block_size)):
        b_k = block_keys(k, block, tiling)
        yield f"K_{step}", b_k
        scores = dot(b_q, b_k.T, state).masked_fill(~keys_kept(token, block, tokens, tiling), -math.inf)
        yield f"S_{step}", scores
        named = torch.tensor([t in naming for t in token.tolist()], device=q.device)
        m_new = torch.maximum(m, (scores.amax(1) * factor).masked_fill(~named, -math.inf))
        yield f"M_{step}", m_new
        shift = _shift(m_new)
        p = torch.exp2(scores * factor - shift.masked_fill(~named, math.inf)[:, None])
        yield f"P_{step}", p
        rescale = torch.exp2(m - shift)
        l, m = l * rescale + p.sum(1), m_new
        yield f"L_{step}", l
        b_v = block_keys(v, block, tiling)
        yield f"V_{step}", b_v
        acc = acc * rescale[:, None] + dot(p.to(v.dtype), b_v, state)
        yield f"O_{step}", acc
    seen = l != 0
    total = torch.where(seen, l, 1.0)
    yield "O_final", acc / total[:, None]
    yield "LSE", torch.where(seen, (m + torch.log2(total)) / LOG2E, -math.inf)


def entry_steps(entries: Sequence[Entry], group: int, tiling: Tiling) -> list[Sequence[Entry]]:
    """The entries of each step of a program in key order."""
    each = tiling.tokens(group)
    return [entries[first : first + each] for first in range(0, len(entries), each)]


def _listed(x: torch.Tensor, part: Sequence[Entry]) -> torch.Tensor:
    """Rows of x [T, G, ...] for each entry."""
    return x[[t for t, _ in part]].flatten(0, 1)


def _tokens_of(part: Sequence[Entry], group: int, device: torch.device) -> torch.Tensor:
    return torch.tensor([t for t, _ in part], device=device).repeat_interleave(group)


def forward_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    entries: Sequence[Entry],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """Key order, `entries` of one block's list: K, V; for each step Q_i, S_i (masked), M_i, P_i, L_i, O_i, a result
    over this block alone.
    """
    group, state = q.shape[1], state_dtype(q)
    sign, factor = _units(scale)
    b_k, b_v = block_keys(k, block, tiling), block_keys(v, block, tiling)
    yield from (("K", b_k), ("V", b_v))
    for step, part in enumerate(entry_steps(entries, group, tiling)):
        b_q = _listed(q, part)
        yield f"Q_{step}", b_q
        kept = keys_kept(_tokens_of(part, group, q.device), block, k.shape[0], tiling)
        scores = (dot(b_q, b_k.T, state) * sign).masked_fill(~kept, -math.inf)
        yield f"S_{step}", scores
        m = scores.amax(1) * factor
        yield f"M_{step}", m
        p = torch.exp2(scores * factor - _shift(m)[:, None])
        yield f"P_{step}", p
        l = p.sum(1)
        yield f"L_{step}", l
        yield f"O_{step}", dot(p.to(v.dtype), b_v, state) * (1.0 / torch.where(l != 0, l, 1.0))[:, None]


class Incoming(NamedTuple):
    """What a backward starts from: do [T, G, Dv], and lse_log2 and delta [T, G] as flash's `prepare` makes them."""

    do: torch.Tensor
    lse_log2: torch.Tensor
    delta: torch.Tensor


class Results(NamedTuple):
    """What the programs in key order leave by entry: `x` [T, S, G, ...], and which entries exist, [T, S]."""

    x: torch.Tensor
    present: torch.Tensor

    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """By row, [T · G, S, ...] and [T · G, S]."""
        return self.x.transpose(1, 2).flatten(0, 1), self.present.repeat_interleave(self.x.shape[2], 0)


def by_entry(
    indices: torch.Tensor,
    found: Sequence[list[torch.Tensor]],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tiling: Tiling,
) -> Results:
    """Results in `dtype` from those `found` of each list, step by step, [M, ...]; 0 where there is no entry.

    `shape` is (G, ...).
    """
    x = torch.zeros(*indices.shape, *shape, dtype=dtype, device=indices.device)
    present = torch.zeros(indices.shape, dtype=torch.bool, device=indices.device)
    for entries, steps in zip(lists(indices, tiling.block_size), found, strict=True):
        for part, rows in zip(entry_steps(entries, shape[0], tiling), steps, strict=True):
            at = [t for t, _ in part], [s for _, s in part]
            x[at] = rows.to(dtype).unflatten(0, (-1, shape[0]))
            present[at] = True
    return Results(x, present)


def stepped(values: dict[str, torch.Tensor], name: str) -> list[torch.Tensor]:
    """A value of every step."""
    return [x for key, x in values.items() if key.startswith(f"{name}_")]


def partial_outputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, indices: torch.Tensor, tiling: Tiling, scale: float
) -> tuple[Results, Results]:
    """What is left for the merge: outputs [T, S, G, Dv] in q's dtype, and LSEs [T, S, G] in base 2."""
    found = [
        dict(forward_lists(q, k, v, entries, block, tiling, scale))
        for block, entries in enumerate(lists(indices, tiling.block_size))
    ]
    outputs = [stepped(values, "O") for values in found]
    lses = [
        [m + torch.log2(l) for m, l in zip(stepped(values, "M"), stepped(values, "L"), strict=True)] for values in found
    ]
    group = q.shape[1]
    return by_entry(indices, outputs, (group, v.shape[1]), q.dtype, tiling), by_entry(
        indices, lses, (group,), state_dtype(q), tiling
    )


def merge(o: torch.Tensor, lse: torch.Tensor, present: torch.Tensor) -> Iterator[Named]:
    """Rows of tokens over their slots, o [R, S, Dv], lse and present [R, S].

    LSE_part, M, L, LSE2 (base 2, over all slots); for each slot i O_part_i, W_i (its weight), O_i; then O_final and
    LSE.
    """
    b_lse = lse.masked_fill(~present, -math.inf)
    m = b_lse.amax(1)
    shift = _shift(m)
    l = torch.exp2(b_lse - shift[:, None]).sum(1)
    seen = l != 0
    total = torch.where(seen, shift + torch.log2(torch.where(seen, l, 1.0)), -math.inf)
    yield from (("LSE_part", b_lse), ("M", m), ("L", l), ("LSE2", total))
    acc = torch.zeros(o.shape[0], o.shape[2], dtype=lse.dtype, device=o.device)
    for slot in range(o.shape[1]):
        yield f"O_part_{slot}", o[:, slot]
        weight = torch.where(b_lse[:, slot] != -math.inf, torch.exp2(b_lse[:, slot] - total), 0.0)
        yield f"W_{slot}", weight
        acc = acc + weight[:, None] * o[:, slot].to(acc.dtype)
        yield f"O_{slot}", acc
    yield "O_final", acc
    yield "LSE", total / LOG2E


def backward_lists(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    incoming: Incoming,
    entries: Sequence[Entry],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """Key order, `entries` of one block's list.

    K, V; for each step Q_i, dO_i, LSE2_i, delta_i, S_i, P_i, dP_i, dS_i (as products take it), dV_i, dK_i (but for the
    scale), dQ_i.
    """
    group, state = q.shape[1], state_dtype(q)
    b_k, b_v = block_keys(k, block, tiling), block_keys(v, block, tiling)
    yield from (("K", b_k), ("V", b_v))
    acc_dk, acc_dv = (torch.zeros(x.shape, dtype=state, device=q.device) for x in (b_k, b_v))
    for step, part in enumerate(entry_steps(entries, group, tiling)):
        b_q, b_do, b_lse, b_delta = (_listed(x, part) for x in (q, *incoming))
        yield from ((f"Q_{step}", b_q), (f"dO_{step}", b_do), (f"LSE2_{step}", b_lse), (f"delta_{step}", b_delta))
        scores = dot(b_q, b_k.T, state)
        yield f"S_{step}", scores
        kept = keys_kept(_tokens_of(part, group, q.device), block, k.shape[0], tiling)
        p = torch.exp2(scores * (scale * LOG2E) - b_lse[:, None]).masked_fill(~kept, 0.0)
        yield f"P_{step}", p
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        ds = (p * (dp - b_delta[:, None])).to(q.dtype)
        yield f"dS_{step}", ds
        acc_dv = acc_dv + dot(p.to(b_do.dtype).T, b_do, state)
        yield f"dV_{step}", acc_dv
        acc_dk = acc_dk + dot(ds.T, b_q, state)
        yield f"dK_{step}", acc_dk
        yield f"dQ_{step}", dot(ds, b_k, state) * scale


def backward_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    incoming: Incoming,
    parts: Sequence[Sequence[Entry]],
    block: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """dK_final and dV_final of one block, from the `parts` of its list that programs own, added in order."""
    sums: dict[str, torch.Tensor] = {}
    for entries in parts:
        values = dict(backward_lists(q, k, v, incoming, entries, block, tiling, scale))
        last = {name: stepped(values, name)[-1] for name in ("dK", "dV")}
        sums = {name: sums[name] + x for name, x in last.items()} if sums else last
    yield "dK_final", sums["dK"] * scale
    yield "dV_final", sums["dV"]


def partial_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    incoming: Incoming,
    indices: torch.Tensor,
    tiling: Tiling,
    scale: float,
) -> Results:
    """What the programs in key order leave of dQ, [T, S, G, D] in q's dtype."""
    by_block = enumerate(lists(indices, tiling.block_size))
    found = [
        stepped(dict(backward_lists(q, k, v, incoming, entries, block, tiling, scale)), "dQ")
        for block, entries in by_block
    ]
    return by_entry(indices, found, (q.shape[1], q.shape[2]), q.dtype, tiling)


def sum_gradients(dq: torch.Tensor, present: torch.Tensor, base: torch.Tensor | None = None) -> Iterator[Named]:
    """Rows of tokens over their slots, dq [R, S, D] and present [R, S]: for each slot i dQ_part_i, dQ_i; then dQ_final.

    Where sums begin with a `base` [R, D], that comes first, as dQ_base.
    """
    acc = torch.zeros(dq.shape[0], dq.shape[2], dtype=state_dtype(dq), device=dq.device)
    if base is not None:
        acc = acc + base.to(acc.dtype)
        yield "dQ_base", acc
    for slot in range(dq.shape[1]):
        yield f"dQ_part_{slot}", dq[:, slot]
        acc = acc + dq[:, slot].to(acc.dtype).masked_fill(~present[:, slot, None], 0.0)
        yield f"dQ_{slot}", acc
    yield "dQ_final", acc


def backward_union(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    incoming: Incoming,
    indices: torch.Tensor,
    i_tile: int,
    tiling: Tiling,
    scale: float,
) -> Iterator[Named]:
    """Query order, tile `i_tile` of tokens: Q, dO, LSE2, delta; for each block i of its union K_i, S_i, V_i, dP_i, P_i,
    dS_i, dQ_i; then dQ_final.
    """
    tokens, group, state = q.shape[0], q.shape[1], state_dtype(q)
    mine, token = _tile_tokens(i_tile, group, tokens, tiling, q.device)
    b_q, b_do, b_lse, b_delta = (x[mine].flatten(0, 1) for x in (q, *incoming))
    yield from (("Q", b_q), ("dO", b_do), ("LSE2", b_lse), ("delta", b_delta))
    acc = torch.zeros(b_q.shape, dtype=state, device=q.device)
    for step, (block, naming) in enumerate(union(indices, i_tile, tiling.tokens(group), tiling.block_size)):
        b_k, b_v = block_keys(k, block, tiling), block_keys(v, block, tiling)
        yield f"K_{step}", b_k
        scores = dot(b_q, b_k.T, state)
        yield f"S_{step}", scores
        yield f"V_{step}", b_v
        dp = dot(b_do, b_v.T, state)
        yield f"dP_{step}", dp
        named = torch.tensor([t in naming for t in token.tolist()], device=q.device)
        shift = b_lse.masked_fill(~named, math.inf)[:, None]
        p = torch.exp2(scores * (scale * LOG2E) - shift).masked_fill(~keys_kept(token, block, tokens, tiling), 0.0)
        yield f"P_{step}", p
        ds = p * (dp - b_delta[:, None])
        yield f"dS_{step}", ds
        acc = acc + dot(ds.to(k.dtype), b_k, state)
        yield f"dQ_{step}", acc
    yield "dQ_final", acc * scale
