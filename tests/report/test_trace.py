"""The page of a trace: what it says, what its pictures hold, that nothing in it can run, and how a browser shows it."""

import math
import re
import struct
import zlib
from base64 import b64decode
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from battery import first_quick
from typer.testing import CliRunner

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from pages import Balanced, assert_stands_alone

from tilewise import cli
from tilewise.ops.flash import simulate
from tilewise.report import STEP_COLOURS, STEPS
from tilewise.report import trace as html
from tilewise.report.trace import LEVELS, MOST_CELLS, facts, render_html
from tilewise.trace.command import verdict
from tilewise.trace.request import Request, Traced, arrays
from tilewise.workbench.flash.programs import FORWARD_ORDER, Case

EPS = float(torch.finfo(torch.bfloat16).eps)
REQUEST = {"operator": "flash", "tiles": "64 queries × 64 keys", "dtype": "bf16"}


@cache
def simulated(block=64):
    q, k, v = (
        torch.randn(1, 2 * block, 1, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(3)
    )
    case = Case(q, k, v, simulate.Options(0.125, right=0))
    tensors = [case.head(x, 0) for x in (q, k, v)]
    # The second tile of queries: of its two blocks the second is masked in part.
    tiling = simulate.Tiling(block, block)
    simulation, exact = (
        arrays(simulate.forward(*(x.to(dtype) for x in tensors), block, tiling, case.options))
        for dtype in (q.dtype, torch.float64)
    )
    return simulation, exact


def traced(name=None, at=(3, 5), add=1.0, block=64, where="head 0, rows 64 to 127"):
    """A kernel that holds what the simulation does, with one element of `name` altered."""
    simulation, exact = simulated(block)
    kernel = {key: x.copy() for key, x in simulation.items()}
    if name:
        kernel[name][at] += add
    return Traced("flash_fwd_kernel", "forward", where, kernel, simulation, exact, 2, FORWARD_ORDER)


def page_of(*programs, request=REQUEST, **options):
    return render_html([(one, verdict(one, EPS)[0]) for one in programs], request, EPS, **options)


PAGES = {
    "right": lambda: page_of(traced()),
    "wrong": lambda: page_of(traced("O_scale_1")),
    "not finite": lambda: page_of(traced("M_0", (7,), math.nan)),
    "two programs": lambda: page_of(traced("S_1", (3, 1)), traced("LSE", (9,), where="head 1, rows 64 to 127")),
}


@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_the_page_is_well_formed_and_stands_alone(make):
    page = make()
    assert_stands_alone(page, "data:image/png;base64,")
    assert len(page) < 2_000_000


def test_where_nothing_parts_nothing_is_marked():
    page = page_of(traced())
    text = Balanced(page).text
    assert "No mismatch ✓ flash_fwd_kernel, head 0, rows 64 to 127: 21 values in 2 steps agree" in text
    assert "first mismatch" not in page
    assert 'class="value parts' not in page
    assert 'title="the worst element"' not in page
    assert "✗" not in page


def test_every_value_of_every_step_has_its_three_maps():
    page = page_of(traced())
    assert re.findall(r"<h3>(.*?)</h3>", page) == ["Before the loop", "Block 0", "Block 1", "After the loop"]
    names = re.findall(r"<h4>(\w+) ", page)
    step = ["K", "S_pre_scaling", "S", "M", "P", "L", "V", "O_scale", "O"]
    assert names == ["Q", *(f"{name}_{block}" for block in (0, 1) for name in step), "O_final", "LSE"]
    assert re.findall(r"<figcaption>(.*?)</figcaption>", page) == ["kernel", "simulation", "difference"] * len(names)
    assert all(f"{name} {text}" in Balanced(page).text for name, text in REQUEST.items())
    simulation, _ = simulated()
    low, high = (html._short(f(simulation["O_final"])) for f in (np.min, np.max))
    assert page.count(f"[64, 64]<br>min {low}<br>max {high}</small>") == 2
    assert f"{64 * 63 // 2} × −inf" in page


def test_the_first_divergence_is_marked_once_and_linked_from_the_verdict():
    one = traced("O_scale_1", (3, 5), 1.0)
    one.kernel["O_final"][0, 0] += 1.0
    page = page_of(one)
    lines, agrees = verdict(one, EPS)
    assert not agrees
    assert all(line.strip() in Balanced(page).text for line in lines)
    assert page.count("first mismatch</span>") == 1
    (anchor,) = re.findall(r'<article class="value parts first" id="([^"]*)"', page)
    assert f'<a href="#{anchor}">See the first mismatch</a>' in page[: page.index("</header>")]
    section = page[page.index(f'id="{anchor}"') :]
    assert re.search(r"<h4>(\w+) ", section)[1] == "O_scale_1"
    assert "1 of 4096 off" in section[: section.index("</article>")]
    # The other that parts is marked as parting alone, and both have their worst element shown.
    assert page.count('class="value parts"') == 1
    assert page.count('title="the worst element"') == 2
    assert "left: 7.812%; top: 4.688%; width: 1.562%; height: 1.562%" in section


def test_the_page_opens_at_the_first_divergence():
    page = PAGES["two programs"]()
    (opened,) = re.findall(r'<article class="([^"]*)" id="([^"]*)" tabindex="-1" autofocus>', page)
    assert "first" in opened[0]
    assert f'href="#{opened[1]}"' in page
    assert "autofocus" not in PAGES["right"]()


def test_what_the_simulation_masks_and_the_kernel_does_not_is_shown_and_not_judged():
    one = traced()
    masked = np.isneginf(one.simulation["S_1"])
    one.kernel["S_1"][masked] = 123.0
    assert not verdict(one, EPS)[1]
    spared = replace(one, unjudged={"S_1": masked})
    assert verdict(spared, EPS)[1]
    page = page_of(spared)
    assert f"{masked.sum()} not judged:<br>masked in the simulation" in page
    assert "max 123" in page
    one.kernel["S_1"][-1, 0] += 1
    assert not verdict(spared, EPS)[1]


def test_each_program_has_its_own_first_divergence():
    page = PAGES["two programs"]()
    assert page.count('class="value parts first"') == page.count("See the first mismatch") == 2


def test_what_was_not_recorded_is_said_and_another_kernel_is_named():
    one = traced()
    del one.kernel["O_scale_0"]
    text = Balanced(page_of(one, other="other kernel")).text
    assert "Not recorded of this kernel, so not compared: O_scale_0." in text
    assert "kernel [64, 64]" in text
    assert "other kernel [64, 64]" in text


def test_what_the_user_names_is_escaped():
    evil = "<script>alert('x')</script>\"&"
    one = traced()
    kernel, simulation, exact = ({**values, evil: values["Q"]} for values in (one.kernel, one.simulation, one.exact))
    one = Traced(evil, "forward", evil, kernel, simulation, exact, 2, FORWARD_ORDER)
    page = render_html([(one, [evil, evil])], {evil: evil}, EPS, evil)
    assert "<script" not in page
    assert Balanced(page).text.count(evil) > 8


def pictures(page):
    """Levels of every picture of the light scheme."""
    found = []
    for data in re.findall(r'<img src="data:image/png;base64,([^"]*)"', page):
        raw = b64decode(data)
        wide, tall = struct.unpack(">II", raw[16:24])
        start = raw.index(b"IDAT")
        body = zlib.decompress(raw[start + 4 : start + 4 + struct.unpack(">I", raw[start - 4 : start])[0]])
        found.append(np.frombuffer(body, np.uint8).reshape(tall, wide + 1)[:, 1:])
    return found


def of(page, name, names=("kernel", "simulation", "difference")):
    at = 3 * re.findall(r"<h4>(\w+) ", page).index(name)
    return dict(zip(names, pictures(page)[at : at + 3], strict=True))


def test_pictures_show_sign_size_and_what_is_not_finite():
    one = traced()
    # Masked in the simulation, seen by the kernel.
    one.kernel["S_1"][10, 20] = 0.0
    one.kernel["S_1"][11, 2] = math.nan
    one.kernel["S_1"][12, 2] = 1e9
    maps = of(page_of(one), "S_1")
    simulation = one.simulation["S_1"]
    assert ((maps["simulation"] == 0) == np.isneginf(simulation)).all()
    lowest, highest = (
        np.unravel_index(f(np.where(np.isfinite(simulation), simulation, 0.0)), simulation.shape)
        for f in (np.argmin, np.argmax)
    )
    assert maps["simulation"][lowest] < LEVELS + 1 < maps["simulation"][highest]
    assert {1, 2 * LEVELS + 1} & {int(maps["simulation"][lowest]), int(maps["simulation"][highest])}
    assert maps["kernel"][10, 20] == LEVELS + 1
    assert maps["kernel"][11, 2] == 0
    assert maps["kernel"][12, 2] == 2 * LEVELS + 1
    assert maps["difference"][10, 20] == maps["difference"][11, 2] == 0
    assert maps["difference"][12, 2] == len(STEPS) + 1
    assert (maps["difference"] == 1).sum() == 64 * 64 - 3


def test_differences_follow_the_multiple_of_what_is_allowed():
    levels = html._difference_levels(np.array([[0.0, 0.99, 1.0, 1.01, 29.0, 5e3, math.inf]]))
    assert levels.tolist() == [[1, 1, 1, 2, 4, len(STEPS) + 1, 0]]
    # Where nothing is allowed, what differs is off the scale, and what does not is within.
    assert html._multiples(np.array([0.0, 1e-9]), np.zeros(2), 0.0).tolist() == [0.0, 2.0 * STEPS[-1]]


def test_large_tiles_keep_the_largest_of_each_cell():
    x = np.zeros((130, 2 * MOST_CELLS))
    x[2, 5], x[129, 127], x[0, 0], x[0, 1], x[50, 3] = -3.0, 2.0, 1.0, -1.5, math.nan
    cells = html._reduced(x)
    assert cells.shape == (44, 64)
    assert (cells[0, 2], cells[43, 63], cells[0, 0]) == (-3.0, 2.0, -1.5)
    assert math.isnan(cells[16, 1])
    assert html._reduced(np.arange(100.0)).tolist() == [[float(i)] for i in range(1, 100, 2)]
    maps = of(page_of(traced("P_1", (101, 7), block=128)), "P_1")
    assert maps["kernel"].shape == (64, 64)
    assert np.argwhere(maps["difference"] > 1).tolist() == [[50, 3]]


def test_colours_are_those_of_verify():
    """The steps of the page's own style are those of the pictures, and of every other page."""
    assert re.findall(r"--s\d: (#\w{6})", page_of(traced())) == [*STEP_COLOURS["light"], *STEP_COLOURS["dark"]]


def test_the_request_in_words():
    asked = Request("flash", warp=1, kernel_index=4, names={"S": "qk"}, fill="range")
    words = facts(asked, {"tiles": "32 queries × 64 keys", "tokens": "96"})
    assert (words["operator"], words["tiles"], words["tokens"]) == ("flash", "32 queries × 64 keys", "96")
    assert (words["rows"], words["configuration"], words["inputs"]) == (
        "of warp 1 of 4",
        "4 of the operator's table",
        "by rule: range",
    )
    assert words["variables"] == "S=qk"
    backward = facts(Request("flash", direction="backward"), {})
    assert not {"variables", "head", "rows", "configuration"} & set(backward)


def test_a_step_is_called_what_it_is():
    page = page_of(replace(traced("O_1"), turn="slot"))
    assert re.findall(r"<h3>(.*?)</h3>", page)[1:3] == ["Slot 0", "Slot 1"]
    assert "first mismatch: slot 1, O[3, 5]" in Balanced(page).text


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are recorded interpreted")
def test_the_command_writes_the_page(tmp_path):
    words = ["trace", "flash", "--block-m", "32", "--block-n", "32", "--out", str(tmp_path / "out")]
    # The folder of the values need not be there before.
    file = tmp_path / "out" / "trace.html"
    outcome = CliRunner().invoke(cli.app, [*words, "--direction", "backward", "--html", str(file)])
    assert outcome.exit_code == 0, outcome.output
    text = Balanced(file.read_text(encoding="utf-8")).text
    *lines, written = outcome.output.splitlines()
    assert len(lines) == 2
    assert all(line.strip() in text for line in lines)
    assert all(fact in text for fact in ("tiles 32 queries × 32 keys", "tokens 64", "mask none"))
    assert str(file) in written
    missing = CliRunner().invoke(cli.app, [*words, "--html", str(tmp_path / "nowhere" / "trace.html")])
    assert missing.exit_code == 2
    assert "there is no folder" in " ".join(missing.output.split())


# In a real browser.


@pytest.mark.parametrize("width", first_quick([390, 1280]))
def test_the_page_opens_at_the_first_divergence_and_it_is_one_click_away(opened, width):
    page = opened(PAGES["wrong"](), width)
    assert page.title() == "First mismatch · tilewise trace"
    first = page.locator("article.first")
    inside = """e => { const b = e.getBoundingClientRect(), r = e.parentElement.getBoundingClientRect();
        return b.top >= 0 && b.top < innerHeight && b.left >= r.left - 1 && b.left + 100 < r.right }"""
    assert first.evaluate(inside)
    page.evaluate("scrollTo(0, 0)")
    assert not first.evaluate(inside)
    page.locator("#verdict a").click()
    assert first.evaluate(inside)
    assert first.locator(".flag").inner_text() == "first mismatch"
    assert first.evaluate("e => getComputedStyle(e).outlineStyle") == "solid"
    # The mark of the worst element lies on its map.
    worst, map_ = first.locator(".worst").bounding_box(), first.locator("img").last.bounding_box()
    assert map_["x"] <= worst["x"] + worst["width"] / 2 <= map_["x"] + map_["width"]
    assert map_["y"] <= worst["y"] + worst["height"] / 2 <= map_["y"] + map_["height"]


SIZES = (
    "es => es.map(e => [e.complete && e.naturalWidth > 0, e.offsetWidth, e.offsetHeight,"
    " getComputedStyle(e).imageRendering])"
)


@pytest.mark.parametrize("scheme", first_quick(["light", "dark"]))
def test_maps_are_drawn(opened, scheme):
    page = opened(PAGES["not finite"](), scheme=scheme)
    sizes = page.locator("img").evaluate_all(SIZES)
    assert len(sizes) == 3 * 21
    assert all(
        loaded and width >= 20 and height >= 100 and look == "pixelated" for loaded, width, height, look in sizes
    )
    shown = page.locator("img").first.evaluate("e => e.currentSrc == e.src")
    assert shown == (scheme == "light")


@pytest.mark.parametrize("width", first_quick([390, 1280]))
@pytest.mark.parametrize("make", PAGES.values(), ids=PAGES)
def test_nothing_overflows_the_page(opened, make, width):
    page = opened(make(), width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_long_names_do_not_overflow_the_page(opened):
    page = opened(
        page_of(replace(traced("P_0"), kernel_name="a" * 300, place="b" * 300), request={"kernel": "c" * 300}), 390
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
