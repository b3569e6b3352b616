"""What is made of the times: statistics, ratios, verdicts, where lines cross, and a comparison with an earlier run."""

import json
import math
from dataclasses import replace

import pytest
import torch

from tilewise.bench.contender import shorter
from tilewise.bench.dense import Work
from tilewise.bench.result import (
    Ceiling,
    Change,
    Report,
    Row,
    Verified,
    as_json,
    changes,
    check_same,
    from_json,
    geometric_mean,
    load,
    overtakes,
    parse_tolerance,
    ratios_of,
    verdict,
)
from tilewise.bench.text import change_lines, draw, plot, summary_lines
from tilewise.bench.timing import TURNS, Clock, in_turns, runs_that_fit, summarise
from tilewise.workbench.flash.cases import Flash
from tilewise.workbench.hstu.cases import Hstu
from tilewise.workbench.operator import UsageError

CEILING = Ceiling(100.0, 1000.0, "float32")


def row(name, milliseconds, tokens=64, mode="fwd", **fields):
    times = None if milliseconds is None else summarise([milliseconds])
    return Row(
        f"t{tokens}",
        f"T={tokens},D=32",
        tokens,
        tokens,
        mode,
        name,
        times,
        **{"operations": 10**9, "bytes": 10**6, **fields},
    )


def report(*rows, dense=()):
    return Report("flash", "fp32", "tilewise", dense, False, CEILING, {}, list(rows))


def test_statistics():
    times = summarise([float(x) for x in range(100, 0, -1)])
    assert (times.count, times.min, times.max, times.median, times.p95, times.p99) == (
        100,
        1.0,
        100.0,
        50.5,
        95.0,
        99.0,
    )
    assert times.mean == 50.5
    assert times.std == pytest.approx(math.sqrt(sum((x - 50.5) ** 2 for x in range(1, 101)) / 99))
    assert summarise([3.0]).std == 0.0


@pytest.mark.parametrize("count", [0, 1, 4, 5, 13, 100])
def test_turns_add_up(count):
    turns = in_turns(count)
    assert sum(turns) == count
    assert len(turns) == TURNS
    assert max(turns) - min(turns) <= 1


def test_runs_that_fit():
    assert runs_that_fit(7, 1e6) == 7
    assert runs_that_fit(None, 0.01) == 100
    assert runs_that_fit(None, 100.0) == 20
    assert runs_that_fit(None, 1e5) == 5


def test_calls_rotate_and_the_cache_is_emptied_before_each():
    clock = Clock(torch.device("cpu"))
    seen = []
    clock._flushed.fill_(1)

    def call(name):
        def record():
            seen.append((name, int(clock._flushed[0]), int(clock._flushed[-1])))
            clock._flushed.fill_(1)

        return record

    assert len(clock.run([call("a"), call("b")], 3, start=1)) == 3
    assert seen == [("b", 0, 0), ("a", 0, 0), ("b", 0, 0)]


def test_operations_and_bytes():
    work = Work(pairs=10, channels=4, values=6, inputs=100, outputs=30, gradients=80)
    assert work.operations("fwd", None) == 10 * 2 * 10
    assert work.operations("bwd", None) == 10 * 2 * (12 + 12)
    assert work.operations("fwd+bwd", 1) == 2 * 10 + 2 * 24
    assert (work.bytes("fwd"), work.bytes("bwd"), work.bytes("fwd+bwd")) == (130, 240, 370)
    assert row("x", 2.0).tflops == 0.5
    assert row("x", 2.0).gbps == 0.5


def test_ratios_and_verdicts():
    group = [row("tilewise", 2.0), row("cudnn", 1.5), row("fa2", 3.0), row("flex", None, reason="no")]
    assert ratios_of(group, "tilewise") == {"cudnn": 0.75, "fa2": 1.5}
    assert verdict(group, "tilewise") == "tilewise runs at 0.75 of cudnn"
    assert verdict([group[0], group[2]], "tilewise") == "tilewise is the fastest: 1.50 × fa2"
    assert (
        verdict([row("tilewise", 2.0), row("fa2", 2.01)], "tilewise")
        == "tilewise is even with fa2, the fastest of the others"
    )
    assert verdict([row("tilewise", None), row("fa2", 2.01)], "tilewise") == ""
    assert geometric_mean([0.5, 2.0, 1.0]) == pytest.approx(1.0)


def test_where_a_sparse_operator_overtakes():
    rows = [
        row("tilewise", 4.0, 1024),
        row("dense-sdpa", 1.0, 1024),
        row("tilewise", 8.0, 4096),
        row("dense-sdpa", 32.0, 4096),
    ]
    found = report(*rows, dense=["dense-sdpa"])
    # A quarter at 1024 and four times at 4096: halfway on log axes.
    assert overtakes(found, "fwd", "dense-sdpa") == {"D=32": pytest.approx(2048)}
    assert "fwd: tilewise is ahead of dense-sdpa from 2048 tokens on (D=32)" in list(summary_lines(found))
    assert json.loads(as_json(found, {}, [], ""))["summary"][0]["overtakes_at"] == {"D=32": pytest.approx(2048)}
    # One length tells nothing.
    assert overtakes(report(*rows[:2]), "fwd", "dense-sdpa") == {}
    slower = [row("tilewise", 9.0, 512), row("dense-sdpa", 1.0, 512)]
    assert overtakes(report(*rows[:2], *slower), "fwd", "dense-sdpa") == {"D=32": None}
    faster = [row("tilewise", 1.0, 8192), row("dense-sdpa", 32.0, 8192)]
    assert overtakes(report(*rows[2:], *faster), "fwd", "dense-sdpa") == {"D=32": 4096}
    # Ahead, behind and ahead again: from the last crossing on.
    again = [row("tilewise", 1.0, 512), row("dense-sdpa", 2.0, 512), *rows]
    assert overtakes(report(*again), "fwd", "dense-sdpa") == {"D=32": pytest.approx(2048)}
    assert not any("ahead" in line for line in summary_lines(report(*rows)))


def test_a_saved_report_is_read_back():
    verified = Verified("T=64,D=32", True, True)
    found = report(
        row("tilewise", 1.0, verified=verified),
        row("dense-torch", None, reason="out of memory"),
        row("torch", 2.0),
        dense=["torch"],
    )
    assert from_json(json.loads(as_json(found, {}, [], ""))) == found


def test_kinds_of_problems_are_not_mixed():
    def of(kind, name, milliseconds, tokens):
        return replace(row(name, milliseconds, tokens), case=f"{kind}-{tokens}", problem=f"T={tokens},{kind}")

    rows = [of(kind, name, 1.0 if name == "tilewise" else ratio, tokens)
            for kind, ratios in (("H=4", (0.5, 2.0)), ("H=8", (0.1, 0.7)))
            for tokens, ratio in zip((64, 256), ratios, strict=True)
            for name in ("tilewise", "dense-fa2")]  # fmt: skip
    assert overtakes(report(*rows), "fwd", "dense-fa2") == {"H=4": pytest.approx(128), "H=8": None}


def test_a_subject_without_times_is_not_complete():
    assert report(row("tilewise", 1.0), row("fa2", None, reason="no")).complete
    assert not report(row("tilewise", 1.0), row("tilewise", None, 128, reason="out of memory")).complete
    wrong = Verified("T=64", True, False, "wrong values", "tilewise verify")
    assert not report(row("tilewise", 1.0), row("mine", None, reason="fails verify", verified=wrong)).complete


def test_a_summary_names_best_and_worst():
    rows = [
        row("tilewise", 1.0, t) if name == "tilewise" else row(name, ratio, t)
        for t, ratio in ((64, 0.5), (128, 2.0))
        for name in ("tilewise", "fa2")
    ]
    assert "fwd: tilewise runs at 1.00 × fa2 (best 2.00, worst 0.50, 2 cases)" in list(summary_lines(report(*rows)))


@pytest.mark.parametrize(("text", "value"), [("5%", 0.05), ("0.05", 0.05), ("0", 0.0), ("12.5%", 0.125)])
def test_tolerances(text, value):
    assert parse_tolerance(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["five", "-1%", "nan", "inf", ""])
def test_a_tolerance_that_is_none(text):
    with pytest.raises(UsageError, match="expected a share such as 5%"):
        parse_tolerance(text)


def test_a_regression(tmp_path):
    path = tmp_path / "old.json"
    path.write_text(
        as_json(report(row("tilewise", 1.0), row("tilewise", 1.0, 128), row("fa2", 1.0)), {"device": "x"}, [], "")
    )
    now = report(row("tilewise", 1.04), row("tilewise", 1.2, 128), row("tilewise", 9.0, 256), row("fa2", 5.0))
    found = changes(now, load(path))
    assert [(change.case, change.regressed(0.05)) for change in found] == [("t64", False), ("t128", True)]
    lines = list(change_lines(found, 0.05))
    assert lines[1] == "✗ t128 fwd tilewise: 1.000 -> 1.200 ms (+20.0%)"
    assert lines[-1] == "FAIL: 1 of 2 slower by more than 5.0%"
    assert (
        list(change_lines([Change("a", "fwd", "tilewise", 2.0, 1.0)], 0.0))[-1]
        == "PASS: none of 1 slower by more than 0.0%"
    )
    # What was timed then and is not now is a regression; nothing in common is a failure too.
    (lost,) = changes(report(row("tilewise", None, reason="out of memory")), load(path))
    assert lost.regressed(1e9)
    assert changes(report(row("tilewise", 1.0, 512)), load(path)) == []
    assert list(change_lines([], 0.05)) == ["FAIL: the earlier run timed none of these cases and modes"]
    check_same("flash", "fp32", load(path))
    with pytest.raises(UsageError, match="a run of flash in fp32, this one of hstu"):
        check_same("hstu", "fp32", load(path))


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"schema": "tilewise.verify", "version": 1}', '{"schema": "tilewise.bench", "version": 1}'],
)
def test_a_file_that_is_no_run(tmp_path, text):
    path = tmp_path / "old.json"
    path.write_text(text)
    with pytest.raises(UsageError, match="expected a file that `tilewise bench` saved"):
        load(path)
    with pytest.raises(UsageError, match="expected a file"):
        load(tmp_path / "nowhere.json")


def test_the_plot_has_a_line_for_each_implementation():
    rows = [
        row(name, t / 64, t, mode) for name in ("tilewise", "fa2") for t in (64, 128, 256) for mode in ("fwd", "bwd")
    ]
    found = report(*rows, row("flex", None, reason="no"))
    assert draw(found, "png").startswith(b"\x89PNG")
    panels = plot(found).axes
    assert [[line.get_label() for line in panel.lines] for panel in panels] == [["tilewise", "fa2"]] * 2
    assert list(panels[0].lines[0].get_xdata()) == [64, 128, 256]
    assert list(panels[0].lines[0].get_ydata()) == [1.0, 0.5, 0.25]
    assert panels[0].get_xscale() == panels[0].get_yscale() == "log"
    assert rows[0].kind == "D=32"
    # The largest batch of a length is drawn; sequences of different lengths, and a kind of one length, are not in its
    # line.
    others = [replace(row("tilewise", 2.0, 128), total_tokens=total, problem=problem) for total, problem in (
        (512, "lengths=128/128,D=32"), (200, "lengths=128/72,D=32"), (128, "T=128,D=64"),
    )]  # fmt: skip
    panels = plot(report(row("tilewise", 1.0, 64), row("tilewise", 1.0, 128), *others)).axes
    assert [list(panel.lines[0].get_ydata()) for panel in panels] == [[1.0, 0.5]]
    assert others[1].kind == "D=32, lengths differ"
    assert draw(report(row("tilewise", None), row("fa2", 1.0, operations=0)), "png") == b""


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (Flash(B=4, T=64, H=4), Flash(B=2, T=64, H=4)),
        (Flash(T=64, H=8), Flash(T=64, H=4)),
        (Flash(T=64, H=8, Hk=4), Flash(T=64, H=4, Hk=2)),
        (Flash(T=64, H=8, Hk=2), Flash(T=32, H=8, Hk=2)),
        (Flash(T=64, H=3), Flash(T=32, H=3)),
        (Flash(T=64, Tk=30), Flash(T=32, Tk=15)),
        (Flash(lengths=(8, 9, 10), lengths_k=(6, 0, 3)), Flash(lengths=(4, 4, 5), lengths_k=(3, 0, 1))),
        (Hstu(lengths=(8, 9), targets=(1, 2)), Hstu(lengths=(4, 4), targets=(0, 1))),
    ],
    ids=str,
)
def test_shorter_problems_of_the_same_kind(problem, expected):
    assert shorter(problem) == expected
