"""The page of a verification: what it says, that nothing in it can run, and how a browser shows it."""

import math
import re
from functools import cache

import pytest
import torch
from battery import first_quick

pytest.importorskip("jinja2", reason="jinja2 is not installed")

from pages import Balanced, assert_stands_alone

from tilewise.report.verify import MOST_CELLS, UNFOLDED, render_html
from tilewise.verify.compare import SHAPE, WRONG, Comparison, Failure, Limits, compare, limits_from_eager
from tilewise.verify.diagnose import HeatMap
from tilewise.verify.result import (
    CRASH,
    MEMORY,
    NOTE,
    SKIPPED,
    WARNING,
    Check,
    Finding,
    Implementation,
    MutantResult,
    Report,
    Result,
    Settings,
)

TRITON, CPU = Implementation("triton", "cpu", interpreted=True), Implementation("cpu", "cpu")
ENVIRONMENT = {"tilewise": "0.1.0", "torch": "2.13.0", "device": "CPU, 16 cores", "kernels": "interpreted"}
COMMAND = "tilewise verify flash --html report.html"
# Where the error is planted: head 2, the tile from token 48 on.
HEAD, TILE, COLUMN = 2, 16, 3


def tensors(tokens=100, heads=4):
    truth = torch.randn(2, tokens, heads, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return truth, truth.bfloat16()


def judged(name, actual, truth):
    return compare(name, actual, truth, torch.bfloat16, limits_from_eager(truth, truth.bfloat16()), "BTHD")


@cache
def wrong(name="o", value=None, tokens=100, heads=4):
    truth, actual = tensors(tokens, heads)
    rows = slice(COLUMN * TILE, (COLUMN + 1) * TILE)
    if value is None:
        actual[1, rows, HEAD] += 1.0
        actual[1, rows, 0] += 0.05
        actual[1, COLUMN * TILE + 5, HEAD, 6] += 9.0
    else:
        actual[1, rows, HEAD] = value
    return judged(name, actual, truth)


@cache
def right(name="lse"):
    truth, actual = tensors()
    return judged(name, actual, truth)


def check(case="small", dtype="bf16", implementation=TRITON, **settings):
    return Check("flash", implementation, case, dtype, Settings(**settings))


def passing():
    results = [
        Result(check(f"case-{i}", dtype, one), (right("o"), right("lse")), seconds=i / 7)
        for one in (TRITON, CPU)
        for i in range(4)
        for dtype in ("bf16", "fp32")
    ]
    return Report(
        results, [MutantResult("flash", "no-rescale", "the running sum is not rescaled", "small bf16", WRONG)]
    )


def failing():
    report = passing()
    report.results[2:2] = [
        Result(
            check("packed", seed=7),
            (wrong("o"), right("lse"), wrong("dq", math.nan)),
            (Finding(MEMORY, "one more matrix than expected", WARNING),),
            1.25,
        ),
        Result(check("T=2048 H=6"), (wrong("o", tokens=1000, heads=12),), (), 2.5),
        Result(check("shape"), (Comparison("o", failure=Failure(SHAPE, "shape [1, 2], expected [2, 1]")),)),
        Result(check("crash", implementation=CPU), (), (Finding(CRASH, "signal 11\n  in flash_fwd_kernel"),), 0.5),
    ]
    report.mutants.append(MutantResult("flash", "mask-off-by-one", "keys one past the diagonal take part", "", ""))
    return report


def page_of(report, environment=ENVIRONMENT, command=COMMAND):
    return render_html(report, environment, command)


REPORTS = {"empty": Report, "passing": passing, "failing": failing, "bugs only": lambda: Report([], passing().mutants)}


@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
def test_the_page_is_well_formed_and_stands_alone(make):
    assert_stands_alone(page_of(make()))


def test_an_empty_report_fails_and_says_why():
    text = Balanced(page_of(Report(), {})).text
    assert "FAIL Nothing was checked." in text


def test_a_passing_report():
    text = Balanced(page_of(passing())).text
    assert "PASS All 16 checks passed. The only planted bug was caught." in text
    assert "checks 16 failures 0 warnings 0 planted bugs caught 1 of 1" in text
    assert "Failed checks" not in text


def test_what_was_skipped_is_neither_passed_nor_failed():
    report = passing()
    report.results.append(Result(check("late"), findings=(Finding(SKIPPED, "the budget is used up", NOTE),)))
    report.mutants.append(MutantResult("flash", "late-bug", "a bug", "", "the budget is used up", skipped=True))
    text = Balanced(page_of(report)).text
    assert "FAIL 16 of 17 checks passed. 1 of 2 planted bugs were caught." in text
    assert "1 skipped, 1 planted bugs skipped: the budget is used up." in text
    assert "checks 17 failures 0 skipped 1 warnings 0" in text
    assert "9 checks, 1 skipped" in text
    assert "SKIPPED late bf16 the budget is used up" in text
    assert "late-bug flash a bug skipped : the budget is used up" in text
    assert "Failed checks" not in text


def test_a_failing_report_has_every_section():
    report = failing()
    parsed = Balanced(page_of(report))
    text = parsed.text
    assert "FAIL 4 of 20 checks failed. 1 of 2 planted bugs got away." in text
    assert "checks 20 failures 4 warnings 1 planted bugs caught 1 of 2" in text
    assert COMMAND in text
    assert all(f"{name} {value}" in text for name, value in ENVIRONMENT.items())
    for result in report.failures:
        assert result.check.command() in text
        assert all(status in text for status in result.statuses)
    o = report.failures[0].comparisons[0]
    assert o.failure.diagnosis
    assert all(sentence in text for sentence in (o.failure.problem, *o.failure.diagnosis))
    for x in (o.max_diff, o.mean_diff, o.std_diff, o.max_rel_diff, o.mean_rel_diff, o.allowed):
        assert f"{x:.2e}" in text
    low, high = o.failure.expected_range
    assert f"expected range {low:.6g} to {high:.6g}" in text
    assert f"at [1, 53, 2, 6]: {o.failure.worst_actual:.6g}, expected {o.failure.worst_expected:.6g}" in text
    assert f"off by more than the {o.failure.atol:.2e} allowed {o.failure.exceeding} of 6400 elements" in text
    assert "shape [1, 2], expected [2, 1]" in text
    assert "failure: crash : signal 11 in flash_fwd_kernel" in text
    assert "mask-off-by-one flash keys one past the diagonal take part GOT AWAY" in text
    assert f"no-rescale flash the running sum is not rescaled caught by small bf16 ({WRONG})" in text


def test_failures_come_first_in_their_group_and_groups_with_failures_first():
    report = Report(
        [Result(check("a", implementation=CPU)), Result(check("b")), Result(check("c"), (wrong(),)), Result(check("d"))]
    )
    page = page_of(report)
    listed = page[page.index('<section id="checks">') :]
    assert re.findall(r'class="case">(\w)<', listed) == ["c", "b", "d", "a"]
    assert re.findall(r"(\d) check(s?),", listed) == [("3", "s"), ("1", "")]


def test_what_the_user_names_is_escaped():
    evil = "<script>alert('x')</script>\"&"
    implementation = Implementation(evil, evil, external=True)
    failure = Failure(evil, evil, (evil,), elements=1, heat=HeatMap(16, ((2.0,),), (0, 0)))
    result = Result(
        Check(evil, implementation, evil, evil),
        (Comparison(evil, failure=failure),),
        (Finding(evil, evil), Finding(evil, evil, WARNING)),
    )
    report = Report([result], [MutantResult(evil, evil, evil, evil, evil), MutantResult(evil, evil, evil, "", "")])
    page = page_of(report, {evil: evil}, evil)
    assert "<script" not in page
    assert Balanced(page).text.count(evil) > 15


def test_statistics_that_were_not_computed_are_dashes_and_nan_is_said():
    page = page_of(Report([Result(check(), (Comparison("o", failure=Failure(SHAPE, "shape")),))]))
    assert page.count('<td class="n">–</td>') == 12
    assert "NaN" not in page
    # A result that is NaN in places has a mean that is NaN.
    assert '<td class="n">NaN</td>' in page_of(Report([Result(check(), (wrong("o", math.nan),))]))


def cells(page):
    return re.findall(r'<td class="(s[^"]*)" title="([^"]*)">([^<]*)</td>', page)


def test_the_heat_map_marks_its_worst_cell_and_labels_its_axes():
    comparison = wrong()
    assert comparison.failure.heat.worst == (HEAD, COLUMN)
    page = page_of(Report([Result(check(), (comparison,))]))
    found = cells(page)
    assert len(found) == 4 * 7
    (worst,) = [(style, title) for style, title, _ in found if "worst" in style]
    assert (
        worst[1]
        == f"head {HEAD}, from token {COLUMN * TILE}: {comparison.failure.heat.cells[HEAD][COLUMN]:.3g} × the limit"
    )
    assert sum(style.startswith("s0") for style, _, _ in found) == 26
    assert re.findall(r'<th scope="col" colspan="1"[^>]*>(\d+)<', page) == [str(16 * i) for i in range(7)]
    assert re.findall(r'<th scope="row"[^>]*>(\d)<', page) == list("0123")
    assert f"Worst in head {HEAD}, the tile from token {COLUMN * TILE} on" in page


def heat_page(heat, count=1):
    failure = Failure(WRONG, "", heat=heat)
    return page_of(Report([Result(check(f"case-{i}"), (Comparison("o", 1.0, failure=failure),)) for i in range(count)]))


def test_colours_follow_the_multiple_of_the_limit():
    row = (0.0, 0.99, 1.0, 1.01, 29.0, 5e3, math.inf, math.nan)
    found = cells(heat_page(HeatMap(16, (row,), (0, 6))))
    assert [style for style, _, _ in found] == ["s0", "s0", "s0", "s1", "s3", "s7", "sx worst", "sx"]
    assert [text for _, _, text in found] == ["0", "1.0", "1.0", "1.0", "29", "5e3", "", ""]
    assert [title.partition(": ")[2] for _, title, _ in found][-2:] == ["NaN or infinite"] * 2


def test_a_map_says_when_the_mean_square_is_its_limit():
    truth, actual = tensors()
    actual[:, :32] += 0.06
    spread = compare("o", actual, truth, torch.bfloat16, Limits(0.1, 0.01), "BTHD")
    said = "here the limit is that of the mean square"
    assert spread.max_diff < spread.allowed
    assert said in page_of(Report([Result(check(), (spread,))]))
    assert said not in page_of(Report([Result(check(), (wrong(),))]))


def test_a_map_of_many_tiles_labels_every_fourth():
    page = heat_page(HeatMap(32, (tuple(float(i) for i in range(42)),), (0, 41)))
    assert re.findall(r'<th scope="col" colspan="(\d)"[^>]*>(\d*)<', page) == [
        ("4", str(32 * i)) for i in range(0, 40, 4)
    ] + [("2", "")]
    assert all(text == "" for _, _, text in cells(page))


@pytest.mark.slow
def test_a_page_of_too_many_cells_says_what_it_leaves_out():
    page = heat_page(HeatMap(16, ((2.0,) * 50,) * (MOST_CELLS // 100), (0, 0)), count=3)
    assert len(cells(page)) == MOST_CELLS
    assert page.count("Not drawn") == 1
    assert page.count("Worst in head 0") == 3


# In a real browser.


@pytest.mark.parametrize(("make", "verdict"), [(passing, "PASS"), (failing, "FAIL"), (Report, "FAIL")])
def test_the_verdict_is_in_sight(opened, make, verdict):
    page = opened(page_of(make()))
    assert page.title() == f"{verdict} · tilewise verify"
    assert page.locator("#verdict strong").inner_text() == verdict
    box = page.locator("#verdict").bounding_box()
    assert box["height"] > 20
    assert box["y"] + box["height"] < 800


WORST = """map => [...map.querySelectorAll("td.worst")].map(cell => {
    const style = getComputedStyle(cell);
    const large = cell.offsetWidth > 10 && cell.offsetHeight > 10;
    const seen = [style.outlineStyle, parseFloat(style.outlineWidth) > 1, large];
    return [cell.parentElement.sectionRowIndex, cell.cellIndex - 1, ...seen];
})"""


def test_the_heat_map_is_visible_with_its_worst_cell_marked(opened):
    page = opened(page_of(failing()))
    maps = page.locator("table.map")
    assert maps.count() == 3
    for i in range(3):
        assert maps.nth(i).is_visible()
        assert maps.nth(i).evaluate(WORST) == [[HEAD, COLUMN, "solid", True, True]]
    worst = maps.first.locator("td.worst")
    assert "head 2, from token 48" in worst.get_attribute("title")
    colour = "cell => getComputedStyle(cell).backgroundColor"
    assert worst.evaluate(colour) != maps.first.locator("td.s0").first.evaluate(colour)
    assert "gradient" in maps.nth(1).locator("td.worst").evaluate("cell => getComputedStyle(cell).backgroundImage")


@pytest.mark.parametrize("width", first_quick([390, 1280]))
@pytest.mark.parametrize("make", REPORTS.values(), ids=REPORTS)
def test_nothing_overflows_the_page(opened, make, width):
    report = make()
    report.results.append(
        Result(
            check("T=" + "1" * 300, implementation=Implementation("a" * 200, "cpu", external=True)), (wrong("o" * 90),)
        )
    )
    page = opened(page_of(report), width)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_failures_only(opened):
    page = opened(page_of(failing()))
    rows = page.locator("#checks tbody tr")
    assert rows.count() == 20
    page.get_by_label("failures only").check()
    assert sum(rows.nth(i).is_visible() for i in range(20)) == 4


def test_a_failure_is_one_click_away_and_unfolds(opened):
    page = opened(page_of(Report([Result(check(f"case-{i}"), (wrong(),)) for i in range(UNFOLDED + 2)])))
    last = page.locator("details.failure").last
    assert last.get_attribute("open") is None
    page.locator("#checks a").last.click()
    assert last.get_attribute("open") is not None
    assert 0 <= last.locator("h3").bounding_box()["y"] < 400
