"""`tilewise warmup` and `tilewise.warmup`."""

import pytest
from typer.testing import CliRunner

import tilewise
from tilewise import _warmup, cli
from tilewise._warmup import Warmed, _architecture
from tilewise.workbench.flash.cases import Flash

runner = CliRunner()


def invoke(*words):
    return runner.invoke(cli.app, ["warmup", *words])


def flat(outcome):
    return " ".join(outcome.output.split())


def test_architectures():
    assert [_architecture(arch) for arch in ("sm_90", "90", "sm_90a", "sm_120")] == [90, 90, 90, 120]
    for wrong in ("hopper", "sm_75", "sm_", ""):
        with pytest.raises(ValueError, match="expected sm_80 or newer"):
            _architecture(wrong)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["flash", "--arch", "sm_9"], "arch is 'sm_9': expected sm_80 or newer"),
        (["flash", "--arch", "sm_90", "--dtype", "fp8"], "dtypes are fp8: expected some of bf16, fp16, fp32"),
        (["flush", "--arch", "sm_90"], "there is no operator 'flush': did you mean flash? expected one of flash"),
        (["flash", "--arch", "sm_90", "--shapes", "Z=4"], "'Z=4' is not a parameter"),
        ([], "Missing argument 'OP...'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_what_to_do(words, message, monkeypatch):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", "1")
    outcome = invoke(*words)
    assert outcome.exit_code == 2
    assert message in flat(outcome)


def test_without_a_gpu_an_architecture_is_asked_for(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="say which architecture to compile for"):
        tilewise.warmup("flash")


def test_a_flag_stands_alone():
    assert Flash.parse("T=9,causal,D=32") == Flash(T=9, causal=True, D=32)
    with pytest.raises(ValueError, match="'T' is not a parameter"):
        Flash.parse("T,causal")


@pytest.mark.parametrize(("count", "shares"), [(1, [1]), (3, [3]), (8, [4, 4]), (10, [5, 5]), (16, [4, 4, 4, 4])])
def test_processes_share_the_jobs(monkeypatch, count, shares):
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", str(count))
    seen = []
    monkeypatch.setattr(_warmup._Run, "_serve", lambda _self, share: seen.append(share))
    tilewise.warmup("flash", arch="sm_90")
    assert sorted(seen) == shares


def test_what_fails_is_named_and_exits_with_1(monkeypatch):
    warmed = Warmed(3, 2, 1.0, {"flash_fwd_kernel": "CompilationError: at 3:4"}, ["libcuda.so.1 was not found"])
    monkeypatch.setattr(_warmup, "warmup", lambda *_, **__: warmed)
    outcome = invoke("flash", "--arch", "sm_90")
    assert outcome.exit_code == 1
    assert "✗ flash_fwd_kernel: CompilationError: at 3:4" in outcome.output
    assert "note: libcuda.so.1 was not found" in outcome.output
    assert "2 kernels compiled, 0 were in the cache already" in outcome.output


@pytest.mark.slow
def test_a_second_warm_up_compiles_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    # Two processes, which share the kernels.
    monkeypatch.setenv("TILEWISE_COMPILE_JOBS", "8")

    def entries():
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file() and path.suffix}

    seen = []
    first = tilewise.warmup(
        "hstu", shapes=["lengths=64/30,D=16"], arch="sm_80", advanced=lambda *both: seen.append(both)
    )
    count = first.kernels
    assert count > 3
    assert (first.compiled, first.errors, seen[-1]) == (count, {}, (count, count))
    before = entries()
    assert len(list(tmp_path.rglob("*.cubin"))) == count
    second = tilewise.warmup("hstu", shapes=["lengths=64/30,D=16"], arch="sm_80")
    assert (second.kernels, second.compiled) == (count, 0)
    assert entries() == before
