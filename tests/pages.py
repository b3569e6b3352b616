"""Pages under test, parsed."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "img", "input", "source"}


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
