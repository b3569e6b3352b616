"""The suites of native sparse attention pass what is right and fail what is wrong, for the reason it is wrong."""

import functools

import pytest
import torch
from battery import some_quick
from nsa_implementations import attend, compressed, selected

from tilewise import workbench
from tilewise.ops.nsa import reference
from tilewise.verify.api import verify
from tilewise.verify.compare import WRONG
from tilewise.verify.plan import DTYPES
from tilewise.verify.result import CHOICE, ERROR, NO_GRADIENT
from tilewise.workbench.nsa import cases as nsa
from tilewise.workbench.nsa import cases_attend as nsa_attend
from tilewise.workbench.nsa import cases_compressed as nsa_compressed
from tilewise.workbench.nsa import cases_selected as nsa_selected

SUITES = {
    "nsa": nsa.SUITE,
    "nsa-selected": nsa_selected.SUITE,
    "nsa-compressed": nsa_compressed.SUITE,
    "nsa-attend": nsa_attend.SUITE,
}
ALL = [(op, case.name) for op, suite in SUITES.items() for case in suite.cases]
NARROW = [(op, case.name) for op, suite in SUITES.items() for case in suite.standard("cpu", interpreted=True)]
WIDE = [at for at in ALL if at not in NARROW and at[1] not in ("xl", "xxl")]


def judged(op, function, case="small", dtype="bf16", seed=42):
    (result,) = verify(op, function, configs=[case], dtypes=[dtype], seed=seed).results
    return result


def failing(result):
    return {c.name for c in result.comparisons if not c.passed}


def by_reference(op, eager=False):
    """The reference as the public function is called; in the inputs' own precision it is eager torch."""
    function = workbench.find(op).load("reference")

    def call(return_lse=None, return_indices=None, **arguments):
        q = arguments.get("q", arguments.get("fq"))
        return function(**arguments, **({"compute_dtype": q.dtype} if eager else {}))

    return call


APART = {"nsa-selected": selected, "nsa-compressed": compressed, "nsa-attend": attend}


# What is right passes.


@pytest.mark.parametrize(("op", "case"), some_quick(NARROW, 4))
def test_no_case_is_unfit(op, case):
    for dtype in DTYPES:
        result = judged(op, by_reference(op), case, dtype)
        assert result.statuses == (), (dtype, failing(result), result.findings)


@pytest.mark.parametrize(("op", "case"), some_quick(NARROW, 4))
def test_eager_torch_passes_but_for_lses(op, case):
    """What it computes in 16 bits is within twice its own error; but LSEs are held to fp32."""
    for dtype in ("fp16", "bf16"):
        result = judged(op, by_reference(op, eager=True), case, dtype)
        assert failing(result) <= {"lse", "lse_win"}, (dtype, failing(result))
        assert not result.findings


@pytest.mark.parametrize(("op", "case"), some_quick([at for at in NARROW if at[0] in APART], 3))
def test_an_independent_implementation_passes(op, case):
    for dtype in DTYPES:
        result = judged(op, APART[op], case, dtype)
        assert result.statuses == (), (dtype, failing(result), result.findings)


@pytest.mark.slow
@pytest.mark.parametrize(("op", "case"), WIDE)
def test_no_wide_case_is_unfit(op, case):
    for dtype in DTYPES:
        result = judged(op, by_reference(op), case, dtype)
        assert result.statuses == (), (dtype, failing(result), result.findings)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 1234])
@pytest.mark.parametrize("op", SUITES)
def test_another_seed_passes(op, seed):
    for name in (case for at, case in NARROW if at == op):
        for dtype in DTYPES:
            result = judged(op, by_reference(op), name, dtype, seed)
            assert result.statuses == (), (name, dtype, failing(result), result.findings)


# What is wrong fails, and for that reason.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("op", "case", "wrong", "names"),
    [
        ("nsa-selected", "small", {"causal": False}, "o lse dq dk dv"),
        ("nsa-selected", "packed", {"causal": False}, "o lse dq dk dv"),
        ("nsa-selected", "repeats", {"once": False}, "o lse dq dk dv"),
        ("nsa-selected", "small", {"shift": 1}, "o lse dq dk dv"),
        ("nsa-compressed", "small", {"early": 1}, "o lse dq dk_cmp dv_cmp"),
        ("nsa-compressed", "packed", {"early": -1}, "o lse dq dk_cmp dv_cmp"),
        ("nsa-attend", "selected-only", {"causal": True}, "o lse dfq dfk dfv dsel_scale"),
        ("nsa-attend", "repeats", {"once": True}, "o lse dfq dfk dfv"),
        ("nsa-attend", "small", {"straight_through": True}, "dsel_scale"),
        ("nsa-attend", "small", {"reach": -1}, "o_win lse_win dfq dfk dfv"),
    ],
    ids=str,
)
def test_what_is_wrong_fails(op, case, wrong, names, dtype):
    assert judged(op, APART[op], case, dtype).passed
    result = judged(op, functools.partial(APART[op], **wrong), case, dtype)
    assert not result.passed
    assert failing(result) == set(names.split())


def test_counting_twice_is_no_mistake_where_nothing_repeats():
    assert judged("nsa-selected", functools.partial(selected, once=False)).passed


@pytest.mark.parametrize("dtype", DTYPES)
def test_exchanged_gates_are_wrong(dtype):
    def wrong(g_cmp, g_slc, **arguments):
        return by_reference("nsa")(g_cmp=g_slc, g_slc=g_cmp, **arguments)

    result = judged("nsa", wrong, dtype=dtype)
    assert result.statuses == (WRONG,)
    assert {"o", "dg_cmp", "dg_slc"} <= failing(result)
    assert "dg_swa" not in failing(result)


def test_a_forgotten_gate_is_named():
    def wrong(g_swa, **arguments):
        return by_reference("nsa")(g_swa=torch.ones_like(g_swa), **arguments)

    result = judged("nsa", wrong)
    assert NO_GRADIENT in result.statuses
    assert "no gradient reaches g_swa" in result.findings[0].message


def choosing(change):
    """The reference, its choice made by changed scores."""

    def function(return_indices=None, **arguments):
        sizes = {
            name: arguments[name]
            for name in ("compress_size", "compress_stride", "block_size", "init_blocks", "local_blocks")
            if name in arguments
        }
        cu = arguments.get("cu_seqlens")
        k_cmp = reference.compress_mean(arguments["k"], sizes["compress_size"], sizes["compress_stride"], cu)
        scores = change(reference.choice_scores(arguments["q"], k_cmp, **sizes, cu_seqlens=cu))
        best, order = scores.sort(dim=-1, descending=True, stable=True)
        blocks, count = scores.shape[-1], arguments["block_count"]
        chosen = order.masked_fill(best == -torch.inf, blocks)[..., :count].sort(-1).values
        indices = torch.nn.functional.pad(
            chosen.masked_fill(chosen == blocks, -1), (0, count - chosen.shape[-1]), value=-1
        ).int()
        return reference.native_sparse_attention(**arguments, block_indices=indices)

    return function


def off_by_one(scores):
    """Each block has the score of the one after it; what is forced and what is forbidden stays."""
    return torch.where(scores.isfinite(), scores.roll(-1, -1).nan_to_num(posinf=0.0, neginf=0.0), scores)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["small", "packed", "choice-alone"])
def test_a_choice_off_by_one_block_is_a_wrong_choice_and_nothing_else(case, dtype):
    assert judged("nsa", choosing(lambda scores: scores), case, dtype).passed
    result = judged("nsa", choosing(off_by_one), case, dtype)
    assert result.statuses == (CHOICE,)
    assert "below what it should be" in result.findings[0].message
    assert result.comparisons


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scores: scores.masked_fill(scores == torch.inf, 0.0), "which is always chosen, is not in"),
        (lambda scores: scores.masked_fill(scores == -torch.inf, 1e9), "which may not be chosen"),
        (lambda scores: scores.mean(-2, keepdim=True).expand(scores.shape), "below what it should be"),
    ],
    ids=["nothing-forced", "later-blocks", "heads-together"],
)
def test_wrong_choices_are_named(change, message):
    result = judged("nsa", choosing(change))
    assert CHOICE in result.statuses
    assert message in result.findings[0].message


def changed(change):
    def function(**arguments):
        o, indices = by_reference("nsa")(**arguments)
        return o, change(indices)

    return function


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.long(), "dtype torch.int64, expected torch.int32"),
        (lambda x: x[..., :3], "shape [1, 64, 2, 3], expected [1, 64, 2, 4]"),
        (lambda x: x.flip(-1), "-1 before the last block"),
    ],
)
def test_indices_that_are_no_choice_are_said_to_be(change, message):
    result = judged("nsa", changed(change))
    assert result.statuses[0] == CHOICE
    assert message in result.findings[0].message


@pytest.mark.slow
def test_given_blocks_must_come_back():
    assert "not those that were given" in judged("nsa", changed(lambda x: x.clamp(max=3)), "given").findings[0].message


def test_what_is_no_pair_of_pairs_is_an_error():
    assert judged("nsa-attend", lambda **arguments: attend(**arguments) * 2).statuses == (ERROR,)
