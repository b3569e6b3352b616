"""`tilewise trace`: runs a kernel and the simulation, writes both out, and reports the first mismatch."""

import dataclasses
from dataclasses import replace

import torch

from tilewise import workbench
from tilewise._gluon.faults import KernelFaultError
from tilewise.ops._host.backend import interpreting
from tilewise.trace import only_rows, warp_rows
from tilewise.trace.explain import Row, explain, first_divergence, judge
from tilewise.trace.request import HSTU_MASK, Request, Traced, option, split_step
from tilewise.trace.values import MissingNameError, Values, write_traces
from tilewise.verify.single import DTYPES
from tilewise.workbench.operator import Tracing, UsageError


def run_trace(request: Request) -> tuple[list[str], bool]:
    """Lines to print, and whether there is no mismatch. A UsageError says what is wrong with the request."""
    tracing: Tracing = workbench.find(request.operator, "trace").load("trace")
    _check(request, tracing)
    try:
        traces, about = tracing.trace(request)
    except MissingNameError as error:
        raise UsageError(str(error)) from None
    except KernelFaultError as fault:
        return [f"✗ {fault}"], False
    pairs: dict[str, tuple[Values, Values]] = {}
    lines: list[str] = []
    agrees = True
    shown: list[tuple[Traced, list[str]]] = []
    low_precision = float(torch.finfo(request.precision).eps)
    for traced in traces:
        kept = _warped(request, traced)
        pairs[f"{traced.part}: {kept.place}"] = ({**kept.simulation, **kept.beside}, {**kept.kernel, **kept.beside})
        found, good = verdict(kept, low_precision)
        shown.append((kept, found))
        lines += found
        agrees &= good
    write_traces(request.out, pairs)
    written = [request.out / name for name in ("debug_pt.txt", "debug_kernel.txt", "trace.npz")]
    if request.html:
        from tilewise.report.trace import facts, render_html

        page = render_html(
            shown, facts(request, about), low_precision, "other kernel" if request.against else "simulation"
        )
        request.html.write_text(page, encoding="utf-8")
        written.append(request.html)
    return [*lines, f"written: {', '.join(map(str, written))}"], agrees


def _check(request: Request, tracing: Tracing) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(request)}
    for name in tracing.refuses:
        if getattr(request, name) != defaults[name]:
            raise UsageError(f"{option(name)} means nothing to {request.operator}: leave it out")
    if request.direction not in ("forward", "backward"):
        raise UsageError(f"there is no direction {request.direction!r}: expected forward or backward")
    if request.order not in (None, "lists", "union"):
        raise UsageError(f"there is no order {request.order!r}: expected lists or union")
    if request.dtype not in DTYPES:
        raise UsageError(f"there is no dtype {request.dtype!r}: expected one of {', '.join(DTYPES)}")
    if request.direction == "backward" and (request.impl or request.against):
        raise UsageError("--impl and --against trace forward kernels: leave out --direction backward")
    if not interpreting() and not tracing.taps:
        raise UsageError(
            f"the kernels of {request.operator} have no taps, so they are traced in Triton's interpreter alone: set"
            " TRITON_INTERPRET=1"
        )
    if not interpreting() and (request.impl or request.against or not torch.cuda.is_available()):
        raise UsageError(
            "a kernel's values are recorded in Triton's interpreter: set TRITON_INTERPRET=1 (ours have taps, which need"
            " a GPU)"
        )
    if request.warp is not None and not 0 <= request.warp < request.warps:
        raise UsageError(f"there is no warp {request.warp}: expected 0 to {request.warps - 1}")
    if request.seq_blocks < 1:
        raise UsageError(f"--seq-blocks {request.seq_blocks}: expected at least 1")
    for name in HSTU_MASK:
        if getattr(request, name) < 0:
            raise UsageError(f"{option(name)} {getattr(request, name)}: expected 0 or more")
    # The folder of the values is made by the run itself.
    if request.html and not request.html.parent.is_dir() and request.html.parent.resolve() != request.out.resolve():
        raise UsageError(f"{request.html}: there is no folder {request.html.parent}")


def _warped(request: Request, traced: Traced) -> Traced:
    """With the rows of one warp, if requested and if the program owns queries."""
    if request.warp is None or traced.at is None:
        return traced
    rows = warp_rows(traced.at[2], request.warps, request.warp)
    sides = (traced.kernel, traced.simulation, traced.exact, traced.beside, traced.unjudged)
    kernel, simulation, exact, beside, unjudged = (only_rows(values, rows) for values in sides)
    place = f"{traced.place}, warp {request.warp} of {request.warps}"
    found = replace(traced, place=place, kernel=kernel, simulation=simulation, exact=exact)
    return replace(found, beside=beside, unjudged=unjudged)


def verdict(traced: Traced, low_precision: float) -> tuple[list[str], bool]:
    """The lines for one program, and whether there is no mismatch."""
    rows = judge(traced, low_precision)
    where = f"{traced.kernel_name}, {traced.place}"
    row = first_divergence(rows, traced.steps, traced.order)
    if row is None and traced.fault:
        return [f"✗ {where}: {len(rows)} values agree, until {traced.fault}"], False
    if row is None:
        agree = f"{len(rows)} values in {traced.steps} steps agree" if traced.steps else "its result agrees"
        return [f"✓ {where}: {agree}"], True
    name, step = split_step(row.name)
    value = row.name if step is None else f"{traced.turn} {step}, {name}"
    beyond = row.difference / row.allowed if row.allowed else float("inf")
    lines = [
        f"✗ {where}: first mismatch: {value}{list(row.worst)}",
        (
            f"    kernel {row.kernel:.7g}, simulation {row.simulation:.7g}: {beyond:.3g} times what rounding allows;"
            f" {row.bad} of {row.elements} are off"
        ),
    ]
    if row.name in traced.lines:
        lines.append(f"    computed at {traced.lines[row.name]}")
    agreeing = _agreeing(rows, row.name, traced.order)
    if agreeing:
        lines.append(f"    {', '.join(agreeing)} agree{'s' if len(agreeing) == 1 else ''}")
    lines += [f"    {sentence}" for sentence in explain(row, traced)]
    return [*lines, *([f"    then {traced.fault}"] if traced.fault else [])], False


def _agreeing(rows: list[Row], first: str, order: tuple[str, ...]) -> list[str]:
    """The values of the same step that agree."""
    name, step = split_step(first)
    if step is None:
        return []
    by_name = {row.name: row for row in rows}
    return [
        f"{other}_{step}"
        for other in order[: order.index(name)]
        if f"{other}_{step}" in by_name and by_name[f"{other}_{step}"].agrees
    ]
