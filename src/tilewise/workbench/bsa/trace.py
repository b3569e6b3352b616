"""Block-sparse attention: programs of its selected branch and of its layer norm, recorded and simulated."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from tilewise.ops._host.launching import tile_widths
from tilewise.ops.bsa import configs, launch, simulate
from tilewise.ops.bsa.combine.launch import norm_rows
from tilewise.ops.bsa.configs import Options, Results
from tilewise.ops.bsa.reference import block_sparse_attn
from tilewise.ops.bsa.selected import launch as selected
from tilewise.ops.flash.simulate import Named
from tilewise.ops.nsa.configs import parts_of_block
from tilewise.ops.nsa.selected.launch import SUMMED_ROWS
from tilewise.ops.nsa.simulate import Results as Entries
from tilewise.ops.nsa.simulate import Segment, Tiling, segments
from tilewise.trace.beside import (
    Cast,
    Fit,
    Kernel,
    array,
    beside,
    only_present,
    padded,
    put_together,
    recorded,
    row_place,
)
from tilewise.trace.record import record
from tilewise.trace.request import HSTU_MASK, Request, Traced, check_tile, entry_of
from tilewise.trace.values import Naming, Values
from tilewise.verify.suite import make_fill
from tilewise.workbench.bsa import configs as bsa_tiles
from tilewise.workbench.operator import Tracing, UsageError

MAKERS = {
    "steps": "what tokens chose: how many entries the list has",
    "Q": "the load of Q: its pointers, strides or mask, or the entries of the list",
    "K": "the load of K: its pointers, strides or mask, or which block the list holds",
    "P_full": "the product of Q and K, or SiLU of it",
    "P": "the mask: the keys of the block that are not after the token",
    "O": "the product of P and V, or the sum over slots",
    "O_part": "the result that a program in key order left for this slot",
    "slope": "the slope of SiLU",
    "dS": "dS = dP · the slope, or the mask",
    "dQ": "the product of dS and K, or the sum over slots",
    "dQ_part": "the part of dQ that a program in key order left for this slot",
    "dQ_base": "the load of what the other branches left of dQ",
    "dK": "the product of dS and Q",
    "X_cmp": "the load of the compressed branch's output",
    "X_slc": "the load of the selected branch's output",
    "G_cmp": "the load of the compressed branch's gates",
    "G_slc": "the load of the selected branch's gates",
    "Y_cmp": "the gate, the mean or the deviation of the compressed branch",
    "Y_slc": "the gate, the mean or the deviation of the selected branch",
    "Y": "the sum of the branches",
    "U": "the load of u",
}
NORM_MAKERS = MAKERS | {"O": "the product of u and the sum of the branches"}
FORWARD = Kernel(
    "bsa_selected_fwd_kernel",
    "forward",
    Naming("P", {"Q": ("b_q",), "P": ("b_p",), "O": ("b_o",)}, {"K": ("b_k",), "V": ("b_v",)}, first={"P": "P_full"}),
    "step",
)
# Both sums over slots are one kernel.
SUM = "nsa_selected_bwd_queries_kernel"
ADD = Kernel(SUM, "sum", Naming("O_part", {"O_part": ("b_dq",), "O": ("acc",)}), "slot")
NORM = Kernel(
    "bsa_norm_fwd_kernel",
    "norm",
    Naming(
        "Y",
        {"X_slc": ("b_x",), "G_slc": ("b_gate",), "Y_slc": ("b_y",), "Y": ("acc",), "U": ("b_u",)},
        first={"X_slc": "X_cmp", "G_slc": "G_cmp", "Y": "Y_cmp"},
    ),
    "step",
)
BACKWARD = Kernel(
    "bsa_selected_bwd_kernel",
    "dkdv",
    Naming(
        "P",
        {"Q": ("b_q",), "dO": ("b_do",), "P": ("b_p",), "slope": ("b_slope",), "dP": ("b_dp",), "dS": ("b_ds",)}
        | {"dV": ("acc_dv",), "dK": ("acc_dk",), "dQ": ("b_dq",)},
        {"K": ("b_k",), "V": ("b_v",)},
        first={"P": "P_full"},
    ),
    "step",
)
ADD_GRADIENTS = Kernel(
    SUM, "dq", Naming("dQ_part", {"dQ_part": ("b_dq",), "dQ": ("acc",)}, {"dQ_base": ("acc",)}), "slot"
)
BY_KEY = ("K", "V", "dK", "dV")


@dataclass(frozen=True)
class Case:
    """One batch entry: q, k, v, u [1, T, H, D], gates [1, T, H] of the two branches; tiles of block_m rows for the
    selected one.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    u: torch.Tensor
    gates: tuple[torch.Tensor, torch.Tensor]
    options: Options
    block_m: int

    @property
    def shared(self) -> int:
        """Neighbouring heads that share one choice."""
        return 2 if self.options.interleave else 1

    @cached_property
    def results(self) -> Results:
        """The results of the whole forward, the choice of blocks too."""
        return launch.forward(self.q, self.k, self.v, self.u, (*self.gates, None), None, self.options)

    @cached_property
    def inputs(self) -> selected.Inputs:
        """The selected branch as the launcher takes it, on these tiles instead of those from configs."""
        block_m = self.block_m

        class Tiled(selected.Inputs):
            def config(self, _kernel: configs.Kernel) -> configs.Config:
                return configs.Config(block_m, 4, 1)

        chosen = self.results.block_indices[:, :: self.shared].transpose(1, 2)
        return Tiled(
            *selected.make_inputs(self.q, self.k, self.v, chosen, None, self.options.block_size, self.options.scale)
        )

    @property
    def tiling(self) -> Tiling:
        """As the simulation takes it: the kernels may split blocks into parts."""
        return Tiling(self.block_m, self.inputs.named.block_size)

    def chosen(self, head: int) -> torch.Tensor:
        """The blocks of a head's tokens, [T, S]."""
        return self.inputs.named.indices[0, :, head // self.shared]

    def segments(self) -> list[Segment]:
        """What the programs own, by number; each for `shared` heads, one after another."""
        return segments(self.inputs.named.indices[0], self.tiling.block_size, configs.SEGMENT)

    def head(self, head: int, cast: Cast, *others: torch.Tensor) -> list[torch.Tensor]:
        """q, k, v and `others` of a head, as the simulation takes them."""
        return [cast(x[0, :, head]) for x in (self.q, self.k, self.v, *others)]

    def together(self, results: Sequence[Entries], first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of all heads from each head's results."""
        shared = [
            Entries(torch.cat([one.x for one in results[i : i + self.shared]], 2), results[i].present)
            for i in range(0, len(results), self.shared)
        ]
        return put_together(shared, first, rows)

    def whole(self, token: int) -> Values:
        """O_full, the reference's output in fp64, and O_ref, that in its own precision, of one token."""
        precisions: dict[str, Cast] = {"O_full": lambda x: x.double(), "O_ref": lambda x: x}
        found: Values = {}
        for name, cast in precisions.items():
            q, k, v, u, g_cmp, g_slc = (cast(x) for x in (self.q, self.k, self.v, self.u, *self.gates))
            o, _ = block_sparse_attn(
                q,
                k,
                v,
                u,
                g_cmp,
                g_slc,
                None,
                self.options.block_counts,
                self.options.block_size,
                interleave=self.options.interleave,
                block_indices=self.results.block_indices,
            )
            found[name] = array(o[0, token])
        return found


def _only_existing(case: Case, segment: Segment) -> Fit:
    """Of a tile of rows those whose entries exist."""
    entries = len(segment.entries)

    def fit(name: str, step: int | None, x: np.ndarray) -> np.ndarray:
        return x if name in BY_KEY else x[: entries - (step or 0) * case.block_m]

    return fit


def _segment_place(number: int, head: int, segment: Segment) -> str:
    return f"program {number}, head {head}, block {segment.block}, {len(segment.entries)} entries"


def trace_forward(case: Case, head: int, segment_number: int, sum_number: int) -> list[Traced]:
    """One segment of a block's list, the sum of tokens' entries, and layer norm of the last token of the list."""
    segment = case.segments()[segment_number]
    number = segment_number * case.shared + head % case.shared
    with record({FORWARD.name: number, SUM: sum_number}) as recording:
        o = selected.forward(case.inputs)

    def of_segment(cast: Cast) -> Iterator[Named]:
        q, k, v = case.head(head, cast)
        return simulate.forward_lists(q, k, v, segment.entries, segment.block, case.tiling, case.options.scale)

    first, rows, place = row_place(case.q.shape[1], case.q.shape[2], sum_number, SUMMED_ROWS)

    def left(cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (case.head(one, cast) for one in range(case.q.shape[2]))
        found = [
            simulate.partial_outputs(q, k, v, case.chosen(one), case.tiling, case.options.scale)
            for one, (q, k, v) in enumerate(heads)
        ]
        return case.together(found, first, rows)

    present = left(lambda x: x)[1]
    stored = {"O_final": array(o[0].flatten(0, 1)[first : first + rows])}
    place_of_segment = _segment_place(number, head, segment)
    return [
        beside(
            FORWARD,
            place_of_segment,
            recorded(recording, FORWARD),
            of_segment,
            _only_existing(case, segment),
            {},
            MAKERS,
        ),
        beside(
            ADD,
            place,
            recorded(recording, ADD),
            lambda cast: simulate.add_slots(*left(cast), "O"),
            only_present(present),
            stored,
            MAKERS,
        ),
        _trace_norm(case, segment.entries[-1][0]),
    ]


def _trace_norm(case: Case, token: int) -> Traced:
    program, row = divmod(token, norm_rows(*case.u.shape[-2:]))
    with record({NORM.name: program}) as recording:
        results = launch.forward(case.q, case.k, case.v, case.u, (*case.gates, None), None, case.options)

    def run(cast: Cast) -> Iterator[Named]:
        outputs = zip(("cmp", "slc"), (results.o_cmp, results.o_slc), case.gates, strict=True)
        return simulate.norm(
            {name: (cast(x[0, token]), cast(gate[0, token])) for name, x, gate in outputs}, cast(case.u[0, token])
        )

    def one(_name: str, _step: int | None, x: np.ndarray) -> np.ndarray:
        return x[row]

    stored = {"O_final": array(results.o[0, token])}
    traced = beside(
        NORM, f"program {program}, token {token}, all heads", recorded(recording, NORM), run, one, stored, NORM_MAKERS
    )
    return replace(traced, beside=case.whole(token))


def trace_backward(
    case: Case, do: torch.Tensor, base: torch.Tensor, head: int, segment_number: int, sum_number: int
) -> list[Traced]:
    """One segment of a block's list, and the sum of what tokens' entries left of dQ.

    `do` is the gradient of the selected branch's output, `base` what another branch already wrote to dQ.
    """
    all_segments = case.segments()
    segment = all_segments[segment_number]
    number = segment_number * case.shared + head % case.shared
    with record({BACKWARD.name: number, SUM: sum_number}) as recording:
        dq, dk, dv = selected.backward(case.inputs, do, base)
    parts = [other.entries for other in all_segments if (other.head, other.block) == (segment.head, segment.block)]

    def of_segment(cast: Cast) -> Iterator[Named]:
        q, k, v, one = case.head(head, cast, do)
        yield from simulate.backward_lists(
            q, k, v, one, segment.entries, segment.block, case.tiling, case.options.scale
        )
        yield from simulate.backward_block(q, k, v, one, parts, segment.block, case.tiling, case.options.scale)

    start = segment.block * case.tiling.block_size
    keys = slice(start, min(start + case.tiling.block_size, case.k.shape[1]))
    ends = {f"{name}_final": padded(x[0, keys, head], case.tiling.block_n) for name, x in (("dK", dk), ("dV", dv))}
    first, rows, place = row_place(case.q.shape[1], case.q.shape[2], sum_number, SUMMED_ROWS)

    def left(cast: Cast) -> tuple[torch.Tensor, torch.Tensor]:
        heads = (case.head(one, cast, do) for one in range(case.q.shape[2]))
        found = [
            simulate.partial_gradients(q, k, v, g, case.chosen(one), case.tiling, case.options.scale)
            for one, (q, k, v, g) in enumerate(heads)
        ]
        return case.together(found, first, rows)

    present = left(lambda x: x)[1]

    def of_rows(cast: Cast) -> Iterator[Named]:
        return simulate.add_slots(*left(cast), "dQ", cast(base[0].flatten(0, 1)[first : first + rows]))

    final = {"dQ_final": array(dq[0].flatten(0, 1)[first : first + rows])}
    place_of_segment = _segment_place(number, head, segment)
    return [
        beside(
            BACKWARD,
            place_of_segment,
            recorded(recording, BACKWARD),
            of_segment,
            _only_existing(case, segment),
            ends,
            MAKERS,
        ),
        beside(ADD_GRADIENTS, place, recorded(recording, ADD_GRADIENTS), of_rows, only_present(present), final, MAKERS),
    ]


# Two choices, each for two heads; channels, and blocks that a token chooses.
HEADS, CHANNELS, COUNT = 4, 64, 3


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    case = _case(request)
    if not 0 <= request.head < HEADS:
        raise UsageError(f"there is no head {request.head}: expected 0 to {HEADS - 1}")
    segments = [number for number, segment in enumerate(case.segments()) if segment.head == request.head // case.shared]
    if not 0 <= request.program < len(segments):
        raise UsageError(
            f"head {request.head} has {len(segments)} programs: expected --program 0 to {len(segments) - 1}"
        )
    tokens, block_size = case.q.shape[1], case.options.block_size
    # The sums' program numbers wrap around.
    numbers = segments[request.program], request.program % -(-tokens * HEADS // SUMMED_ROWS)
    about = {
        "tiles": f"{case.block_m} rows × blocks of {block_size} keys",
        "tokens": str(tokens),
        "heads": f"{HEADS}, of which each two share a choice",
        "chosen": f"{COUNT} blocks by each token, its own among them",
    }
    if request.direction == "backward":
        fill = make_fill(request.fill, request.seed + 1)
        do, base = (fill(name, tuple(case.q.shape), 1.0).to(case.q) for name in ("do", "dq"))
        return trace_backward(case, do, base, request.head, *numbers), about
    return trace_forward(case, request.head, *numbers), about


def _case(request: Request) -> Case:
    entry = entry_of(request, bsa_tiles.entries(), "block_m")
    block_m = (request.block_m or 64) if entry is None else entry.config.block_m
    block_size = 16 if request.block_n is None else request.block_n
    check_tile("block_m", block_m)
    if block_size < 1:
        raise UsageError(f"--block-n {block_size}: expected a block of at least 1 key")
    if not parts_of_block(
        block_size, max(tile_widths(CHANNELS, CHANNELS, request.precision.itemsize)), request.precision.itemsize, 90
    ):
        raise UsageError(
            f"--block-n {block_size}: so many keys fit no tile, nor can they be cut into equal parts that do; take a"
            " multiple of 16"
        )
    tokens = request.seq_blocks * block_m
    fill = make_fill(request.fill, request.seed)
    q, k, v, u = (
        fill(name, (1, tokens, HEADS, CHANNELS), 1.0).to(request.device, request.precision) for name in "qkvu"
    )
    g_cmp, g_slc = (
        fill(name, (1, tokens, HEADS), 1.0).sigmoid().to(request.device, request.precision)
        for name in ("g_cmp", "g_slc")
    )
    return Case(q, k, v, u, (g_cmp, g_slc), Options(COUNT, block_size, 0, CHANNELS**-0.5, interleave=True), block_m)


TRACE = Tracing(trace, refuses=("order", "causal", "warp", "impl", "names", "against", *HSTU_MASK), taps=False)
