"""The one guarded import of Gluon, the language of Hopper's own kernels.

Gluon is experimental: a build of Triton may lack it, and its names change from release to release. Whether the kernels
can be imported is decided here by the names that they use, not by the version. Importing this module never raises;
where `usable` says no, the portable kernels run, and `why_off` says why.
"""

import functools
import importlib
import operator
import re
import threading
import warnings
from typing import Any

# The newest release that the kernels have been run with.
NEWEST_KNOWN = (3, 9)
# By module, the names that the kernels use; of names separated by | any one will do.
NEEDED: dict[str, tuple[str, ...]] = {
    "triton.language.core": ("_aggregate",),
    "triton.experimental.gluon": ("constexpr_function", "jit"),
    "triton.experimental.gluon.language": (
        *("BlockedLayout", "DistributedLinearLayout", "DotOperandLayout", "NVMMADistributedLayout"),
        "NVMMASharedLayout.get_default_for",
        *("SliceLayout", "SwizzledSharedLayout", "allocate_shared_memory", "arange", "atomic_add", "atomic_max"),
        *("bfloat16", "cast", "cdiv", "constexpr", "convert_layout", "exp2", "expand_dims", "float16", "float32"),
        *("full", "int32", "int64", "load", "log2", "max", "maximum", "minimum", "num_programs", "program_id"),
        *("static_assert", "static_range", "store", "sum", "tensor", "to_tensor", "warp_specialize", "where", "zeros"),
        *("zeros_like", "thread_barrier|barrier"),
        *(f"shared_memory_descriptor.{name}" for name in ("index", "load", "permute", "reshape", "slice", "store")),
    ),
    "triton.experimental.gluon.language.nvidia.hopper": (
        *("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait"),
        *(f"mbarrier.{name}" for name in ("MBarrierLayout", "arrive", "expect", "init", "wait")),
        *("tma.async_load|tma.async_copy_global_to_shared", "tma.async_store|tma.async_copy_shared_to_global"),
        "tma.store_wait",
    ),
    "triton.experimental.gluon.nvidia.hopper": ("TensorDescriptor",),
}


def _has(module: Any, name: str) -> bool:
    try:
        operator.attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def _in_words(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"no module named {error.name}"
    # Without the file path in Python's message: reasons are shown to others.
    lines = re.sub(r" \([^()]*[/\\][^()]*\)", "", str(error).strip()).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _imported() -> tuple[str, str | None]:
    """Triton's version, "" without it, and what is missing of Gluon, None where nothing is."""
    # Anything may fail in a package that does not fit this machine, and reference and CPU backends do not need it.
    try:
        version = str(importlib.import_module("triton").__version__)
    except Exception as error:
        return "", f"triton cannot be imported ({_in_words(error)})"
    for place, names in NEEDED.items():
        try:
            module = importlib.import_module(place)
        except Exception as error:
            return version, f"Gluon cannot be imported from Triton {version} ({_in_words(error)})"
        missing = [name for name in names if not any(_has(module, one) for one in name.split("|"))]
        if missing:
            return version, f"the Gluon of Triton {version} has no {', '.join(missing)} in {place}"
    return version, None


def _is_newer(version: str) -> bool:
    return tuple(int(digits) for digits in re.findall(r"\d+", version)[:2]) > NEWEST_KNOWN


_version, _reason = _imported()
if _reason is not None and _is_newer(_version):
    _newest = ".".join(map(str, NEWEST_KNOWN))
    _reason += f"; this Triton is newer than {_newest}, the newest that this release of tilewise knows"
AVAILABLE = _reason is None


def _module(place: str) -> Any:
    """None where Gluon is not available."""
    return importlib.import_module(place) if AVAILABLE else None


gluon = _module("triton.experimental.gluon")
gl = _module("triton.experimental.gluon.language")
TensorDescriptor: Any = getattr(_module("triton.experimental.gluon.nvidia.hopper"), "TensorDescriptor", None)
_warning = threading.Lock()


def why_off() -> str | None:
    """Why Gluon cannot be used, None where it can."""
    return _reason


def usable() -> bool:
    """Whether kernels in Gluon can be used. Call it only where they would be: on a Hopper GPU.

    Warns once per process where a Triton newer than every known one has another Gluon: an upgrade made calls
    slower.
    """
    if not AVAILABLE and _is_newer(_version):
        with _warning:
            _warn()
    return AVAILABLE


@functools.cache
def _warn() -> None:
    warnings.warn(f"tilewise runs its portable kernels, not those for Hopper: {_reason}", RuntimeWarning, stacklevel=3)
