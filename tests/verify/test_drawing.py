"""Drawn cases: how far they reach, and what a search over them finds."""

import functools
import math

import pytest
import torch

from tilewise import workbench
from tilewise.ops.flash.reference import flash_attention
from tilewise.verify import api, verify
from tilewise.verify.compare import UNFIT, WRONG, Comparison, Failure
from tilewise.verify.drawing import INTERPRETED, LONGEST, drawn
from tilewise.verify.result import ERROR, NOT_JUDGED, NOTE, Finding, Implementation, Result, Settings
from tilewise.verify.suite import LAWS, make_fill, make_inputs
from tilewise.workbench.bsa.cases_hstu import HstuBsa
from tilewise.workbench.flash.cases import Flash
from tilewise.workbench.hstu.cases import Hstu


def problems(operator, longest, count):
    """So many problems of its suite."""
    return drawn(workbench.find(operator).load("suite"), 0, count, longest)


def lengths(problem):
    """Of its queries and its keys."""
    queries = getattr(problem, "lengths", ()) or (problem.T,)
    return queries, problem.tokens()


def sequences(problem):
    return len(getattr(problem, "lengths", ())) or problem.B


@pytest.mark.parametrize("longest", [INTERPRETED, LONGEST])
@pytest.mark.parametrize("operator", workbench.names("suite"))
def test_drawn_problems_keep_their_bounds_and_are_read_as_written(operator, longest):
    for problem in problems(operator, longest, 12):
        problem.check()
        assert type(problem).parse(str(problem) or "B=1") == problem
        queries, keys = lengths(problem)
        assert max(*queries, *keys) <= longest
        assert 1 <= problem.H <= 16
        assert 1 <= problem.D <= problem.width <= 256
        assert sequences(problem) <= 12
        # As many scores as one head of the longest sequence has; what is short and has four heads is less in any case.
        batch = 1 if getattr(problem, "lengths", ()) else problem.B
        scores = batch * problem.H * sum(i * j for i, j in zip(queries, keys, strict=False))
        assert scores <= max(longest * longest, 4 * sum(i * j for i, j in zip(queries, keys, strict=False)))


def test_draws_reach_everywhere():
    far, near = problems("flash", LONGEST, 250), problems("flash", INTERPRETED, 100)
    for found in (far, near):
        assert any(problem.D > 128 for problem in found)
        assert any(problem.H > 8 for problem in found)
        assert any(sequences(problem) > 8 for problem in found)
    assert any(problem.Hk == 1 and problem.H > 4 for problem in far)
    assert any(problem.scale and abs(problem.scale) < 0.01 for problem in far)
    assert any(problem.scale and problem.scale < -1 for problem in far)
    assert any(problem.softcap > 20 for problem in far)
    assert any(0 in problem.lengths for problem in far)
    assert any(problem.lengths and problem.window and problem.causal for problem in far)
    longest = sorted(max(*queries, *keys) for queries, keys in map(lengths, far))
    assert longest[-1] > 2000
    assert longest[len(far) // 2] <= 200


@pytest.mark.parametrize("text", ["scale=0.001", "scale=-0.0013", "scale=10.0", "scale=1e-05", "softcap=0.1"])
def test_numbers_are_written_as_they_are(text):
    problem = Flash.parse(text)
    assert Flash.parse(str(problem)) == problem


# The laws.


@pytest.mark.parametrize("law", LAWS)
def test_a_law_follows_the_seed_and_the_size(law):
    one, same, other = (make_fill(law, seed)("q", (4, 50, 3, 8), 1.0) for seed in (1, 1, 2))
    assert one.dtype == torch.float64
    assert torch.equal(one, same)
    assert torch.equal(one, other) == (law == "zero")
    assert torch.equal(make_fill(law, 1)("q", (4, 50, 3, 8), 4.0), 4 * one)
    assert make_fill(law, 1)("q", (0, 8), 1.0).shape == (0, 8)


def test_what_the_laws_are():
    one_signed, heavy, constant, zero = (
        make_fill(law, 0)("v", (100, 100), 1.0) for law in ("one-signed", "heavy-tails", "constant", "zero")
    )
    assert one_signed.min() >= 0
    assert 0.7 < one_signed.mean() < 0.9
    # Of as many normal numbers the largest is about 4.
    assert 10 < heavy.abs().max() <= 1000
    assert heavy.abs().median() < 1
    assert constant.unique().numel() == 1
    assert not zero.any()


@pytest.mark.parametrize("layout", ["plain", "transposed", "mixed"])
def test_one_head_is_a_thousand_times_smaller_whatever_the_strides(layout):
    problem = Flash(B=2, T=40, H=4, Hk=2, layout=layout)
    normal, smaller = (make_inputs(problem, law, 3) for law in ("random", "small-head"))
    for name, x in smaller.items():
        assert x.stride() == normal[name].stride()
        assert torch.equal(x[:, :, 0], normal[name][:, :, 0] / 1024)
        assert torch.equal(x[:, :, 1:], normal[name][:, :, 1:])


def test_heads_that_lie_in_channels_or_share_memory():
    problem = HstuBsa(lengths=(5, 30), H=4, D=8, Dv=12)
    normal, smaller = (make_inputs(problem, law, 3) for law in ("random", "small-head"))
    assert torch.equal(smaller["v"][:, :12], normal["v"][:, :12] / 1024)
    assert torch.equal(smaller["v"][:, 12:], normal["v"][:, 12:])
    assert torch.equal(smaller["gate_weights"][:, :, 0], normal["gate_weights"][:, :, 0] / 1024)
    # Where all heads read the same keys, those are smaller.
    mixed = Hstu(lengths=(5, 30), layout="mixed")
    assert torch.equal(make_inputs(mixed, "small-head", 3)["k"], make_inputs(mixed, "random", 3)["k"] / 1024)


def right(q, k, v, *, return_lse, **options):
    return flash_attention(q, k, v, **options)


def judged(function, case="small", dtype="bf16", **settings):
    (result,) = verify("flash", function, configs=[case], dtypes=[dtype], **settings).results
    return result


@pytest.mark.parametrize("law", LAWS)
def test_what_is_right_passes_under_every_law(law):
    assert verify("flash", right, configs=["T=33,softcap=4.0"], dtypes=["bf16"], fill=law).passed


def test_under_a_law_what_is_unfit_is_a_note_and_nan_is_not():
    # Scores at their cap: of the slope little more than a rounding is left.
    result = judged(right, "T=1,D=8,softcap=0.2", fill="one-signed")
    assert result.passed
    assert Finding(NOT_JUDGED, "dq: unfit in bf16, not judged", NOTE) in result.findings

    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return o / o.detach().abs().amax().sign(), lse

    assert judged(wrong, "T=5").passed
    assert not judged(wrong, "T=5", fill="zero").passed


# The search.


def searched(fails, count=200, external=True, settings=None):
    """What a search finds in a function that fails where `fails` says so of a problem and a law; and its problem."""
    implementation = Implementation("mine.py:attention", "cpu", external=external)

    def run(check):
        problem = workbench.find("flash").load("suite").find(check.case).problem
        wrong = check.case != "small" and fails(problem, check.settings.fill)
        return Result(check, findings=(Finding(ERROR, "wrong"),) if wrong else ())

    found = api.find_failure(workbench.find("flash"), implementation, count, ["bf16"], settings or Settings(), run)
    return [(result.check, Flash.parse(result.check.case)) for result in found]


def test_what_fails_under_one_law_alone_is_found_and_its_command_has_the_law():
    ((check, problem),) = searched(lambda problem, fill: fill == "small-head" and problem.H > 2, 100)
    assert (check.settings.fill, problem.H) == ("small-head", 3)
    assert check.command().endswith("--fill small-head")


FAR = {
    "length": (lambda problem: problem.T > 1000, lambda problem: problem.T == 1001),
    "scale": (lambda problem: problem.scale is not None and problem.scale > 3.7, lambda problem: problem.scale < 3.9),
    "heads": (lambda problem: problem.H > 9, lambda problem: problem.H == 10),
    "batch": (lambda problem: not problem.lengths and problem.B > 8, lambda problem: problem.B == 9),
    "channels": (lambda problem: problem.D > 130, lambda problem: problem.D == 131),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAR)
def test_what_fails_far_out_is_found_and_shrunk(name):
    fails, smallest = FAR[name]
    ((check, problem),) = searched(lambda problem, _: fails(problem))
    assert smallest(problem)
    assert check.settings.fill == "random"


@pytest.mark.slow
def test_a_fill_that_was_asked_for_is_kept():
    ((check, _),) = searched(lambda problem, fill: fill == "range", settings=Settings(fill="range"))
    assert "--range" in check.command()


def test_interpreted_kernels_are_searched_to_300_tokens():
    checks = []

    def run(check):
        checks.append(check)
        return Result(check, interpreted=True)

    implementation = Implementation("mine.py:attention", "cpu", external=True)
    assert not api.find_failure(workbench.find("flash"), implementation, 30, ["bf16"], Settings(), run)
    assert checks[0].case == "small"
    assert max(max(map(max, lengths(Flash.parse(check.case)))) for check in checks[1:]) <= 300


@pytest.mark.parametrize(("share", "passes"), [(0.9, True), (math.nan, True), (1.1, False), (math.inf, False)])
def test_a_drawn_case_that_is_unfit_says_nothing(share, passes):
    """But what is beyond even that limit, or not finite, is wrong."""
    unfit = Comparison("dq", failure=Failure(UNFIT, "nothing could fail"), share=share)
    implementation = Implementation("mine.py:attention", "cpu", external=True)
    found = api.find_failure(
        workbench.find("flash"),
        implementation,
        2 if passes else 1,
        ["bf16"],
        Settings(),
        lambda check: Result(check, comparisons=(unfit,)),
    )
    assert (not found) == passes


def as_eager(q, k, v, *, return_lse, **options):
    """Torch in the inputs' own precision, but for the LSE."""
    o, _ = flash_attention(q, k, v, compute_dtype=q.dtype, **options)
    return o, flash_attention(q, k, v, **options)[1]


def test_where_16_bits_lose_everything_a_named_case_asks_for_more_than_eager_torch():
    case = workbench.find("flash").load("suite").find("large-logits")
    named, written = judged(as_eager, case.name), judged(as_eager, str(case.problem))
    assert (named.statuses, written.statuses) == ((WRONG,), (UNFIT,))
    assert {one.name for one in written.comparisons if one.failure} == {"dq", "dk"}
    assert api._says_nothing(written)
    assert not api._says_nothing(named)

    def ten_times(q, k, v, **options):
        return as_eager(q * 10, k, v, **options)

    assert not api._says_nothing(judged(ten_times, str(case.problem)))


def test_what_was_interpreted_is_known():
    kernels = workbench.find("flash").load("function")
    results = verify("flash", functools.partial(kernels, backend="triton"), configs=["T=3"], dtypes=["bf16"]).results
    assert [result.interpreted for result in results] == [not torch.cuda.is_available()]
    assert not judged(right, "T=3").interpreted


@pytest.mark.slow
def test_a_search_finds_nothing_in_what_is_right():
    report = verify("flash", right, configs=["T=3"], search=40, seed=5)
    assert report.passed
    assert report.searched == {"flash": 40}


@pytest.mark.slow
def test_a_search_finds_what_is_wrong_for_values_of_one_sign():
    def wrong(q, k, v, **options):
        o, lse = right(q, k, v, **options)
        return (o * 1.5 if bool((v > 0).all()) and v.numel() > 20 else o), lse

    (failure,) = verify("flash", wrong, configs=["T=3"], dtypes=["fp32"], gradients=False, search=100).failures
    law = failure.check.settings.fill
    assert law in ("one-signed", "constant")
    (again,) = verify("flash", wrong, configs=[failure.check.case], dtypes=["fp32"], gradients=False, fill=law).results
    assert not again.passed


@pytest.mark.slow
@pytest.mark.parametrize("operator", workbench.names("suite"))
def test_a_search_finds_nothing_in_our_operators(operator, monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    monkeypatch.setattr(api, "LONGEST", 500)
    assert verify(operator, configs=["small"], dtypes=["bf16"], search=12).passed
