"""What the documents claim is what is there."""

import re
import sys
from pathlib import Path

import pytest

import tilewise

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_the_readme_shows_the_measured_table():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from table import table

    assert table(ROOT / "benchmarks" / "results" / "flash-h200.json") in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_version_is_the_same_everywhere():
    assert f'version = "{tilewise.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$? ?make (\S+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target
