"""Attention over a cache in torch, as the kernels do it: a split of the keys, tile by tile, for a tile of queries that
packs tokens with the query heads of one KV head; and the merge of the splits.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tilewise.ops.flash import simulate
from tilewise.ops.flash.simulate import Named, Options, Tiling


class Splits(NamedTuple):
    """How an entry's keys are split: the first key, keys in each split, how many there are."""

    low: int
    chunk: int
    number: int


def split_keys(keys: int, given: int, block_n: int) -> Splits:
    """Into `given` parts of whole tiles, or fewer."""
    chunk = -(-max(-(-keys // given), block_n) // block_n) * block_n
    return Splits(0, chunk, max(1, -(-keys // chunk)))


def split(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, number: int, splits: Splits, block_n: int, options: Options
) -> Iterator[Named]:
    """Split `number` for one KV head of an entry: q [Tq, G, D], k [Tk, D], v [Tk, Dv]; row r is token r // G with head
    r % G.

    Q; for each key tile i of the split: K_i, S_pre_scaling_i, S_i, M_i, L_i, P_i, V_i, O_scale_i, O_i; then O_final and
    LSE, of this split alone.
    """
    queries, group, keys = *q.shape[:2], k.shape[0]
    rows = Tiling(queries, block_n)
    low = splits.low + number * splits.chunk
    blocks = [i_n for i_n in simulate.key_blocks(0, queries, keys, rows, options) if low <= i_n < low + splits.chunk]

    def kept(i_n: int) -> torch.Tensor:
        return simulate.keep(0, i_n, queries, keys, rows, options, q.device).repeat_interleave(group, 0)

    yield from simulate.attend(q.flatten(0, 1), k, v, blocks, kept, rows, options)


def merge(outputs: torch.Tensor, lses: torch.Tensor, at_a_time: int) -> Iterator[Named]:
    """One row's splits, outputs [S, Dv] and LSEs [S], `at_a_time`.

    LSE_part_i, O_part_i, the maximum M_i and the weights W_i next to it, and O_i, the sum so far; then O_final and
    LSE [1].
    """
    m = lses.new_tensor(-math.inf)
    total, acc = torch.zeros_like(m), torch.zeros_like(outputs[0])
    for step, first in enumerate(range(0, len(lses), at_a_time)):
        mine = slice(first, first + at_a_time)
        largest = torch.maximum(m, lses[mine].max())
        shift = torch.zeros_like(largest) if largest == -math.inf else largest
        rescale = torch.exp2((m - shift) * simulate.LOG2E)
        weights = torch.exp2((lses[mine] - shift) * simulate.LOG2E)
        m = largest
        yield f"LSE_part_{step}", lses[mine]
        yield f"O_part_{step}", outputs[mine]
        yield f"M_{step}", m
        yield f"W_{step}", weights
        total = total * rescale + weights.sum()
        acc = acc * rescale + (weights[:, None] * outputs[mine]).sum(0)
        yield f"O_{step}", acc
    yield "O_final", acc / (total if total else 1.0)
    yield "LSE", (m + torch.log2(total) / simulate.LOG2E)[None] if total else lses.new_full((1,), -math.inf)
