"""The problems of native sparse attention: what they write out as, the inputs they make, what they ask a function to
return.
"""

import dataclasses
import subprocess
import sys

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tilewise.ops.nsa import reference
from tilewise.verify.drawing import INTERPRETED
from tilewise.verify.implementation import WrongReturnError, evaluate
from tilewise.verify.suite import make_fill
from tilewise.workbench.nsa import cases as nsa
from tilewise.workbench.nsa import cases_attend as nsa_attend
from tilewise.workbench.nsa import cases_compressed as nsa_compressed
from tilewise.workbench.nsa import cases_selected as nsa_selected
from tilewise.workbench.nsa.base import LAYOUTS, PATTERNS, block_pattern

SUITES = {
    "nsa": nsa.SUITE,
    "nsa-selected": nsa_selected.SUITE,
    "nsa-compressed": nsa_compressed.SUITE,
    "nsa-attend": nsa_attend.SUITE,
}
FUNCTIONS = {
    "nsa": reference.native_sparse_attention,
    "nsa-selected": reference.selected_attention,
    "nsa-compressed": reference.compressed_attention,
    "nsa-attend": reference.native_sparse_attend,
}


def test_pairs_of_pairs_come_apart_and_a_last_none_is_no_output():
    problem = nsa_attend.NsaAttend(T=5, D=4, window=True)
    inputs = problem.tensors(make_fill("random", 0))
    assert list(evaluate(problem, reference.native_sparse_attend, inputs, torch.float64, None)) == [
        "o",
        "o_win",
        "lse",
        "lse_win",
    ]
    problem = nsa.Nsa(T=5, D=4, gates="swa")
    inputs = problem.tensors(make_fill("random", 0))
    assert list(evaluate(problem, reference.native_sparse_attention, inputs, torch.float64, None)) == ["o"]
    with pytest.raises(WrongReturnError, match=r"expected 1 tensors \(o\), got NoneType"):
        evaluate(problem, lambda **_: None, inputs, torch.float64, None)
    with pytest.raises(WrongReturnError, match="got Tensor, Tensor"):
        evaluate(problem, lambda q, **_: (q, (q, None)), inputs, torch.float64, None)


@pytest.mark.parametrize("op", SUITES)
def test_problems_read_and_write(op):
    suite = SUITES[op]
    names = [case.name for case in suite.cases]
    assert len(set(names)) == len(names)
    assert names[:5] == ["small", "medium", "large", "xl", "xxl"]
    for case in suite.cases:
        case.problem.check()
        assert suite.problem.parse(str(case.problem) or "B=1") == case.problem
    suite.growth.twice_as_long().check()
    assert suite.growth.twice_as_long().tokens() == (512,)


@pytest.mark.parametrize("op", SUITES)
def test_interpreted_cases_are_few_and_short(op):
    cases = SUITES[op].standard("cpu", interpreted=True)
    assert len(cases) <= 12
    assert all(
        sum(case.problem.tokens()) * case.problem.B <= 150 and case.problem.kv_heads <= 2 and case.problem.width <= 32
        for case in cases
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("op", "lengths"), [*((op, ()) for op in SUITES), *((op, (5, 0, 20)) for op in SUITES if op != "nsa-attend")]
)
def test_layouts_change_strides_and_not_shapes(op, layout, lengths):
    further = {"nsa": {"learned": True, "given": True}, "nsa-attend": {"scaled": True}}.get(op, {})
    packed = {"lengths": lengths} if lengths else {}
    problem = SUITES[op].problem(B=2, T=20, H=4, Hk=2, Dv=8, layout=layout, **packed, **further)
    plain = dataclasses.replace(problem, layout="plain").tensors(make_fill("random", 0))
    tensors = problem.tensors(make_fill("random", 0))
    assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in plain.items()}
    assert all(x.stride(-1) == 1 for x in tensors.values())
    assert any(not x.is_contiguous() for x in tensors.values()) == (layout != "plain")
    axes = problem.axes()
    assert all(len(axes[name]) == x.dim() for name, x in tensors.items() if name != "cu_seqlens")
    assert set(problem.offsets().values()) <= {"cu_seqlens"}


@pytest.mark.parametrize(
    ("op", "text", "message"),
    [
        ("nsa", "gates=some", "there is no gate 'some'"),
        ("nsa", "compress=6,stride=4", "a multiple of stride"),
        ("nsa", "block=6", "block a multiple of stride"),
        ("nsa", "init=2,local=3", "at most count"),
        ("nsa", "window=0", "at least 1"),
        ("nsa", "H=3,Hk=2", "not a multiple of Hk=2"),
        ("nsa", "layout=diagonal", "there is no layout"),
        ("nsa", "lengths=3/-1", "must not be negative"),
        ("nsa", "D=300", "channels from 1 to 256"),
        ("nsa-selected", "pattern=stripes", "there is no pattern 'stripes'"),
        ("nsa-selected", "count=0", "at least 1 of each"),
        ("nsa-compressed", "stride=3", "a multiple of stride"),
        ("nsa-attend", "mask=some", "there is no mask 'some'"),
        ("nsa-attend", "block=0", "blocks of at least 1"),
    ],
)
def test_what_does_not_go_together_raises(op, text, message):
    with pytest.raises(ValueError, match=message):
        SUITES[op].find(text)


@pytest.mark.parametrize("op", SUITES)
def test_drawn_problems_are_problems(op):
    @hypothesis.settings(
        max_examples=25, deadline=None, database=None, suppress_health_check=list(hypothesis.HealthCheck)
    )
    @hypothesis.seed(0)
    @hypothesis.given(st.composite(SUITES[op].draw)(INTERPRETED))
    def check(problem):
        problem.check()
        assert SUITES[op].problem.parse(str(problem) or "B=1") == problem
        inputs = problem.tensors(make_fill("random", 0))
        results = evaluate(problem, FUNCTIONS[op], inputs, torch.float64, None)
        assert not any(x.isnan().any() for x in results.values())

    check()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("tokens", [0, 1, 7, 61])
def test_patterns(pattern, tokens):
    indices = block_pattern(pattern, (2, tokens, 3, 4), 8, torch.Generator().manual_seed(0))
    current = (torch.arange(tokens) // 8)[:, None, None]
    assert indices.shape == (2, tokens, 3, 4)
    assert indices.dtype == (torch.int64 if pattern == "repeats" else torch.int32)
    # What a public function takes: -1, or a block of the sequence.
    assert ((indices >= -1) & (indices < max(-(-tokens // 8), 1))).all()
    if pattern != "holes":
        assert (indices <= current).all()
        assert (indices[..., 0] >= 0).all()
    if pattern == "own":
        assert (indices[..., :1] == current).all()
    if pattern == "smooth":
        assert ((indices == current).any(-1) & (indices == 0).any(-1)).all()
    if tokens == 61:
        twice = (indices[..., 1:] == indices[..., :-1]) & (indices[..., 1:] >= 0)
        assert bool(twice.any()) == (pattern in ("repeats", "holes"))
        assert bool((indices == -1).all(-1).any()) == (pattern == "holes")
        assert bool((indices > current).any()) == (pattern == "holes")


def test_the_problem_alone_decides_which_blocks_are_named():
    problem = nsa_attend.NsaAttend(T=20, scaled=True)
    one, other = (problem.tensors(make_fill("random", seed)) for seed in (0, 1))
    assert all(torch.equal(one[name], other[name]) for name in ("selected_block_indices", "fmask"))
    assert not torch.equal(one["sel_scale"], other["sel_scale"])
    assert (one["sel_scale"] == 0).any()
    assert (one["selected_block_indices"][~one["fmask"]] == nsa_attend.UNREAD).all()
    # Packed sequences draw their own, each from its own start.
    packed = nsa_selected.NsaSelected(lengths=(0, 20, 40), block=8).tensors(make_fill("random", 0))["block_indices"]
    assert packed.shape == (60, 2, 3)
    assert packed[:20].max() == 2
    assert packed[20:].max() == 4


def test_nsa_507():
    problem = SUITES["nsa-attend"].find("nsa-507").problem
    tensors = problem.tensors(make_fill("random", 0))
    assert [tuple(tensors[name].shape) for name in ("fq", "fk", "fv", "sel_scale")] == [
        (4, 4, 507, 64),
        *[(4, 2, 507, 64)] * 2,
        (4, 2, 507, 6),
    ]
    assert tensors["selected_block_indices"][tensors["fmask"]].unique().tolist() == [0, 1]
    assert problem.options() == {"block_size": 32, "return_sliding_window_out": True}
    assert problem.outputs == ("o", "o_win", "lse", "lse_win")


@pytest.mark.slow
def test_a_suite_loads_without_the_operators():
    """So that a bug can be planted before they are imported."""
    code = (
        "import sys; from tilewise import workbench\n"
        "suites = [workbench.find(name).load('suite') for name in workbench.names('suite')]\n"
        "print([x for x in sys.modules if 'tilewise.ops' in x])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
