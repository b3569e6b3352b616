"""`tilewise doctor --report`, and what doctor says of families of kernels."""

import os
import re
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from tilewise import cli, doctor, interpreter
from tilewise.doctor import machine
from tilewise.ops._host import gluon

LINES = [
    *("tilewise", "python", "torch", "triton", "numpy", "CUDA", "driver", "cuDNN", "GPU", "Gluon"),
    *("portable Triton kernels", "Hopper's own kernels", "interpreter"),
]


def rows(text):
    first, *lines, last = text.splitlines()
    assert (first, last) == ("```text", "```")
    return [(line[: doctor.WIDTH].strip(), line[doctor.WIDTH :]) for line in lines]


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in list(os.environ):
        if name in machine.VARIABLES or (name.startswith(doctor.PREFIXES) and name != "TRITON_INTERPRET"):
            monkeypatch.delenv(name)


@pytest.fixture
def gpus(monkeypatch):
    """Makes GPUs of these capabilities, and kernels that are compiled."""

    class Properties:
        total_memory = 141 * 2**30

    def make(*capabilities):
        monkeypatch.setattr(interpreter, "interpreting", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"NVIDIA {capabilities[index][0]}")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)

    return make


def test_the_command_prints_one_block_and_nothing_else():
    outcome = CliRunner().invoke(cli.app, ["doctor", "--report"])
    assert outcome.exit_code == 0
    assert [name for name, _ in rows(outcome.output.rstrip())][: len(LINES)] == LINES
    assert outcome.output.rstrip() == doctor.report()


def test_with_json_both_are_made(tmp_path):
    path = tmp_path / "doctor.json"
    outcome = CliRunner().invoke(cli.app, ["doctor", "--report", "--json", str(path)])
    assert outcome.exit_code == 0
    assert outcome.output.rstrip() == doctor.report()
    assert '"Hopper\'s own kernels"' in path.read_text(encoding="utf-8")


def test_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(interpreter, "interpreting", lambda: True)
    found = dict(rows(doctor.report()))
    assert (found["GPU"], found["driver"], found["Gluon"]) == ("none", "none", "importable")
    assert found["portable Triton kernels"] == "on, interpreted"
    assert found["Hopper's own kernels"] == "off: no GPU; kernels are interpreted"
    monkeypatch.setattr(interpreter, "interpreting", lambda: False)
    found = dict(rows(doctor.report()))
    assert found["portable Triton kernels"] == "off: no GPU, and kernels are not interpreted"
    assert (found["Hopper's own kernels"], found["interpreter"]) == ("off: no GPU", "off")


@pytest.mark.parametrize(("here", "words"), [(True, "the command line chose it"), (False, "TRITON_INTERPRET is set")])
def test_who_chose_interpretation_is_said(monkeypatch, here, words):
    """A variable that tilewise has set itself is none of the user's."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(interpreter, "interpreting", lambda: True)
    monkeypatch.setattr(interpreter, "_set_here", here)
    found = dict(rows(doctor.report()))
    assert words in found["interpreter"]
    assert ("TRITON_INTERPRET" in found) != here


@pytest.mark.parametrize(
    ("capabilities", "portable", "hopper"),
    [
        ([(9, 0)], "on", "on"),
        ([(8, 6), (9, 0)], "on", "on"),
        ([(8, 0)], "on", "off: compute capability 8.0, not 9.0"),
        ([(10, 0), (10, 0)], "on", "off: compute capability 10.0, not 9.0"),
        ([(7, 5)], "off: compute capability 7.5, not 8.0 or newer", "off: compute capability 7.5, not 9.0"),
    ],
)
def test_families_by_gpu(gpus, capabilities, portable, hopper):
    gpus(*capabilities)
    found = dict(rows(doctor.report()))
    assert (found["portable Triton kernels"], found["Hopper's own kernels"]) == (portable, hopper)
    finding = doctor.hopper()
    assert (finding.found, finding.level) == (hopper, "ok")


def test_gluon_is_a_note_only_where_it_could_run(gpus, monkeypatch):
    monkeypatch.setattr(gluon, "_reason", "the Gluon of Triton 3.10.0 has no warpgroup_mma")
    gpus((9, 0))
    finding = doctor.hopper()
    assert (finding.found, finding.level) == ("off: the Gluon of Triton 3.10.0 has no warpgroup_mma", "note")
    assert finding.advice
    gpus((8, 0))
    assert doctor.hopper().level == "ok"


def test_many_gpus_take_few_lines(gpus):
    gpus(*[(9, 0)] * 8)
    assert ("GPU", "8 x NVIDIA 9, sm_90, 141 GiB") in rows(doctor.report())
    gpus((8, 0), (9, 0), (10, 0), (12, 0))
    found = [value for name, value in rows(doctor.report()) if name == "GPU"]
    assert found == ["NVIDIA 8, sm_80, 141 GiB", "NVIDIA 9, sm_90, 141 GiB", "2 of other kinds"]


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [
        ("TILEWISE_BACKEND", "reference", "reference"),
        ("TILEWISE_UNHEARD_OF", "1", "1"),
        ("TRITON_DEBUG", "", ""),
        ("CUDA_VISIBLE_DEVICES", "0,1", "0,1"),
        ("TRITON_CACHE_DIR", "/home/somebody/cache", "<path>"),
        ("TRITON_CACHE_DIR", "cache", "<path>"),
        ("TRITON_PTXAS_PATH", "C:\\cuda\\ptxas.exe", "<path>"),
        ("TRITON_X", "~somebody", "<path>"),
        ("TRITON_X", "key=some/where else", "<path>"),
        ("TRITON_X", "a\nb", "a b"),
        ("TRITON_X", "9" * 100, "9" * 60 + "..."),
    ],
)
def test_variables(monkeypatch, name, value, shown):
    monkeypatch.setenv(name, value)
    assert (name, shown) in rows(doctor.report())


def test_others_variables_are_left_out(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert "secret" not in doctor.report()
    assert "somebody" not in doctor.report()


def test_it_stays_short_and_in_order(gpus, monkeypatch):
    gpus((8, 0), (9, 0), (10, 0))
    for i in reversed(range(30)):
        monkeypatch.setenv(f"TRITON_VARIABLE_{i:02}", str(i))
    found = rows(doctor.report())
    assert len(found) <= 25
    shown = [name for name, _ in found if name.startswith("TRITON_VARIABLE")]
    assert shown == [f"TRITON_VARIABLE_{i:02}" for i in range(len(shown))]
    assert found[-1][0] == "also set"
    assert "TRITON_VARIABLE_29" in found[-1][1]


def test_reasons_lose_their_paths(monkeypatch):
    reason = "(ImportError: cannot import name 'x' from 'triton.y' (/home/some body/y.py)) /a/b: no symbol"
    monkeypatch.setattr(gluon, "_reason", reason)
    text = doctor.report()
    assert not re.search(r"[/\\]", text)
    assert "cannot import name 'x' from 'triton.y' (<path>)) <path> no symbol" in text


BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name == "{0}" or name.startswith("{0}."):
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Blocked())
"""
NEWER = """
import triton; triton.__version__ = '3.10.0'
from triton.experimental.gluon.language.nvidia import hopper; del hopper.warpgroup_mma
"""
PRINT = """
from typer.testing import CliRunner
from tilewise import cli
for words in (["--report"], []):
    outcome = CliRunner().invoke(cli.app, ["doctor", *words], env={"COLUMNS": "400"})
    assert outcome.exception is None or isinstance(outcome.exception, SystemExit), outcome.exception
    print(outcome.exit_code, outcome.output)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "code", "said"),
    [
        (BLOCKED.format("triton"), 1, "triton is not installed"),
        (BLOCKED.format("triton.experimental"), 0, "(no module named triton.experimental)"),
        (
            NEWER,
            0,
            "has no warpgroup_mma in triton.experimental.gluon.language.nvidia.hopper; this Triton is newer than 3.9",
        ),
    ],
    ids=["no-triton", "no-gluon", "newer-triton"],
)
def test_what_is_missing_is_said(before, code, said):
    """In both forms, in a process of its own."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    result = subprocess.run([sys.executable, "-c", before + PRINT], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr
    report, table = result.stdout.split("\n```\n")
    assert report.startswith("0 ```text")
    assert table.strip().startswith(str(code))
    assert said in report
    for text in (report, table):
        assert re.search(r"Hopper's own kernels\s+off: no GPU; ", text)
        assert said.replace("is not installed", "cannot be imported (no module named triton)") in text


def test_a_triton_that_cannot_be_imported_is_a_problem(monkeypatch):
    monkeypatch.setattr(doctor, "triton_off", lambda: "triton cannot be imported (OSError)")
    found = {finding.subject: finding for finding in doctor.examine(probe=False)}
    assert found["triton"].level == "problem"
    assert found["triton"].found.endswith("triton cannot be imported (OSError)")
    assert "ptxas" not in found


@pytest.mark.parametrize(("system", "level"), [("Linux", "problem"), ("Darwin", "note")])
def test_triton_is_missed_where_there_is_one_to_install(monkeypatch, system, level):
    found = doctor.is_there
    monkeypatch.setattr(doctor, "is_there", lambda name: name != "triton" and found(name))
    monkeypatch.setattr("platform.system", lambda: system)
    findings = {finding.subject: finding for finding in doctor.examine(probe=False)}
    assert findings["triton"].level == level
    assert findings["triton"].advice
    assert "Hopper's own kernels" in findings
