"""Devices by name, each in its own file, and which of the two CPU backends serves.

A backend is imported when it is first needed: numba takes half a second; torch, triton and tilewise are for CUDA alone.
"""

import functools
import importlib

from mytorch.backends.base import Backend
from mytorch.device import Device

_FILES = {"serial": "SerialBackend", "parallel": "ParallelBackend", "cuda": "CudaBackend"}
_cpu = "parallel"


@functools.cache
def load(name: str) -> Backend:
    """The backend in the file of that name."""
    if name not in _FILES:
        raise ValueError(f"there is no backend {name!r}: expected one of {', '.join(_FILES)}")
    try:
        module = importlib.import_module(f"mytorch.backends.{name}")
    except ImportError as error:
        if name != "cuda":
            raise
        raise ImportError(
            f"Device.CUDA needs tilewise of the same version, with the torch and triton that it requires, and they"
            f" cannot be imported ({error}): install both with `pip install . ./packages/mytorch` in the repository, or"
            " use Device.CPU"
        ) from error
    return getattr(module, _FILES[name])()


def of(device: Device) -> Backend:
    """The backend that computes on a device."""
    if device is Device.CPU:
        return load(_cpu)
    return load("cuda") if device is Device.CUDA else of(Device(device))


def set_cpu_backend(name: str) -> None:
    """Compute on the CPU with "parallel" (numba's threads; the default) or "serial" (NumPy).

    The results are equal but for rounding.
    """
    global _cpu
    if name not in ("serial", "parallel"):
        raise ValueError(f"the CPU backend is 'serial' or 'parallel', not {name!r}")
    _cpu = name


def cpu_backend() -> str:
    """The name of the backend that computes on the CPU."""
    return _cpu


def set_num_threads(count: int) -> None:
    """Run loops that this thread starts in the parallel backend on `count` threads, from 1 to as many as numba may
    start; BLAS has its own variables.
    """
    # The backend chooses which threads numba starts, which asking for their number does.
    load("parallel")
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= most:
        raise ValueError(
            f"the number of threads is an integer from 1 to {most} (the cores, or NUMBA_NUM_THREADS where it is set),"
            f" not {count!r}"
        )
    numba.set_num_threads(count)


def get_num_threads() -> int:
    """How many threads the parallel backend's loops run on."""
    load("parallel")
    import numba

    return numba.get_num_threads()
