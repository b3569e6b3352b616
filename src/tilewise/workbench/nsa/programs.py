"""Attention to selected blocks: programs of both loop orders, recorded and simulated."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from tilewise.ops.flash.simulate import Named, prepare
from tilewise.ops.nsa import configs, simulate
from tilewise.ops.nsa.reference import selected_attention
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.selected.index import Inputs, make_inputs
from tilewise.ops.nsa.simulate import Incoming, Segment, Tiling
from tilewise.trace import beside
from tilewise.trace.beside import (
    Cast,
    Fit,
    Kernel,
    Simulation,
    array,
    only_present,
    padded,
    put_together,
    recorded,
    row_place,
)
from tilewise.trace.record import Recording, record
from tilewise.trace.request import Traced
from tilewise.trace.values import Naming, Values

# Values with one row per key, not per query.
BY_KEY = ("K", "V", "dK", "dV")


@dataclass(frozen=True)
class Case:
    """One batch entry: q [1, T, Hq, D], k and v [1, T, Hk, D], indices [1, T, Hk, S]; tiles of block_m rows, blocks of
    block_size keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    indices: torch.Tensor
    block_m: int
    block_size: int

    @cached_property
    def inputs(self) -> Inputs:
        """As the launcher takes them, on these tiles instead of those from configs."""
        block_m = self.block_m

        class Tiled(Inputs):
            def config(self, _kernel: configs.Kernel) -> configs.Config:
                return configs.Config(block_m, 4, 1)

        return Tiled(*make_inputs(self.q, self.k, self.v, self.indices, None, self.block_size, self.scale))

    @property
    def scale(self) -> float:
        """Of the scores."""
        return self.q.shape[-1] ** -0.5

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def tiling(self) -> Tiling:
        """As the simulation takes it: the kernels may split blocks into parts."""
        return Tiling(self.block_m, self.inputs.named.block_size)

    @property
    def named(self) -> torch.Tensor:
        """The blocks that tokens name, [T, Hk, S]."""
        return self.inputs.named.indices[0]

    def rows(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """A KV head's query rows of x [1, T, Hq, ...], [T, G, ...]."""
        return x[0].unflatten(1, (self.k.shape[2], self.group))[:, head]

    def head(self, head: int, cast: Cast) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of a KV head, as the simulation takes them."""
        return cast(self.rows(self.q, head)), cast(self.k[0, :, head]), cast(self.v[0, :, head])

    def segments(self, direction: str, order: selected.Order) -> list[Segment]:
        """What the programs in key order own, by number; in query order they leave dQ to others."""
        most = configs.segment_entries(
            "forward" if direction == "forward" else "backward" if order == "lists" else "dkdv", self.group
        )
        return simulate.segments(self.named, self.tiling.block_size, most)

    @property
    def tiles(self) -> int:
        """Programs of one KV head in query order."""
        return -(-self.q.shape[1] // self.tiling.tokens(self.group))

    def whole(self, rows: Callable[[torch.Tensor], torch.Tensor]) -> Values:
        """O_full, the reference's output in fp64, and O_ref, that in its own precision, of `rows` of [1, T, Hq, Dv]."""
        precisions: dict[str, Cast] = {"O_full": lambda x: x.double(), "O_ref": lambda x: x}
        return {
            name: array(
                rows(
                    selected_attention(
                        cast(self.q), cast(self.k), cast(self.v), self.indices, block_size=self.block_size
                    )[0]
                )
            )
            for name, cast in precisions.items()
        }


def _beside(kernel: Kernel, place: str, recording: Recording, run: Simulation, fit: Fit, stored: Values) -> Traced:
    return beside.beside(kernel, place, recorded(recording, kernel), run, fit, stored, MAKERS)


def _only_existing(case: Case, counts: Sequence[int]) -> Fit:
    """Of a tile's rows those that exist, for `counts[i]` tokens or entries in step i; one count serves every step."""
    padded = 1 << (case.group - 1).bit_length()
    row = np.arange(case.block_m)

    def fit(name: str, step: int | None, x: np.ndarray) -> np.ndarray:
        count = counts[min(step or 0, len(counts) - 1)]
        return x if name in BY_KEY else x[(row // padded < count) & (row % padded < case.group)]

    return fit


class Numbers(NamedTuple):
    """Which programs: of the kernel in key order, and of that in query order or the one that merges what the first
    stored by entry.
    """

    keys: int
    queries: int


def _segment_place(number: int, segment: Segment) -> str:
    return f"program {number}, KV head {segment.head}, block {segment.block}, {len(segment.entries)} entries"


def _tile_place(case: Case, number: int) -> tuple[int, int, slice, str]:
    """KV head, tile, tokens and place of a program in query order."""
    head, i_tile = divmod(number, case.tiles)
    each = case.tiling.tokens(case.group)
    tokens = slice(i_tile * each, min((i_tile + 1) * each, case.q.shape[1]))
    return head, i_tile, tokens, f"program {number}, KV head {head}, tokens {tokens.start} to {tokens.stop - 1}"


def _steps_of(case: Case, segment: Segment) -> list[int]:
    """Entries of each step."""
    each, entries = case.tiling.tokens(case.group), len(segment.entries)
    return [min(each, entries - first) for first in range(0, entries, each)]


def trace_forward_lists(case: Case, numbers: Numbers) -> list[Traced]:
    """Key order: one segment of a block's list, and the merge of tokens' entries."""
    segment = case.segments("forward", "lists")[numbers.keys]
    with record({FORWARD_LISTS.name: numbers.keys, MERGE.name: numbers.queries}) as recording:
        o, lse = selected.forward(case.inputs, "lists")

    def of_segment(cast: Cast) -> Iterator[Named]:
        return simulate.forward_lists(
            *case.head(segment.head, cast), segment.entries, segment.block, case.tiling, case.scale
        )

    first, rows, place = row_place(case.q.shape[1], case.q.shape[2], numbers.queries, selected.MERGED_ROWS)

    def left(cast: Cast) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        heads = [
            simulate.partial_outputs(*case.head(head, cast), case.named[:, head], case.tiling, case.scale)
            for head in range(case.k.shape[2])
        ]
        outputs, lses = zip(*heads, strict=True)
        x, present = put_together(outputs, first, rows)
        return x, put_together(lses, first, rows)[0], present

    def mine(x: torch.Tensor) -> torch.Tensor:
        return x[0].flatten(0, 1)[first : first + rows]

    stored = {"O_final": array(mine(o)), "LSE": array(mine(lse.transpose(1, 2)))}
    present = left(lambda x: x)[2]
    keys = _beside(
        FORWARD_LISTS,
        _segment_place(numbers.keys, segment),
        recording,
        of_segment,
        _only_existing(case, _steps_of(case, segment)),
        {},
    )
    merged = _beside(MERGE, place, recording, lambda cast: simulate.merge(*left(cast)), only_present(present), stored)
    return [keys, replace(merged, beside=case.whole(mine))]


def trace_forward_union(case: Case, number: int) -> Traced:
    """Query order: a tile of tokens over the union of their blocks."""
    head, i_tile, tokens, place = _tile_place(case, number)
    with record({FORWARD_UNION.name: number}) as recording:
        o, lse = selected.forward(case.inputs, "union")

    def run(cast: Cast) -> Iterator[Named]:
        return simulate.forward_union(*case.head(head, cast), case.named[:, head], i_tile, case.tiling, case.scale)

    def mine(x: torch.Tensor) -> torch.Tensor:
        return case.rows(x, head)[tokens].flatten(0, 1)

    stored = {"O_final": array(mine(o)), "LSE": array(mine(lse.transpose(1, 2)))}
    traced = _beside(FORWARD_UNION, place, recording, run, _only_existing(case, [tokens.stop - tokens.start]), stored)
    return replace(traced, beside=case.whole(mine))


def trace_backward(case: Case, do: torch.Tensor, order: selected.Order, numbers: Numbers) -> list[Traced]:
    """One segment of a block's list; and dQ, in query order or merged from what the key order stored."""
    o, lse = selected.forward(case.inputs, order)
    queries = BACKWARD_UNION if order == "union" else SUM
    with record({BACKWARD_LISTS.name: numbers.keys, queries.name: numbers.queries}) as recording:
        dq, dk, dv, _ = selected.backward(case.inputs, o, lse, do, None, order)

    def tensors(cast: Cast, head: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Incoming]:
        rows = case.rows(do, head)
        delta, lse_log2 = prepare(case.rows(o, head), rows, case.rows(lse.transpose(1, 2), head), None)
        return *case.head(head, cast), Incoming(cast(rows), cast(lse_log2), cast(delta))

    segments = case.segments("backward", order)
    segment = segments[numbers.keys]
    parts = [other.entries for other in segments if (other.head, other.block) == (segment.head, segment.block)]

    def of_segment(cast: Cast) -> Iterator[Named]:
        rows = tensors(cast, segment.head)
        for name, x in simulate.backward_lists(*rows, segment.entries, segment.block, case.tiling, case.scale):
            # In query order another kernel computes dQ.
            if order == "lists" or not name.startswith("dQ_"):
                yield name, x
        yield from simulate.backward_block(*rows, parts, segment.block, case.tiling, case.scale)

    start = segment.block * case.tiling.block_size
    keys = slice(start, min(start + case.tiling.block_size, case.k.shape[1]))
    ends = {
        f"{name}_final": padded(x[0, keys, segment.head], case.tiling.block_n) for name, x in (("dK", dk), ("dV", dv))
    }
    place = _segment_place(numbers.keys, segment)
    traced = _beside(BACKWARD_LISTS, place, recording, of_segment, _only_existing(case, _steps_of(case, segment)), ends)
    if order == "union":
        head, i_tile, tokens, place = _tile_place(case, numbers.queries)

        def of_tile(cast: Cast) -> Iterator[Named]:
            return simulate.backward_union(*tensors(cast, head), case.named[:, head], i_tile, case.tiling, case.scale)

        final = {"dQ_final": array(case.rows(dq, head)[tokens].flatten(0, 1))}
        return [
            traced,
            _beside(
                BACKWARD_UNION, place, recording, of_tile, _only_existing(case, [tokens.stop - tokens.start]), final
            ),
        ]
    first, rows, place = row_place(case.q.shape[1], case.q.shape[2], numbers.queries, selected.SUMMED_ROWS)

    def left(cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
        heads = range(case.k.shape[2])
        parts = [
            simulate.partial_gradients(*tensors(cast, head), case.named[:, head], case.tiling, case.scale)
            for head in heads
        ]
        return put_together(parts, first, rows)

    final = {"dQ_final": array(dq[0].flatten(0, 1)[first : first + rows])}
    present = left(lambda x: x)[1]
    return [
        traced,
        _beside(SUM, place, recording, lambda cast: simulate.sum_gradients(*left(cast)), only_present(present), final),
    ]


MAKERS = {
    "steps": "what tokens name: how many blocks the union has, or entries the list",
    "Q": "the load of Q: its pointers, strides or mask, or the entries of the list",
    "K": "the load of K: its pointers, strides or mask, or which block the list or the union holds",
    "LSE_part": "the LSE that the programs in key order leave by entry, or which entries there are",
    "LSE2": "the LSE in base 2 over all slots, or of the forward",
    "O_part": "the result that a program in key order left for this slot",
    "W": "the weight of a slot: exp2(its LSE - that of all)",
    "dQ_part": "the part of dQ that a program in key order left for this slot",
}


FORWARD_LISTS = Kernel(
    "nsa_selected_fwd_lists_kernel",
    "forward",
    Naming(
        "S",
        {"Q": ("b_q",), "S": ("b_s",), "M": ("m",), "P": ("b_p",), "L": ("l",), "O": ("b_o",)},
        {"K": ("b_k",), "V": ("b_v",)},
    ),
    "step",
)
MERGE = Kernel(
    "nsa_selected_fwd_merge_kernel",
    "merge",
    Naming(
        "O_part",
        {"O_part": ("b_o",), "W": ("weight",), "O": ("acc",)},
        {"LSE_part": ("b_lse",), "M": ("m",), "L": ("l",), "LSE2": ("total",)},
    ),
    "slot",
)
FORWARD_UNION = Kernel(
    "nsa_selected_fwd_union_kernel",
    "forward",
    Naming(
        "S",
        {"K": ("b_k",), "S": ("b_s",), "M": ("m_new",), "P": ("b_p",), "L": ("l",), "V": ("b_v",), "O": ("acc",)},
        {"Q": ("b_q",)},
    ),
    "block",
)
BACKWARD_LISTS = Kernel(
    "nsa_selected_bwd_lists_kernel",
    "dkdv",
    Naming(
        "S",
        {
            "Q": ("b_q",),
            "dO": ("b_do",),
            "LSE2": ("b_lse",),
            "delta": ("b_delta",),
            "S": ("b_s",),
            "P": ("b_p",),
            "dP": ("b_dp",),
            "dS": ("b_ds",),
        }
        | {"dV": ("acc_dv",), "dK": ("acc_dk",), "dQ": ("b_dq",)},
        {"K": ("b_k",), "V": ("b_v",)},
    ),
    "step",
)
SUM = Kernel("nsa_selected_bwd_queries_kernel", "dq", Naming("dQ_part", {"dQ_part": ("b_dq",), "dQ": ("acc",)}), "slot")
BACKWARD_UNION = Kernel(
    "nsa_selected_bwd_union_kernel",
    "dq",
    Naming(
        "S",
        {
            "K": ("b_k",),
            "S": ("b_s",),
            "V": ("b_v",),
            "dP": ("b_dp",),
            "P": ("b_p",),
            "dS": ("b_ds",),
            "dQ": ("acc_dq",),
        },
        {"Q": ("b_q",), "dO": ("b_do",), "LSE2": ("b_lse",), "delta": ("b_delta",)},
    ),
    "block",
)
