"""Problems as text, and the inputs they make."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise import workbench
from tilewise.verify.drawing import LONGEST
from tilewise.verify.suite import Suite, cut, make_fill, place, transposed
from tilewise.workbench.flash.cases import CASES, Flash, draw
from tilewise.workbench.operator import GROWTH, UsageError

CPU = torch.device("cpu")

OPERATORS = [workbench.find(name) for name in workbench.names("suite")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_problem_reads_what_it_writes(case):
    assert Flash.parse(str(case.problem) or "B=1") == case.problem


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_drawn_problems_read_what_they_write(data):
    problem = draw(data.draw, LONGEST)
    assert Flash.parse(str(problem) or "B=1") == problem


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("T", "NAME=VALUE"),
        ("X=3", "expected NAME=VALUE with a name out of B, T, Tk"),
        ("T=x", "expected an integer"),
        ("causal=yes", "expected true or false"),
        ("lengths=1,2", "expected NAME=VALUE"),
        ("softcap=a", "expected a number"),
    ],
)
def test_what_is_wrong_with_a_problem_is_said(text, message):
    with pytest.raises(ValueError, match=message):
        Flash.parse(text)


def test_the_range_rule():
    shape = (1, 3, 2, 4)
    q, k = make_fill("range", 0)("q", shape, 9.0), make_fill("range", 7)("k", shape, 1.0)
    assert q.dtype == torch.float64
    assert q.flatten().tolist() == [i / 24 for i in range(24)]
    assert torch.equal(k, -q)
    assert make_fill("range-raw", 0)("v", shape, 1.0).flatten().tolist() == list(range(24))
    assert make_fill("range", 0)("q", (0, 4), 1.0).shape == (0, 4)


def test_the_range_rule_holds_whatever_the_strides():
    for layout in ("plain", "transposed", "mixed"):
        tensors = Flash(B=1, T=5, H=2, D=4, layout=layout).tensors(make_fill("range", 0))
        assert tensors["q"].flatten().tolist() == [i / 40 for i in range(40)]
        assert tensors["v"].flatten().tolist() == [i / 40 for i in range(40)]


def test_random_inputs_follow_the_seed():
    one, same, other = (Flash(T=9).tensors(make_fill("random", seed))["q"] for seed in (42, 42, 43))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    "x",
    [
        transposed(torch.randn(2, 5, 3, 8)),
        cut(torch.randn(2, 5, 3, 8), 3),
        torch.randn(1, 5, 3, 8).expand(4, -1, -1, -1),
    ],
)
def test_placing_keeps_values_strides_and_alignment_and_surrounds(x):
    placed = place(x, torch.bfloat16, CPU, math.nan)
    assert torch.equal(placed, x.bfloat16())
    assert placed.stride() == x.stride()
    assert (placed.storage_offset() - x.storage_offset()) % 8 == 0
    memory = torch.tensor([], dtype=torch.bfloat16).set_(placed.untyped_storage())
    distinct = math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
    assert int(memory.isnan().sum()) == memory.numel() - distinct


@pytest.mark.parametrize("operator", OPERATORS, ids=lambda operator: operator.name)
def test_every_suite_is_whole(operator):
    suite: Suite = operator.load("suite")
    assert callable(operator.load("reference"))
    names = [case.name for case in suite.cases]
    assert len(names) == len(set(names))
    assert names[:5] == ["small", "medium", "large", "xl", "xxl"]
    assert all(suite.find(name).name == name for name in names)
    with pytest.raises(ValueError, match="there is no case 'smal': did you mean small\\? expected one of small"):
        suite.find("smal")
    assert callable(operator.load("function"))
    assert len(suite.mutants) >= 15
    for case in suite.cases:
        problem = case.problem
        tensors = problem.tensors(make_fill("random", 0))
        assert {name for name, x in tensors.items() if x.is_floating_point()} <= set(problem.axes())
        assert all(len(problem.axes()[name]) == x.ndim for name, x in tensors.items() if x.is_floating_point())
        assert set(problem.offsets().values()) <= set(tensors)
        assert dataclasses.fields(problem)


def test_the_standard_cases():
    suite: Suite = workbench.find("flash").load("suite")
    interpreted = {case.name for case in suite.standard("cpu", True)}
    assert {"small", "window", "packed"} <= interpreted
    assert not {"medium", "large", "xl", "d-128"} & interpreted
    by_default = {case.name for case in suite.standard("cpu", False)}
    assert by_default == interpreted | {"medium"}
    everything = {case.name for case in suite.standard("cpu", False, everything=True)}
    assert {case.name for case in suite.cases} - everything == {"xl", "xxl"}
    assert suite.standard("cuda", False) == suite.cases


# One that is declared with its suite is imported with it.
APART = [name for name in workbench.names("suite") if isinstance(workbench.find(name).suite, str)]


@pytest.mark.parametrize("name", APART)
def test_names_of_cases_are_known_without_the_suite(name):
    operator = workbench.find(name)
    for case in (*(case.name for case in operator.load("suite").cases), GROWTH, "T=9"):
        workbench.check_case(operator, case)
    with pytest.raises(UsageError, match="did you mean medium"):
        workbench.check_case(operator, "mediun")
