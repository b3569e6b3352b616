"""Native sparse attention's branches: the inputs of a trace, and the programs that are traced.

Attention to compressed windows is flash attention with keys one stride apart: the same kernels, taps and simulation.
Attention to selected blocks is traced in either loop order.
"""

from functools import partial

import torch

from tilewise.ops.nsa.problem import window_count
from tilewise.ops.nsa.reference import compressed_attention
from tilewise.ops.nsa.selected import launch as selected
from tilewise.ops.nsa.simulate import compressed_options
from tilewise.trace.request import HSTU_MASK, Request, Traced, check_tile, entry_of
from tilewise.verify.suite import make_fill
from tilewise.workbench.flash.programs import CHANNELS as FLASH_CHANNELS
from tilewise.workbench.flash.programs import Case as FlashCase
from tilewise.workbench.flash.trace import filled, programs, tile_words, tiles
from tilewise.workbench.nsa import configs as selected_tiles
from tilewise.workbench.nsa.programs import Case, Numbers, trace_backward, trace_forward_lists, trace_forward_union
from tilewise.workbench.operator import Tracing, UsageError

# Tokens per window, and the stride between windows: short, so that few tokens have several tiles of them.
SIZE, STRIDE = 8, 4
# KV heads, query heads of each, channels, and blocks that a token names.
KEY_HEADS, GROUP, CHANNELS, SLOTS = 2, 2, 64, 3


def trace_compressed(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    config = tiles(request, 16)
    tokens = request.seq_blocks * config.block_m
    windows = window_count(tokens, SIZE, STRIDE)
    case = FlashCase(*filled(request, tokens, windows), compressed_options(tokens, SIZE, STRIDE, FLASH_CHANNELS**-0.5))
    about = {
        "tiles": tile_words(request, config),
        "tokens": str(tokens),
        "windows": f"{windows} of {SIZE} tokens, one each {STRIDE}",
    }
    return programs(
        request, case, config, partial(compressed_attention, compress_size=SIZE, compress_stride=STRIDE)
    ), about


def trace_selected(request: Request) -> tuple[list[Traced], dict[str, str]]:
    """The requested programs, and what they work on."""
    case = _case(request)
    order: selected.Order = "union" if request.order == "union" else "lists"
    if order == "union" and not case.inputs.union_tokens("union_fwd"):
        raise UsageError(
            f"tiles of {case.block_m} rows have more tokens or entries than a union holds: take a smaller --block-m, or"
            " --order lists"
        )
    about = {
        "order": "by keys (lists)" if order == "lists" else "by queries (unions)",
        "tiles": f"{case.block_m} rows × blocks of {case.block_size} keys",
        "tokens": str(case.q.shape[1]),
        "heads": f"{KEY_HEADS} KV heads of {GROUP} query heads",
        "named": f"{SLOTS} blocks by each token, up to its own; some twice, some none",
    }
    if request.direction == "backward":
        do = make_fill(request.fill, request.seed + 1)("do", tuple(case.q.shape), 1.0).to(case.q)
        return trace_backward(case, do, order, _numbers(request, case, order, selected.SUMMED_ROWS)), about
    numbers = _numbers(request, case, order, selected.MERGED_ROWS)
    return (
        trace_forward_lists(case, numbers) if order == "lists" else [trace_forward_union(case, numbers.queries)]
    ), about


def _case(request: Request) -> Case:
    entry = entry_of(request, selected_tiles.entries(), "block_m")
    block_m = (request.block_m or 64) if entry is None else entry.config.block_m
    block_size = 16 if request.block_n is None else request.block_n
    check_tile("block_m", block_m)
    if block_size < 1:
        raise UsageError(f"--block-n {block_size}: expected a block of at least 1 key")
    tokens = request.seq_blocks * block_m // GROUP
    fill = make_fill(request.fill, request.seed)
    shapes = {
        "q": (1, tokens, KEY_HEADS * GROUP, CHANNELS),
        "k": (1, tokens, KEY_HEADS, CHANNELS),
        "v": (1, tokens, KEY_HEADS, CHANNELS),
    }
    q, k, v = (fill(name, shape, 1.0).to(request.device, request.precision) for name, shape in shapes.items())
    case = Case(q, k, v, _indices(tokens, block_size, request.seed), block_m, block_size)
    try:
        case.inputs.config("lists_fwd")
    except ValueError as error:
        raise UsageError(f"--block-n {block_size}: {error}") from None
    return case


def _indices(tokens: int, block_size: int, seed: int) -> torch.Tensor:
    """Any blocks up to the token's own, in any order: some twice, and -1 among them."""
    own = (torch.arange(tokens) // block_size)[:, None, None]
    drawn = torch.rand(1, tokens, KEY_HEADS, SLOTS, generator=torch.Generator().manual_seed(seed))
    return (drawn * (own + 2)).int() - 1


def _numbers(request: Request, case: Case, order: selected.Order, rows: int) -> Numbers:
    """The requested program of the requested head; program numbers of the other kernel wrap around."""
    if not 0 <= request.head < KEY_HEADS:
        raise UsageError(f"there is no KV head {request.head}: expected 0 to {KEY_HEADS - 1}")
    segments = [
        number for number, segment in enumerate(case.segments(request.direction, order)) if segment.head == request.head
    ]
    if order == "union":
        asked = list(range(request.head * case.tiles, (request.head + 1) * case.tiles))
        others = segments
    else:
        asked, others = segments, list(range(-(-case.q.shape[1] * case.q.shape[2] // rows)))
    if not 0 <= request.program < len(asked):
        raise UsageError(
            f"KV head {request.head} has {len(asked)} programs in this order: expected --program 0 to {len(asked) - 1}"
        )
    one, other = asked[request.program], others[request.program % len(others)]
    return Numbers(other, one) if order == "union" else Numbers(one, other)


COMPRESSED = Tracing(trace_compressed, refuses=("order", "causal", *HSTU_MASK))
SELECTED = Tracing(trace_selected, refuses=("causal", "warp", "impl", "names", "against", *HSTU_MASK), taps=False)
