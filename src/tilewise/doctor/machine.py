"""What doctor checks on any machine: packages, variables, the C compiler, Triton's cache, disk and threads; and how a
finding is written down.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import sysconfig
import time
from collections.abc import Iterator
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
    """The version of an importable package; one that was only copied next to others has none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "of no known version"


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
    "TRITON_ALWAYS_COMPILE": "every first launch compiles anew; unset it to use the cache",
    "TRITON_KERNEL_OVERRIDE": "compiled kernels may be replaced by files; unset it unless that is meant",
    "TRITON_PTXAS_PATH": (
        "another ptxas than Triton's own assembles kernels; unset it before comparing registers and spills"
    ),
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the one before; unset it before timing",
    "CUDA_VISIBLE_DEVICES": "torch sees only these GPUs, and numbers them anew",
    "NVIDIA_TF32_OVERRIDE": "fp32 products of torch change; unset it before verifying",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "fp32 products of torch are less exact; unset it before verifying",
    "PYTORCH_CUDA_ALLOC_CONF": "memory is given out in another way; peaks of memory differ from the default's",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "every allocation waits for the GPU; unset it before timing",
    "OMP_NUM_THREADS": "torch and numba use so many threads on the CPU",
    "NUMBA_NUM_THREADS": "mytorch's loops use so many threads",
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
    found = f"{free / 2**30:,.1f} GiB free beside Triton's cache"
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
