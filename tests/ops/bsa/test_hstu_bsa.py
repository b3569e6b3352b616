"""`hstu_attention_with_bsa`: each sequence as if it were alone, whatever else there is; and a suite whose inputs leave
no doubt what is chosen.
"""

import itertools

import pytest
import torch
from bsa_inputs import assert_close, cumulative, random

from tilewise import block_sparse_attn, hstu_attention_with_bsa
from tilewise.ops.bsa import reference
from tilewise.verify.api import verify
from tilewise.verify.plan import DTYPES
from tilewise.verify.single import DTYPES as TORCH_DTYPES
from tilewise.verify.suite import make_fill
from tilewise.workbench.bsa.cases_hstu import CASES, SUITE, HstuBsa

BACKENDS = ["reference", "cpu", pytest.param("triton", marks=pytest.mark.gpu)]
LENGTHS = (0, 23, 7, 0, 45, 1)
HEADS, CHANNELS, VALUES, PADDED = 2, 16, 8, 50
SIZES = {"block_counts": 2, "block_size": 8, "window_size": 5}


@pytest.fixture(params=BACKENDS)
def place(request, device):
    """A backend and a device that it runs on."""
    return request.param, device if request.param == "triton" else torch.device("cpu")


class GateModel(torch.nn.Module):
    """Three gates of each head, all from all of its channels."""

    def __init__(self, heads=HEADS):
        super().__init__()
        (weight,) = random((3, heads, CHANNELS), seed=5)
        self.weight = torch.nn.Parameter(weight / CHANNELS**0.5)
        self.seen = []

    def forward(self, padded_q):
        self.seen.append(padded_q)
        return torch.einsum("bnhd,ghd->gbnh", padded_q, self.weight).sigmoid().unbind(0)


def inputs(heads=HEADS, lengths=LENGTHS, seed=0):
    tokens = sum(lengths)
    return dict(
        zip("qkvu", random(*[(tokens, heads * CHANNELS)] * 2, *[(tokens, heads * VALUES)] * 2, seed=seed), strict=True)
    )


def attend(tensors, model, backend, device, lengths=LENGTHS, padded=PADDED, heads=HEADS, **more):
    mask = torch.ones(len(lengths), padded, padded, dtype=torch.bool)
    sizes = {"num_heads": heads, "attention_dim": CHANNELS, "linear_dim": VALUES} | SIZES | more
    given = {name: x.to(device) for name, x in tensors.items()} | {
        "x_offsets": cumulative(lengths).to(device),
        "invalid_attn_mask": mask,
    }
    return hstu_attention_with_bsa(**given, **sizes, gate_model=model.to(device), backend=backend)


def differentiate(tensors, backend, device, **more):
    """Outputs, and gradients of all of them weighted by random numbers: of q, k, v, u and of the model's weights."""
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in tensors.items()}
    model = GateModel(more.get("heads", HEADS)).to(device)
    outputs = attend(leaves, model, backend, device, **more)
    weights = random(*(x.shape for x in outputs), seed=1)
    total = sum((x * weight.to(device)).sum() for x, weight in zip(outputs, weights, strict=True))
    return [
        *(x.detach().cpu() for x in outputs),
        *(x.cpu() for x in torch.autograd.grad(total, [*leaves.values(), model.weight])),
    ]


@pytest.mark.parametrize("heads", [2, 3])
def test_against_the_reference_in_fp64(place, heads):
    tensors, model = inputs(heads), GateModel(heads)
    leaves = {name: x.double().requires_grad_() for name, x in tensors.items()}
    mask, offsets = torch.ones(6, PADDED, PADDED), cumulative(LENGTHS)
    outputs = reference.hstu_attention_with_bsa(
        heads, CHANNELS, VALUES, **leaves, x_offsets=offsets, invalid_attn_mask=mask, gate_model=model.double(), **SIZES
    )
    weights = random(*(x.shape for x in outputs), seed=1)
    total = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    expected = [*(x.detach() for x in outputs), *torch.autograd.grad(total, [*leaves.values(), model.weight])]
    assert_close(differentiate(tensors, *place, heads=heads), expected, tolerance=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 3])
def test_each_sequence_is_as_if_it_were_alone(place, heads):
    tensors, model = inputs(heads), GateModel(heads)
    outputs = [x.detach() for x in attend(tensors, model, *place, heads=heads)]
    assert [tuple(x.shape) for x in outputs] == [(76, heads * VALUES), *[(6, PADDED, heads, CHANNELS)] * 2]
    for b, (start, end) in enumerate(itertools.pairwise(cumulative(LENGTHS).tolist())):
        alone = {name: x[start:end] for name, x in tensors.items()}
        o, padded_q, padded_k = attend(alone, model, *place, lengths=(end - start,), heads=heads)
        torch.testing.assert_close(outputs[0][start:end], o, rtol=1e-5, atol=1e-5)
        assert torch.equal(outputs[1][b], padded_q[0])
        assert torch.equal(outputs[2][b], padded_k[0])
        # By the operator itself, dense, with the same gates.
        dense = {name: x.to(place[1]).unflatten(-1, (heads, -1))[None] for name, x in alone.items()}
        gates = [gate[:, : end - start] for gate in model(padded_q)]
        expected, _ = block_sparse_attn(*dense.values(), *gates, **SIZES, interleave=heads == 2, backend=place[0])
        torch.testing.assert_close(o, expected[0].flatten(1), rtol=1e-5, atol=1e-5)


def test_padding_holds_zeros_and_the_tokens_before_it(place):
    tensors, model = inputs(), GateModel()
    _, padded_q, padded_k = attend(tensors, model, *place)
    assert model.seen[0] is padded_q
    for b, (start, end) in enumerate(itertools.pairwise(cumulative(LENGTHS).tolist())):
        for padded, x in ((padded_q, tensors["q"]), (padded_k, tensors["k"])):
            assert torch.equal(padded[b, : end - start].flatten(1).cpu(), x[start:end])
            assert not padded[b, end - start :].any()


@pytest.mark.slow
def test_how_far_is_padded_changes_nothing(place):
    short, long = (attend(inputs(), GateModel(), *place, padded=padded) for padded in (45, 133))
    torch.testing.assert_close(short[0], long[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(short[1], long[1][:, :45])
    assert not long[1][:, 45:].any()


@pytest.mark.slow
def test_what_gates_hold_in_the_padding_changes_nothing(place):
    class Broken(GateModel):
        def forward(self, padded_q):
            beyond = (
                torch.arange(PADDED, device=padded_q.device) >= torch.tensor(LENGTHS, device=padded_q.device)[:, None]
            )
            return [gate.masked_fill(beyond[..., None], torch.nan) for gate in super().forward(padded_q)]

    results = []
    for kind in (GateModel, Broken):
        model, tensors = kind(), {name: x.requires_grad_() for name, x in inputs().items()}
        o, _, _ = attend(tensors, model, *place)
        results.append([o, *torch.autograd.grad(o.square().sum(), [*tensors.values(), model.weight])])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.slow
def test_nan_in_another_sequence_changes_nothing(place):
    """Sequence 4 is NaN: all others keep their outputs and gradients, those of the model's weights apart, which see
    every sequence.
    """
    clean, theirs = inputs(), slice(30, 75)
    broken = {name: x.clone() for name, x in clean.items()}
    for x in broken.values():
        x[theirs] = torch.nan
    mine = torch.ones(76, dtype=torch.bool)
    mine[theirs] = False
    expected, actual = differentiate(clean, *place), differentiate(broken, *place)
    # By name: attn_output, padded_q, padded_k, then the gradients of q, k, v and u.
    for at in (0, 3, 4, 5, 6):
        assert actual[at][mine].isfinite().all()
        torch.testing.assert_close(actual[at][mine], expected[at][mine], rtol=1e-6, atol=1e-6)
    for at in (1, 2):
        assert torch.equal(actual[at][[0, 1, 2, 3, 5]], expected[at][[0, 1, 2, 3, 5]])


def test_gradients_reach_the_padded_tensors_and_the_gates(place):
    tensors = {name: x.requires_grad_() for name, x in inputs().items()}
    _, padded_q, padded_k = attend(tensors, GateModel(), *place)
    dq, dk = torch.autograd.grad(
        (2 * padded_q + 3 * padded_k).sum(), [tensors["q"], tensors["k"]], materialize_grads=True
    )
    assert (dq == 2).all()
    assert (dk == 3).all()
    model = GateModel()
    attend(tensors, model, *place)[0].square().sum().backward()
    assert model.weight.grad.abs().max() > 0


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("padded", [0, 4])
def test_no_tokens(lengths, padded, place):
    o, padded_q, padded_k = attend(inputs(lengths=()), GateModel(), *place, lengths=lengths, padded=padded)
    assert o.shape == (0, HEADS * VALUES)
    assert padded_q.shape == padded_k.shape == (len(lengths), padded, HEADS, CHANNELS)
    assert not padded_q.any()


def test_the_defaults_are_4_blocks_of_32_and_no_window():
    tensors = inputs(lengths=(300,))
    given = {
        **tensors,
        "x_offsets": torch.tensor([0, 300]),
        "invalid_attn_mask": torch.ones(300, 300),
        "gate_model": GateModel(),
    }
    o, _, _ = hstu_attention_with_bsa(HEADS, CHANNELS, VALUES, **given)
    expected, _, _ = hstu_attention_with_bsa(
        HEADS, CHANNELS, VALUES, **given, block_counts=4, block_size=32, window_size=0
    )
    assert torch.equal(o, expected)


# The suite: its inputs decide the choice by more than rounding.


def scores(problem, dtype, compute_dtype, seed=42):
    inputs = problem.tensors(make_fill("random", seed))
    q, k = (inputs[name].to(dtype).to(compute_dtype).unflatten(-1, (problem.H, problem.D)) for name in "qk")
    return reference.choice_scores(
        q, k, block_size=problem.block, seq_offsets=inputs["x_offsets"], compute_dtype=compute_dtype
    )


# With so few blocks that all are taken, or the own block alone, there is nothing to decide.
CUT = [case for case in CASES if -(-max(case.problem.lengths) // case.problem.block) > case.problem.count > 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CUT, ids=lambda case: case.name)
def test_scores_about_the_cut_lie_apart_by_more_than_rounding(case, dtype):
    problem, dtype = case.problem, TORCH_DTYPES[dtype]
    truth, eager = (scores(problem, dtype, compute_dtype).double() for compute_dtype in (torch.float64, dtype))
    best, order = truth.sort(dim=-1, descending=True, stable=True)
    about = slice(problem.count - 1, problem.count + 1)
    cut = best[..., about].isfinite().all(-1)
    assert cut.any()
    taken, left = best[..., about][cut].unbind(-1)
    off = (eager - truth).gather(-1, order)[..., about][cut].abs().sum(-1)
    assert (taken - left > 4 * off).all()
    # And so far that another way to sum cannot reach: 16 roundings in bf16 of the larger one.
    assert (taken - left > 16 * torch.finfo(torch.bfloat16).eps * taken).all()


def test_most_cases_have_a_cut_and_queries_of_one_head_choose_differently():
    assert {"small", "medium", "large", "empty-sequences", "odd-lengths", "odd-heads", "window"} <= {
        case.name for case in CUT
    }
    problem = SUITE.find("large").problem
    given = problem.tensors(make_fill("random", 42))
    dense = (given[name][None, :256].unflatten(-1, (problem.H, -1)) for name in "qkvu")
    _, block_indices = reference.block_sparse_attn(*dense, None, None, None, problem.count, problem.block)
    # The queries of the last block: two orders in each pair of heads, and not the same in all.
    chosen = [block_indices[0, h, -32:].unique(dim=0).tolist() for h in range(0, problem.H, 2)]
    assert all(len(rows) == 2 for rows in chosen)
    assert len({str(rows) for rows in chosen}) > 1


@pytest.mark.parametrize("case", ["small", "empty-sequences", "odd-heads", "window"])
def test_the_reference_passes_in_every_precision(case):
    report = verify("hstu-bsa", reference.hstu_attention_with_bsa, configs=[case])
    assert [result.statuses for result in report.results] == [()] * len(DTYPES)


def test_a_gate_that_is_ignored_is_found():
    def wrong(*, gate_model, **others):
        return hstu_attention_with_bsa(
            **others, gate_model=lambda padded_q: [torch.ones_like(gate) for gate in gate_model(padded_q)]
        )

    (result,) = verify("hstu-bsa", wrong, configs=["small"], dtypes=["bf16"]).results
    assert not result.passed
    assert "no gradient reaches gate_weights" in result.findings[0].message


def test_sequences_taken_for_one_are_found():
    def wrong(*, x_offsets, invalid_attn_mask, **others):
        o, *_ = hstu_attention_with_bsa(
            **others | {"gate_model": lambda q: [torch.ones(q.shape[:3], dtype=q.dtype)] * 3},
            x_offsets=x_offsets[[0, -1]],
            invalid_attn_mask=torch.ones(int(x_offsets[-1])),
        )
        return o, *hstu_attention_with_bsa(**others, x_offsets=x_offsets, invalid_attn_mask=invalid_attn_mask)[1:]

    (result,) = verify("hstu-bsa", wrong, configs=["odd-lengths"], dtypes=["bf16"]).results
    assert not next(c for c in result.comparisons if c.name == "attn_output").passed


def test_problems_read_and_write():
    for case in CASES:
        assert SUITE.problem.parse(str(case.problem) or "H=4") == case.problem
        case.problem.check()


@pytest.mark.parametrize("wrong", ["lengths=20/3,n=10", "D=1", "lengths=900,block=8", "layout=diagonal"])
def test_problems_that_cannot_be(wrong):
    with pytest.raises(ValueError, match="expected"):
        SUITE.find(wrong)


def test_twice_as_long():
    assert HstuBsa(lengths=(3, 4), n=9).twice_as_long() == HstuBsa(lengths=(6, 8), n=18)
