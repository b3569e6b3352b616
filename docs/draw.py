"""Draws the pictures of these pages by asking the operators' references, and from saved benchmarks:
`python docs/draw.py` writes docs/pictures/*.svg.

What a query sees is never written down here: the value of every key is shifted a little, and a query sees those whose
shift reaches its output. The tiles that a kernel visits come from its simulation.
"""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tilewise.bench.result import from_json, load
from tilewise.bench.text import plot
from tilewise.ops.bsa import reference as bsa
from tilewise.ops.flash import reference as flash
from tilewise.ops.flash import simulate
from tilewise.ops.flash.decode import reference as decode
from tilewise.ops.hstu import reference as hstu
from tilewise.ops.nsa import reference as nsa
from tilewise.parallel.assignment import assign

FOLDER = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
# Okabe and Ito's colours, which the colour-blind tell apart; the background is the picture's own, so that it reads the
# same on dark pages.
GREY, BLUE, SKY, ORANGE, RED, GREEN = "#e4e4e4", "#0072b2", "#56b4e9", "#e69f00", "#d55e00", "#009e73"
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "tilewise",
    "font.family": "DejaVu Sans",
    "font.size": 8.0,
    "axes.titlesize": 8.5,
    "figure.constrained_layout.h_pad": 0.1,
    "figure.constrained_layout.w_pad": 0.1,
}

FLASH: dict[str, dict[str, Any]] = {
    "causal": {"queries": 12, "keys": 12, "causal": True},
    "causal, window_size=(3, 0)": {"queries": 12, "keys": 12, "causal": True, "window_size": (3, 0)},
    "window_size=(2, 2)": {"queries": 12, "keys": 12, "window_size": (2, 2)},
    "causal, 6 queries and 12 keys": {"queries": 6, "keys": 12, "causal": True},
    "causal, 12 queries and 8 keys": {"queries": 12, "keys": 8, "causal": True},
}
GROUP: dict[str, Any] = {"query_heads": 8, "key_heads": 2}
TILES: dict[str, simulate.Options] = {
    "causal": simulate.Options(scale=1.0, right=0),
    "causal, window_size=(31, 0)": simulate.Options(scale=1.0, left=31, right=0),
}
TILING, TILED = simulate.Tiling(block_m=16, block_n=8), 96
# Tokens of a sequence, and the ranks that share it.
SHARED, RANKS = 32, 4
# Three sequences, the first and the last with a common prompt; -1 where no page has been handed out.
PAGE_SIZE, PAGE_TABLE, LENGTHS = 16, ((4, 1, -1), (2, 0, 5), (4, 3, -1)), (25, 41, 20)
NSA: dict[str, Any] = {
    "compress_size": 8,
    "compress_stride": 4,
    "block_size": 8,
    "block_count": 5,
    "init_blocks": 1,
    "local_blocks": 2,
}
NSA_TOKENS, NSA_WINDOW, NSA_QUERY = 80, 12, 66
HSTU: dict[str, dict[str, Any]] = {
    "causal": {"lengths": [12]},
    "num_targets=3": {"lengths": [12], "targets": [3]},
    "contextual_seq_len=2": {"lengths": [12], "contextual_seq_len": 2},
    "max_attn_len=3": {"lengths": [12], "max_attn_len": 3},
    "all three": {"lengths": [12], "targets": [3], "contextual_seq_len": 2, "max_attn_len": 3},
    "packed: lengths 4, 0, 7 and 5, targets 1, 0, 3 and 2": {"lengths": [4, 0, 7, 5], "targets": [1, 0, 3, 2]},
}
BSA: dict[str, Any] = {"block_counts": 3, "block_size": 8, "window_size": 12}
BSA_TOKENS, BSA_HEADS = 64, 4


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Inputs of the pictures, the same wherever they are drawn."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seen(attend: Callable[[torch.Tensor], torch.Tensor], keys: int) -> np.ndarray:
    """[T, J], True where a shift of key j reaches query t: `attend` takes a shift of each key, [J], and gives a number
    for each query, [T].
    """
    return (torch.autograd.functional.jacobian(attend, torch.zeros(keys, dtype=torch.float64)) != 0).numpy()


def flash_mask(queries: int, keys: int, **options: Any) -> np.ndarray:
    """What the queries of one head see."""
    q, k, v = random(1, queries, 1, 4), random(1, keys, 1, 4, seed=1), random(1, keys, 1, 4, seed=2)
    return seen(lambda shift: flash.flash_attention(q, k, v + shift[:, None, None], **options)[0].sum((0, 2, 3)), keys)


def flash_heads(query_heads: int, key_heads: int) -> np.ndarray:
    """[Hq, Hk], which KV head each query head reads."""
    q, k, v = random(1, 3, query_heads, 4), random(1, 3, key_heads, 4, seed=1), random(1, 3, key_heads, 4, seed=2)
    return seen(lambda shift: flash.flash_attention(q, k, v + shift[:, None])[0].sum((0, 1, 3)), key_heads)


def pool_rows() -> np.ndarray:
    """[entries, pages · PAGE_SIZE], the rows of a pool that the last query of each sequence sees."""
    table, lengths = torch.tensor(PAGE_TABLE), torch.tensor(LENGTHS)
    pages = int(table.max()) + 1
    q, k, v = random(3, 1, 1, 4), random(pages, PAGE_SIZE, 1, 4, seed=1), random(pages, PAGE_SIZE, 1, 4, seed=2)

    def attend(shift: torch.Tensor) -> torch.Tensor:
        shifted = v + shift.view(pages, PAGE_SIZE, 1, 1)
        return decode.attend_cached(q, k, shifted, causal=True, seqused_k=lengths, page_table=table)[0].sum((1, 2, 3))

    return seen(attend, pages * PAGE_SIZE)


def flash_tiles(options: simulate.Options) -> tuple[np.ndarray, int, int]:
    """Cells, 0 where no tile is visited, 1 in a tile that needs no mask, 2 kept and 3 left out in one that does; tiles
    visited, and masked.
    """
    cells, visited, masked = np.zeros((TILED, TILED), int), 0, 0
    for i_m in range(0, TILED, TILING.block_m):
        for i_n in simulate.key_blocks(i_m, TILED, TILED, TILING, options):
            kept = simulate.keep(i_m, i_n, TILED, TILED, TILING, options, torch.device("cpu")).numpy()
            cells[i_m : i_m + TILING.block_m, i_n : i_n + TILING.block_n] = 1 if kept.all() else np.where(kept, 2, 3)
            visited, masked = visited + 1, masked + (not kept.all())
    return cells, visited, masked


def nsa_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, the means of the keys' windows, and the blocks that the reference selects."""
    q, k, v = (random(1, NSA_TOKENS, 1, 4, seed=seed) for seed in (3, 4, 5))
    # Neighbouring queries ask for like things, as they do in a text.
    q = 0.3 * q.cumsum(1)
    k_cmp = nsa.compress_mean(k, NSA["compress_size"], NSA["compress_stride"])
    return q, k, v, k_cmp, nsa.select_blocks(q, k_cmp, **NSA)


def nsa_windows() -> np.ndarray:
    """[T, C], the compressed windows that each query sees."""
    q, _, _, k_cmp, _ = nsa_inputs()
    sizes = {name: NSA[name] for name in ("compress_size", "compress_stride")}
    return seen(
        lambda shift: nsa.compressed_attention(q, k_cmp, k_cmp + shift[:, None, None], **sizes)[0].sum((0, 2, 3)),
        k_cmp.shape[1],
    )


def nsa_mask(branch: str) -> np.ndarray:
    """[T, T], the tokens that reach each query through one branch: g_cmp, g_slc or g_swa."""
    q, k, v, _, blocks = nsa_inputs()
    gates: dict[str, Any] = {
        name: torch.ones(1, NSA_TOKENS, 1, dtype=q.dtype) if name == branch else None
        for name in ("g_cmp", "g_slc", "g_swa")
    }

    def attend(shift: torch.Tensor) -> torch.Tensor:
        shifted = v + shift[:, None, None]
        return nsa.native_sparse_attention(q, k, shifted, **gates, **NSA, window_size=NSA_WINDOW, block_indices=blocks)[
            0
        ].sum((0, 2, 3))

    return seen(attend, NSA_TOKENS)


def nsa_forced() -> np.ndarray:
    """[T, T], True where the key lies in a block that the query selects whatever its score."""
    q, _, _, k_cmp, _ = nsa_inputs()
    scores = nsa.choice_scores(q, k_cmp, **{name: size for name, size in NSA.items() if name != "block_count"})
    return (scores[0, :, 0] == torch.inf).numpy().repeat(NSA["block_size"], axis=1)


def hstu_mask(lengths: list[int], targets: list[int] | None = None, **options: Any) -> np.ndarray:
    """What each token of a packed batch sees."""
    tokens = sum(lengths)
    q, k, v = (random(tokens, 1, 4, seed=seed) for seed in range(3))
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    options["num_targets"] = None if targets is None else torch.tensor(targets)
    return seen(
        lambda shift: hstu.hstu_attention(
            q, k, v + shift[:, None, None], offsets, max_seq_len=max(lengths), **options
        ).sum((1, 2)),
        tokens,
    )


def hstu_kinds(
    lengths: list[int], targets: list[int] | None = None, contextual_seq_len: int = 0, **_: Any
) -> np.ndarray:
    """1 for a token of the history, 2 of the context, 3 for a target."""
    kinds = []
    for length, count in zip(lengths, targets or [0] * len(lengths), strict=True):
        kinds += [2] * min(contextual_seq_len, length) + [1] * (length - contextual_seq_len - count) + [3] * count
    return np.array(kinds)


def bsa_inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v, and the blocks that the reference chooses."""
    q, k, v = (random(1, BSA_TOKENS, BSA_HEADS, 4, seed=seed) for seed in (6, 7, 8))
    q = q.cumsum(1)
    return q, k, v, bsa.block_sparse_attn(q, k, v, v, None, None, None, **BSA)[1]


def bsa_forced() -> np.ndarray:
    """[T, T], True where the key lies in the query's own block."""
    q, k, _, _ = bsa_inputs()
    return (
        (bsa.choice_scores(q, k, block_size=BSA["block_size"])[0, 0] == torch.inf)
        .numpy()
        .repeat(BSA["block_size"], axis=1)
    )


def bsa_mask(branch: str, head: int) -> np.ndarray:
    """[T, T], the tokens that reach each query of `head` through one branch."""
    q, k, v, blocks = bsa_inputs()
    gates: Any = [
        torch.full(q.shape[:-1], float(name == branch), dtype=q.dtype) for name in ("g_cmp", "g_slc", "g_swa")
    ]
    one = torch.zeros(BSA_HEADS, 1, dtype=q.dtype)
    one[head] = 1.0
    # Layer norm takes the mean out, so that a shift of all channels alike could go unseen.
    direction = one * torch.tensor([1.0, 2.0, -1.0, 3.0], dtype=q.dtype)

    def attend(shift: torch.Tensor) -> torch.Tensor:
        o, _ = bsa.block_sparse_attn(q, k, v + shift[:, None, None] * direction, v, *gates, **BSA, block_indices=blocks)
        return (o * direction).sum((0, 2, 3))

    return seen(attend, BSA_TOKENS)


def paint(
    axes: Axes,
    cells: np.ndarray,
    colours: list[str],
    title: str,
    across: str = "key",
    down: str = "query",
    tile: tuple[int, int] = (1, 1),
) -> None:
    """Cells as an image of one pixel each, in `colours` by their number, with white lines around tiles of so many rows
    and columns.
    """
    rows, columns = cells.shape
    palette = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in colours], np.uint8)
    axes.imshow(palette[cells.astype(int)], interpolation="none", extent=(0, columns, rows, 0))
    axes.set_title(title)
    axes.set_xlabel(across)
    axes.set_ylabel(down)
    step = 2 ** max(0, round(math.log2(max(rows, columns) / 6)))
    axes.set_xticks(np.arange(0, columns, step) + 0.5, np.arange(0, columns, step))
    axes.set_yticks(np.arange(0, rows, step) + 0.5, np.arange(0, rows, step))
    axes.vlines(np.arange(tile[1], columns, tile[1]), 0, rows, color="white", linewidth=0.6)
    axes.hlines(np.arange(tile[0], rows, tile[0]), 0, columns, color="white", linewidth=0.6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def legend(figure: Figure, **colours: str) -> None:
    """What the colours mean, below the panels."""
    handles = [Patch(color=colour, label=label.replace("_", " ")) for label, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)


def draw_flash_masks() -> Figure:
    """Masks of flash attention, and its groups of heads."""
    figure = Figure(figsize=(7.2, 5.2), layout="constrained")
    panels = figure.subplots(2, 3).flat
    for axes, (name, problem) in zip(panels, FLASH.items(), strict=False):
        paint(axes, flash_mask(**problem), [GREY, BLUE], name)
    heads = flash_heads(**GROUP)
    paint(panels[5], heads, [GREY, GREEN], "8 query heads, 2 KV heads", across="KV head", down="query head")
    legend(figure, takes_part=BLUE, left_out=GREY, this_head_reads_that_one=GREEN)
    return figure


def draw_balance() -> Figure:
    """Which rank computes what of a causal mask."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    mask = flash_mask(SHARED, SHARED, causal=True)
    for axes, name in zip(figure.subplots(1, 2), ("contiguous", "head_tail"), strict=True):
        runs = assign(torch.tensor([0, SHARED]), RANKS, name)
        rank = runs.ranks.repeat_interleave(runs.stops - runs.starts).numpy()
        pairs = ", ".join(str(mask[rank == r].sum()) for r in range(RANKS))
        cells, colours = np.where(mask, 1 + rank[:, None], 0), [GREY, BLUE, SKY, ORANGE, GREEN]
        paint(
            axes,
            cells,
            colours,
            f'balance="{name}"',
            f"key\npairs of ranks 0 to {RANKS - 1}: {pairs}",
            tile=(4, SHARED),
        )
    legend(figure, rank_0=BLUE, rank_1=SKY, rank_2=ORANGE, rank_3=GREEN, not_seen=GREY)
    return figure


def draw_flash_tiles() -> Figure:
    """The tiles that the forward kernel visits, with and without its mask."""
    figure = Figure(figsize=(7.2, 4.4), layout="constrained")
    for axes, (name, options) in zip(figure.subplots(1, 2), TILES.items(), strict=True):
        cells, visited, masked = flash_tiles(options)
        tiles = (TILED // TILING.block_m) * (TILED // TILING.block_n)
        counts = f"key\n{visited} of {tiles} tiles visited, {masked} of them with the mask"
        paint(axes, cells, [GREY, BLUE, ORANGE, RED], name, across=counts, tile=(TILING.block_m, TILING.block_n))
    legend(figure, tile_not_visited=GREY, visited_without_mask=BLUE, kept_by_the_mask=ORANGE, left_out_by_the_mask=RED)
    return figure


def draw_decode_pages() -> Figure:
    """Sequences by position, and the pool that they lie in."""
    figure = Figure(figsize=(7.2, 2.6), layout="constrained")
    sequences, pool = figure.subplots(1, 2, width_ratios=(3, 1.4))
    rows = pool_rows()
    # 0 where none sees it, 1 to 3 for a sequence's own, 4 where two do.
    kinds = np.where(rows.sum(0) > 1, 4, rows.argmax(0) + rows.any(0)).reshape(-1, PAGE_SIZE)
    # Page -1 is the last, in which nothing lies.
    cells = np.vstack([kinds, 0 * kinds[:1]])[np.array(PAGE_TABLE)].reshape(len(PAGE_TABLE), -1)
    colours = [GREY, BLUE, ORANGE, GREEN, SKY]
    paint(sequences, cells, colours, "keys by position", across="position", down="sequence", tile=(1, PAGE_SIZE))
    for b, pages in enumerate(PAGE_TABLE):
        for i, page in enumerate(pages):
            words, colour = f"page {page}" if page >= 0 else "-1", "white" if cells[b, i * PAGE_SIZE] == 1 else "black"
            sequences.text(i * PAGE_SIZE + 0.5, b + 0.5, words, va="center", color=colour)
    paint(pool, kinds, colours, "the pool", across="row", down="page", tile=(1, PAGE_SIZE))
    for axes, count in ((sequences, len(PAGE_TABLE)), (pool, len(kinds))):
        axes.set_aspect("auto")
        axes.set_yticks(np.arange(count) + 0.5, np.arange(count))
    legend(figure, sequence_0=BLUE, sequence_1=ORANGE, sequence_2=GREEN, sequences_0_and_2=SKY, no_key=GREY)
    return figure


def draw_nsa() -> Figure:
    """Native sparse attention's branches, for one query and for all of them."""
    figure = Figure(figsize=(7.2, 4.9), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=[1, 2])
    strip = figure.add_subplot(grid[0, :])
    masks = {branch: nsa_mask(branch) for branch in ("g_cmp", "g_slc", "g_swa")}

    cells = np.zeros((4, NSA_TOKENS), int)
    size, stride = NSA["compress_size"], NSA["compress_stride"]
    for window, visible in enumerate(nsa_windows()[NSA_QUERY]):
        cells[window % (size // stride), window * stride : window * stride + size] = 2 if visible else 1
    chosen = np.where(masks["g_slc"], 1 + nsa_forced(), 0)
    cells[2], cells[3] = np.array([1, 3, 4])[chosen[NSA_QUERY]], np.where(masks["g_swa"][NSA_QUERY], 5, 1)
    paint(
        strip,
        cells,
        ["#ffffff", GREY, SKY, RED, ORANGE, GREEN],
        f"what query {NSA_QUERY} sees",
        down="",
        tile=(1, NSA_TOKENS),
    )
    strip.set_aspect("auto")
    strip.set_yticks(np.arange(4) + 0.5, ["windows 0, 2, ...", "windows 1, 3, ...", "blocks", "sliding window"])
    for lane in range(size // stride):
        strip.vlines(np.arange(lane * stride, NSA_TOKENS, size), lane, lane + 1, color="white", linewidth=1.2)
    strip.vlines(np.arange(0, NSA_TOKENS, NSA["block_size"]), 2, 3, color="white", linewidth=1.2)
    strip.axvline(NSA_QUERY + 0.5, color="black", linewidth=0.8, linestyle=":")

    panels = {
        "compressed": (masks["g_cmp"], [SKY]),
        "selected": (chosen, [RED, ORANGE]),
        "window": (masks["g_swa"], [GREEN]),
    }
    for column, (name, (painted, colours)) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[1, column])
        paint(axes, painted, [GREY, *colours], name, tile=(NSA_TOKENS, NSA["block_size"]))
        axes.axhline(NSA_QUERY + 0.5, color="black", linewidth=0.8, linestyle=":")
    legend(
        figure,
        compressed_windows=SKY,
        selected_by_score=RED,
        always_selected=ORANGE,
        sliding_window=GREEN,
        not_seen=GREY,
    )
    return figure


def draw_hstu() -> Figure:
    """HSTU's masks, and a packed batch."""
    figure = Figure(figsize=(7.2, 5.4), layout="constrained")
    for axes, (name, problem) in zip(figure.subplots(2, 3).flat, HSTU.items(), strict=True):
        paint(
            axes,
            np.where(hstu_mask(**problem), hstu_kinds(**problem), 0),
            [GREY, BLUE, ORANGE, GREEN],
            name.replace(" and 5, ", " and 5,\n"),
        )
        for end in np.cumsum(problem["lengths"])[:-1]:
            axes.axvline(end, color="black", linewidth=0.8)
            axes.axhline(end, color="black", linewidth=0.8)
    legend(figure, history=BLUE, context=ORANGE, target=GREEN, not_seen=GREY)
    return figure


def draw_bsa() -> Figure:
    """Block-sparse attention's branches; heads choose in pairs."""
    figure = Figure(figsize=(7.2, 7.0), layout="constrained")
    panels = {"compressed": (bsa_mask("g_cmp", 0), [SKY]), "window": (bsa_mask("g_swa", 0), [GREEN])}
    for head in (0, 2):
        panels[f"chosen blocks, heads {head} and {head + 1}"] = (
            np.where(bsa_mask("g_slc", head), 1 + bsa_forced(), 0),
            [RED, ORANGE],
        )
    for axes, (name, (cells, colours)) in zip(figure.subplots(2, 2).flat, panels.items(), strict=True):
        paint(axes, cells, [GREY, *colours], name, tile=(BSA_TOKENS, BSA["block_size"]))
    legend(figure, means_of_blocks=SKY, sliding_window=GREEN, chosen_by_score=RED, own_block=ORANGE, not_seen=GREY)
    return figure


def draw_bench(name: str) -> Figure:
    """Speed over length, as `tilewise bench` saved it."""
    figure = plot(from_json(load(RESULTS / f"{name}-h200.json")))
    assert figure is not None
    return figure


PICTURES: dict[str, Callable[[], Figure]] = {
    "flash-masks": draw_flash_masks,
    "flash-tiles": draw_flash_tiles,
    "decode-pages": draw_decode_pages,
    "parallel-balance": draw_balance,
    "nsa-branches": draw_nsa,
    "hstu-masks": draw_hstu,
    "bsa-blocks": draw_bsa,
    **{
        f"bench-{name}": functools.partial(draw_bench, f"bench-{name}")
        for name in ("flash", "nsa", "nsa-selected", "nsa-compressed", "hstu", "bsa")
    },
}


def save(name: str, folder: Path) -> Path:
    """Draws one picture into `folder`: the same data gives the same file."""
    path = folder / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        PICTURES[name]().savefig(path, facecolor="white", metadata={"Date": None, "Creator": None})
    return path


if __name__ == "__main__":
    for name in PICTURES:
        print(save(name, FOLDER))
