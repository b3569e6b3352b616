"""`tilewise trace`: runs a kernel and the simulation, writes both out, and says where they first part."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tilewise import interpreter
from tilewise.ops._host.backend import interpreting
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.reference import flash_attention
from tilewise.sanity import flash as flash_tiles
from tilewise.trace import flash, tapped
from tilewise.trace.block import only_rows, warp_rows
from tilewise.trace.explain import explain
from tilewise.trace.files import write_traces
from tilewise.trace.flash import Case, Traced
from tilewise.trace.judge import first_divergence, judge
from tilewise.trace.values import MissingNameError, Values
from tilewise.verify.fill import make_fill
from tilewise.verify.implementation import UsageError, load_function
from tilewise.verify.result import Implementation
from tilewise.verify.run import DTYPES


@dataclass(frozen=True)
class Request:
    """What the command line asked for."""

    operator: str
    block_m: int | None = None
    block_n: int | None = None
    kernel_index: int | None = None
    seq_blocks: int = 2
    program: int = 0
    warp: int | None = None
    warps: int = 4
    head: int = 0
    direction: str = "forward"
    dtype: str = "bf16"
    causal: bool = False
    fill: str = "random"
    seed: int = 42
    impl: str | None = None
    names: Mapping[str, str] | None = None
    against: str | None = None
    out: Path = Path("debug")
    html: Path | None = None


def run_trace(request: Request) -> tuple[list[str], bool]:
    """Lines to print, and whether nothing parts. A UsageError says what is wrong with the request."""
    _check(request)
    config = _config(request)
    case = _case(request, config)
    try:
        traces = _traces(request, case, config)
    except MissingNameError as error:
        raise UsageError(str(error)) from None
    pairs: dict[str, tuple[Values, Values]] = {}
    lines: list[str] = []
    agrees = True
    shown: list[tuple[Traced, list[str]]] = []
    low_precision = float(torch.finfo(DTYPES[request.dtype]).eps)
    for traced in traces:
        kept = _warped(request, traced)
        sections = _ends(request, case, traced) if traced.part == "forward" else {}
        pairs[f"{traced.part}: {kept.place}"] = ({**kept.simulation, **sections}, {**kept.kernel, **sections})
        found, good = _verdict(kept, low_precision)
        shown.append((kept, found))
        lines += found
        agrees &= good
    write_traces(request.out, pairs)
    written = [request.out / name for name in ("debug_pt.txt", "debug_kernel.txt", "trace.npz")]
    if request.html:
        from tilewise.trace.html import facts, render_html

        page = render_html(shown, facts(request, config), low_precision, "other kernel" if request.against else "simulation")
        request.html.write_text(page, encoding="utf-8")
        written.append(request.html)
    return [*lines, f"written: {', '.join(map(str, written))}"], agrees


def _check(request: Request) -> None:
    if request.operator != "flash":
        raise UsageError(f"there is no trace of {request.operator!r}: expected flash")
    if request.direction not in ("forward", "backward"):
        raise UsageError(f"there is no direction {request.direction!r}: expected forward or backward")
    if request.dtype not in DTYPES:
        raise UsageError(f"there is no dtype {request.dtype!r}: expected one of {', '.join(DTYPES)}")
    if request.direction == "backward" and (request.impl or request.against):
        raise UsageError("--impl and --against trace forward kernels: leave out --direction backward")
    if not interpreting() and (request.impl or request.against or not torch.cuda.is_available()):
        raise UsageError("a kernel's values are recorded in Triton's interpreter: set TRITON_INTERPRET=1 (ours have taps, which need a GPU)")
    if request.warp is not None and not 0 <= request.warp < request.warps:
        raise UsageError(f"there is no warp {request.warp}: expected 0 to {request.warps - 1}")
    if request.seq_blocks < 1:
        raise UsageError(f"--seq-blocks {request.seq_blocks}: expected at least 1")
    # The folder of the values is made by the run itself.
    if request.html and not request.html.parent.is_dir() and request.html.parent.resolve() != request.out.resolve():
        raise UsageError(f"{request.html}: there is no folder {request.html.parent}")


def _config(request: Request) -> configs.Config:
    if request.kernel_index is not None:
        if request.block_m or request.block_n:
            raise UsageError("--kernel-index and --block-m, --block-n both choose tiles: give one of them")
        table = flash_tiles.entries()
        if not 0 <= request.kernel_index < len(table):
            raise UsageError(
                f"there is no configuration {request.kernel_index}: expected 0 to {len(table) - 1}, as tilewise sanity --list numbers them"
            )
        # Descriptors are a GPU's.
        return table[request.kernel_index].config._replace(tma=False)
    block_m, block_n = request.block_m or 64, request.block_n or 64
    for name, block in (("--block-m", block_m), ("--block-n", block_n)):
        # A user's kernel has its own tiles: here block_m makes the length only.
        if (block < 16 or block & (block - 1)) and not request.impl:
            raise UsageError(f"{name} {block}: expected a power of two of at least 16")
    return configs.Config(block_m, block_n, 4, 1)


def _case(request: Request, config: configs.Config) -> Case:
    tokens = request.seq_blocks * config.block_m
    fill, dtype = make_fill(request.fill, request.seed), DTYPES[request.dtype]
    q = fill("q", (1, tokens, flash.HEADS, flash.CHANNELS), 1.0).to(dtype)
    # Ours share a key head between the query heads; a user's kernel need not know how.
    kv_heads = flash.HEADS if request.impl else 1
    device = torch.device("cpu" if interpreting() else "cuda:0")
    k, v = (fill(name, (1, tokens, kv_heads, flash.CHANNELS), 1.0).to(dtype) for name in "kv")
    tiles = -(-tokens // config.block_m)
    if not 0 <= request.head < flash.HEADS or request.program < 0 or request.program + request.head * tiles >= tiles * flash.HEADS:
        raise UsageError(
            f"there are {flash.HEADS} heads of {tiles} programs each: expected --head and --program below that, together below {tiles * flash.HEADS}"
        )
    return Case(q.to(device), k.to(device), v.to(device), request.causal)


def _traces(request: Request, case: Case, config: configs.Config) -> list[Traced]:
    tiles = -(-case.q.shape[1] // config.block_m)
    program = request.program + request.head * tiles
    do = make_fill(request.fill, request.seed + 1)("do", tuple(case.q.shape), 1.0).to(case.q)
    if not interpreting():
        return [tapped.tap_forward(case, config, program)] if request.direction == "forward" else tapped.tap_backward(case, do, config, program)
    interpreter.repair()
    with interpreter.quiet():
        if request.direction == "backward":
            return flash.trace_backward(case, do, config, program)
        ours = launch.make_inputs(case.q, case.k, case.v, None, None, case.causal, -1, -1, case.options.scale, 0.0)
        if request.impl is None:
            traced = flash.trace_forward(case, partial(launch.forward, ours, config), program, flash.OUR_FORWARD)
        else:
            traced = _trace_function(request, case, request.impl, program)
        if request.against:
            other = _trace_function(request, case, request.against, program)
            traced = replace(traced, simulation=other.kernel, place=f"{traced.place}, against {request.against}")
        return [traced]


def _trace_function(request: Request, case: Case, spec: str, program: int) -> Traced:
    from tilewise import registry

    function: Callable[..., Any] = load_function(registry.find("flash"), Implementation(spec, "cpu", external=True))
    names = dict(request.names or {})
    naming = flash.FORWARD.renamed(names)
    return flash.trace_forward(case, partial(function, case.q, case.k, case.v, causal=case.causal), program, naming, tuple(names))


def _warped(request: Request, traced: Traced) -> Traced:
    if request.warp is None or traced.part == "dkdv":
        return traced
    rows = warp_rows(traced.kernel["Q"].shape[0], request.warps, request.warp)
    kernel, simulation, exact = (only_rows(values, rows) for values in (traced.kernel, traced.simulation, traced.exact))
    place = f"{traced.place}, warp {request.warp} of {request.warps}"
    return replace(traced, place=place, kernel=kernel, simulation=simulation, exact=exact)


def _ends(request: Request, case: Case, traced: Traced) -> Values:
    """O_full, plain attention of these rows in fp64, and O_ref, the reference's in its own precision."""
    words = traced.place.replace(",", "").split()
    head, first, last = (int(words[words.index(word) + 1]) for word in ("head", "rows", "to"))
    group = case.q.shape[2] // case.k.shape[2]
    q, k, v = case.head(case.q, head).double(), case.head(case.k, head // group).double(), case.head(case.v, head // group).double()
    scores = q @ k.T * case.options.scale
    if case.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    full = torch.softmax(scores, -1) @ v
    reference = flash_attention(case.q, case.k, case.v, causal=case.causal)[0][0, :, head]
    values = {"O_full": full[first : last + 1].cpu().numpy(), "O_ref": reference[first : last + 1].double().cpu().numpy()}
    return values if request.warp is None else only_rows(values, warp_rows(last + 1 - first, request.warps, request.warp))


def _verdict(traced: Traced, low_precision: float) -> tuple[list[str], bool]:
    rows = judge(traced.kernel, traced.simulation, traced.exact, list(traced.simulation), low_precision)
    where = f"{traced.kernel_name}, {traced.place}"
    row = first_divergence(rows, traced.steps, flash.ORDER[traced.part])
    if row is None:
        return [f"✓ {where}: {len(rows)} values in {traced.steps} steps agree"], True
    name, _, step = row.name.rpartition("_")
    block = f"block {step}, {name}" if step.isdigit() else row.name
    beyond = row.difference / row.allowed if row.allowed else float("inf")
    lines = [
        f"✗ {where}: the first to part is {block} at {list(row.worst)}",
        f"    kernel {row.kernel:.7g}, simulation {row.simulation:.7g}: {beyond:.3g} times what rounding allows; {row.bad} of {row.elements} are off",
    ]
    if row.name in traced.lines:
        lines.append(f"    made at {traced.lines[row.name]}")
    agreeing = _agreeing(rows, row.name, traced)
    if agreeing:
        lines.append(f"    {', '.join(agreeing)} agree{'s' if len(agreeing) == 1 else ''}")
    return lines + [f"    {sentence}" for sentence in explain(row, traced.kernel, traced.simulation)], False


def _agreeing(rows: list[Any], first: str, traced: Traced) -> list[str]:
    """The values of the same step that agree."""
    name, _, step = first.rpartition("_")
    if not step.isdigit():
        return []
    order = flash.ORDER[traced.part]
    by_name = {row.name: row for row in rows}
    return [f"{other}_{step}" for other in order[: order.index(name)] if f"{other}_{step}" in by_name and by_name[f"{other}_{step}"].agrees]
