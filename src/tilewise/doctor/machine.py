"""What doctor checks: packages, variables, the C compiler, Triton's cache, disk and threads; the GPUs if there are any,
their current state by nvidia-smi, and what torch and Triton bring for them; and how a finding is written down.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["ok", "note", "problem"]
MISSING = "not installed"


@dataclass(frozen=True)
class Finding:
    """One check: what was found, whether it is a problem, and what to do about it."""

    subject: str
    found: str
    level: Level = "ok"
    advice: str = ""


def version_of(package: str) -> str:
    """The version of the package that an import brings: one that was copied before an installed one in the path has
    metadata of its own or none, and is asked itself.
    """
    spec = importlib.util.find_spec(package)
    beside = [str(Path(spec.origin).parent.parent)] if spec and spec.origin else []
    for found in importlib.metadata.distributions(name=package, path=beside):
        return found.version
    return getattr(importlib.import_module(package), "__version__", "of no known version")


# What is missing without a package, and what installs it from the repository.
PACKAGES = {
    "rich": ("the command line", "'.[tools]'"),
    "typer": ("the command line", "'.[tools]'"),
    "jinja2": ("HTML reports", "'.[tools]'"),
    "hypothesis": ("verify --search", "'.[tools]'"),
    "matplotlib": ("plots of bench", "'.[tools]'"),
    "numba": ("mytorch's parallel backend", "./packages/mytorch"),
    "safetensors": ("mytorch's files of weights", "./packages/mytorch"),
}
# Variables that change what runs or how fast, and what to know about each.
VARIABLES = {
    "TILEWISE_BACKEND": "every call without backend= takes this one; unset it to let the device decide",
    "TILEWISE_CHECK": "offsets are checked at every call, which waits for the GPU; unset it before timing",
    "TRITON_CACHE_DIR": "compiled kernels are kept there",
    "TRITON_DEBUG": "kernels are compiled with checks and are slower; unset it before timing",
    "TRITON_ALWAYS_COMPILE": "every first launch compiles, cached or not; unset it to use the cache",
    "TRITON_KERNEL_OVERRIDE": "compiled kernels may be replaced by files; unset it unless that is meant",
    "TRITON_PTXAS_PATH": (
        "another ptxas than Triton's own assembles kernels; unset it before comparing registers and spills"
    ),
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the one before; unset it before timing",
    "CUDA_VISIBLE_DEVICES": "torch sees only these GPUs, and numbers them from 0",
    "NVIDIA_TF32_OVERRIDE": "fp32 products of torch change; unset it before verifying",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "fp32 products of torch are less exact; unset it before verifying",
    "PYTORCH_CUDA_ALLOC_CONF": "memory is given out in another way; peaks of memory differ from the default's",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the GPU; unset it before timing",
    "OMP_NUM_THREADS": "torch and numba use this many threads on the CPU",
    "NUMBA_NUM_THREADS": "mytorch's loops use this many threads",
}
# Seconds that counting the cache's files may take, and free space in bytes below which compiling may fail.
COUNTING = 0.5
LITTLE_SPACE = 2 << 30


def packages() -> Iterator[Finding]:
    """Packages that parts of tilewise need."""
    for name, (what, source) in PACKAGES.items():
        if importlib.util.find_spec(name) is None:
            yield Finding(name, MISSING, "note", f"without it {what} will not work: pip install {source}")
        else:
            yield Finding(name, version_of(name))


def variables() -> Iterator[Finding]:
    """Those of VARIABLES that are set. Paths are not repeated: reports get shared."""
    for name, advice in VARIABLES.items():
        value = os.environ.get(name)
        if value:
            yield Finding(name, "set to a path" if os.sep in value else value, "note", advice)


def compiler() -> Finding:
    """Triton builds a small C launcher for each kernel signature: on a GPU it needs a compiler and Python's headers."""
    import torch

    level: Level = "problem" if torch.cuda.is_available() else "note"
    found = shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if found is None:
        return Finding("C compiler", "none", level, "install gcc: Triton needs it to launch kernels on a GPU")
    if not header.exists():
        return Finding(
            "C compiler",
            f"{Path(found).name}, no Python.h",
            level,
            "install Python's headers (python3-dev): Triton needs them on a GPU",
        )
    return Finding("C compiler", f"{Path(found).name}, with Python.h")


def _cache_folder() -> Path:
    import triton

    return Path(triton.knobs.cache.dir)


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next((place for place in (folder, *folder.parents) if place.is_dir()), Path(folder.anchor or "."))


def cache() -> Finding:
    """Whether compiled kernels can be cached, and how much space they take."""
    folder = _cache_folder()
    if not os.access(_existing(folder), os.W_OK):
        return Finding(
            "Triton's cache",
            f"{folder} cannot be written",
            "problem",
            "set TRITON_CACHE_DIR to a folder that can: kernels are compiled there",
        )
    files = size = 0
    end = time.monotonic() + COUNTING
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                size += os.lstat(os.path.join(place, name)).st_size
            except OSError:
                # Another process is clearing it right now.
                continue
            files += 1
        if time.monotonic() > end:
            return Finding(
                "Triton's cache",
                f"more than {files:,} files",
                "note",
                "it only grows: delete the folder now and then, nothing is lost but time",
            )
    return Finding("Triton's cache", f"{files:,} files, {size / 2**20:,.0f} MiB")


def disk() -> Finding:
    """Free space where compiled kernels are cached."""
    try:
        free = shutil.disk_usage(_existing(_cache_folder())).free
    except OSError as error:
        return Finding("disk", f"not known ({error.strerror})", "note", "look at the folder of Triton's cache")
    found = f"{free / 2**30:,.1f} GiB free on the disk of Triton's cache"
    if free < LITTLE_SPACE:
        return Finding(
            "disk",
            found,
            "note",
            "make room, or set TRITON_CACHE_DIR to a folder that has some: compiling fails on a full disk",
        )
    return Finding("disk", found)


def threads() -> Finding:
    """Cores, and threads that torch uses on the CPU."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = torch.get_num_threads()
    found = f"{cores} cores, {count} threads of torch"
    if count > cores:
        return Finding(
            "CPU", found, "note", f"more threads than cores slow each other down: set OMP_NUM_THREADS={cores}"
        )
    return Finding("CPU", found)


SECONDS = 5.0
# Why clocks are below the requested ones, as bits of `clocks_event_reasons.active`; idle and user-set clocks are none
# of these.
THROTTLES = {
    0x04: "the power cap",
    0x08: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "the power supply",
}
STATE = (
    "index",
    "driver_version",
    "memory.used",
    "memory.total",
    "clocks.sm",
    "clocks.max.sm",
    "clocks.mem",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "power.default_limit",
    "ecc.mode.current",
    "mig.mode.current",
)


def reported_states() -> list[dict[str, str]]:
    """The fields of STATE by name for each GPU, without units; what a GPU does not report is in brackets, as in
    `[N/A]`.
    """
    return [dict(zip(STATE, row, strict=True)) for row in _query("gpu", STATE)]


def throttles() -> list[str]:
    """For each GPU why its clocks are throttled now: "" if they are not."""
    # Older drivers have another name for it.
    rows = _query("gpu", ("clocks_event_reasons.active",)) or _query("gpu", ("clocks_throttle_reasons.active",))
    reasons = [int(row[0], 16) if re.fullmatch(r"0x[0-9a-fA-F]+", row[0]) else 0 for row in rows]
    return [" and ".join(name for bit, name in THROTTLES.items() if bits & bit) for bits in reasons]


def processes() -> list[str]:
    """The ids of processes that compute on any GPU."""
    return [row[0] for row in _query("compute-apps", ("pid",)) if row[0].isdigit()]


def number(text: str) -> float | None:
    """A field as a number, None if it is not one."""
    try:
        return float(text)
    except ValueError:
        return None


def _query(what: str, fields: Sequence[str]) -> list[list[str]]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[field.strip() for field in line.split(",")] for line in result.stdout.splitlines()]
    # A message instead of an answer has other columns.
    return rows if result.returncode == 0 and all(len(row) == len(fields) for row in rows) else []


# Memory used by others, in MiB, from which it is worth a note; this process's own context takes less.
MUCH_MEMORY = 1024.0


def gpus() -> Iterator[Finding]:
    """The GPUs that torch sees, or why it sees none."""
    import torch

    if not torch.cuda.is_available():
        reason = "torch is built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device"
        yield Finding(
            "GPU",
            f"none ({reason})",
            "note",
            "nothing, unless there is one: then install a CUDA build of torch and its driver",
        )
        return
    from tilewise.ops._host.backend import MINIMUM_CAPABILITY

    for index in range(torch.cuda.device_count()):
        major, minor = torch.cuda.get_device_capability(index)
        memory = torch.cuda.get_device_properties(index).total_memory / 2**30
        found = f"{torch.cuda.get_device_name(index)}, sm_{major}{minor}, {memory:.0f} GiB"
        if (major, minor) < MINIMUM_CAPABILITY:
            yield Finding(
                f"GPU {index}", found, "problem", "the kernels need sm_80 or newer: use backend='reference' on it"
            )
        else:
            yield Finding(f"GPU {index}", found)


def states() -> Iterator[Finding]:
    """The current state of each GPU, numbered as nvidia-smi does."""
    import torch

    if not torch.cuda.is_available():
        return
    found = reported_states()
    if not found:
        yield Finding(
            "nvidia-smi",
            "missing, or says nothing",
            "note",
            "driver, clocks and power are not known: install the driver's tools",
        )
        return
    yield Finding("driver", f"{found[0]['driver_version']}; torch is built with CUDA {torch.version.cuda}")
    reasons, others = (
        throttles(),
        [number for number in processes() if number != str(os.getpid())],
    )
    for place, state in enumerate(found):
        # With CUDA_VISIBLE_DEVICES torch's numbering differs.
        own = torch.cuda.memory_reserved(place) / 2**20 if len(found) == torch.cuda.device_count() else 0.0
        yield _memory(state, own, others)
        yield _clocks(state, reasons[place] if place < len(reasons) else "")
        yield _power(state)
        yield from _modes(state)


def _memory(state: dict[str, str], own: float, others: list[str]) -> Finding:
    subject, found = f"GPU {state['index']} memory", f"{state['memory.used']} of {state['memory.total']} MiB in use"
    if (number(state["memory.used"]) or 0.0) - own < MUCH_MEMORY:
        return Finding(subject, found)
    by = f" (processes on GPUs: {', '.join(others)})" if others else ""
    return Finding(
        subject,
        found + by,
        "note",
        "others use this GPU: times measured now are not its best; wait, or choose one by CUDA_VISIBLE_DEVICES",
    )


def _clocks(state: dict[str, str], reason: str) -> Finding:
    subject = f"GPU {state['index']} clocks"
    found = (
        f"{state['clocks.sm']} of {state['clocks.max.sm']} MHz, memory {state['clocks.mem']} MHz,"
        f" {state['temperature.gpu']} °C"
    )
    if reason:
        return Finding(
            subject,
            f"{found}, held down by {reason}",
            "note",
            "do not trust times measured now: let it cool, or lift the cap",
        )
    return Finding(subject, found)


def _power(state: dict[str, str]) -> Finding:
    subject, found = f"GPU {state['index']} power", f"{state['power.draw']} of {state['power.limit']} W"
    limit, default = (number(state[name]) for name in ("power.limit", "power.default_limit"))
    if limit and default and limit < default:
        advice = (
            f"the cap is below the default of {default:.0f} W and slows long runs: `nvidia-smi -pl {default:.0f}` as"
            " root lifts it"
        )
        return Finding(subject, found, "note", advice)
    return Finding(subject, found)


def _modes(state: dict[str, str]) -> Iterator[Finding]:
    if state["ecc.mode.current"] == "Disabled":
        yield Finding(
            f"GPU {state['index']} ECC",
            "off",
            "note",
            "memory errors go unseen: `nvidia-smi -e 1` as root, and a restart, turns it on",
        )
    if state["mig.mode.current"] == "Enabled":
        yield Finding(
            f"GPU {state['index']} MIG",
            "on",
            "note",
            "torch sees a slice of this GPU: compare its times with those of equal slices only",
        )


def baselines() -> Iterator[Finding]:
    """Which of torch's own attention kernels can be a benchmark's baseline on a GPU."""
    import torch

    if not torch.cuda.is_available():
        return
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    there = {
        f"cuDNN {cudnn}": cudnn is not None,
        "FlashAttention-2": torch.backends.cuda.is_flash_attention_available(),
    }
    there["FlexAttention"] = _has_flex()
    found = ", ".join(name for name, has in there.items() if has) or "none"
    missing = [name.split(" ")[0] for name, has in there.items() if not has]
    if missing:
        yield Finding(
            "torch's attention",
            found,
            "note",
            f"no comparison with {' and '.join(missing)}: install a build of torch that has it",
        )
    else:
        yield Finding("torch's attention", found)


def _has_flex() -> bool:
    try:
        from torch.nn.attention import flex_attention  # noqa: F401
    except ImportError:
        return False
    return True


def ptxas() -> Finding:
    """The assembler that Triton calls: registers and spills depend on it."""
    from triton.backends.nvidia import compiler

    try:
        version = str(compiler.get_ptxas(90).version)
    except Exception as error:
        # In any case, kernels for an NVIDIA GPU cannot be compiled.
        return Finding(
            "ptxas",
            f"does not run ({type(error).__name__})",
            "note",
            "kernels cannot be compiled: reinstall triton, or unset TRITON_PTXAS_PATH",
        )
    return Finding("ptxas", version)
