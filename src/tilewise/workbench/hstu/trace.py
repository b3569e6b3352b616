"""HSTU attention: one program of each kernel, recorded or through taps, and simulated."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from tilewise import interpreter
from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash.simulate import Named
from tilewise.ops.hstu import launch, simulate
from tilewise.ops.hstu.configs import Config
from tilewise.ops.hstu.kernels.bwd import DkdvStep, DqStep
from tilewise.ops.hstu.kernels.fwd import FwdStep
from tilewise.ops.hstu.reference import hstu_attention
from tilewise.ops.hstu.simulate import Options, Tiling
from tilewise.trace.beside import Cast, Kernel, Tap, array, as_it_is, beside, padded, recorded
from tilewise.trace.record import record
from tilewise.trace.request import Request, Traced, check_tile, entry_of
from tilewise.trace.values import Lines, Naming, Values
from tilewise.verify.suite import make_fill
from tilewise.workbench.hstu import configs as hstu_tiles
from tilewise.workbench.operator import Tracing, UsageError

HEADS, CHANNELS = 2, 64
# A short sequence before the traced one, so that a wrong offset shows.
LEAD = 5

MAKERS = {
    "steps": "which tiles the mask reaches",
    "S": "the product of Q and K",
    "P": "SiLU of the scores, or the mask",
    "O": "the product of P and V, what it is added to, or its factor at the end",
    "dS": "dS = dP · the slope of SiLU, or the mask",
    "dQ": "the product of dS and K, what it is added to, or its factor at the end",
    "dK": "the product of dS and Q, what it is added to, or its factor at the end",
    "dV": "the product of P and dO, what it is added to, or its factor at the end",
}
FORWARD = Kernel(
    "hstu_fwd_kernel",
    "forward",
    Naming("S", {"K": ("b_k",), "S": ("b_s",), "P": ("b_p",), "V": ("b_v",), "O": ("acc",)}, {"Q": ("b_q",)}),
    "block",
)
DKDV = Kernel(
    "hstu_bwd_dkdv_kernel",
    "dkdv",
    Naming(
        "S",
        {
            "Q": ("b_q",),
            "S": ("b_sT",),
            "P": ("b_pT",),
            "dO": ("b_do",),
            "dV": ("acc_dv",),
            "dP": ("b_dpT",),
            "dS": ("b_dsT",),
            "dK": ("acc_dk",),
        },
        {"K": ("b_k",), "V": ("b_v",)},
        transposed=frozenset({"S", "P", "dP", "dS"}),
    ),
    "block",
)
DQ = Kernel(
    "hstu_bwd_dq_kernel",
    "dq",
    Naming(
        "S",
        {"K": ("b_k",), "S": ("b_s",), "V": ("b_v",), "dP": ("b_dp",), "dS": ("b_ds",), "dQ": ("acc_dq",)},
        {"Q": ("b_q",), "dO": ("b_do",)},
    ),
    "block",
)
# What each slot of the taps holds, as the kernels declare it; FORWARD's first is written before the loop.
FORWARD_SLOTS = ("Q", *FwdStep._fields)
DKDV_SLOTS, DQ_SLOTS = DkdvStep._fields, DqStep._fields


@dataclass(frozen=True)
class Case:
    """Two packed sequences, q, k and v [N, H, D]: one of LEAD tokens, and the one that is traced."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    options: Options
    config: Config

    @property
    def tokens(self) -> int:
        """Of the traced sequence."""
        return self.q.shape[0] - LEAD

    @property
    def tiling(self) -> Tiling:
        """As the simulation takes it."""
        return Tiling(self.config.block_m, self.config.block_n)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Of both sequences."""
        return torch.tensor([0, LEAD, self.q.shape[0]], device=self.q.device)

    @cached_property
    def num_targets(self) -> torch.Tensor | None:
        """Of both sequences; they fill the short one at most."""
        targets = self.options.targets
        return torch.tensor([min(targets, LEAD), targets], device=self.q.device) if targets else None

    @cached_property
    def inputs(self) -> launch.Inputs:
        """As the launcher takes them."""
        options = self.options
        numbers = options.max_seq_len, options.alpha, options.causal, options.max_attn_len, options.contextual_seq_len
        return launch.make_inputs(self.q, self.k, self.v, self.offsets, self.num_targets, *numbers)

    @cached_property
    def simulated(self) -> Options:
        """As the simulation takes them."""
        return replace(self.options, gain=self.inputs.gain or 1.0)

    def head(self, x: torch.Tensor, head: int) -> torch.Tensor:
        """[T, D] of the traced sequence."""
        return x[LEAD:, head]

    def tiles(self, block: int) -> int:
        """Of the traced sequence; being the longer, its programs come first."""
        return -(-self.tokens // block)

    def first_query(self, tile: int) -> int:
        """Where query tile number `tile` in program order starts: under the causal mask the last comes first."""
        return (self.tiles(self.config.block_m) - 1 - tile if self.options.causal else tile) * self.config.block_m

    def shapes(self) -> dict[str, tuple[int, int]]:
        """Of tiles, as the kernels hold them and the simulation names them."""
        m, n = self.config.block_m, self.config.block_n
        block_d, block_dv = tile_widths(self.q.shape[-1], self.v.shape[-1], self.q.element_size())
        rows = {"Q": (m, block_d), "dQ": (m, block_d), "O": (m, block_dv), "dO": (m, block_dv)}
        keys = {"K": (n, block_d), "dK": (n, block_d), "V": (n, block_dv), "dV": (n, block_dv)}
        return rows | keys | dict.fromkeys(("S", "P", "dP", "dS"), (m, n))

    def whole(self, head: int, i_m: int) -> Values:
        """O_full, the reference's output in fp64, and O_ref, that in its own precision, of one query tile."""
        options = self.options
        precisions: dict[str, Cast] = {"O_full": lambda x: x.double(), "O_ref": lambda x: x}
        found: Values = {}
        for name, cast in precisions.items():
            o = hstu_attention(
                cast(self.q),
                cast(self.k),
                cast(self.v),
                self.offsets,
                num_targets=self.num_targets,
                max_seq_len=options.max_seq_len,
                alpha=options.alpha,
                causal=options.causal,
                max_attn_len=options.max_attn_len,
                contextual_seq_len=options.contextual_seq_len,
            )
            found[name] = array(self.head(o, head)[i_m : i_m + self.config.block_m])
        return found


def _tap(case: Case, program: int, slots: Sequence[str], steps: int) -> Tap:
    return Tap(case.q, case.v, case.config.block_m, case.config.block_n, program, len(slots), steps)


def _tapped(case: Case, tap: Tap, kernel: Kernel, slots: Sequence[str], expected: Sequence[int]) -> Values:
    """What the taps hold, by tile number: the `expected` ones in order, then anything else that was written."""
    shapes = case.shapes()
    written = [int(i) for i in (~tap.buffer[:, slots.index(kernel.naming.anchor), 0].isnan()).nonzero()]
    # Expected but never written values stay NaN.
    rows = [*expected, *(row for row in written if row not in expected)] if written else []
    values: Values = {"Q": tap.value(0, 0, *shapes["Q"])} if kernel is FORWARD else {}
    for step, row in enumerate(rows):
        for name in kernel.order:
            rotated = name in kernel.naming.transposed
            value = tap.value(row, slots.index(name), *(shapes[name][::-1] if rotated else shapes[name]))
            values[f"{name}_{step}"] = value.T if rotated else value
    return values


def trace_forward(case: Case, head: int, tile: int, tapped: bool) -> Traced:
    """A program of the forward."""
    number, i_m, block = tile * HEADS + head, case.first_query(tile), case.config.block_m
    if tapped:
        tap = _tap(case, number, FORWARD_SLOTS, case.tiles(case.config.block_n))
        o = launch.forward(case.inputs, case.config, tap.argument)
        expected = [
            i_n // case.config.block_n for i_n in simulate.key_blocks(i_m, case.tokens, case.tiling, case.simulated)
        ]
        found: tuple[Values, Lines] = _tapped(case, tap, FORWARD, FORWARD_SLOTS, expected), {}
    else:
        with record({FORWARD.name: number}) as recording:
            o = launch.forward(case.inputs, case.config)
        found = recorded(recording, FORWARD)

    def run(cast: Cast) -> Iterator[Named]:
        q, k, v = (cast(case.head(x, head)) for x in (case.q, case.k, case.v))
        return simulate.forward(q, k, v, i_m, case.tiling, case.simulated)

    stored = {"O_final": padded(case.head(o, head)[i_m : i_m + block], block)}
    place, rows = _rows_place(case, number, head, i_m)
    traced = beside(FORWARD, place, found, run, as_it_is, stored, MAKERS)
    return replace(traced, at=(head, i_m, rows), beside=case.whole(head, i_m))


def trace_backward(case: Case, do: torch.Tensor, head: int, tile: int, tapped: bool) -> list[Traced]:
    """A program of the kernel that owns key tiles, and one of the kernel that owns query tiles."""
    m, n = case.config.block_m, case.config.block_n
    i_n, i_m = tile % case.tiles(n) * n, case.first_query(tile)
    numbers: Mapping[str, int] = {DKDV.name: tile % case.tiles(n) * HEADS + head, DQ.name: tile * HEADS + head}
    if tapped:
        of_keys, of_queries = (
            _tap(case, numbers[kernel.name], slots, case.tiles(block))
            for kernel, slots, block in ((DKDV, DKDV_SLOTS, m), (DQ, DQ_SLOTS, n))
        )
        dq, dk, dv = launch.backward(case.inputs, do, case.config, case.config, (of_keys.argument, of_queries.argument))
        queries = [start // m for start in simulate.query_blocks(i_n, case.tokens, case.tiling, case.simulated)]
        keys = [start // n for start in simulate.key_blocks(i_m, case.tokens, case.tiling, case.simulated)]
        found: list[tuple[Values, Lines]] = [
            (_tapped(case, of_keys, DKDV, DKDV_SLOTS, queries), {}),
            (_tapped(case, of_queries, DQ, DQ_SLOTS, keys), {}),
        ]
    else:
        with record(numbers) as recording:
            dq, dk, dv = launch.backward(case.inputs, do, case.config, case.config)
        found = [recorded(recording, kernel) for kernel in (DKDV, DQ)]

    def tensors(cast: Cast) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, one = (cast(case.head(x, head)) for x in (case.q, case.k, case.v, do))
        return q, k, v, one

    def run_keys(cast: Cast) -> Iterator[Named]:
        return simulate.backward_dkdv(*tensors(cast), i_n, case.tiling, case.simulated)

    def run_queries(cast: Cast) -> Iterator[Named]:
        return simulate.backward_dq(*tensors(cast), i_m, case.tiling, case.simulated)

    ends = {f"{name}_final": padded(case.head(x, head)[i_n : i_n + n], n) for name, x in (("dK", dk), ("dV", dv))}
    place = f"program {numbers[DKDV.name]}, head {head}, keys {i_n} to {min(i_n + n, case.tokens) - 1}"
    of_tile = beside(DKDV, place, found[0], run_keys, as_it_is, ends, MAKERS)
    place, rows = _rows_place(case, numbers[DQ.name], head, i_m)
    end = {"dQ_final": padded(case.head(dq, head)[i_m : i_m + m], m)}
    return [of_tile, replace(beside(DQ, place, found[1], run_queries, as_it_is, end, MAKERS), at=(head, i_m, rows))]


def _rows_place(case: Case, number: int, head: int, i_m: int) -> tuple[str, int]:
    """Place and rows of a program that owns a query tile."""
    rows = min(case.config.block_m, case.tokens - i_m)
    return f"program {number}, head {head}, rows {i_m} to {i_m + rows - 1}", rows


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    config = _tiles(request)
    tokens = request.seq_blocks * config.block_m
    if request.targets > tokens:
        raise UsageError(f"--targets {request.targets}: the sequence has {tokens} tokens, and no more can be targets")
    fill = make_fill(request.fill, request.seed)
    shape = (LEAD + tokens, HEADS, CHANNELS)
    q, k, v = (fill(name, shape, 1.0).to(request.device, request.precision) for name in "qkv")
    options = Options(
        CHANNELS**-0.5, tokens, request.causal, request.targets, request.max_attn_len, min(request.context, tokens + 1)
    )
    case = Case(q, k, v, options, config)
    tiles = request.seq_blocks
    if not 0 <= request.head < HEADS or not 0 <= request.program < tiles:
        raise UsageError(
            f"there are {HEADS} heads of {tiles} programs each: expected --head 0 to {HEADS - 1} and --program 0 to"
            f" {tiles - 1}"
        )
    about = {
        "tiles": f"{config.block_m} queries × {config.block_n} keys",
        "tokens": f"{tokens}, behind a sequence of {LEAD}",
        "mask": _mask_words(request),
    }
    with interpreter.quiet():
        if request.direction == "backward":
            do = make_fill(request.fill, request.seed + 1)("do", shape, 1.0).to(q)
            return trace_backward(case, do, request.head, request.program, not interpreting()), about
        return [trace_forward(case, request.head, request.program, not interpreting())], about


def _tiles(request: Request) -> Config:
    entry = entry_of(request, hstu_tiles.entries(), "block_m", "block_n")
    if entry is not None:
        # Descriptors exist on GPUs only.
        return entry.config._replace(tma=False)
    config = Config(request.block_m or 64, request.block_n or 64, 4, 1)
    check_tile("block_m", config.block_m)
    check_tile("block_n", config.block_n)
    return config


def _mask_words(request: Request) -> str:
    numbers = {
        "targets": request.targets,
        "tokens of context": request.context,
        "tokens of reach": request.max_attn_len,
    }
    return ", ".join(
        [
            "causal" if request.causal else "both ways",
            *(f"{number} {word}" for word, number in numbers.items() if number),
        ]
    )


TRACE = Tracing(trace, refuses=("order", "impl", "names", "against"))
