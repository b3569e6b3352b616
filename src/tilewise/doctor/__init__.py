"""`tilewise doctor`: what is on this machine, how kernels will run, and what to do about each finding.

Also which families of kernels run here, and why the others do not; what a result was made with (`environment`); and
`tilewise doctor --report`: one block of text for a bug report, without paths.
"""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from tilewise import interpreter
from tilewise.doctor import machine
from tilewise.doctor.machine import MISSING, VARIABLES, Finding, reported_states, version_of

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
    if triton_off():
        return [*findings, hopper(), *machine.variables(), machine.threads()]
    return [
        *findings,
        _mode(),
        hopper(),
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
        if not is_there(package):
            yield _missing(package, needed)
            continue
        if package == "triton" and (why := triton_off()):
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


PORTABLE, HOPPER = "portable Triton kernels", "Hopper's own kernels"
HOPPERS = (9, 0)


def is_there(package: str) -> bool:
    """Whether a package can be found. One whose import is blocked counts as missing."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def triton_off() -> str:
    """Why triton cannot be imported, "" where it can."""
    if not is_there("triton"):
        return "triton is not installed"
    try:
        importlib.import_module("triton")
    except Exception as error:
        # A package that does not fit this machine may fail in any way.
        return f"triton cannot be imported ({type(error).__name__})"
    return ""


def interpreted() -> bool:
    """Whether this process interprets kernels; never without triton."""
    return not triton_off() and interpreter.interpreting()


def capabilities() -> list[tuple[int, int]]:
    """Of each GPU that torch sees."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.cuda.get_device_capability(index) for index in range(count)]


def portable_off() -> list[str]:
    """Why the portable kernels do not run here, empty where they do."""
    why = triton_off()
    if why or interpreted():
        return [why] if why else []
    from tilewise.ops._host.backend import MINIMUM_CAPABILITY

    found = capabilities()
    if not found:
        return ["no GPU, and kernels are not interpreted"]
    if max(found) < MINIMUM_CAPABILITY:
        return [_too_old(found, MINIMUM_CAPABILITY)]
    return []


def hopper_off() -> list[str]:
    """Why Hopper's own kernels do not run here, empty if they do: every reason, since fixing one may not be enough."""
    from tilewise.ops._host import gluon

    reasons = []
    found = capabilities()
    if not found:
        reasons.append("no GPU")
    elif HOPPERS not in found:
        reasons.append(_too_old(found, HOPPERS))
    if interpreted():
        reasons.append("kernels are interpreted")
    why = gluon.why_off()
    return [*reasons, why] if why else reasons


def _too_old(found: list[tuple[int, int]], needed: tuple[int, int]) -> str:
    numbers = ", ".join(f"{major}.{minor}" for major, minor in dict.fromkeys(found))
    return f"compute capability {numbers}, not {needed[0]}.{needed[1]}" + ("" if needed == HOPPERS else " or newer")


def hopper() -> Finding:
    """Hopper's own kernels: on, or off and why. A note only on a Hopper GPU, which could have them."""
    reasons = hopper_off()
    if not reasons:
        return Finding(HOPPER, "on")
    found = f"off: {'; '.join(reasons)}"
    if HOPPERS not in capabilities() or interpreted():
        return Finding(HOPPER, found)
    advice = "the portable kernels run, which are slower here: install a Triton that this release of tilewise knows"
    return Finding(HOPPER, found, "note", advice)


PREFIXES = ("TILEWISE_", "TRITON_")
# Names of variables that hold a path even where nothing in the value shows it.
PATH_NAMES = re.compile(r"(DIR|PATH|HOME|FILE|FOLDER|ROOT)$")
PATH = "<path>"
# Keeps a report short: kinds of GPUs and variables, further ones by name or number.
MOST_GPUS, MOST_VARIABLES, MOST_CHARACTERS = 2, 8, 60
WIDTH = 26


def report() -> str:
    """The block, fenced as Markdown needs it; the same lines in the same order on every machine, then variables."""
    import tilewise

    rows = [
        ("tilewise", tilewise.__version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        *((name, version_of(name) if is_there(name) else MISSING) for name in ("torch", "triton", "numpy")),
    ]
    if is_there("torch"):
        rows += [*_cuda(), *_kernels()]
    rows += _variables()
    return "\n".join(["```text", *(f"{name:<{WIDTH}}{without_paths(value)}" for name, value in rows), "```"])


def _cuda() -> list[tuple[str, str]]:
    import torch

    gpu = torch.cuda.is_available()
    states = reported_states() if gpu else []
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    return [
        ("CUDA", torch.version.cuda or "none: torch is built without it"),
        ("driver", states[0]["driver_version"] if states else "not known" if gpu else "none"),
        ("cuDNN", str(cudnn or "none")),
        *_gpus(),
    ]


def _gpus() -> list[tuple[str, str]]:
    import torch

    found: Counter[str] = Counter()
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found[f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {memory:.0f} GiB"] += 1
    if not found:
        return [("GPU", "none")]
    rows = [("GPU", f"{count} x {name}" if count > 1 else name) for name, count in list(found.items())[:MOST_GPUS]]
    others = sum(list(found.values())[MOST_GPUS:])
    return [*rows, ("GPU", f"{others} of other kinds")] if others else rows


def _kernels() -> list[tuple[str, str]]:
    from tilewise import interpreter
    from tilewise.ops._host import gluon

    is_interpreted = interpreted()
    chosen = "no GPU, so the command line chose it" if interpreter.set_here() else "TRITON_INTERPRET is set"
    portable, hopper = portable_off(), hopper_off()
    return [
        ("Gluon", gluon.why_off() or "importable"),
        (PORTABLE, f"off: {'; '.join(portable)}" if portable else "on, interpreted" if is_interpreted else "on"),
        (HOPPER, f"off: {'; '.join(hopper)}" if hopper else "on"),
        ("interpreter", f"on: {chosen}" if is_interpreted else "off"),
    ]


def _variables() -> list[tuple[str, str]]:
    """Those that the user has set, by name."""
    from tilewise import interpreter

    own = {"TRITON_INTERPRET"} if interpreter.set_here() else set()
    names = sorted(name for name in os.environ if (name.startswith(PREFIXES) or name in VARIABLES) and name not in own)
    rows = [(name, _value(name)) for name in names[:MOST_VARIABLES]]
    return [*rows, ("also set", ", ".join(names[MOST_VARIABLES:]))] if len(names) > MOST_VARIABLES else rows


def _value(name: str) -> str:
    value = " ".join(os.environ[name].split())
    if PATH_NAMES.search(name) or re.search(r"[/\\~]|^\.+$", value):
        return PATH if value else ""
    return value if len(value) <= MOST_CHARACTERS else f"{value[:MOST_CHARACTERS]}..."


def without_paths(text: str) -> str:
    """The text with <path> for each word, and each bracket's contents, that has a path separator in it."""
    text = re.sub(r"\([^()]*[/\\][^()]*\)", f"({PATH})", text)
    return re.sub(r"[^\s'\"();,]*[/\\][^\s'\"();,]*", PATH, text)


def environment() -> dict[str, str]:
    """By name, for reports.

    On a GPU also CUDA, cuDNN, FlashAttention-4, the driver and the current clocks, as far as nvidia-smi reports them.
    """
    import torch

    import tilewise
    from tilewise.ops._host.backend import interpreting

    found = {"tilewise": tilewise.__version__, "python": platform.python_version()}
    packages = ("torch", "triton", "numpy")
    found |= {name: version_of(name) if is_there(name) else MISSING for name in packages}
    gpu = torch.cuda.is_available()
    found["device"] = torch.cuda.get_device_name() if gpu else f"{platform.machine()} CPU"
    found["kernels"] = "interpreted" if interpreting() else "compiled"
    if gpu:
        found["CUDA"] = str(torch.version.cuda)
        if torch.backends.cudnn.is_available():
            found["cuDNN"] = str(torch.backends.cudnn.version())
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["flash-attn-4"] = importlib.metadata.version("flash-attn-4")
        states = reported_states()
        # With CUDA_VISIBLE_DEVICES torch's numbering differs from nvidia-smi's, which shows all GPUs.
        if len(states) == torch.cuda.device_count():
            state = states[torch.cuda.current_device()]
            found["clocks"] = f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz, memory {state['clocks.mem']} MHz"
            found["power"] = f"{state['power.draw']} of {state['power.limit']} W"
        if states:
            found["driver"] = states[0]["driver_version"]
    return found
