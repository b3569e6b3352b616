"""The suite of block-sparse attention passes what is right, by whatever choice among equals, and fails what is wrong
for the reason it is wrong.
"""

import dataclasses
import importlib.util
from pathlib import Path

import pytest
import torch
from battery import some_quick

import tilewise
from tilewise import workbench
from tilewise.ops.bsa.reference import block_sparse_attn, choice_scores
from tilewise.verify.api import verify
from tilewise.verify.compare import DTYPE, WRONG, compare_choices
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import CHOICE, NO_GRADIENT, Check, Implementation
from tilewise.verify.run import Runner
from tilewise.verify.suite import make_fill
from tilewise.workbench.bsa.cases import CASES, LAYOUTS, SUITE, Bsa
from tilewise.workbench.operator import GROWTH

_spec = importlib.util.spec_from_file_location(
    "bsa_implementations", Path(__file__).parents[2] / "examples" / "bsa_implementations.py"
)
examples = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(examples)

EDGES = [case.name for case in CASES if case.name not in ("large", "xl", "xxl")]


def judged(function, case="small", dtype="bf16", **settings):
    (result,) = verify("bsa", function, configs=[case], dtypes=[dtype], **settings).results
    return result


def diagnoses(result, name):
    (failure,) = [c.failure for c in result.comparisons if c.name == name]
    return "; ".join(failure.diagnosis)


def eager(q, **others):
    """What eager torch makes of it in the inputs' own precision, the choice too."""
    return block_sparse_attn(q, **others, compute_dtype=q.dtype)


# What is right passes.


@pytest.mark.parametrize("case", some_quick(EDGES, 4))
def test_an_independent_implementation_passes(case):
    report = verify("bsa", examples.correct, configs=[case])
    assert [result.statuses for result in report.results] == [()] * len(DTYPES)


@pytest.mark.slow
@pytest.mark.parametrize("case", EDGES)
@pytest.mark.parametrize(
    ("function", "dtypes"), [(block_sparse_attn, DTYPES), (eager, ("fp16", "bf16"))], ids=["fp32", "own-precision"]
)
def test_no_case_is_unfit(case, function, dtypes):
    report = verify("bsa", function, configs=[case], dtypes=dtypes)
    assert [result.statuses for result in report.results] == [()] * len(dtypes)


@pytest.mark.slow
def test_memory_of_the_example_does_not_grow_as_the_square():
    runner = Runner(workbench.find("bsa"), examples.correct)
    assert not runner.run(Check("bsa", Implementation("correct", "cpu", external=True), GROWTH, "bf16")).findings


def test_choices_that_rounding_decides_pass():
    problem = SUITE.find("T=158,block=4,count=6").problem
    inputs = {
        name: x.bfloat16() if x.is_floating_point() else x
        for name, x in problem.tensors(make_fill("random", 42)).items()
    }
    chosen = [
        block_sparse_attn(**inputs, **problem.options(), compute_dtype=dtype)[1]
        for dtype in (torch.float64, torch.bfloat16)
    ]
    assert not torch.equal(*chosen)
    assert judged(eager, "T=158,block=4,count=6").passed


# What is wrong fails, and for that reason.


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_gate_is_named(dtype):
    result = judged(examples.wrong_gate, dtype=dtype)
    assert result.statuses == (NO_GRADIENT, WRONG)
    assert "no gradient reaches g_cmp" in result.findings[0].message
    # The branch that it gates begins at the last row of the first block.
    assert "only from row 15 on" in diagnoses(result, "o")
    assert next(c for c in result.comparisons if c.name == "dg_slc").passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_norm_of_each_head_is_wrong_everywhere(dtype):
    result = judged(examples.approximate_norm, dtype=dtype)
    assert result.statuses == (WRONG,)
    assert {c.name for c in result.comparisons if not c.passed} == {"o", "dq", "dk", "dv", "du", "dg_cmp", "dg_slc"}
    assert "spread over all elements" in diagnoses(result, "o")
    # With a norm of its own no head's gate matters: that is not another gate's zero gradient.
    assert "should hold" not in diagnoses(result, "dg_slc")


@pytest.mark.parametrize("dtype", DTYPES)
def test_indices_shared_by_the_wrong_head_are_a_wrong_choice_and_nothing_else(dtype):
    result = judged(examples.shared_indices, dtype=dtype)
    assert result.statuses == (CHOICE,)
    assert "head 0 takes head 1's blocks in place of head 0's" in result.findings[0].message
    assert len(result.comparisons) == 8
    assert judged(examples.shared_indices, "no-interleave", dtype).passed
    assert "in place of" in judged(examples.shared_indices, "packed", dtype).findings[0].message


def changed(change):
    """`correct`, its indices changed after the fact."""

    def function(**arguments):
        o, indices = examples.correct(**arguments)
        return o, change(indices)

    return function


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.float(), "dtype torch.float32, expected torch.int32"),
        (lambda x: x.long(), "dtype torch.int64"),
        (lambda x: x[..., :1], "shape [1, 4, 64, 1], expected [1, 4, 64, 2]"),
        (lambda x: x.flip(-1), "-1 before the last block"),
        (lambda x: x + 1, "index 4 is no block"),
    ],
)
def test_indices_that_are_no_choice_are_said_to_be(change, message):
    result = judged(changed(change))
    assert result.statuses[0] == CHOICE
    assert message in result.findings[0].message


def test_an_integer_output_is_a_wrong_dtype_not_a_choice():
    def wrong(**arguments):
        o, indices = examples.correct(**arguments)
        return o.long(), indices

    result = judged(wrong)
    assert next(c for c in result.comparisons if c.name == "o").failure.status == DTYPE


def test_a_pair_takes_the_same_blocks_even_where_both_choices_are_right():
    problem = Bsa(T=48, H=2)
    inputs = problem.tensors(make_fill("random", 0))
    # Equal keys: every score ties, and any block is as good as another.
    inputs["k"] = torch.ones_like(inputs["k"])
    _, indices = block_sparse_attn(**inputs, **problem.options())
    assert problem.judge_choice("block_indices", indices, inputs, torch.float32) == ""
    both = indices.clone()
    both[:, :, 32:, 0] = 1
    assert problem.judge_choice("block_indices", both, inputs, torch.float32) == ""
    indices[:, 1] = both[:, 1]
    assert "head 1 must take head 0's blocks" in problem.judge_choice("block_indices", indices, inputs, torch.float32)
    assert (
        dataclasses.replace(problem, interleave=False).judge_choice("block_indices", indices, inputs, torch.float32)
        == ""
    )


def test_scores_that_overflow_16_bits_are_judged_by_fp32():
    problem = Bsa(T=64, H=2)
    inputs = {name: x.half() for name, x in problem.tensors(make_fill("random", 0)).items()}
    inputs["q"] = inputs["q"] * 2.0**13
    inputs["k"] = inputs["k"] * 2.0**3
    _, indices = block_sparse_attn(**inputs, **problem.options())
    assert problem.judge_choice("block_indices", indices, inputs, torch.float16) == ""
    worst = indices.clone()
    worst[:, :, 32:, 0] = 1 - worst[:, :, 32:, 0].clamp(max=1)
    assert "below what it should be" in problem.judge_choice("block_indices", worst, inputs, torch.float16)


# compare_choices by itself: rows of five blocks, the last one forced in the first three rows, the first one in the
# last.

SCORES = torch.tensor(
    [[3.0, 1.0, 2.0, 2.0, torch.inf], [0.1, 0.4, -0.2, 0.3, torch.inf], [torch.inf, *[-torch.inf] * 4]],
    dtype=torch.float64,
)
RIGHT = torch.tensor([[0, 2, 4], [1, 3, 4], [0, -1, -1]], dtype=torch.int32)


def compared(*rows, error=0.0):
    indices = RIGHT.clone()
    for at, row in enumerate(rows):
        indices[at] = torch.tensor(row)
    return compare_choices(indices, SCORES, (SCORES + error).float())


def test_the_best_pass_and_so_does_a_tie():
    assert compared() == ""
    assert compared([0, 3, 4]) == ""


def test_what_rounding_may_exchange_passes_and_no_more():
    # Block 0 lies 0.2 below block 3.
    assert compared([0, 2, 4], [0, 1, 4], error=0.11) == ""
    wrong = compared([0, 2, 4], [0, 1, 4], error=0.09)
    assert wrong.startswith("at [1] blocks [0, 1, 4] are chosen, the best are [1, 3, 4]: a score 0.2 below")
    assert "(1 of 3 rows)" in wrong
    # The floor: a few roundings of the largest score, not none.
    assert "below what it should be" in compared([0, 1, 4])


def test_each_rank_is_judged_not_the_sum():
    scores = torch.tensor([5.0, 4.0, 3.0, torch.inf], dtype=torch.float64)
    indices = torch.tensor([[0, 2, 3]], dtype=torch.int32)
    assert "below" in compare_choices(indices, scores[None], scores[None] + 0.4)
    assert compare_choices(indices, scores[None], scores[None] + 0.6) == ""


def test_eager_that_overflows_allows_nothing():
    assert "below" in compare_choices(
        RIGHT[:1] * 0 + torch.tensor([1, 2, 4]), SCORES[:1], torch.full_like(SCORES[:1], torch.nan)
    )
    assert compare_choices(RIGHT, SCORES, torch.full_like(SCORES, torch.inf)) == ""


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([0, 1, 4], "a score 1 below"),
        ([0, 2, 3], "block 4, which is always chosen, is not in [0, 2, 3]"),
        ([0, 4, 4], "block 4 is chosen twice"),
        ([2, 0, 4], "[2, 0, 4] does not ascend"),
        ([0, -1, 4], "has -1 before the last block"),
        ([0, 4, -1], "3 blocks can be chosen, and [0, 4, -1] are"),
        ([0, 4, 5], "index 5 is no block"),
        ([-2, 0, 4], "index -2 is no block"),
    ],
)
def test_what_is_no_right_choice_is_named_with_its_place(row, message):
    wrong = compared(row)
    assert wrong.startswith("at [0] ")
    assert message in wrong


def test_a_block_that_may_not_be_chosen():
    assert "block 3, which may not be chosen, is in [0, 3, -1]" in compare_choices(
        torch.tensor([[0, 3, -1]]), SCORES[2:], SCORES[2:]
    )


def test_the_place_has_all_axes():
    indices, scores = RIGHT.expand(2, 3, 3).clone(), SCORES.expand(2, 3, 5)
    indices[1, 2] = 0
    assert compare_choices(indices, scores, scores).startswith("at [1, 2] ")


def test_nothing_to_choose_is_right():
    empty = torch.empty(2, 4, 0, 0)
    assert compare_choices(empty.int(), empty, empty) == ""
    assert "shape" in compare_choices(RIGHT, SCORES[:2], SCORES[:2])


# The problem.


def test_problems_read_and_write():
    for case in CASES:
        text = str(case.problem)
        assert SUITE.problem.parse(text or "B=1") == case.problem
    assert SUITE.find("T=65,gates=cmp+swa,interleave=false").problem.options() == {
        "g_slc": None,
        "block_counts": 2,
        "block_size": 16,
        "interleave": False,
    }


def test_gates_lie_between_0_and_1_and_a_rule_is_kept():
    gate = Bsa().tensors(make_fill("random", 0))["g_slc"]
    assert 0 < gate.min() < gate.max() < 1
    gate = Bsa().tensors(make_fill("range", 0))["g_slc"]
    assert torch.equal(gate.flatten(), torch.arange(256) / 256)


@pytest.mark.parametrize("wrong", [Bsa(gates="some"), Bsa(layout="diagonal")], ids=str)
def test_words_that_mean_nothing_raise(wrong):
    with pytest.raises(ValueError, match="expected"):
        wrong.tensors(make_fill("random", 0))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [(), (5, 0, 20)])
def test_layouts_change_strides_and_not_shapes(layout, lengths):
    problem = Bsa(B=2, T=20, lengths=lengths, layout=layout)
    plain = dataclasses.replace(problem, layout="plain").tensors(make_fill("random", 0))
    tensors = problem.tensors(make_fill("random", 0))
    assert {name: x.shape for name, x in tensors.items()} == {name: x.shape for name, x in plain.items()}
    assert all(x.stride(-1) == 1 for x in tensors.values())
    assert {name: len(axes) for name, axes in problem.axes().items() if name in tensors} == {
        name: x.dim() for name, x in tensors.items() if name != "seq_offsets"
    }


def test_the_operator_is_registered():
    operator = workbench.find("bsa")
    assert operator.load("function") is tilewise.block_sparse_attn
    assert operator.load("reference") is block_sparse_attn
    assert operator.load("suite") is SUITE


def test_scores_are_those_of_the_choice():
    """judge_choice and the reference agree on what the best is, in every case."""
    for case in CASES:
        problem = case.problem
        if case.name in ("large", "xl", "xxl"):
            continue
        inputs = problem.tensors(make_fill("random", 3))
        _, indices = block_sparse_attn(**inputs, **problem.options())
        assert tuple(indices.shape) == problem._choice_shape()
        assert problem.judge_choice("block_indices", indices, inputs, torch.float32) == ""
        offsets = {"seq_offsets": inputs["seq_offsets"]} if problem.lengths else {}
        scores = choice_scores(inputs["q"], inputs["k"], block_size=problem.block, scale=problem.scale, **offsets)
        assert scores.shape[:-1] == indices.shape[:-1]
