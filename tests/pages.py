"""Pages under test, parsed."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "source"}
# For every piece of text in sight: how it stands out from what lies behind it.
CONTRASTS = """() => {
    const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(x => x / 255)
        .map(x => x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = e => {
        const c = numbers(getComputedStyle(e).backgroundColor);
        return c.length < 4 || c[3] > 0 ? c : behind(e.parentElement);
    };
    const written = e => [...e.childNodes].some(node => node.nodeType == 3 && node.textContent.trim());
    return [...document.querySelectorAll("main *")].filter(written).map(e => {
        const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))].sort((x, y) => y - x);
        return [(a + 0.05) / (b + 0.05), e.className + ": " + e.textContent.slice(0, 40)];
    });
}"""


class Balanced(HTMLParser):
    """Fails on a tag that is closed out of order; collects text, tags and attributes."""

    def __init__(self, page):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] != ["style"]:
            self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", " ".join(self.texts))


def assert_stands_alone(page, *further):
    """Well formed, without scripts, and with nothing to fetch: references lead within the page, or begin as one of
    `further` does.
    """
    parsed = Balanced(page)
    assert page.startswith("<!DOCTYPE html>")
    assert "script" not in parsed.tags
    references = [value for _, name, value in parsed.attributes if name in ("src", "href", "action", "srcset", "data")]
    assert all(value.startswith(("#", *further)) or value == "data:," for value in references)
    assert not re.search(r"https?://|url\(|@import|\bon\w+=", page)
    ids = [value for _, name, value in parsed.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in references if value.startswith("#")} <= set(ids)
