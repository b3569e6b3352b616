"""Which families of kernels run on this machine, and why the others do not."""

import importlib
import importlib.util

from tilewise import interpreter
from tilewise.doctor.finding import Finding

PORTABLE, HOPPER = "portable Triton kernels", "Hopper's own kernels"
HOPPERS = (9, 0)


def is_there(package: str) -> bool:
    """Whether a package can be found. One that something keeps from being imported counts as missing."""
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
    """Why Hopper's own kernels do not run here, empty where they do: every reason, for one alone may be mended."""
    from tilewise.ops._host import gluon

    reasons = []
    found = capabilities()
    if not found:
        reasons.append("no GPU")
    elif HOPPERS not in found:
        reasons.append(_too_old(found, HOPPERS))
    if interpreted():
        reasons.append("kernels are interpreted, and Gluon has no interpreter")
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
