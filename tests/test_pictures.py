"""The pictures of docs/ show what the references compute: a key that is moved changes a query's output exactly where
the committed one says so.
"""

import base64
import io
import sys
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.image import imread

from tilewise.ops._device.mask import key_range
from tilewise.ops._device.records import Window
from tilewise.ops.bsa import reference as bsa
from tilewise.ops.flash import reference as flash
from tilewise.ops.hstu import reference as hstu
from tilewise.ops.nsa import reference as nsa

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import draw  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"
BRANCHES = ("g_cmp", "g_slc", "g_swa")


def contents(path):
    """The images of a picture, a pixel for each cell, and its texts, in order."""
    tree = ElementTree.parse(path)
    pngs = [base64.b64decode(image.get(LINK).partition(",")[2]) for image in tree.iter(f"{SVG}image")]
    images = [np.round(imread(io.BytesIO(png))[..., :3] * 255).astype(int) for png in pngs]
    return images, ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]


def colour(name):
    return [int(name[i : i + 2], 16) for i in (1, 3, 5)]


def is_colour(image, name):
    return (image == colour(name)).all(-1)


@cache
def panels(name):
    """Where the committed picture says that a query sees a key, for each panel."""
    return [~is_colour(image, draw.GREY) for image in contents(DOCS / "pictures" / f"{name}.svg")[0]]


def changed(attend, keys):
    """[T, J], True where another key and value j change what `attend` gives for query t."""
    still = attend(torch.zeros(keys, dtype=torch.float64))
    return np.stack([(attend(move) != still).numpy() for move in torch.eye(keys, dtype=torch.float64)], axis=1)


def moved(k, v, move, axis):
    """Keys and values with those moved that `move` marks; values far, for their weights may be small."""
    move = move.view([-1 if i == axis else 1 for i in range(k.dim())])
    return k + 0.1 * move, v + 1e12 * move


@pytest.mark.parametrize("name", draw.PICTURES)
def test_the_committed_picture_is_the_one_that_is_drawn(name, tmp_path):
    committed = DOCS / "pictures" / f"{name}.svg"
    images, texts = contents(committed)
    drawn_images, drawn_texts = contents(draw.save(name, tmp_path))
    assert texts == drawn_texts
    assert [image.tolist() for image in images] == [image.tolist() for image in drawn_images]
    assert committed.stat().st_size < 150_000
    assert "<dc:date>" not in committed.read_text(encoding="utf-8")


def test_every_picture_is_shown():
    pages = "".join(path.read_text(encoding="utf-8") for path in DOCS.rglob("*.md"))
    names = {f"{name}.svg" for name in draw.PICTURES} | {path.name for path in (DOCS / "pictures").iterdir()}
    assert [name for name in sorted(names) if f"pictures/{name})" not in pages] == []


@pytest.mark.parametrize("panel", range(len(draw.FLASH)))
def test_flash_masks(panel):
    options = dict(list(draw.FLASH.values())[panel])
    queries, keys = options.pop("queries"), options.pop("keys")
    q, k, v = draw.random(1, queries, 2, 4), draw.random(1, keys, 1, 4, seed=8), draw.random(1, keys, 1, 4, seed=9)

    def attend(move):
        return flash.flash_attention(q, *moved(k, v, move, 1), **options)[0].sum((0, 2, 3))

    assert (panels("flash-masks")[panel] == changed(attend, keys)).all()


def test_flash_heads():
    q, k, v = draw.random(1, 5, 8, 4), draw.random(1, 5, 2, 4, seed=8), draw.random(1, 5, 2, 4, seed=9)
    seen = changed(lambda move: flash.flash_attention(q, *moved(k, v, move, 2))[0].sum((0, 1, 3)), 2)
    assert (panels("flash-masks")[-1] == seen).all()


@triton.jit
def ends_kernel(out, i_m, n, left: tl.constexpr, right: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    low, full_low, full_high, high = key_range(i_m, n, Window(left, right, 0), BLOCK_M, BLOCK_N)
    tl.store(out, low)
    tl.store(out + 1, full_low)
    tl.store(out + 2, full_high)
    tl.store(out + 3, high)


@pytest.mark.gpu
@pytest.mark.parametrize("panel", range(len(draw.TILES)))
def test_flash_tiles_are_those_that_the_kernel_walks(panel, device):
    options, size = list(draw.TILES.values())[panel], draw.TILED
    image = contents(DOCS / "pictures" / "flash-tiles.svg")[0][panel]
    whole = is_colour(image, draw.BLUE)
    masked = is_colour(image, draw.ORANGE) | is_colour(image, draw.RED)
    expected = np.zeros((size, size), int)
    for i_m in range(0, size, draw.TILING.block_m):
        out = torch.full((4,), -1, dtype=torch.int32, device=device)
        ends_kernel[(1,)](out, i_m, size, options.left, options.right, draw.TILING.block_m, draw.TILING.block_n)
        low, full_low, full_high, high = out.tolist()
        rows = slice(i_m, i_m + draw.TILING.block_m)
        expected[rows, low:high] = 2
        expected[rows, full_low:full_high] = 1
    assert (np.where(whole, 1, np.where(masked, 2, 0)) == expected).all()
    kept = whole | is_colour(image, draw.ORANGE)
    left = -1 if options.left is None else options.left
    assert (kept == flash.keep_mask(size, size, True, (left, 0), torch.device("cpu")).numpy()).all()


@pytest.mark.parametrize("branch", BRANCHES)
def test_nsa_branches(branch):
    q, k, v, _, blocks = draw.nsa_inputs()
    gates = {name: torch.ones(1, draw.NSA_TOKENS, 1, dtype=q.dtype) if name == branch else None for name in BRANCHES}
    options = {**gates, **draw.NSA, "window_size": draw.NSA_WINDOW, "block_indices": blocks}

    def attend(move):
        return nsa.native_sparse_attention(q, *moved(k, v, move, 1), **options)[0].sum((0, 2, 3))

    assert (panels("nsa-branches")[1 + BRANCHES.index(branch)] == changed(attend, draw.NSA_TOKENS)).all()


def test_nsa_one_query():
    image = contents(DOCS / "pictures" / "nsa-branches.svg")[0][0]
    query, size, stride = draw.NSA_QUERY, draw.NSA["compress_size"], draw.NSA["compress_stride"]
    for window in range((draw.NSA_TOKENS - size) // stride + 1):
        first = window * stride
        cells = image[window % (size // stride), first : first + size]
        assert is_colour(cells, draw.SKY if first + size - 1 <= query else draw.GREY).all()
    seen = ~is_colour(image, draw.GREY)
    assert (seen[2] == panels("nsa-branches")[2][query]).all()
    assert (seen[3] == panels("nsa-branches")[3][query]).all()
    chosen = nsa.select_blocks(*draw.nsa_inputs()[::3], **draw.NSA)[0, query, 0].tolist()
    own, block = query // draw.NSA["block_size"], np.arange(query + 1) // draw.NSA["block_size"]
    forced = (block == 0) | (block > own - draw.NSA["local_blocks"])
    assert (is_colour(image[2, : query + 1], draw.ORANGE) == forced).all()
    assert (is_colour(image[2, : query + 1], draw.RED) == np.isin(block, chosen) & ~forced).all()


@pytest.mark.parametrize("panel", range(len(draw.HSTU)))
def test_hstu_masks(panel):
    options = dict(list(draw.HSTU.values())[panel])
    lengths, targets = options.pop("lengths"), options.pop("targets", None)
    tokens = sum(lengths)
    q, k, v = (draw.random(tokens, 2, 4, seed=seed) for seed in (7, 8, 9))
    offsets = torch.tensor([0, *np.cumsum(lengths)])
    options |= {"max_seq_len": max(lengths), "num_targets": None if targets is None else torch.tensor(targets)}
    seen = changed(lambda move: hstu.hstu_attention(q, *moved(k, v, move, 0), offsets, **options).sum((1, 2)), tokens)
    assert (panels("hstu-masks")[panel] == seen).all()


@pytest.mark.parametrize(
    ("panel", "branch", "heads"),
    [(0, "g_cmp", (0, 3)), (1, "g_swa", (1, 2)), (2, "g_slc", (0, 1)), (3, "g_slc", (2, 3))],
)
def test_bsa_blocks(panel, branch, heads):
    q, k, v, blocks = draw.bsa_inputs()
    gates = [torch.full(q.shape[:-1], float(name == branch), dtype=q.dtype) for name in BRANCHES]
    for head in heads:
        # Layer norm takes out what all channels of a token share, so the channels of one head move by different
        # amounts.
        one = torch.zeros(draw.BSA_HEADS, 4, dtype=q.dtype)
        one[head] = torch.arange(1, 5)

        def attend(move, one=one):
            place = move[:, None, None] * one
            return (
                bsa.block_sparse_attn(q, k + 0.1 * place, v + 1e3 * place, v, *gates, **draw.BSA, block_indices=blocks)[
                    0
                ]
                .abs()
                .sum((0, 2, 3))
            )

        assert (panels("bsa-blocks")[panel] == changed(attend, draw.BSA_TOKENS)).all()
