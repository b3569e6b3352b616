"""The page of a benchmark: what it says, that nothing in it can run, and how a browser shows it."""

import json
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("jinja2", reason="jinja2 is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from pages import Balanced, assert_stands_alone

from tilewise.bench.result import from_json, load
from tilewise.report import render_html

SAVED = Path(__file__).parents[2] / "benchmarks" / "results" / "bench-nsa-h200.json"
EVIL = "<script>alert('x')</script>\"&"


@cache
def document():
    return load(SAVED)


@cache
def page():
    doctor = [{"subject": "GPU 0", "found": "busy", "level": "note", "advice": "times are those of a shared GPU"}]
    return render_html(from_json(document()), document()["environment"], doctor, document()["command"])


def test_the_page_is_well_formed_and_stands_alone():
    assert_stands_alone(page(), "data:image/png;base64,")


def test_every_time_and_what_it_was_made_with_is_said():
    text = Balanced(page()).text
    assert "nsa, bf16, on NVIDIA H200" in text
    assert "fwd: tilewise is ahead of dense-cudnn from 12701 tokens on" in text
    for row in document()["rows"]:
        times = " ".join(f"{row['times'][name]:.3f}" for name in ("median", "mean", "std", "min", "max", "p95", "p99"))
        assert f"{row['mode']} {row['implementation']} {times} {row['times']['count']} {row['tflops']:.2f}" in text
    assert document()["command"] in text
    assert all(f"{name} {value}" in text for name, value in document()["environment"].items())
    assert all(f"{name} {value}" in text for name, value in document()["implementations"].items())
    assert "GPU 0 busy: times are those of a shared GPU" in text


def test_what_the_user_names_is_escaped():
    found = json.loads(json.dumps(document()).replace('"dense-cudnn"', json.dumps(EVIL)))
    shown = render_html(from_json(found), {"device": EVIL}, [], EVIL)
    assert "<script" not in shown
    assert Balanced(shown).text.count(EVIL) > 10


def test_the_headline_is_in_sight(opened):
    shown = opened(page())
    assert shown.title() == "nsa, bf16, on NVIDIA H200 · tilewise bench"
    assert shown.locator("#verdict li").count() == 5
    assert shown.locator("img.plot").evaluate("e => e.complete && e.naturalWidth > 0")


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_the_page(opened, width):
    assert opened(page(), width).evaluate("document.documentElement.scrollWidth <= innerWidth")
