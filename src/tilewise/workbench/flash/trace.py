"""Flash attention: the inputs of a trace, and the programs that are traced: interpreted, or on a GPU, through taps
compiled in for this one launch.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewise import interpreter, workbench
from tilewise.ops._host.backend import interpreting
from tilewise.ops._host.launching import tile_widths
from tilewise.ops.flash import configs, launch, simulate
from tilewise.ops.flash.configs import Config
from tilewise.ops.flash.kernels.bwd import DkdvStep, DqStep
from tilewise.ops.flash.kernels.fwd import FwdStep
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.flash.simulate import Options, Tiling
from tilewise.trace.beside import Tap
from tilewise.trace.request import HSTU_MASK, Request, Traced, arrays, check_tile, entry_of
from tilewise.trace.values import Values
from tilewise.verify.implementation import accepted, load_function
from tilewise.verify.result import Implementation
from tilewise.verify.suite import make_fill
from tilewise.workbench.flash import configs as flash_tiles
from tilewise.workbench.flash.programs import (
    CHANNELS,
    FORWARD,
    FORWARD_ORDER,
    HEADS,
    OUR_FORWARD,
    Backward,
    Case,
    crop,
    stored,
    trace_backward,
    trace_forward,
)
from tilewise.workbench.operator import Tracing, UsageError

# Output and LSE of q, k and v; other arguments are bound.
Reference = partial[tuple[torch.Tensor, torch.Tensor]]


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    config = tiles(request, 64)
    tokens = request.seq_blocks * config.block_m
    case = Case(*filled(request, tokens, tokens), Options(CHANNELS**-0.5, right=0 if request.causal else None))
    about = {
        "tiles": tile_words(request, config),
        "tokens": str(tokens),
        "mask": "causal" if request.causal else "none",
    }
    return programs(request, case, config, partial(flash_attention, causal=request.causal)), about


def tiles(request: Request, block_n: int) -> configs.Config:
    """The requested tiles, of `block_n` keys by default."""
    entry = entry_of(request, flash_tiles.entries(), "block_m", "block_n")
    if entry is not None:
        # Descriptors exist on GPUs only.
        return entry.config._replace(tma=False)
    config = configs.Config(request.block_m or 64, request.block_n or block_n, 4, 1)
    # A user's kernel has its own tiles: here block_m only sets the length.
    if not request.impl:
        check_tile("block_m", config.block_m)
        check_tile("block_n", config.block_n)
    return config


def tile_words(request: Request, config: configs.Config) -> str:
    """Tiles for the page."""
    return "the kernel's own" if request.impl else f"{config.block_m} queries × {config.block_n} keys"


def filled(request: Request, tokens: int, keys: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v of one batch entry."""
    fill = make_fill(request.fill, request.seed)
    # Ours share a KV head between the query heads; a user's kernel need not support that.
    kv_heads = HEADS if request.impl else 1
    shapes = {"q": (1, tokens, HEADS, CHANNELS), "k": (1, keys, kv_heads, CHANNELS), "v": (1, keys, kv_heads, CHANNELS)}
    q, k, v = (fill(name, shape, 1.0).to(request.device, request.precision) for name, shape in shapes.items())
    return q, k, v


def programs(request: Request, case: Case, config: configs.Config, reference: Reference) -> list[Traced]:
    """The traced programs of a case: the forward's, or the two of the backward."""
    tiles_m = -(-case.q.shape[1] // config.block_m)
    program = request.program + request.head * tiles_m
    if not 0 <= request.head < HEADS or request.program < 0 or program >= tiles_m * HEADS:
        raise UsageError(
            f"there are {HEADS} heads of {tiles_m} programs each: expected --head and --program below that, together"
            f" below {tiles_m * HEADS}"
        )
    if request.direction == "backward":
        do = make_fill(request.fill, request.seed + 1)("do", tuple(case.q.shape), 1.0).to(case.q)
        if not interpreting():
            return tap_backward(case, do, config, program)
        with interpreter.quiet():
            return trace_backward(case, do, config, program)
    if not interpreting():
        traced = tap_forward(case, config, program)
    else:
        with interpreter.quiet():
            traced = _recorded_forward(request, case, config, program, reference)
    return [dataclasses.replace(traced, beside=whole(case, reference, *traced.at)) if traced.at else traced]


def _recorded_forward(
    request: Request, case: Case, config: configs.Config, program: int, reference: Reference
) -> Traced:
    if request.impl is None:
        traced = trace_forward(case, partial(launch.forward, case.inputs, config), program, OUR_FORWARD)
    else:
        traced = _trace_function(request, case, request.impl, program, reference)
    if request.against:
        other = _trace_function(request, case, request.against, program, reference)
        traced = dataclasses.replace(
            traced, simulation=other.kernel, place=f"{traced.place}, against {request.against}"
        )
    return traced


def _trace_function(request: Request, case: Case, spec: str, program: int, reference: Reference) -> Traced:
    function: Callable[..., Any] = load_function(
        workbench.find(request.operator), Implementation(spec, "cpu", external=True)
    )
    names = dict(request.names or {})
    options = accepted(function, reference.keywords)
    lacking = [name for name, value in reference.keywords.items() if value and name not in options]
    if lacking:
        raise UsageError(f"{spec} has no parameter {', '.join(lacking)}: trace it without")
    call = partial(function, case.q, case.k, case.v, **options)
    return trace_forward(case, call, program, FORWARD.renamed(names), tuple(names))


def whole(case: Case, reference: Reference, head: int, first: int, rows: int) -> Values:
    """O_full, plain attention of these rows in fp64, and O_ref, the reference's in its own precision."""
    group = case.q.shape[2] // case.k.shape[2]
    q, k, v = (
        case.head(case.q, head).double(),
        case.head(case.k, head // group).double(),
        case.head(case.v, head // group).double(),
    )
    scores = q @ k.T * case.options.scale
    if case.options.right is not None:
        key = torch.arange(k.shape[0], device=k.device) * (case.options.key_stride or 1)
        query = torch.arange(q.shape[0], device=q.device) + case.options.right
        scores = scores.masked_fill(key[None, :] > query[:, None], -torch.inf)
    # A row that sees nothing is 0 by definition.
    full = torch.softmax(scores, -1).nan_to_num(nan=0.0) @ v
    plain = reference(case.q, case.k, case.v)[0][0, :, head]
    return {
        "O_full": full[first : first + rows].cpu().numpy(),
        "O_ref": plain[first : first + rows].double().cpu().numpy(),
    }


# What each slot holds, as the kernels declare it; TAPPED's first is written before the loop, and `t` marks tiles that
# the kernel keeps transposed.
TAPPED = ("Q", *FwdStep._fields)
DKDV, DQ = DkdvStep._fields, DqStep._fields


def _place(case: Case, config: Config, program: int) -> tuple[int, int]:
    """Head and first row of a program that owns query tiles; if later keys are masked, the last tile comes first."""
    tiles = -(-case.q.shape[1] // config.block_m)
    tile = program % tiles
    return program // tiles, (tile if case.options.right is None else tiles - 1 - tile) * config.block_m


def tap_forward(case: Case, config: Config, program: int) -> Traced:
    """The forward kernel's program next to the simulation."""
    tap = Tap(
        case.q, case.v, config.block_m, config.block_n, program, len(TAPPED), -(-case.k.shape[1] // config.block_n)
    )
    o, lse = launch.forward(case.inputs, config, tap.argument)
    head, i_m = _place(case, config, program)
    block_d, block_dv = tile_widths(case.q.shape[-1], case.v.shape[-1], case.q.element_size())
    m, n = config.block_m, config.block_n
    shapes = {
        "K": (n, block_d),
        "S_pre_scaling": (m, n),
        "M": (m,),
        "L": (m,),
        "P": (m, n),
        "V": (n, block_dv),
        "O_scale": (m, block_dv),
    }
    shapes["O"] = shapes["O_scale"]
    tiling = Tiling(m, n)
    tensors = case.head(case.q, head), case.head(case.k, 0), case.head(case.v, 0)
    simulation = arrays(simulate.forward(*tensors, i_m, tiling, case.options))
    exact = arrays(
        simulate.forward(tensors[0].double(), tensors[1].double(), tensors[2].double(), i_m, tiling, case.options)
    )
    blocks = simulate.key_blocks(i_m, case.q.shape[1], case.k.shape[1], tiling, case.options)
    values: Values = {"Q": tap.value(0, 0, m, block_d)}
    for step, i_n in enumerate(blocks):
        values |= {f"{name}_{step}": tap.value(i_n // n, TAPPED.index(name), *shape) for name, shape in shapes.items()}
    values |= {"O_final": stored(o, head, i_m, m), "LSE": simulate.tile(lse[0, head], i_m, m).double().cpu().numpy()}
    rows = min(m, case.q.shape[1] - i_m)
    kernel = crop(values, simulation, rows)
    simulation, exact = (
        {name: x if name.startswith(("K_", "V_")) else x[:rows] for name, x in found.items()}
        for found in (simulation, exact)
    )
    place = f"program {program}, head {head}, rows {i_m} to {i_m + rows - 1}"
    return Traced(
        "flash_fwd_kernel",
        "forward",
        place,
        kernel,
        simulation,
        exact,
        len(blocks),
        FORWARD_ORDER,
        at=(head, i_m, rows),
    )


def tap_backward(case: Case, do: torch.Tensor, config: Config, program: int) -> list[Traced]:
    """A program of the kernel that owns key tiles, and one of the kernel that owns query tiles."""
    tiles_m, tiles_n = -(-case.q.shape[1] // config.block_m), -(-case.k.shape[1] // config.block_n)
    key_program = program % tiles_n
    key_tap = Tap(case.q, case.v, config.block_m, config.block_n, key_program, len(DKDV), HEADS * tiles_m)
    query_tap = Tap(case.q, case.v, config.block_m, config.block_n, program, len(DQ), tiles_n)
    backward = Backward(case, do, config)
    backward.run((key_tap.argument, query_tap.argument))
    block_d, block_dv = tile_widths(case.q.shape[-1], case.v.shape[-1], case.q.element_size())
    m, n, tiling = config.block_m, config.block_n, Tiling(config.block_m, config.block_n)

    i_n = key_program * n
    pairs = [
        (h, i_m)
        for h in range(HEADS)
        for i_m in simulate.query_blocks(i_n, case.q.shape[1], case.k.shape[1], tiling, case.options)
    ]
    shapes = {
        "Q": (m, block_d),
        "St": (n, m),
        "Pt": (n, m),
        "dO": (m, block_dv),
        "dV": (n, block_dv),
        "dPt": (n, m),
        "dSt": (n, m),
        "dK": (n, block_d),
    }
    values: Values = {}
    for step, (h, i_m) in enumerate(pairs):
        for slot, name in enumerate(DKDV):
            value = key_tap.value(h * tiles_m + i_m // m, slot, *shapes[name])
            values[f"{name.removesuffix('t')}_{step}"] = value.T if name.endswith("t") else value
    keys = backward.of_keys(values, i_n, key_program)

    head, i_m = _place(case, config, program)
    blocks = simulate.key_blocks(i_m, case.q.shape[1], case.k.shape[1], tiling, case.options)
    shapes = {
        "K": (n, block_d),
        "S": (m, n),
        "V": (n, block_dv),
        "dP": (m, n),
        "P": (m, n),
        "dS": (m, n),
        "dQ": (m, block_d),
    }
    values = {}
    for step, i_n in enumerate(blocks):
        values |= {
            f"{name}_{step}": query_tap.value(i_n // n, DQ.index(name), *shape) for name, shape in shapes.items()
        }
    if blocks:
        values["delta"] = query_tap.value(blocks[0] // n, DQ.index("delta"), m)
    return [keys, backward.of_queries(values, head, i_m, program)]


TRACE = Tracing(trace, refuses=("order", *HSTU_MASK))
