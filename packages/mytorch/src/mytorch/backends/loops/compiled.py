"""How the loops are compiled: two decorators, and the OpenMP threads they run on."""

import contextlib
import os
from collections.abc import Iterator

import numba
import numpy as np
from numba import njit, prange

__all__ = ["bounds", "prange", "private", "threaded"]


@contextlib.contextmanager
def _waiting_without_spinning() -> Iterator[None]:
    """OpenMP reads this variable once, when it is loaded: threads that spin between two loops would hold the cores that
    BLAS's threads need.
    """
    name = "OMP_WAIT_POLICY"
    given = os.environ.get(name)
    os.environ.setdefault(name, "passive")
    try:
        yield
    finally:
        if given is None:
            del os.environ[name]


def _choose_threads() -> None:
    """OpenMP's threads, where they can be loaded and nothing else was asked for; otherwise numba's choice stays."""
    if numba.config.THREADING_LAYER != "default":
        return
    try:
        with _waiting_without_spinning():
            from numba.np.ufunc import omppool  # noqa: F401
    except ImportError:
        return
    numba.config.THREADING_LAYER = "omp"


_choose_threads()

# Sums may be taken in any order and products join them without rounding between; NaN and infinity keep their meaning.
_FLAGS = {"contract", "reassoc", "nsz"}

threaded = njit(parallel=True, cache=True, fastmath=_FLAGS, error_model="numpy", nogil=True)
# Called by compiled functions only.
private = njit(
    cache=True, fastmath=_FLAGS, error_model="numpy", nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True
)


@private
def bounds(part, parts, count):
    """Where a part of `count` things starts and stops.

    Numba's threads number parts without a sign, and that times a length would be a float.
    """
    part = np.int64(part)
    return part * count // parts, (part + 1) * count // parts
