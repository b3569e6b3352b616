"""`tilewise bench` as a user meets it: what is timed, what is refused and why, reports, exit codes."""

import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from battery import first_quick
from typer.testing import CliRunner

from tilewise import cli, workbench
from tilewise.bench import command
from tilewise.bench.contender import (
    OURS,
    Call,
    CannotRunError,
    Contender,
    contenders,
    floating_leaves,
    own_implementation,
    verify_case,
)
from tilewise.bench.result import Ceiling, Verified
from tilewise.bench.run import Bench
from tilewise.bench.timing import Clock
from tilewise.verify.result import Implementation, Result
from tilewise.verify.suite import Case, make_fill
from tilewise.workbench.operator import Benchmark

jsonschema = pytest.importorskip("jsonschema")
runner = CliRunner()
IMPLEMENTATIONS = Path(__file__).parent.parent / "verify" / "implementations.py"
SCHEMA = json.loads(files("tilewise.bench").joinpath("report.schema.json").read_text())
# One small problem an operator: sequences of one length, so that every baseline can run. Those over a cache are for
# slots or for pages: test_decode.py.
SMALL = {
    "flash": "B=2,T=33,H=4,Hk=2,causal=true",
    "nsa": "T=64,H=4,Hk=2",
    "nsa-compressed": "T=64,H=4,Hk=2",
    "nsa-selected": "T=64,H=4,Hk=2",
    "hstu": "lengths=32/32",
    "bsa": "lengths=32/32",
}


@pytest.fixture(autouse=True)
def known_ceiling(monkeypatch):
    """A large product takes long beside other tests."""
    monkeypatch.setattr(command, "measure_ceiling", lambda *arguments: Ceiling(0.5, 50.0, "float32"))


@pytest.fixture
def on_the_cpu(monkeypatch):
    """The CPU backend, on a machine with a GPU too."""
    monkeypatch.setenv("TILEWISE_BACKEND", "cpu")


def invoke(*words):
    return runner.invoke(cli.app, ["bench", *words])


def bench(name, *further, modes=("fwd", "bwd"), asked=()):
    operator, timed = workbench.find(name), workbench.find(name).load("bench")
    own = own_implementation(operator)
    everyone = [*contenders(operator, timed, [], asked, torch.float32, own), *further]
    device = torch.device(own.device)
    return Bench(operator, timed, everyone, modes, torch.float32, device, 1, 2, Clock(device))


def rows(one, text, verified=None):
    case = Case("it", "", one.operator.load("suite").find(text).problem)
    return {(row.mode, row.implementation): row for row in one.time_case(case, verified or {})}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", first_quick(name for name in workbench.names("bench") if name in SMALL))
def test_every_operator_and_baseline_is_timed(name):
    found = rows(bench(name, modes=("fwd", "bwd", "fwd+bwd")), SMALL[name])
    assert {row.implementation for row in found.values()} >= {"tilewise", "torch"}
    for row in found.values():
        assert row.times, row.reason
        assert row.times.count == 2
        assert row.times.median > 0
        assert row.operations > 0
        assert row.bytes > 0
    assert found["bwd", "tilewise"].operations > found["fwd", "tilewise"].operations
    assert (
        found["fwd+bwd", "tilewise"].operations
        == found["fwd", "tilewise"].operations + found["bwd", "tilewise"].operations
    )
    assert found["fwd+bwd", "tilewise"].peak_allocated > 0


@pytest.mark.parametrize("name", workbench.names("bench"))
def test_the_standard_cases_are_problems_of_the_operator(name):
    operator, timed = workbench.find(name), workbench.find(name).load("bench")
    for cases in (timed.gpu_cases, timed.cpu_cases):
        assert len({case.name for case in cases}) == len(cases) >= 2
        for case in cases:
            assert operator.load("suite").find(str(case.problem)).problem == case.problem


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_dense_attention_beside_a_sparse_operator_counts_its_own_work():
    found = rows(bench("nsa-selected"), "T=64,H=2,count=1,block=16")
    dense, ours = found["fwd", "dense-sdpa"], found["fwd", "tilewise"]
    assert dense.operations == 2 * (64 * 65 // 2) * 2 * (16 + 16)
    assert ours.operations < dense.operations


def contender(name, build):
    return Contender(name, "", build)


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_who_cannot_run_is_reported_with_the_reason():
    def refuses(_problem, _tensors):
        raise CannotRunError("has no such mask")

    def fails(_problem, tensors):
        return Call(lambda: (_ for _ in ()).throw(RuntimeError("boom\nand more")), list(tensors.values()))

    def too_large(_problem, _tensors):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    def differs(_problem, tensors):
        leaves = floating_leaves(tensors)
        return Call(lambda: (leaves["q"] * 2,), list(leaves.values()))

    def no_gradient(_problem, tensors):
        from tilewise.ops.flash.reference import flash_attention

        return Call(lambda: (flash_attention(**tensors, causal=True)[0],), list(tensors.values()))

    builders = {"refuses": refuses, "fails": fails, "large": too_large, "differs": differs, "no-gradient": no_gradient}
    found = rows(
        bench("flash", *(contender(*item) for item in builders.items()), asked=["torch"]), "T=20,H=2,causal=true"
    )
    assert found["fwd", "refuses"].reason == "has no such mask"
    assert found["fwd", "fails"].reason == "RuntimeError: boom"
    assert found["bwd", "large"].reason == "out of memory"
    assert "computes something else: its output differs from tilewise's by" in found["fwd", "differs"].reason
    assert "does not require grad" in found["bwd", "no-gradient"].reason
    assert not any(found[mode, name].times for mode in ("fwd", "bwd") for name in builders)
    assert all(found[mode, name].times for mode in ("fwd", "bwd") for name in ("tilewise", "torch"))


@pytest.mark.usefixtures("on_the_cpu")
def test_a_case_that_does_not_run_is_reported():
    one = bench("flash", asked=["torch"])
    one.bench = Benchmark((), (), lambda *_: 1 // 0, ())
    wrong = Verified("T=8", True, False, "wrong values", "tilewise verify")
    found = rows(one, "T=8", {"torch": wrong})
    assert (
        found["fwd", "tilewise"].reason
        == "the case itself does not run: ZeroDivisionError: integer division or modulo by zero"
    )
    assert found["fwd", "torch"].reason == "fails verify: wrong values; see: tilewise verify"


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_what_is_wrong_judges_nobody():
    """Where tilewise itself fails verify, the others are timed, whatever its output."""
    one = bench("flash", asked=["torch"])
    honest = one._work
    one._work = lambda problem, tensors: (honest(problem, tensors)[0], torch.zeros(1))
    assert "computes something else" in rows(one, "T=8")["fwd", "torch"].reason
    found = rows(one, "T=8", {"tilewise": Verified("T=8", True, False, "wrong values (o)", "tilewise verify flash")})
    assert found["fwd", "torch"].times
    assert found["fwd", "tilewise"].reason == "fails verify: wrong values (o); see: tilewise verify flash"


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_who_fails_while_being_timed_ends_nothing():
    runs = []

    def tires(_problem, tensors):
        from tilewise.ops.flash.reference import flash_attention

        leaves = floating_leaves(tensors)

        def run():
            runs.append(1)
            if len(runs) > 5:
                raise RuntimeError("tired")
            return flash_attention(**leaves)

        return Call(run, list(leaves.values()))

    found = rows(bench("flash", contender("tires", tires), asked=["torch"]), "T=8")
    assert found["fwd", "tires"].reason == found["bwd", "tires"].reason == "fwd: RuntimeError: tired"
    assert found["fwd", "torch"].times
    assert found["bwd", "tilewise"].times


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_a_choice_in_lower_precision_is_no_other_computation():
    """Plain torch in bf16 chooses other blocks here and there."""
    operator, timed = workbench.find("nsa"), workbench.find("nsa").load("bench")
    own = own_implementation(operator)
    everyone = contenders(operator, timed, [], ["torch"], torch.bfloat16, own)
    one = Bench(
        operator, timed, everyone, ["fwd"], torch.bfloat16, torch.device("cpu"), 1, 1, Clock(torch.device("cpu"))
    )
    assert rows(one, "T=512,H=2,D=16,block=16,stride=8,compress=16,count=4")["fwd", "torch"].times


@pytest.mark.slow
@pytest.mark.usefixtures("on_the_cpu")
def test_compiled_functions_are_compiled_anew_for_every_case(monkeypatch):
    import torch._dynamo

    resets = []
    monkeypatch.setattr(torch._dynamo, "reset", lambda: resets.append(1))
    one = bench("flash", asked=["torch"], modes=("fwd",))
    rows(one, "T=8")
    rows(one, "T=9")
    assert len(resets) == 2


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("name", workbench.names("bench"))
def test_what_is_verified_for_a_long_case_is_no_trifle(name):
    """Of every standard case: several sequences stay several, and more blocks stay than are chosen."""
    timed, seen = workbench.find(name).load("bench"), []

    def run(check):
        seen.append(workbench.find(name).load("suite").find(check.case).problem)
        return Result(check)

    for device, cases in (("cuda", timed.gpu_cases), ("cpu", timed.cpu_cases)):
        for case in cases:
            found = verify_case(
                run, workbench.find(name), Implementation("cpu", device), case.problem, "bf16", gradients=True
            )
            assert found.same == (seen[-1] == case.problem)
            before, after = vars(case.problem), vars(seen[-1])
            assert len(after.get("lengths", ())) == len(before.get("lengths", ()))
            assert max(seen[-1].tokens()) >= min(max(case.problem.tokens()), 512)
            if "count" in after:
                assert max(seen[-1].tokens()) // after["block"] > after["count"] or seen[-1] == case.problem


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("T=16,softcap=3.0", "has no softcap"),
        ("T=16,window=4/0", "no such window"),
        ("lengths=8/9", "takes no packed sequences"),
        ("T=8,Tk=12,causal=true", "no such window"),
    ],
)
def test_what_fused_attention_cannot_do(text, reason):
    found = rows(bench("flash", asked=["sdpa", "torch"]), text)
    assert reason in found["fwd", "sdpa"].reason
    assert found["fwd", "torch"].times


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so():
    found = rows(bench("flash", asked=["cudnn", "fa2"]), "T=8")
    assert found["fwd", "cudnn"].reason == found["bwd", "fa2"].reason == "needs a CUDA GPU"


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "lengths=20/0/33,causal=true",
        "T=33,Tk=50,H=4,Hk=2,window=9/3,softcap=2.0",
        pytest.param("T=40,H=4,Hk=2,causal=true", marks=pytest.mark.nightly),
        pytest.param("T=40,window=9/3", marks=pytest.mark.nightly),
        pytest.param("T=33,Tk=50,causal=true", marks=pytest.mark.nightly),
        pytest.param("T=40,softcap=2.0", marks=pytest.mark.nightly),
    ],
)
def test_flex_attention_computes_the_same(text):
    """Compiled, which takes its time; on a CPU it has no backward, and wants none asked for."""
    from tilewise.bench.dense import flex
    from tilewise.workbench.flash.cases import describe

    operator = workbench.find("flash")
    problem = operator.load("suite").find(text).problem
    tensors = {
        name: x.float() if x.is_floating_point() else x for name, x in problem.tensors(make_fill("random", 0)).items()
    }
    call = flex(tensors["q"], tensors["k"], tensors["v"], describe(problem))
    for leaf in call.leaves:
        leaf.requires_grad_(False)
    expected = operator.load("reference")(**tensors, **problem.options())[0]
    try:
        output = call.run()[0]
    except Exception as error:
        if "not supported for CPU" in str(error):
            pytest.skip("torch compiles no FlexAttention for this kind of CPU")
        raise
    torch.testing.assert_close(call.lay_out(output), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nsa-attend"], "there is no benchmark of 'nsa-attend': it launches the kernels of nsa-selected"),
        (["flush"], "there is no operator 'flush'"),
        (["flash", "--baseline", "fa9"], "flash has no baseline 'fa9': expected some of cudnn, fa2, flash-attn-4"),
        (["flash", "--mode", "sideways"], "--mode sideways: expected some of fwd,bwd,fwd+bwd"),
        (["flash", "--dtype", "fp8"], "there is no dtype 'fp8': expected one of fp32, fp16, bf16"),
        (["flash", "--config", "smal"], "or one of the benchmark's own: causal-128-512"),
        (["flash", "--shape", "T=x"], "'T=x': expected an integer"),
        (["flash", "--impl", "a.py:f"], "there is no file a.py"),
        (["flash", "--json", "nowhere/b.json"], "there is no folder nowhere"),
        (["flash", "--compare", "nowhere.json"], "expected a file that `tilewise bench` saved"),
        (["flash", "--plot", "b.docx"], "expected a name that ends in one of .png, .svg, .pdf"),
        (["flash", "--tolerance", "much"], "expected a share such as 5%"),
        (["flash", "--iterations", "0"], "equal to 1"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(words, message):
    outcome = invoke(*words)
    assert outcome.exit_code == 2, outcome.output
    assert message in " ".join(outcome.output.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_interpreted_kernels_are_not_timed(monkeypatch):
    monkeypatch.setenv("TILEWISE_BACKEND", "triton")
    assert "interpreted kernels are not timed" in invoke("flash").output


def test_list_names_cases_and_baselines():
    text = invoke("nsa", "--list").output
    assert "tokens-65536" in text
    assert "dense-cudnn" in text


@pytest.mark.slow
@pytest.mark.gpu
def test_a_run_with_all_reports(tmp_path, monkeypatch):
    """Our own backend, a right function and a wrong one, which is refused: it alone makes the exit code 1."""
    monkeypatch.chdir(tmp_path)
    right, wrong = f"{IMPLEMENTATIONS}:right", f"{IMPLEMENTATIONS}:fails_from_17_tokens_on"
    words = [
        "flash",
        "--shape",
        "T=33,causal=true",
        "--baseline",
        "torch",
        "--dtype",
        "fp32",
        "--iterations",
        "3",
        "--warmup",
        "1",
    ]
    outcome = invoke(*words, "--impl", right, "--json", "b.json", "--html", "b.html", "--plot", "b.png")
    assert outcome.exit_code == 0, outcome.output
    assert "right" in outcome.output
    assert "of this machine, measured in this run" in outcome.output
    document = json.loads(Path("b.json").read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["subject"] == "right"
    assert document["implementations"]["right"] == right
    assert [row["verified"]["same"] for row in document["rows"] if row["verified"]] == [True] * 4
    assert {row["ratio"] is None for row in document["rows"] if row["implementation"] == "right"} == {True}
    assert document["doctor"]
    assert Path("b.png").read_bytes().startswith(b"\x89PNG")
    page = Path("b.html").read_text()
    assert not re.search(r"(src|href)=.https?:", page)
    assert "<td>torch</td>" in page

    for row in document["rows"]:
        for name in row["times"]:
            row["times"][name] = 1e-9
    Path("fast.json").write_text(json.dumps(document))
    outcome = invoke(*words, "--impl", right, "--unverified", "--no-save", "--compare", "fast.json")
    assert outcome.exit_code == 1, outcome.output
    assert "FAIL: 2 of 2 slower by more than 5.0%" in outcome.output
    assert "NOT VERIFIED" in outcome.output

    outcome = invoke(*words, "--impl", wrong, "--mode", "fwd", "--no-save")
    assert outcome.exit_code == 1, outcome.output
    text = " ".join(outcome.output.split())
    assert "fails_from_17_tokens_on was not timed: fails verify: wrong values (o" in text
    assert "see: tilewise verify flash --config T=33,causal=true --dtype fp32" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.html", "b.json", "b.png", "fast.json"]


@pytest.mark.slow
def test_a_run_is_saved_unless_told_otherwise(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        "hstu",
        "--shape",
        "lengths=9",
        "--shape",
        "lengths=9",
        "--baseline",
        "torch",
        "--mode",
        "fwd,fwd",
        "--iterations",
        "2",
        "--unverified",
    ]
    assert invoke(*words, "--no-save").exit_code == 0
    assert list(tmp_path.iterdir()) == []
    assert invoke(*words).exit_code == 0
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("bench-hstu-")
    document = json.loads(path.read_text())
    jsonschema.validate(document, SCHEMA)
    assert document["unverified"] is True
    # Asked for twice, timed once.
    assert [(row["mode"], row["times"]["count"]) for row in document["rows"]] == [("fwd", 2)] * 2


def test_the_schema_would_refuse_another_document():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"schema": "tilewise.bench", "version": 2}, SCHEMA)


def test_a_baseline_of_an_operator_can_be_asked_for_by_name():
    everyone = bench("hstu", asked=["batched"]).contenders
    assert [one.name for one in everyone] == [OURS, "batched"]


def test_a_function_called_as_a_baseline_is_keeps_its_whole_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("def sdpa(q, k, v): pass\ndef fast(q, k, v): pass\ndef tilewise(q, k, v): pass\n")
    operator, timed = workbench.find("flash"), workbench.find("flash").load("bench")
    specs = [f"{path}:{name}" for name in ("sdpa", "fast", "tilewise")]
    everyone = contenders(operator, timed, specs, [], torch.float32, own_implementation(operator))
    assert [one.name for one in everyone][:4] == [specs[0], "fast", specs[2], OURS]
    assert len({one.name for one in everyone}) == len(everyone)
