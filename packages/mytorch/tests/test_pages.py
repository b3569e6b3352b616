"""The code of mytorch's pages runs, in order; in attention's story and the lesson it prints what stands below it."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest
from against_torch import on

ROOT = Path(__file__).parents[3]
STORY, LESSON = ROOT / "docs" / "attention_story.md", ROOT / "docs" / "mytorch_lesson.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)


@pytest.mark.parametrize(
    ("page", "backend"),
    [
        (STORY, "serial"),
        (STORY, "parallel"),
        # It trains models, for half a minute.
        pytest.param(LESSON, "parallel", marks=pytest.mark.slow),
    ],
    ids=lambda x: getattr(x, "stem", x),
)
def test_every_block_runs_and_prints_what_the_page_shows(page, backend, monkeypatch):
    monkeypatch.chdir(ROOT)
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert {kind for kind, _ in blocks} == {"python", "text"}
    names, printed = {}, ""
    with on(backend):
        for kind, text in blocks:
            if kind == "text":
                assert printed == text
                printed = ""
                continue
            assert printed == "", "what a block prints must stand below it"
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, page.name, "exec"), names)
            printed = out.getvalue()
    assert printed == ""


def test_the_numbers_of_the_text_are_those_of_the_code():
    """The formulas in the prose, from the sizes in the code."""
    T, D, M = 512, 64, 128
    page = STORY.read_text(encoding="utf-8")
    assert f"T, D, M, N = {T}, {D}, {M}, 64" in page
    assert f"{np.finfo(np.float32).max:.1e}".replace("+", "") in page
    with np.errstate(over="ignore"):
        assert np.isinf(np.exp(np.float32(89)))
    for number in (
        T * D + 2 * T * T * D // M + 4 * T * T,
        T * D + 2 * T * T * D // M + 3 * T * T,
        T * D + 2 * T * T * D // M,
        2 * T * T + T * D,
        T * D + T,
        3 * T * D + 2 * T * T + 1,
        4 * T * D + T,
    ):
        assert f"{number:,}" in page


def test_the_code_of_the_guide_and_the_readme_runs():
    blocks = [
        text
        for page in ("docs/mytorch.md", "README.md")
        for _, text in BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    ]
    ours = [text for text in blocks if "from mytorch import" in text]
    assert len(ours) == 4
    for text in ours:
        exec(compile(text, "a page", "exec"), {})
