"""What the documents claim is what is there."""

import contextlib
import inspect
import io
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import mytorch
import tilewise
from tilewise import compat, interpreter, nn, parallel, trace, verify
from tilewise.integrations import sdpa, transformers

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("packages/*/*.md"), *(ROOT / "docs").rglob("*.md")])
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
READMES = {"README.md": "README.zh-CN.md", "README.zh-CN.md": "README.md"}


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def without_code(text):
    return BLOCK.sub("", text)


def test_the_measured_table_is_shown():
    """All of it on flash's page, four of its cases in the README, one of them where we are behind cuDNN."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from table import readme_lines, table

    from tilewise.bench.result import load

    path = ROOT / "benchmarks" / "results" / "flash-h200.json"
    assert table(path) in read("docs/flash.md")
    lines = readme_lines(load(path))
    assert "\n".join(lines) in read("README.md")
    speeds = [[float(number) for number in re.findall(r"\d+", line.partition(" | ")[2])] for line in lines[2:]]
    assert any(ours < cudnn for row in speeds for ours, cudnn in zip(row[:2], row[2:4], strict=True))


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text()):
        assert (path.parent / target).exists(), target


def test_the_changelog_has_dated_releases_the_newest_of_this_version():
    headings = re.findall(r"^## (.*)$", read("CHANGELOG.md"), flags=re.M)
    releases = [
        re.fullmatch(r"(\d+\.\d+\.\d+) - (\d{4}-\d{2}-\d{2})", line) for line in headings if line != "Unreleased"
    ]
    assert all(releases)
    assert releases[0][1] == tilewise.__version__
    assert [one[2] for one in releases] == sorted((one[2] for one in releases), reverse=True)
    assert releases[-1][1] == "0.1.0"


def test_every_make_target_of_the_readme_exists():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$? ?make (\S+)", (ROOT / "README.md").read_text(), flags=re.M):
        assert re.search(rf"^{target}:", makefile, flags=re.M), target


def parts(name):
    """What the two READMEs must share: code, inline code, levels of headings, numbers of each table, and links, but for
    those to each other.
    """
    text = read(name)
    prose = without_code(text)
    tables = [line for line in prose.splitlines() if line.startswith("|")]
    return {
        "code": BLOCK.findall(text),
        "inline code": sorted(re.findall(r"`[^`\n]+`", prose)),
        "headings": re.findall(r"^#+ ", prose, flags=re.M),
        "tables": [(line.count("|"), re.findall(r"\d[\d.,]*\d|\d", line)) for line in tables],
        "lists": len(re.findall(r"^- ", prose, flags=re.M)),
        "links": sorted(target for target in re.findall(r"\]\(([^)]+)\)", prose) if target != READMES[name]),
    }


def test_the_readmes_say_the_same():
    english, chinese = (parts(name) for name in READMES)
    for part in english:
        assert english[part] == chinese[part], part


@pytest.mark.parametrize("name", READMES)
def test_the_readmes_link_to_each_other_at_their_top(name):
    assert f"]({READMES[name]})" in read(name).splitlines()[2]


def test_the_navigation_names_every_page_once():
    yaml = pytest.importorskip("yaml", reason="the documentation's tools are not installed")

    def leaves(entry):
        if isinstance(entry, str):
            return [entry]
        return [leaf for below in (entry.values() if isinstance(entry, dict) else entry) for leaf in leaves(below)]

    assert sorted(leaves(yaml.safe_load(read("mkdocs.yml"))["nav"])) == [
        str(path.relative_to(ROOT / "docs")) for path in PAGES
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_render_as_they_are_meant(path):
    """A blank line stands above each list and table, or mkdocs takes them for a part of the paragraph; pictures have
    words for those who see none.
    """
    text = without_code(path.read_text(encoding="utf-8"))
    item, inside = r"(- |\d+\. |\|)", r"(- |\d+\. |\||  |$)"
    for above, line in pairwise(text.splitlines()):
        assert not re.match(item, line) or re.match(inside, above), line
    assert all(len(words) > 40 for words in re.findall(r"!\[([^\]]*)\]", text))


def test_the_site_opens_as_the_readme_does():
    """The same sentences of what it is, commands, excerpt, rows of speed, and picture, in that order."""
    start = "Attention kernels people can trust"
    readme, index = (read(name)[read(name).index(start) :] for name in ("README.md", "docs/index.md"))
    picture = r"^!\[.*\]\((?:docs/)?(pictures/\S+)\)$"
    firsts = [text[: re.search(picture, text, flags=re.M).end()] for text in (readme, index)]

    def shared(text):
        table = [line for line in text.splitlines() if line.startswith("|")]
        return text.split("\n\n")[0], BLOCK.findall(text), table, re.findall(picture, text, flags=re.M)

    assert shared(firsts[0]) == shared(firsts[1])


def test_code_fits_the_sites_column():
    """At most 120 characters, as docs/stylesheets/wide.css counts on."""
    for path in PAGES:
        for _, code in BLOCK.findall(path.read_text(encoding="utf-8")):
            assert [line for line in code.splitlines() if len(line) > 120] == [], path


MODELS = pytest.param("docs/integrations.md", marks=pytest.mark.transformers)


@pytest.mark.parametrize("page", ["docs/index.md", "docs/decoding.md", "docs/compat.md", MODELS])
def test_a_pages_code_prints_what_it_shows(page):
    """Blocks of Python run one after another; each that prints has its output below."""
    if page == "docs/integrations.md":
        pytest.importorskip("transformers", reason="transformers is not installed: make test-transformers")
    space, printed = {}, []
    blocks = BLOCK.findall(read(page))
    for code in (text for kind, text in blocks if kind == "python"):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, page, "exec"), space)
        printed.append(out.getvalue())
    assert [text for text in printed if text] == [text for kind, text in blocks if kind == "text"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_is_quoted_is_there(path):
    """A block of Python whose first line names a file is a part of that file."""
    for kind, code in BLOCK.findall(path.read_text(encoding="utf-8")):
        named = re.fullmatch(r"# (\S+\.py)", code.partition("\n")[0])
        assert kind != "py" or not named or code.partition("\n")[2] in read(named[1]), named[1]


TOOLS = (verify, trace, interpreter)
MODULES = (tilewise, nn, parallel, compat, sdpa, transformers, *TOOLS, mytorch, mytorch.nn, mytorch.optim, mytorch.data)
# Names for methods of Tensor, and classes of numbers that NumPy documents.
NOT_SHOWN = {"mytorch": {"cat", "einsum", "stack", "bool_", "float16", "float32", "float64", "int64"}}


def api_page(module):
    return f"{module.__name__.removeprefix('tilewise.')}.md"


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_its_api_page_has_every_public_name(module):
    documented = {name for name in module.__all__ if callable(getattr(module, name))}
    shown = re.findall(r"^::: (\S+)$", read(f"docs/api/{api_page(module)}"), flags=re.M)
    # Where a module and the function in it share a name, the page says which: module.function.function.
    prefix = rf"{re.escape(module.__name__)}\.(?:(\w+)\.(?=\1$))?"
    assert sorted(re.sub(prefix, "", name) for name in shown) == sorted(
        documented - NOT_SHOWN.get(module.__name__, set())
    )


def test_the_api_index_has_every_page():
    index = read("docs/api/index.md")
    assert re.findall(r"^\| \[(\S+)\]\((\S+)\) \|", index, flags=re.M) == [
        (module.__name__, api_page(module)) for module in MODULES
    ]
    assert {path.name for path in (ROOT / "docs" / "api").iterdir()} == {"index.md", *map(api_page, MODULES)}


@pytest.mark.parametrize("name", [*sorted(set(tilewise.__all__) - {"__version__"}), "verify"])
def test_docstrings_name_the_arguments_there_are(name):
    """The API pages show them; a line may name several."""
    function = verify.verify if name == "verify" else getattr(tilewise, name)
    arguments = re.search(r"Args:\n(.*?)(\n\n|\Z)", inspect.getdoc(function), flags=re.S)[1]
    named = [word for line in re.findall(r"^    (\w[\w, ]*):", arguments, flags=re.M) for word in line.split(", ")]
    assert sorted(named) == sorted(inspect.signature(function).parameters)
