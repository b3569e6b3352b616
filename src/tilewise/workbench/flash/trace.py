"""Flash attention: the inputs of a trace, and the programs that are traced."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tilewise import interpreter, workbench
from tilewise.ops._host.backend import interpreting
from tilewise.ops.flash import configs, launch
from tilewise.ops.flash.reference import flash_attention
from tilewise.ops.flash.simulate import Options
from tilewise.trace.request import HSTU_MASK, Request, Traced, check_tile, entry_of
from tilewise.trace.values import Values
from tilewise.verify.implementation import load_function
from tilewise.verify.problem import make_fill
from tilewise.verify.result import Implementation
from tilewise.workbench.flash import configs as flash_tiles
from tilewise.workbench.flash import tapped
from tilewise.workbench.flash.programs import CHANNELS, FORWARD, HEADS, OUR_FORWARD, Case, trace_backward, trace_forward
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
            return tapped.tap_backward(case, do, config, program)
        with interpreter.quiet():
            return trace_backward(case, do, config, program)
    if not interpreting():
        traced = tapped.tap_forward(case, config, program)
    else:
        with interpreter.quiet():
            traced = _recorded_forward(request, case, config, program, reference)
    return [dataclasses.replace(traced, beside=_whole(case, reference, *traced.at)) if traced.at else traced]


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
    call = partial(function, case.q, case.k, case.v, **reference.keywords)
    return trace_forward(case, call, program, FORWARD.renamed(names), tuple(names))


def _whole(case: Case, reference: Reference, head: int, first: int, rows: int) -> Values:
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


TRACE = Tracing(trace, refuses=("order", *HSTU_MASK))
