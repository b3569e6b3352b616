"""Which implementation runs a call: `triton`, `cpu` or `reference`.

And how many kernels to compile in parallel. Imports no Triton: commands that only start helpers use it too.
"""

import contextlib
import contextvars
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch

try:
    import triton
except ImportError:
    triton = None

BACKENDS = ("triton", "cpu", "reference")
MINIMUM_CAPABILITY = (8, 0)


# Triton decides this when a kernel is defined, so once per process.
HAS_TRITON = triton is not None
# Ask a function of Triton's: the variable may have been set or unset since.
_INTERPRETING = HAS_TRITON and any(
    type(x).__name__ == "InterpretedFunction" for x in vars(triton.language.standard).values()
)


def interpreting() -> bool:
    """Whether this process runs Triton kernels through Triton's interpreter, on CPU tensors."""
    return _INTERPRETING


def resolve_backend(requested: str | None, device: torch.device) -> str:
    """The backend to use: the one asked for (argument, then TILEWISE_BACKEND), else by device.

    It runs or raises; it never falls back.
    """
    # Only explained calls have tensors there: torch.compile sees no context variable.
    found = _explained.get() if device.type == "meta" else None
    device = device if found is None else found.device
    source = "backend"
    asked_for = requested is not None
    if requested is None and os.environ.get("TILEWISE_BACKEND"):
        requested, source = os.environ["TILEWISE_BACKEND"], "TILEWISE_BACKEND"
    name = requested or ("cpu" if device.type == "cpu" else "triton")
    if name not in BACKENDS:
        raise ValueError(f"{source} is {name!r}: expected one of {', '.join(BACKENDS)}")
    if name == "cpu" and device.type != "cpu":
        raise ValueError(
            f"{source} is 'cpu' and the tensors are on {device}: move them to the CPU, or leave {source} out to use"
            " 'triton'"
        )
    if name == "triton":
        _check_triton(device, source)
    if found is not None:
        found.settle(name, "the argument backend" if asked_for else source if requested else "")
    return name


def _check_triton(device: torch.device, source: str) -> None:
    if not HAS_TRITON:
        raise ImportError(
            f"{source} is 'triton', for tensors on {device}, and triton cannot be imported: install it (`pip install"
            " triton` on Linux), or use backend='cpu' for tensors on the CPU, or backend='reference' anywhere"
        )
    if device.type == "cpu":
        if not interpreting():
            raise ValueError(
                f"{source} is 'triton' and the tensors are on the CPU: move them to a GPU, or set TRITON_INTERPRET=1"
                " before triton is imported to interpret the kernels, or use backend='cpu'"
            )
    elif device.type == "cuda":
        if interpreting() and _as_if.get() is None:
            raise ValueError(
                f"the tensors are on {device} and TRITON_INTERPRET=1 interprets kernels on the CPU: unset it, or move"
                " them to the CPU"
            )
    elif device.type != "meta" or not observed():
        # Without data nothing runs; launches of such tensors can be collected all the same.
        raise ValueError(
            f"the tensors are on {device}: tilewise runs on CUDA GPUs and CPUs; use backend='reference' elsewhere"
        )


# Per context: a thread or a task. Others are not affected.
_as_if: contextvars.ContextVar[int | None] = contextvars.ContextVar("tilewise_as_if", default=None)
# An H100's and an H200's.
SMS = 132
_sms: contextvars.ContextVar[int] = contextvars.ContextVar("tilewise_sms", default=SMS)


@contextlib.contextmanager
def as_if_on(architecture: int) -> Iterator[None]:
    """Inside, `architecture` returns this one in this context, on any device: for launches that are compiled but not
    run, or simulated.
    """
    token = _as_if.set(architecture)
    try:
        yield
    finally:
        _as_if.reset(token)


@contextlib.contextmanager
def few_sms(count: int) -> Iterator[None]:
    """Inside, a device that is not there has so many SMs in this context."""
    token = _sms.set(count)
    try:
        yield
    finally:
        _sms.reset(token)


def pretended_sms() -> int:
    """How many SMs a device has where there is none to ask."""
    return _sms.get()


def pretended() -> int | None:
    """The architecture set by `as_if_on`; None outside it."""
    return _as_if.get()


_collected: contextvars.ContextVar[list[Any] | None] = contextvars.ContextVar("tilewise_collected", default=None)


@contextlib.contextmanager
def collecting(launches: list[Any]) -> Iterator[None]:
    """Inside, this context's launches do not run: they are appended to `launches`."""
    token = _collected.set(launches)
    try:
        yield
    finally:
        _collected.reset(token)


def collected() -> list[Any] | None:
    """Where this context's launches are collected; None where they run."""
    return _collected.get()


class Explained:
    """What `tilewise.explain` records of a call on `meta` tensors, which stand in for tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = self.why = ""
        # Operators by name, each with its template.
        self.templates: list[tuple[str, Any]] = []

    def settle(self, name: str, asked: str) -> None:
        """The backend, and what asked for it, if anything. One without launches records nothing more."""
        where = f"the tensors are on {self.device}" if _as_if.get() is None else f"as if on sm_{_as_if.get()}"
        self.backend, self.why = name, f"{asked} asks for it" if asked else where
        if name != "triton":
            raise Settled


class Settled(Exception):  # noqa: N818 it is no error
    """Raised where nothing more is to be explained."""


_explained: contextvars.ContextVar[Explained | None] = contextvars.ContextVar("tilewise_explained", default=None)


@contextlib.contextmanager
def explaining(found: Explained) -> Iterator[None]:
    """Inside, this context's calls on `meta` tensors do not run: their templates are collected."""
    token = _explained.set(found)
    try:
        yield
    finally:
        _explained.reset(token)


def explained() -> Explained | None:
    """Where this context's calls are recorded; None where they run."""
    return _explained.get()


def actual(device: torch.device) -> torch.device:
    """The device that tensors count as being on: for `meta` tensors, that of the tensors they stand in for."""
    found = _explained.get() if device.type == "meta" else None
    return device if found is None else found.device


def compiles_for(device: torch.device) -> bool:
    """Whether kernels for tensors there are compiled; those for CPU tensors are interpreted."""
    return _as_if.get() is not None or actual(device).type == "cuda"


def observed() -> bool:
    """Whether launches are collected rather than run, or tiles are chosen for an architecture not the device's."""
    return _collected.get() is not None or _as_if.get() is not None or _explained.get() is not None


_watched: contextvars.ContextVar[bool] = contextvars.ContextVar("tilewise_watched", default=False)


@contextlib.contextmanager
def watching() -> Iterator[None]:
    """Inside, this context's allocations go through torch's functions, one by one, where a watch over fresh memory sees
    them.
    """
    token = _watched.set(True)
    try:
        yield
    finally:
        _watched.reset(token)


def watched() -> bool:
    """Whether this context's allocations are watched."""
    return _watched.get()


def asked() -> contextvars.Context | None:
    """This context's settings, to carry over to a backward, which torch runs in another thread; None where it
    has none.
    """
    return contextvars.copy_context() if observed() or _watched.get() else None


def architecture(device: torch.device) -> int:
    """Compute capability as one number, 90 for an H100; raises where the GPU is older than the kernels support.

    Interpreted kernels take the tiles of 90, so that tests run what GPUs run.
    """
    pretended_one = _as_if.get()
    if pretended_one is not None:
        return pretended_one
    device = actual(device)
    return _capability(device) if device.type == "cuda" else 90


@functools.cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MINIMUM_CAPABILITY:
        raise RuntimeError(
            f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}: tilewise's kernels need "
            f"{MINIMUM_CAPABILITY[0]}.{MINIMUM_CAPABILITY[1]} or newer; use backend='reference'"
        )
    return 10 * major + minor


VARIABLE = "TILEWISE_COMPILE_JOBS"


def jobs() -> int:
    """TILEWISE_COMPILE_JOBS, or this rank's share of the cores that the process may use."""
    asked = os.environ.get(VARIABLE, "")
    if asked:
        if not asked.isdecimal() or int(asked) < 1:
            raise ValueError(
                f"{VARIABLE} is {asked!r}: expected how many kernels to compile at a time, 1 for one after the other"
            )
        return int(asked)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, cores // max(1, int(ranks) if ranks.isdecimal() else 1))
