"""`tilewise doctor`: what is on this machine, how kernels will run, and what to do about each finding."""

import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from tilewise.doctor import bug_report, machine
from tilewise.doctor.bug_report import report
from tilewise.doctor.machine import MISSING, Finding, version_of

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Finding", "as_json", "examine", "print_findings", "report"]

MINIMUM = {"torch": (2, 10), "triton": (3, 6)}


def examine(probe: bool = True) -> list[Finding]:
    """Check everything, in the order in which one would ask; without `probe` only what takes no time."""
    findings = [Finding("python", platform.python_version()), *_versions()]
    if any(finding.subject == "torch" and finding.found == MISSING for finding in findings):
        return findings
    findings += [*machine.packages(), *machine.gpus(), *machine.states(), *machine.baselines()]
    if bug_report.triton_off():
        return [*findings, bug_report.hopper(), *machine.variables(), machine.threads()]
    return [
        *findings,
        _mode(),
        bug_report.hopper(),
        *machine.variables(),
        machine.compiler(),
        machine.ptxas(),
        machine.cache(),
        machine.disk(),
        machine.threads(),
        *([_miscompile()] if probe else []),
    ]


def as_json(findings: Iterable[Finding] | None = None) -> list[dict[str, str]]:
    """Findings for reports: subject, found, level and advice; those of a quick examination by default."""
    return [asdict(finding) for finding in (examine(probe=False) if findings is None else findings)]


def print_findings(findings: Iterable[Finding], console: "Console") -> bool:
    """A table of findings; returns whether none is a problem."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "found", "what to do", box=None, pad_edge=False)
    marks = {"ok": "[green]✓[/]", "note": "[yellow]•[/]", "problem": "[red]✗[/]"}
    healthy = True
    for finding in findings:
        healthy &= finding.level != "problem"
        table.add_row(marks[finding.level], *map(escape, (finding.subject, finding.found, finding.advice)))
    console.print(table)
    return healthy


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2])


def _versions() -> Iterable[Finding]:
    for package, minimum in MINIMUM.items():
        needed = ".".join(map(str, minimum))
        if not bug_report.is_there(package):
            yield _missing(package, needed)
            continue
        if package == "triton" and (why := bug_report.triton_off()):
            advice = f"pip install --force-reinstall '{package}>={needed}'"
            yield Finding(package, f"{version_of(package)}: {why}", "problem", advice)
            continue
        version = version_of(package)
        old = _number(version) < minimum
        yield Finding(
            package,
            version,
            "problem" if old else "ok",
            f"tilewise needs {needed} or newer: pip install -U {package}" if old else "",
        )


def _missing(package: str, needed: str) -> Finding:
    if package == "triton" and platform.system() != "Linux":
        # There is no package to install: references and CPU backends run there.
        return Finding(package, MISSING, "note", "no kernel runs without it: use backend='cpu' or backend='reference'")
    return Finding(package, MISSING, "problem", f"pip install '{package}>={needed}'")


def _mode() -> Finding:
    import torch

    from tilewise.ops._host.backend import interpreting

    if not interpreting():
        return Finding("kernels", "compiled for the GPU")
    if torch.cuda.is_available():
        found = "interpreted (TRITON_INTERPRET is set), on CPU tensors, though there is a GPU"
        return Finding("kernels", found, "note", "unset TRITON_INTERPRET to use the GPU")
    return Finding(
        "kernels",
        "interpreted, on CPU tensors: right but slow",
        "note",
        "for speed on the CPU use backend='cpu', the default there",
    )


def _miscompile() -> Finding:
    """Triton 3.6 on Hopper: products of a tile narrower than 128 bytes next to a wider one are wrong, with no error."""
    import torch

    from tilewise.ops._host.backend import interpreting

    subject = "mixed tile widths"
    if not torch.cuda.is_available() or interpreting():
        return Finding(
            subject,
            "not probed: needs a GPU",
            "note",
            "Triton 3.6 gets them wrong on Hopper; tilewise's own kernels avoid them",
        )
    wrong = "this Triton miscompiles them"
    advice = (
        "tilewise's own kernels avoid them; in yours, pad tiles of fewer than 64 channels in 16 bits to the width of"
        " the others"
    )
    # In a separate process: wrong code may kill it, or its GPU context.
    try:
        result = subprocess.run(
            [sys.executable, "-m", "tilewise.ops.probe.launch"], capture_output=True, text=True, timeout=120
        )
    except subprocess.TimeoutExpired:
        return Finding(subject, "the probe did not end within two minutes", "note", advice)
    if result.returncode != 0:
        return Finding(subject, f"{wrong}, or cannot run: {result.stderr.strip().splitlines()[-1:]}", "note", advice)
    error = float(result.stdout)
    if error > 1e-2:
        return Finding(subject, f"{wrong} (relative error {error:.1e})", "note", advice)
    return Finding(subject, f"right (relative error {error:.1e})")
