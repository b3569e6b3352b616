"""FlashAttention-4 as a baseline: how it is called, and why it is not, with a package that stands in for it."""

import sys

import pytest
import torch
from fake_flash_attn import fake_flash_attn, no_flash_attn  # noqa: F401
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.bench import dense
from tilewise.bench.contender import CannotRunError, contenders, own_implementation
from tilewise.bench.run import Bench
from tilewise.bench.timing import Clock
from tilewise.verify.suite import Case, make_fill

NAMES = ("flash-attn-4", "flash-attn-4-fixed")


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")
    monkeypatch.setattr(dense, "NEEDS_GPU", ())


def bench(dtype=torch.bfloat16, operator="flash", asked=NAMES):
    found = workbench.find(operator)
    timed, own, device = found.load("bench"), own_implementation(found), torch.device("cpu")
    everyone = contenders(found, timed, [], asked, dtype, own)
    return Bench(found, timed, everyone, ["fwd"], dtype, device, 1, 1, Clock(device))


def prepare(one, text):
    """Every baseline's call, its output compared with tilewise's."""
    problem = one.operator.load("suite").find(text).problem
    sets = one._input_sets(problem)[:1]
    work, expected = one._work(problem, sets[0])
    return work, [one._prepare(contender, problem, sets, expected)[0] for contender in one.contenders[1:]]


def test_it_is_timed_on_a_gpu_by_default():
    known = {one.name: one for one in workbench.find("flash").load("bench").baselines}
    assert all(known[name].on == ("cuda",) for name in NAMES)
    assert all(name in CliRunner().invoke(cli.app, ["bench", "flash", "--list"]).output for name in NAMES)


@pytest.mark.usefixtures("fake_flash_attn")
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B=2,T=17,H=4,Hk=2,D=16", {"shape": (2, 17, 4, 16), "causal": False, "window_size": (None, None)}),
        ("T=9,Tk=12,D=8,causal=true", {"causal": True, "window_size": (None, 0)}),
        ("T=20,D=8,window=4/-1,softcap=3.0,scale=0.5", {"causal": False, "window_size": (4, None)}),
        ("T=20,D=8,window=4/0", {"window_size": (4, 0)}),
        ("lengths=8/0/5,lengths_k=3/2/6,D=8", {"shape": (13, 2, 8), "max_seqlen_q": 8, "max_seqlen_k": 6}),
    ],
)
def test_how_it_is_called(text, expected):
    one = bench()
    assert "flash_attn.cute" not in sys.modules
    work, found = prepare(one, text)
    for call in found:
        assert call.pairs == work.pairs
        o = call.run()[0]
        torch.autograd.grad(o, call.leaves, torch.ones_like(o))
    calls = sys.modules["flash_attn.cute"].calls
    assert {call["deterministic"] for call in calls} == {False, True}
    for call in calls:
        assert {name: call[name] for name in expected} == expected
        if "lengths" in text:
            assert call["cu_seqlens_q"].dtype == torch.int32
            assert call["cu_seqlens_k"].tolist() == [0, 3, 5, 11]


@pytest.mark.usefixtures("fake_flash_attn")
def test_what_computes_something_else_is_not_timed(monkeypatch):
    module = dense.flash_attn_4()
    monkeypatch.setattr(module, "flash_attn_func", lambda q, k, v, **_: (2 * v, None))
    with pytest.raises(CannotRunError, match="computes something else"):
        prepare(bench(), "T=8,D=8")


@pytest.mark.usefixtures("fake_flash_attn")
def test_dense_attention_beside_a_sparse_operator():
    one = bench(operator="nsa-selected", asked=["dense-flash-attn-4"])
    assert prepare(one, "T=64,H=2,count=1,block=16")[1][0].pairs == 2 * (64 * 65 // 2)


@pytest.mark.usefixtures("fake_flash_attn")
@pytest.mark.parametrize(
    ("text", "dtype", "reason"),
    [
        ("T=8,D=8", torch.float32, "FlashAttention-4 takes fp16 and bf16 only"),
        ("T=8,D=12", torch.bfloat16, "FlashAttention-4 takes multiples of 8 channels only"),
        ("T=8,D=8,Dv=9", torch.bfloat16, "FlashAttention-4 takes multiples of 8 channels only"),
    ],
)
def test_what_it_does_not_take(text, dtype, reason):
    problem = bench().operator.load("suite").find(text).problem
    tensors = {name: x.to(dtype) for name, x in problem.tensors(make_fill("random", 0)).items()}
    for contender in bench(dtype).contenders[1:]:
        with pytest.raises(CannotRunError, match=reason):
            contender.build(problem, tensors)


def test_an_older_flash_attn_has_no_fourth(fake_flash_attn):  # noqa: F811
    (fake_flash_attn / "flash_attn" / "cute.py").unlink()
    with pytest.raises(CannotRunError, match="not installed"):
        dense.flash_attn_4()


@pytest.mark.usefixtures("no_flash_attn")
def test_where_it_is_missing_it_is_listed_with_the_reason():
    one = bench()
    case = Case("it", "", one.operator.load("suite").find("T=8,D=8").problem)
    found = {row.implementation: row for row in one.time_case(case, {})}
    assert found["tilewise"].times
    reason = "FlashAttention-4 is not installed: pip install --pre flash-attn-4"
    assert [found[name].reason for name in NAMES] == [reason] * 2
