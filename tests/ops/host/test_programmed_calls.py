"""Calls that programs run, from the public function to the kernels, which are interpreted: checks, options and
gradients are as ever.
"""

import pytest
import torch
from interpreted_programs import watching
from runtime_problems import KINDS, ON_GPU, TOKENS, make, operators

from tilewise import flash_attention
from tilewise.ops._host import register, template

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ON_GPU, reason="kernels are interpreted here")]


@pytest.fixture(autouse=True)
def forgotten():
    """Neither a program of another test nor one of these is left."""
    every = [operator for name in KINDS for operator in operators(name)]
    for operator in every:
        operator.forget()
    yield
    for operator in every:
        operator.forget()


def leaves(tokens=20, heads=2, channels=16, offset=0):
    generator = torch.Generator().manual_seed(tokens)
    flat = (torch.randn(1, tokens, heads, channels + offset, generator=generator)[..., offset:] for _ in range(3))
    return [x.requires_grad_() for x in flat]


def attend(x, backend="triton", **options):
    return flash_attention(*x, causal=True, backend=backend, **options)


def step(x, backend="triton", **options):
    o = attend(x, backend, **options)
    return [o, *torch.autograd.grad(o, x, torch.ones_like(o))]


@pytest.mark.parametrize(
    "name",
    [name if name.startswith(("flash", "hstu")) else pytest.param(name, marks=pytest.mark.slow) for name in KINDS],
)
def test_every_operator_s_programs_give_what_its_plans_give(name, programmed, on_the_cpu, monkeypatch):
    counts = []
    # Neither does 16 divide, which Triton compiles other kernels for.
    for tokens in (TOKENS, TOKENS + 2):
        problem = make(name, tokens, backend="triton")
        # A gradient whose last axis is apart makes the backward compute a copy.
        problem = problem.on(problem.leaves, problem.do.transpose(-1, -2).contiguous().transpose(-1, -2))
        # Scratch shares memory; then each allocation is by itself, as where fresh memory is filled or watched.
        made = [problem.step()]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", watching(torch.empty, on_the_cpu))
            patch.setattr(torch, "zeros", watching(torch.zeros, on_the_cpu))
            torch.use_deterministic_algorithms(True, warn_only=True)
            made.append(problem.step())
            patch.setattr(register, "_is_on_gpu", lambda _: False)
            truth = problem.step()
            torch.use_deterministic_algorithms(False)
        for results in made:
            for a, b in zip(results, truth, strict=True):
                assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
                # Rows that no sequence owns are never written: they hold what fresh memory is filled with.
                assert torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0))
        counts.append(len(programmed))
    assert counts[0] >= 2, "forward and backward"
    assert counts[1] < 2 * counts[0], "a program serves other sizes too"
    assert any(isinstance(step, template.Computation) for one in programmed for step in one.template.steps)


def test_other_sizes_and_numbers_are_the_same_program(programmed):
    for tokens, options in ((20, {}), (23, {}), (21, {"scale": 0.3}), (22, {"scale": 0.7}), (25, {"scale": 1.1})):
        x = leaves(tokens)
        for a, b in zip(step(x, **options), step(x, "reference", **options), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    # Without a scale and with one, each forward and backward; the backward has a number in either case.
    assert len(programmed) == 3


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"scale": 1}, {"scale": True}),
        ({"scale": 1.0}, {"scale": True}),
        ({"scale": 1.0}, {"scale": float("nan")}),
        ({"scale": 1.0}, {"scale": float("inf")}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, 0)}),
        ({"window_size": (1, 0)}, {"window_size": (-2, 0)}),
        ({"max_seqlen_q": 1}, {"max_seqlen_q": True}),
        ({"max_seqlen_q": 1}, {"max_seqlen_q": -1}),
        ({"softcap": 1.0}, {"softcap": -1.0}),
    ],
    ids=str,
)
def test_an_option_is_checked_though_an_equal_one_came_before(programmed, good, bad):
    x = leaves()
    for _ in range(2):
        attend(x, **good)
    with pytest.raises((TypeError, ValueError)) as raised:
        attend(x, **bad)
    with pytest.raises(type(raised.value)) as truth:
        attend(x, "cpu", **bad)
    assert str(raised.value) == str(truth.value)


def test_tensors_are_checked_though_others_of_their_kind_came_before(programmed):
    q, k, v = leaves()
    attend((q, k, v))
    wrong = [
        (q, k[:, :3], v),
        (q, k[:, :, :1], v),
        (q, k[..., :8], v),
        (q, k.transpose(1, 3), v),
        (q, k, v.expand(2, -1, -1, -1)),
        (None, k, v),
    ]
    for x in wrong:
        with pytest.raises((TypeError, ValueError)) as raised:
            attend(x)
        with pytest.raises(type(raised.value)) as truth:
            attend(x, "cpu")
        assert str(raised.value) == str(truth.value)


def test_an_option_that_is_no_key(programmed):
    x = leaves()
    assert torch.equal(attend(x, window_size=[3, 0]), attend(x, window_size=(3, 0)))
    assert len(programmed) == 1


def test_offsets_that_are_not_contiguous_are_copied_by_the_program(programmed):
    q, k, v = (x[0] for x in leaves())
    cu = torch.tensor([[0, 7], [8, 7], [20, 7]])[:, 0]
    for _ in range(2):
        packed = step([q, k, v], cu_seqlens_q=cu)
        truth = step([q, k, v], "reference", cu_seqlens_q=cu)
        for a, b in zip(packed, truth, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
