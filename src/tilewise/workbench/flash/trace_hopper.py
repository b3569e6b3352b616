"""Flash attention's kernels for Hopper, simulated: a CTA's warpgroups next to the simulation, in their own order of
tiles.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from tilewise._gluon.faults import KernelFaultError
from tilewise.ops._host import gluon
from tilewise.ops._host.backend import as_if_on
from tilewise.ops._host.program import run_all
from tilewise.ops.flash import launch, simulate
from tilewise.ops.flash.hopper.configs import ARCHITECTURE, BACKWARD, FORWARD, is_wide
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.flash.simulate import Options, Tiling
from tilewise.trace.record import fault_of, record
from tilewise.trace.request import Request, Traced, arrays, entry_of, split_step
from tilewise.trace.values import Values
from tilewise.verify.suite import make_fill
from tilewise.workbench.flash.configs_hopper import SOFTCAP, BackwardEntry, Entry, ForwardEntry, entries
from tilewise.workbench.flash.found import WIDE, Found, first_columns, of_backward, of_forward, of_wide
from tilewise.workbench.flash.programs import FORWARD_ORDER, Case, find_rows, stored
from tilewise.workbench.flash.trace import whole
from tilewise.workbench.operator import Tracing, UsageError

if gluon.AVAILABLE:
    from tilewise.ops.flash.hopper import launch as hopper_launch

HEADS, CHANNELS = 2, 64
# Rows of a warpgroup of the forward.
ROWS = 64
ORDER = ("Q", "S", "P", "dO", "dV", "dP", "dS", "dQ_part", "dK")
BY_KEY, SCORES = ("K", "V", "dK", "dV"), ("S", "P", "dP", "dS")
MAKERS = {"dQ_part": "the product of dS and K, of both warpgroups' keys"}


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The warpgroups of the requested CTA."""
    if not gluon.AVAILABLE:
        raise UsageError(f"these kernels are written in Gluon: {gluon.why_off()}")
    if request.dtype == "fp32":
        raise UsageError("--dtype fp32: these kernels take fp16 and bf16")
    entry = _entry(request)
    tokens = request.seq_blocks * entry.config.block_m
    softcap = SOFTCAP if isinstance(entry, ForwardEntry) and entry.capped else 0.0
    options = Options(entry.channels**-0.5, right=0 if request.causal else None, softcap=softcap)
    fill = make_fill(request.fill, request.seed)
    # Zeroed lazily, dQ has no groups.
    kv_heads = HEADS if isinstance(entry, BackwardEntry) and entry.order == "opened" else 1
    shapes = {
        "q": (HEADS, entry.channels),
        "k": (kv_heads, entry.channels),
        "v": (kv_heads, entry.values),
        "do": (HEADS, entry.values),
    }
    q, k, v, do = (fill(name, (1, tokens, *shape), 1.0).to(request.precision) for name, shape in shapes.items())
    case = Case(q, k, v, options)
    with as_if_on(ARCHITECTURE):
        if isinstance(entry, BackwardEntry):
            traced = _backward(case, do, entry, request)
        else:
            traced = _forward(case, entry, request)
    about = {
        "tiles": f"{entry.config.block_m} queries × {entry.config.block_n} keys",
        "tokens": str(tokens),
        "mask": "causal" if request.causal else "none",
    }
    return traced, about


def _entry(request: Request) -> Entry:
    chosen, backward = entry_of(request, entries()), request.direction == "backward"
    if chosen is not None and isinstance(chosen, BackwardEntry) is not backward:
        raise UsageError(
            f"--kernel-index {request.kernel_index} is {chosen.short}: it does not fit --direction {request.direction}"
        )
    widths = CHANNELS, CHANNELS
    if backward:
        return chosen or BackwardEntry(*widths, BACKWARD[widths], "fixed")
    return chosen or ForwardEntry(*widths, False, FORWARD[widths])


def _check_program(request: Request, count: int) -> None:
    # As many CTAs as SMs; those take one item each.
    most = min(count, hopper_launch.sm_count(torch.device("cpu")))
    if not 0 <= request.program < most:
        raise UsageError(f"--program {request.program}: expected 0 to {most - 1}")


def _forward(case: Case, entry: ForwardEntry, request: Request) -> list[Traced]:
    config = entry.config
    _check_program(request, -(-case.q.shape[1] // config.block_m) * HEADS)
    o = torch.empty(*case.q.shape[:3], entry.values, dtype=case.q.dtype)
    lse = torch.empty(1, HEADS, case.q.shape[1])
    with record({"flash_fwd_hopper_kernel": request.program}) as recording:
        fault = fault_of(lambda: run_all([hopper_launch.forward_launch(case.inputs, o, lse, config)], o.device))
    traced = []
    for warpgroup in range(config.groups):
        found = of_forward(recording.of_kernel("flash_fwd_hopper_kernel", warpgroup), entry.channels, entry.values)
        if "Q" in found.values:
            traced.append(_rows_of_queries(case, entry, request, found, warpgroup, fault))
    if fault and not traced:
        raise fault
    return traced


def _rows_of_queries(
    case: Case, entry: ForwardEntry, request: Request, found: Found, warpgroup: int, fault: KernelFaultError | None
) -> Traced:
    head, i_m, _ = find_rows(found.values["Q"], case.q, ROWS)
    rows = min(ROWS, case.q.shape[1] - i_m)
    tiling = Tiling(ROWS, entry.config.block_n, reverse=True)
    tensors = case.head(case.q, head), case.head(case.k, 0), case.head(case.v, 0)
    run: simulate.Program = simulate.forward
    simulation, exact = (
        _cut(arrays(run(*(x.to(kind) for x in tensors), i_m, tiling, case.options)), rows)
        for kind in (case.q.dtype, torch.float64)
    )
    traced = Traced(
        "flash_fwd_hopper_kernel",
        f"warpgroup {warpgroup}",
        f"CTA {request.program}, warpgroup {warpgroup}, head {head}, rows {i_m} to {i_m + rows - 1}",
        _cut(_like(found.values, simulation), rows),
        simulation,
        exact,
        sum(split_step(name)[0] == "S" for name in simulation),
        FORWARD_ORDER,
        found.lines,
        (head, i_m, rows),
        fault=str(fault or ""),
    )
    reference = partial(flash_attention, causal=request.causal, softcap=case.options.softcap)
    return dataclasses.replace(traced, beside=whole(case, reference, head, i_m, rows))


def _cut(values: Values, rows: int) -> Values:
    return {name: x if split_step(name)[0] in BY_KEY else x[:rows] for name, x in values.items()}


def _like(values: Values, simulation: Values) -> Values:
    """Without a tile's padding channels."""
    return {
        name: x[tuple(slice(0, size) for size in simulation[name].shape)]
        for name, x in values.items()
        if name in simulation
    }


def _backward(case: Case, do: torch.Tensor, entry: BackwardEntry, request: Request) -> list[Traced]:
    config = entry.config
    blocks = -(-case.k.shape[1] // config.block_n)
    _check_program(request, blocks)
    o, lse = launch.forward(case.inputs)
    rows = [simulate.prepare(o[0, :, h], do[0, :, h], lse[0, h], None) for h in range(HEADS)]
    delta, lse_log2 = (torch.stack(found) for found in zip(*rows, strict=True))
    gradients = [torch.full_like(x, torch.nan) for x in (case.q, case.k, case.v)]
    launches = hopper_launch.backward_launches(
        case.inputs, o, lse, do, None, (gradients[0], gradients[1], gradients[2]), entry.order, config
    )
    with record({"flash_bwd_hopper_kernel": request.program}) as recording:
        fault = fault_of(lambda: run_all(launches, o.device))
    of_keys = _Block(case, do, entry, lse_log2, delta, gradients)
    traced = []
    for warpgroup in range(2):
        events = recording.of_kernel("flash_bwd_hopper_kernel", warpgroup)
        wide = is_wide(entry.channels, entry.values)
        found = of_wide(events, warpgroup, entry.channels, entry.values) if wide else of_backward(events)
        if found.values:
            traced.append(of_keys.part(found, warpgroup, request.program, fault))
    if fault and not traced:
        raise fault
    return traced if fault else [*traced, *(of_keys.queries(head, request.program) for head in range(HEADS))]


class _Block:
    """The backward's results, and the simulation of what its CTAs compute."""

    def __init__(
        self,
        case: Case,
        do: torch.Tensor,
        entry: BackwardEntry,
        lse_log2: torch.Tensor,
        delta: torch.Tensor,
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self._case, self._config, self._wide = case, entry.config, is_wide(entry.channels, entry.values)
        self._dq, self._dk, self._dv = gradients
        self._group = HEADS // case.k.shape[2]
        self._do, self._lse_log2, self._delta = do, lse_log2, delta

    def _tensors(self, kv_head: int, kind: torch.dtype) -> list[torch.Tensor]:
        """A KV head and its query heads, [G, ...], of that dtype or better."""
        heads = slice(kv_head * self._group, (kv_head + 1) * self._group)
        q, do = (x[0, :, heads].transpose(0, 1) for x in (self._case.q, self._do))
        k, v = (self._case.head(x, kv_head) for x in (self._case.k, self._case.v))
        found = q, k, v, do, self._lse_log2[heads], self._delta[heads]
        return [x.to(torch.promote_types(x.dtype, kind)) for x in found]

    def part(self, found: Found, warpgroup: int, program: int, fault: KernelFaultError | None) -> Traced:
        """A warpgroup's part of the block that the CTA took: half of its keys and of the columns of what it adds to dQ;
        or of all keys what it computes.
        """
        size = self._config.block_n if self._wide else self._config.block_n // 2
        rows_of, tensor = ("K", self._case.k) if "K" in found.values else ("V", self._case.v)
        head, start, _ = find_rows(found.values[rows_of], tensor, size)
        block = start // self._config.block_n * self._config.block_n
        rows = max(0, min(size, self._case.k.shape[1] - start))
        ends = {"dK_final": stored(self._dk, head, start, size), "dV_final": stored(self._dv, head, start, size)}
        values = found.values | ({} if fault else ends)
        simulation, exact = (
            self._of_part(self._tensors(head, kind), block, slice(start - block, start - block + rows), warpgroup)
            for kind in (self._case.q.dtype, torch.float64)
        )
        return Traced(
            "flash_bwd_hopper_kernel",
            f"warpgroup {warpgroup}",
            f"CTA {program}, warpgroup {warpgroup}, KV head {head}, keys {start} to {start + rows - 1}",
            _like(values, simulation),
            simulation,
            exact,
            sum(split_step(name)[0] == "dS" for name in simulation),
            ORDER,
            found.lines,
            turn="visit",
            makers=MAKERS,
            fault=str(fault or ""),
        )

    def _of_part(self, tensors: Sequence[torch.Tensor], block: int, keys: slice, warpgroup: int) -> Values:
        tiling = Tiling(self._config.block_m, self._config.block_n, reverse=True, rounded_p=self._wide)
        run: simulate.Program = simulate.backward_dkdv
        values = arrays(run(*tensors, block, tiling, self._case.options))
        result: Values = {}
        end = values["K"].shape[1]
        half = first_columns(end) if self._wide else end // 2
        columns = slice(half, end) if warpgroup else slice(0, half)
        for name, x in values.items():
            base = split_step(name)[0].removesuffix("_final")
            if base == "dS":
                # As products take it.
                x = torch.from_numpy(x).to(tensors[0].dtype).double().numpy()
                result[name.replace("dS", "dQ_part")] = (x @ values["K"])[:, columns]
            if not self._wide or base in WIDE[warpgroup]:
                result[name] = x[keys] if base in BY_KEY else x[:, keys] if base in SCORES else x
        return result

    def queries(self, head: int, program: int) -> Traced:
        """dQ of one tile, to which all blocks have added."""
        size = self._config.block_m
        start = program * size
        rows = min(size, self._case.q.shape[1] - start)
        tiling = Tiling(size, self._config.block_n, rounded_p=self._wide)
        simulation, exact = (
            self._of_queries(kind, head, start, tiling) for kind in (self._case.q.dtype, torch.float64)
        )
        return Traced(
            "flash_bwd_hopper_finish_kernel",
            "dq",
            f"head {head}, rows {start} to {start + rows - 1}",
            {"dQ_final": stored(self._dq, head, start, size)[:rows]},
            {"dQ_final": simulation[:rows]},
            {"dQ_final": exact[:rows]},
            0,
            (),
            at=(head, start, rows),
        )

    def _of_queries(self, kind: torch.dtype, head: int, start: int, tiling: Tiling) -> np.ndarray:
        q, k, v, do, lse_log2, delta = self._tensors(head // self._group, kind)
        one = head % self._group
        tensors = q[one], k, v, do[one], lse_log2[one], delta[one]
        return arrays(simulate.backward_dq(*tensors, start, tiling, self._case.options))["dQ_final"]


TRACE = Tracing(
    trace,
    refuses=(
        "block_m",
        "block_n",
        "warp",
        "head",
        "order",
        "impl",
        "names",
        "against",
        "targets",
        "context",
        "max_attn_len",
    ),
    taps=False,
)
