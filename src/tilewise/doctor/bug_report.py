"""`tilewise doctor --report`: one block of text for a bug report. Nothing in it says where anything lies."""

import os
import platform
import re
from collections import Counter

from tilewise.doctor import families, nvidia_smi
from tilewise.doctor.finding import MISSING, version_of
from tilewise.doctor.machine import VARIABLES

PREFIXES = ("TILEWISE_", "TRITON_")
# Names of variables that hold a path even where nothing in the value shows it.
PATH_NAMES = re.compile(r"(DIR|PATH|HOME|FILE|FOLDER|ROOT)$")
PATH = "<path>"
# So that a report stays short: kinds of GPUs and variables, further ones by name or number.
MOST_GPUS, MOST_VARIABLES, MOST_CHARACTERS = 2, 8, 60
WIDTH = 26


def report() -> str:
    """The block, fenced as Markdown wants it; the same lines in the same order on every machine, then variables."""
    import tilewise

    rows = [
        ("tilewise", tilewise.__version__),
        ("python", f"{platform.python_version()}, {platform.system()} {platform.machine()}"),
        *((name, version_of(name) if families.is_there(name) else MISSING) for name in ("torch", "triton", "numpy")),
    ]
    if families.is_there("torch"):
        rows += [*_cuda(), *_kernels()]
    rows += _variables()
    return "\n".join(["```text", *(f"{name:<{WIDTH}}{without_paths(value)}" for name, value in rows), "```"])


def _cuda() -> list[tuple[str, str]]:
    import torch

    gpu = torch.cuda.is_available()
    states = nvidia_smi.states() if gpu else []
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

    interpreted = families.interpreted()
    chosen = "no GPU, so the command line chose it" if interpreter.set_here() else "TRITON_INTERPRET is set"
    portable, hopper = families.portable_off(), families.hopper_off()
    return [
        ("Gluon", gluon.why_off() or "importable"),
        (families.PORTABLE, f"off: {'; '.join(portable)}" if portable else "on, interpreted" if interpreted else "on"),
        (families.HOPPER, f"off: {'; '.join(hopper)}" if hopper else "on"),
        ("interpreter", f"on: {chosen}" if interpreted else "off"),
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
    """The text with <path> for each word, and each bracket's contents, that has a separator of paths in it."""
    text = re.sub(r"\([^()]*[/\\][^()]*\)", f"({PATH})", text)
    return re.sub(r"[^\s'\"();,]*[/\\][^\s'\"();,]*", PATH, text)
