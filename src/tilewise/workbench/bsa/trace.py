"""Block-sparse attention: what a trace is asked of."""

from tilewise.ops._host.launching import tile_widths
from tilewise.ops.bsa.problem import Options
from tilewise.ops.nsa.configs import parts_of_block
from tilewise.ops.nsa.selected.launch import SUMMED_ROWS
from tilewise.trace.request import HSTU_MASK, Request, Traced
from tilewise.trace.tiles import check_tile, entry_of
from tilewise.verify.fill import make_fill
from tilewise.workbench.bsa import configs as bsa_tiles
from tilewise.workbench.bsa.programs import Case, trace_backward, trace_forward
from tilewise.workbench.operator import Tracing, UsageError

# Two choices, each for two heads; channels, and blocks that a token chooses.
HEADS, CHANNELS, COUNT = 4, 64, 3


def trace(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The programs asked for, and what they work on."""
    case = _case(request)
    if not 0 <= request.head < HEADS:
        raise UsageError(f"there is no head {request.head}: expected 0 to {HEADS - 1}")
    segments = [number for number, segment in enumerate(case.segments()) if segment.head == request.head // case.shared]
    if not 0 <= request.program < len(segments):
        raise UsageError(
            f"head {request.head} has {len(segments)} programs: expected --program 0 to {len(segments) - 1}"
        )
    tokens, block_size = case.q.shape[1], case.options.block_size
    # The sums' programs come round again.
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
