"""The documentation site: it builds, wants nothing from a network, and a wrong link stops it."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("mkdocs", reason="the documentation's tools are not installed")

ROOT = Path(__file__).parent.parent
SOURCES = {
    "script": "src",
    "link": "href",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "object": "data",
    "embed": "src",
}


def build(project, site):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(project / "mkdocs.yml"),
        "--site-dir",
        str(site),
    ]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    built = build(ROOT, folder)
    assert built.returncode == 0, built.stderr
    return folder


class Page(HTMLParser):
    """What a page fetches, where it leads, and the places in it."""

    def __init__(self, path):
        super().__init__()
        self.fetched, self.links, self.ids = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids.add(given.get("id"))
        if SOURCES.get(tag) in given:
            self.fetched.append(given[SOURCES[tag]])
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])


@pytest.mark.slow
def test_nothing_comes_from_elsewhere(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 15
    for path in pages:
        page = Page(path)
        assert page.fetched
        assert [address for address in page.fetched if re.match(r"(https?:)?//", address)] == [], path
        styles = " ".join(
            re.findall(r"<style.*?</style>|style=\"[^\"]*\"", path.read_text(encoding="utf-8"), flags=re.S)
        )
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", styles), path
    for path in site.rglob("*.css"):
        assert not re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", path.read_text(encoding="utf-8")), path


@pytest.mark.slow
def test_every_link_leads_to_a_file_and_a_place_in_it(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for address in page.links + page.fetched:
            parts = urlsplit(address)
            if parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            assert target.exists(), f"{path}: {address}"
            assert not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids, (
                f"{path}: {address}"
            )


@pytest.mark.slow
def test_what_a_function_returns_is_one_item(site):
    """However many lines of the docstring say it."""
    lists = [
        found
        for path in (site / "api").glob("*.html")
        for found in re.findall(r"Returns:</span></p>\s*<ul>(.*?)</ul>", path.read_text(encoding="utf-8"), flags=re.S)
    ]
    assert len(lists) > 10
    assert [found for found in lists if found.count("<li") != 1] == []


@pytest.mark.slow
def test_pages_fit_their_window(site, browser):
    """At 1,280 pixels no code scrolls sideways; on a phone it may, the page itself never does."""
    wide = "[...document.querySelectorAll('article pre > code')].filter(x => x.scrollWidth > x.clientWidth + 1).length"
    for width in (1280, 390):
        page = browser.new_page(viewport={"width": width, "height": 900})
        for path in sorted(site.rglob("*.html")):
            page.goto(path.as_uri())
            assert page.evaluate("document.documentElement.scrollWidth") <= width, (path, width)
            assert width < 1280 or page.evaluate(wide) == 0, path
        page.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "text", "complaint"),
    [
        ("index.md", "\n[nowhere](nowhere.md)\n", "nowhere.md"),
        ("index.md", "\n[nowhere](flash.md#nowhere)\n", "flash.md#nowhere"),
        ("lost.md", "# Lost\n", "- lost.md"),
        ("api/tilewise.md", "\n::: tilewise.nowhere\n", "tilewise.nowhere"),
    ],
    ids=["link", "anchor", "page", "name"],
)
def test_what_leads_nowhere_fails_the_build(page, text, complaint, tmp_path):
    for folder in ("docs", "src", "packages", "examples", "benchmarks"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    with (tmp_path / "docs" / page).open("a", encoding="utf-8") as file:
        file.write(text)
    built = build(tmp_path, tmp_path / "site")
    assert built.returncode != 0
    assert complaint in built.stderr


@pytest.mark.slow
def test_the_search_works_from_the_disk(site, browser):
    page = browser.new_page()
    page.set_default_timeout(120_000)
    said, fetched = [], []
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("console", lambda message: said.append(message.text))
    page.on("request", lambda request: fetched.append(request.url))
    page.goto((site / "index.html").as_uri())
    box = page.get_by_role("textbox", name="Search")
    box.click()
    box.press_sequentially("softcap")
    found = page.locator('.md-search-result__link[href*="api/tilewise.html"]').first
    found.wait_for()
    assert "flash_attention" in page.locator(".md-search-result__list").inner_text()
    found.click()
    page.wait_for_url("**/api/tilewise.html*")
    assert said == []
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    page.close()
