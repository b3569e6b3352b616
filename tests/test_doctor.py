"""`tilewise doctor` finds what is there, and says what to do."""

import importlib.util
import json
import os
import shutil
import stat
import subprocess
import sys

import pytest
import torch
import triton
from rich.console import Console
from typer.testing import CliRunner

from tilewise import cli, doctor
from tilewise.doctor import environment
from tilewise.doctor import machine as doctor_machine
from tilewise.doctor.machine import Finding
from tilewise.ops._host import backend
from tilewise.ops.probe.launch import mixed_widths_error
from tilewise.verify import command


def find(subject):
    return next(finding for finding in doctor.examine() if finding.subject == subject)


def test_it_looks_at_everything():
    subjects = [finding.subject for finding in doctor.examine()]
    assert subjects[:3] == ["python", "torch", "triton"]
    assert {
        "rich",
        "numba",
        "kernels",
        "C compiler",
        "ptxas",
        "Triton's cache",
        "disk",
        "CPU",
        "mixed tile widths",
    } <= set(subjects)
    assert any(subject.startswith("GPU") for subject in subjects)
    assert len(subjects) == len(set(subjects))


def test_without_probe_nothing_is_started_that_takes_long(monkeypatch):
    monkeypatch.setattr(doctor, "_miscompile", lambda: pytest.fail("the probe takes seconds"))
    assert [finding.subject for finding in doctor.examine(probe=False)][:3] == ["python", "torch", "triton"]
    found = doctor.as_json()
    assert all(list(finding) == ["subject", "found", "level", "advice"] for finding in found)
    assert all(isinstance(text, str) for finding in found for text in finding.values())


def test_this_machine_is_healthy_and_every_note_has_advice():
    findings = doctor.examine()
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    assert doctor.print_findings(findings, console)
    assert all(finding.advice for finding in findings if finding.level != "ok")


def test_an_old_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "version_of", lambda package: "3.5.1" if package == "triton" else "2.10.0+cpu")
    assert find("torch").level == "ok"
    finding = find("triton")
    assert finding.level == "problem"
    assert "3.6 or newer" in finding.advice
    assert not doctor.print_findings([finding], Console(file=open(os.devnull, "w")))  # noqa: SIM115


def test_a_missing_package_is_said_and_nothing_else_is_looked_at(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    findings = doctor.examine()
    assert [finding.subject for finding in findings] == ["python", "torch", "triton"]
    assert "pip install 'triton>=3.6'" in findings[2].advice


def test_a_probe_that_hangs_is_a_finding(monkeypatch):
    def hang(*args, **kwargs):
        raise subprocess.TimeoutExpired(args, 120)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    monkeypatch.setattr(subprocess, "run", hang)
    assert "two minutes" in doctor._miscompile().found


def test_release_candidates_have_numbers_too():
    assert doctor._number("3.6rc1") == (3, 6)
    assert doctor._number("2.13.0+cpu") == (2, 13)


@pytest.mark.parametrize(("gpu", "level"), [(True, "problem"), (False, "note")])
def test_a_missing_compiler(monkeypatch, gpu, level):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    finding = doctor_machine.compiler()
    assert finding.level == level
    assert "install gcc" in finding.advice


def test_an_old_gpu_is_a_problem(monkeypatch):
    class Properties:
        total_memory = 16 * 2**30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    (finding,) = doctor_machine.gpus()
    assert finding.level == "problem"
    assert finding.found == "Tesla T4, sm_75, 16 GiB"


@pytest.mark.parametrize(
    ("code", "out", "error", "found"),
    [
        (0, "0.0017\n", "", "right"),
        (0, "4.97\n", "", "miscompiles them"),
        (1, "", "CUDA error: an illegal memory access", "illegal memory access"),
    ],
)
def test_the_sentinel(monkeypatch, code, out, error, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, code, out, error))
    finding = doctor._miscompile()
    assert found in finding.found
    assert (finding.level == "ok") == (found == "right")


@pytest.mark.skipif(
    "__import__('torch').cuda.is_available()",
    reason="a GPU's compiler may well get it wrong: that is what it looks for",
)
def test_the_probe_is_right_where_nothing_is_miscompiled(device):
    assert mixed_widths_error(device) < 5e-3


STATE = dict(
    zip(
        doctor_machine.STATE,
        (
            "0",
            "570.1",
            "500",
            "143771",
            "1980",
            "1980",
            "3201",
            "45",
            "120.5",
            "700.00",
            "700.00",
            "Enabled",
            "Disabled",
        ),
        strict=True,
    )
)


@pytest.fixture
def smi(monkeypatch, tmp_path):
    """Puts a program called nvidia-smi first on the path, which runs the given shell lines."""

    def put(lines):
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{lines}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    return put


def answer(gpu="", reasons="0x0", apps=""):
    return f"""case "$1" in
*event_reasons*) echo "{reasons}";;
*compute-apps*) printf "{apps}";;
*) echo "{gpu or ", ".join(STATE.values())}";;
esac"""


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)


def levels(findings):
    return {finding.subject: finding.level for finding in findings}


def test_a_gpu_at_rest_is_well(gpu, smi):
    smi(answer())
    findings = list(doctor_machine.states())
    assert levels(findings) == {"driver": "ok", "GPU 0 memory": "ok", "GPU 0 clocks": "ok", "GPU 0 power": "ok"}
    assert findings[0].found.startswith("570.1; torch is built with CUDA")
    assert findings[2].found == "1980 of 1980 MHz, memory 3201 MHz, 45 °C"


@pytest.mark.parametrize(
    ("changes", "reasons", "subject", "words"),
    [
        ({"memory.used": "20000"}, "0x0", "GPU 0 memory", "processes on GPUs: 71, 72"),
        ({}, "0x0000000000000044", "GPU 0 clocks", "held down by the power cap and heat (hardware)"),
        ({"power.limit": "350.00"}, "0x0", "GPU 0 power", "120.5 of 350.00 W"),
        ({"ecc.mode.current": "Disabled"}, "0x0", "GPU 0 ECC", "off"),
        ({"mig.mode.current": "Enabled"}, "0x0", "GPU 0 MIG", "on"),
    ],
)
def test_what_makes_times_doubtful_is_a_note_with_advice(gpu, smi, changes, reasons, subject, words):
    smi(answer(", ".join((STATE | changes).values()), reasons, "71\\n72\\n"))
    finding = next(finding for finding in doctor_machine.states() if finding.subject == subject)
    assert finding.level == "note"
    assert words in finding.found
    assert finding.advice


def test_what_this_process_holds_itself_is_no_finding(gpu, smi, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 19_500 * 2**20)
    smi(answer(", ".join((STATE | {"memory.used": "20000"}).values()), apps=f"{os.getpid()}\\n"))
    assert levels(doctor_machine.states())["GPU 0 memory"] == "ok"
    smi(answer(", ".join((STATE | {"memory.used": "30000"}).values()), apps=f"{os.getpid()}\\n71\\n"))
    assert next(finding for finding in doctor_machine.states() if "memory" in finding.subject).found.endswith(
        "(processes on GPUs: 71)"
    )


@pytest.mark.parametrize("reasons", ["0x0000000000000001", "0x0000000000000000", "[N/A]"])
def test_an_idle_gpu_is_not_throttled(gpu, smi, reasons):
    smi(answer(", ".join((STATE | {"clocks.sm": "345"}).values()), reasons))
    assert set(levels(doctor_machine.states()).values()) == {"ok"}


@pytest.mark.parametrize(
    "lines",
    [
        "exit 9",
        "echo no devices were found",
        "echo a,b,c",
        "printf '\\377\\376'",
        ":",
        "echo 'Failed to initialize NVML'; exit 255",
    ],
)
def test_an_nvidia_smi_that_says_nothing_is_a_note(gpu, smi, lines):
    smi(lines)
    (finding,) = doctor_machine.states()
    assert (finding.subject, finding.level) == ("nvidia-smi", "note")


def test_numbers_that_are_none_are_repeated_and_nothing_more(gpu, smi):
    smi(answer(", ".join(["0", "570.1", *["[N/A]"] * (len(STATE) - 2)])))
    assert set(levels(doctor_machine.states()).values()) == {"ok"}


def test_an_nvidia_smi_that_hangs_or_is_missing_is_a_note(gpu, smi, monkeypatch):
    monkeypatch.setattr(doctor_machine, "SECONDS", 0.05)
    smi("exec sleep 20")
    assert levels(doctor_machine.states()) == {"nvidia-smi": "note"}
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert levels(doctor_machine.states()) == {"nvidia-smi": "note"}


@pytest.mark.parametrize(("flash", "level"), [(True, "ok"), (False, "note")])
def test_torchs_attention(gpu, monkeypatch, flash, level):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: flash)
    (finding,) = doctor_machine.baselines()
    assert finding.level == level
    assert "cuDNN 91002" in finding.found
    assert ("FlashAttention-2" in finding.found) == flash
    assert ("FlashAttention-2" in finding.advice) != flash


def test_a_ptxas_that_does_not_run(monkeypatch):
    from triton.backends.nvidia import compiler

    def fail(_):
        raise RuntimeError("cannot find ptxas")

    monkeypatch.setattr(compiler, "get_ptxas", fail)
    assert doctor_machine.ptxas() == Finding(
        "ptxas",
        "does not run (RuntimeError)",
        "note",
        "kernels cannot be compiled: reinstall triton, or unset TRITON_PTXAS_PATH",
    )


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        ("jinja2", "without it HTML reports will not work: pip install '.[tools]'"),
        ("numba", "without it mytorch's parallel backend will not work: pip install ./packages/mytorch"),
    ],
)
def test_a_missing_package_says_what_lacks_without_it(monkeypatch, missing, advice):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else found(name))
    finding = next(finding for finding in doctor_machine.packages() if finding.subject == missing)
    assert (finding.found, finding.level, finding.advice) == ("not installed", "note", advice)


def test_the_version_is_that_of_the_package_which_an_import_brings(monkeypatch, tmp_path):
    """Not that of one behind it in the path, whose metadata `importlib.metadata.version` finds."""
    for folder, text in (("installed", ""), ("copied", "__version__ = '2.0'\n"), ("nameless", "")):
        package = tmp_path / folder / "in_two_places"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(text)
    metadata = tmp_path / "installed" / "in_two_places-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: in_two_places\nVersion: 1.0\n")
    versions = []
    for folder in ("installed", "copied", "nameless"):
        monkeypatch.syspath_prepend(tmp_path / folder)
        versions.append(doctor_machine.version_of("in_two_places"))
        sys.modules.pop("in_two_places", None)
    assert versions == ["1.0", "2.0", "of no known version"]


def test_variables_that_change_results_are_said_and_paths_are_not_repeated(monkeypatch):
    for name in doctor_machine.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert list(doctor_machine.variables()) == []
    monkeypatch.setenv("TILEWISE_BACKEND", "reference")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/home/somebody/cache")
    findings = list(doctor_machine.variables())
    assert [(finding.subject, finding.found) for finding in findings] == [
        ("TILEWISE_BACKEND", "reference"),
        ("TRITON_CACHE_DIR", "set to a path"),
    ]
    assert all(finding.level == "note" and finding.advice for finding in findings)


def test_tritons_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "not there yet"))
    assert doctor_machine.cache().found == "0 files, 0 MiB"
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "kernel.cubin").write_bytes(bytes(3 << 20))
    (tmp_path / "b").symlink_to("nowhere")
    assert doctor_machine.cache() == Finding("Triton's cache", "2 files, 3 MiB")
    monkeypatch.setattr(doctor_machine, "COUNTING", -1.0)
    assert doctor_machine.cache().level == "note"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    finding = doctor_machine.cache()
    assert finding.level == "problem"
    assert "set TRITON_CACHE_DIR" in finding.advice


def test_a_full_disk(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100 << 30, 99 << 30, 1 << 30))
    finding = doctor_machine.disk()
    assert finding.found == "1.0 GiB free on the disk of Triton's cache"
    assert "make room" in finding.advice


@pytest.mark.parametrize(("threads", "level"), [(2, "ok"), (8, "note")])
def test_more_threads_than_cores(monkeypatch, threads, level):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    finding = doctor_machine.threads()
    assert (finding.found, finding.level) == (f"4 cores, {threads} threads of torch", level)


def test_the_command_writes_json(tmp_path):
    path = tmp_path / "doctor.json"
    assert CliRunner().invoke(cli.app, ["doctor", "--json", str(path)]).exit_code == 0
    written = json.loads(path.read_text(encoding="utf-8"))
    assert [finding["subject"] for finding in written][:3] == ["python", "torch", "triton"]
    assert {finding["level"] for finding in written} <= {"ok", "note"}
    outcome = CliRunner().invoke(cli.app, ["doctor", "--json", str(tmp_path / "nowhere" / "doctor.json")])
    assert outcome.exit_code == 2
    assert "cannot be written: No such file or directory" in " ".join(outcome.output.split())


def test_words_in_brackets_are_printed_as_they_are(capsys):
    doctor.print_findings([Finding("x", "[N/A]", "note", "pip install '.[tools]'")], Console(width=100))
    out = capsys.readouterr().out
    assert "[N/A]" in out
    assert "'.[tools]'" in out


def test_the_environment_of_a_gpu(gpu, smi, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    smi(answer())
    found = environment()
    assert (found["device"], found["driver"]) == ("NVIDIA H200", "570.1")
    assert found["clocks"] == "1980 of 1980 MHz, memory 3201 MHz"
    assert found["power"] == "120.5 of 700.00 W"
    assert (found["CUDA"], found["cuDNN"]) == ("12.8", "91002")
    monkeypatch.setattr(importlib.metadata, "version", lambda name: f"4.0 of {name}")
    assert environment()["flash-attn-4"] == "4.0 of flash-attn-4"
    # Of several GPUs nobody knows here which one nvidia-smi calls the first.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "clocks" not in environment()


def test_verify_reports_hold_what_doctor_finds(tmp_path, monkeypatch):
    path, page = tmp_path / "report.json", tmp_path / "report.html"
    monkeypatch.setattr(command, "run_checks", lambda checks, budget: iter(()))
    CliRunner().invoke(cli.app, ["verify", "flash", "--config", "T=5", "--json", str(path), "--html", str(page)])
    report = json.loads(path.read_text(encoding="utf-8"))
    assert [finding["subject"] for finding in report["doctor"]][:3] == ["python", "torch", "triton"]
    assert "mixed tile widths" not in [finding["subject"] for finding in report["doctor"]]
    text = page.read_text(encoding="utf-8")
    notes = [finding for finding in report["doctor"] if finding["level"] != "ok"]
    assert "What tilewise doctor says of this machine" in text
    assert all(f"<dt>{finding['subject']}</dt>" in text.replace("&#39;", "'") for finding in notes)
