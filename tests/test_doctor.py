"""`tilewise doctor` finds what is there, and says what to do."""

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess

import pytest
import torch
from rich.console import Console

from tilewise import doctor
from tilewise.ops._host import backend
from tilewise.ops.probe.launch import mixed_widths_error


def find(subject):
    return next(finding for finding in doctor.examine() if finding.subject == subject)


def test_it_looks_at_everything():
    subjects = [finding.subject for finding in doctor.examine()]
    assert subjects[:3] == ["python", "torch", "triton"]
    assert {"kernels", "C compiler", "mixed tile widths"} <= set(subjects)
    assert any(subject.startswith("GPU") for subject in subjects)


def test_this_machine_is_healthy_and_every_note_has_advice():
    findings = doctor.examine()
    console = Console(file=open(os.devnull, "w"))  # noqa: SIM115
    assert doctor.print_findings(findings, console)
    assert all(finding.advice for finding in findings if finding.level != "ok")


def test_an_old_version_is_a_problem(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda package: "3.5.1" if package == "triton" else "2.10.0+cpu")
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
    finding = doctor._compiler()
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
    (finding,) = doctor._gpu()
    assert finding.level == "problem"
    assert finding.found == "Tesla T4, sm_75, 16 GiB"


@pytest.mark.parametrize(
    ("code", "out", "error", "found"),
    [(0, "0.0017\n", "", "right"), (0, "4.97\n", "", "miscompiles them"), (1, "", "CUDA error: an illegal memory access", "illegal memory access")],
)
def test_the_sentinel(monkeypatch, code, out, error, found):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(backend, "interpreting", lambda: False)
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: subprocess.CompletedProcess(args, code, out, error))
    finding = doctor._miscompile()
    assert found in finding.found
    assert (finding.level == "ok") == (found == "right")


@pytest.mark.skipif("__import__('torch').cuda.is_available()", reason="a GPU's compiler may well get it wrong: that is what it looks for")
def test_the_probe_is_right_where_nothing_is_miscompiled(device):
    assert mixed_widths_error(device) < 5e-3
