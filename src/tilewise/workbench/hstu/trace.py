"""HSTU attention: what a trace is asked of."""

from tilewise import interpreter
from tilewise.ops._host.backend import interpreting
from tilewise.ops.hstu.configs import Config
from tilewise.ops.hstu.simulate import Options
from tilewise.trace.request import Request, Traced
from tilewise.trace.tiles import check_tile, entry_of
from tilewise.verify.fill import make_fill
from tilewise.workbench.hstu import configs as hstu_tiles
from tilewise.workbench.hstu.programs import CHANNELS, HEADS, LEAD, Case, trace_backward, trace_forward
from tilewise.workbench.operator import Tracing, UsageError


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The programs asked for, and what they work on."""
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
        # Descriptors are a GPU's.
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
