"""What torch has one of for the whole process, and what a call has changed of it."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

# Where a user finds torch's public functions.
_NAMESPACES = (
    torch,
    torch.Tensor,
    torch.nn.functional,
    torch.autograd,
    torch.linalg,
    torch.special,
    torch.fft,
    torch.amp,
    torch.cuda,
    torch.random,
    torch.testing,
    torch.nn,
    torch.nn.attention,
)


class _Setting(NamedTuple):
    get: Callable[[], Any]
    set: Callable[[Any], None]


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(lambda: getattr(owner, name), lambda value: setattr(owner, name, value))


def _matmul_precision() -> str:
    # The older functions raise where this setting was used. `none`, never set, computes as `ieee` does.
    found = torch.backends.cuda.matmul.fp32_precision
    return "ieee" if found == "none" else found


def _set_matmul_precision(value: str) -> None:
    # Both what the older functions report and the setting.
    torch.set_float32_matmul_precision("highest" if value == "ieee" else "high")


def _autocast(device: str) -> _Setting:
    return _Setting(partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device))


def _sdp(name: str) -> _Setting:
    return _Setting(getattr(torch.backends.cuda, f"{name}_enabled"), getattr(torch.backends.cuda, f"enable_{name}"))


_SETTINGS = {
    "the default dtype": _Setting(torch.get_default_dtype, torch.set_default_dtype),
    "the default device": _Setting(torch.get_default_device, torch.set_default_device),
    "the number of threads": _Setting(torch.get_num_threads, torch.set_num_threads),
    "grad mode": _Setting(torch.is_grad_enabled, torch._C._set_grad_enabled),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on the GPU": _autocast("cuda"),
    "the precision of fp32 matmuls (TF32)": _Setting(_matmul_precision, _set_matmul_precision),
    "the precision of fp32 convolutions (TF32)": _attribute(
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
        "fp32_precision",
    ),
    "cuDNN's deterministic flag": _attribute(torch.backends.cudnn, "deterministic"),
    "cuDNN's benchmark flag": _attribute(torch.backends.cudnn, "benchmark"),
    "deterministic algorithms": _Setting(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1]),
    ),
    "fp16 sums of reduced precision": _attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction"),
    "bf16 sums of reduced precision": _attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction"),
    **{
        f"whether attention may use {name}": _sdp(f"{name}_sdp") for name in ("flash", "mem_efficient", "math", "cudnn")
    },
}


class State:
    """Settings, random numbers and public functions as they are now."""

    def __init__(self) -> None:
        self._settings = {name: setting.get() for name, setting in _SETTINGS.items()}
        self._random = torch.get_rng_state()
        # Asking an idle GPU would start it.
        self._random_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._members = {owner: dict(vars(owner)) for owner in _NAMESPACES}

    def restore(self) -> list[str]:
        """What has changed since, each as it was and as it is, undone where torch lets one."""
        changes = []
        for name, setting in _SETTINGS.items():
            before, now = self._settings[name], setting.get()
            if now != before:
                changes.append(f"{name}: {before} before the call, {now} after it")
                setting.set(before)
        if not torch.equal(self._random, torch.get_rng_state()):
            changes.append("the state of torch's random numbers: others will follow than before the call")
            torch.set_rng_state(self._random)
        if self._random_cuda:
            now = torch.cuda.get_rng_state_all()
            if not all(map(torch.equal, self._random_cuda, now)):
                changes.append("the state of the GPU's random numbers: others will follow than before the call")
                torch.cuda.set_rng_state_all(self._random_cuda)
        for owner, before in self._members.items():
            for name, x in _changed(before, dict(vars(owner)), owner):
                changes.append(f"{owner.__name__}.{name} is another function than before the call")
                if x is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, x)
        return changes


def _changed(before: dict[str, Any], now: dict[str, Any], owner: Any) -> list[tuple[str, Any]]:
    """Names of public functions that are other ones now, with what they were; None where that was a base class's."""
    found = [(name, x) for name, x in before.items() if now.get(name) is not x and not _is_wrapped(x, now.get(name))]
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    # Other new names are what a lazy import adds.
    found += [(name, None) for name in now if name not in before and any(name in vars(base) for base in bases)]
    return [
        (name, x)
        for name, x in found
        if not name.startswith("_") and (x is None or callable(x) or inspect.isdatadescriptor(x))
    ]


def _is_wrapped(before: Any, now: Any) -> bool:
    """Whether torch itself has put a layer around its function, as importing its compiler does."""
    return getattr(now, "__module__", "").partition(".")[0] == "torch" and inspect.unwrap(now) is before
