"""`tilewise doctor`: what is on this machine, how kernels will run, and what to do about each finding."""

import importlib.metadata
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

Level = Literal["ok", "note", "problem"]
MISSING = "not installed"
MINIMUM = {"torch": (2, 10), "triton": (3, 6)}


@dataclass(frozen=True)
class Finding:
    """One thing looked at: what was found, whether it is a problem, and what to do about it."""

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def examine() -> list[Finding]:
    """Look at everything, in the order in which one would ask."""
    findings = [Finding("python", platform.python_version()), *_versions()]
    if any(finding.found == MISSING for finding in findings):
        return findings
    return [*findings, *_gpu(), _mode(), _compiler(), _miscompile()]


def print_findings(findings: Iterable[Finding], console: Console) -> bool:
    """A table of findings; returns whether none is a problem."""
    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    marks = {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "problem": "[red]✗[/]"}
    healthy = True
    for finding in findings:
        healthy &= finding.level != "problem"
        table.add_row(marks[finding.level], finding.subject, finding.found, finding.advice)
    console.print(table)
    return healthy


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def _versions() -> Iterable[Finding]:
    for package, minimum in MINIMUM.items():
        needed = ".".join(map(str, minimum))
        if importlib.util.find_spec(package) is None:
            yield Finding(package, MISSING, "problem", f"pip install '{package}>={needed}'")
            continue
        version = importlib.metadata.version(package)
        old = _number(version) < minimum
        yield Finding(package, version, "problem" if old else "ok", f"tilewise needs {needed} or newer: pip install -U {package}" if old else "")


def _gpu() -> Iterable[Finding]:
    import torch

    from tilewise.ops._host.backend import MINIMUM_CAPABILITY

    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Finding("GPU", f"none ({reason})", "note", "nothing, unless there is one: then install a CUDA build of torch and its driver")
        return
    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {memory:.0f} GiB"
        if (major, minor) < MINIMUM_CAPABILITY:
            yield Finding(f"GPU {index}", found, "problem", "the kernels need sm_80 or newer: use backend='reference' on it")
        else:
            yield Finding(f"GPU {index}", found)


def _mode() -> Finding:
    import torch

    from tilewise.ops._host.backend import interpreting

    if not interpreting():
        return Finding("kernels", "compiled for the GPU")
    if torch.cuda.is_available():
        return Finding("kernels", "interpreted, on CPU tensors, though there is a GPU", "note", "unset TRITON_INTERPRET to use the GPU")
    return Finding("kernels", "interpreted, on CPU tensors: right but slow", "note", "for speed on the CPU use backend='cpu', the default there")


def _compiler() -> Finding:
    """Triton builds a small C launcher for each kernel signature: on a GPU it needs a compiler and Python's headers."""
    import torch

    level: Level = "problem" if torch.cuda.is_available() else "note"
    compiler = shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if compiler is None:
        return Finding("C compiler", "none", level, "install gcc: Triton needs it to launch kernels on a GPU")
    if not header.exists():
        return Finding(
            "C compiler", f"{Path(compiler).name}, no Python.h", level, "install Python's headers (python3-dev): Triton needs them on a GPU"
        )
    return Finding("C compiler", f"{Path(compiler).name}, with Python.h")


def _miscompile() -> Finding:
    """Triton 3.6 on Hopper: products of a tile narrower than 128 bytes beside a wider one come out wrong, with no error."""
    import torch

    from tilewise.ops._host.backend import interpreting

    subject = "mixed tile widths"
    if not torch.cuda.is_available() or interpreting():
        return Finding(subject, "not probed: needs a GPU", "note", "Triton 3.6 gets them wrong on Hopper; tilewise's own kernels avoid them")
    wrong = "this Triton miscompiles them"
    advice = "tilewise's own kernels avoid them; in yours, pad tiles of fewer than 64 channels in 16 bits to the width of the others"
    # In a process of its own: wrong code may end it, or the GPU context with it.
    try:
        result = subprocess.run([sys.executable, "-m", "tilewise.ops.probe"], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return Finding(subject, "the probe did not end within two minutes", "note", advice)
    if result.returncode != 0:
        return Finding(subject, f"{wrong}, or cannot run: {result.stderr.strip().splitlines()[-1:]}", "note", advice)
    error = float(result.stdout)
    if error > 1e-2:
        return Finding(subject, f"{wrong} (relative error {error:.1e})", "note", advice)
    return Finding(subject, f"right (relative error {error:.1e})")
