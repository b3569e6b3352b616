"""The pictures of docs/ are those that docs/draw.py makes of the references, and each is shown."""

import base64
import io
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.image import imread

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS))

import draw  # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
LINK = "{http://www.w3.org/1999/xlink}href"


def contents(path):
    """The images of a picture, a pixel for each cell, and its texts, in order."""
    tree = ElementTree.parse(path)
    pngs = [base64.b64decode(image.get(LINK).partition(",")[2]) for image in tree.iter(f"{SVG}image")]
    images = [np.round(imread(io.BytesIO(png))[..., :3] * 255).astype(int) for png in pngs]
    return images, ["".join(text.itertext()) for text in tree.iter(f"{SVG}text")]


@pytest.mark.slow
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
