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


def _matmul_setting(backend: Any) -> _Setting:
    # torch.get_float32_matmul_precision raises where these differ. `none`, never set, computes as `ieee` does.
    def get() -> str:
        found = str(backend.matmul.fp32_precision)
        return "ieee" if found == "none" else found

    return _Setting(get, lambda value: setattr(backend.matmul, "fp32_precision", value))


# Of products of fp32, on a GPU and on a CPU.
_MATMULS = _matmul_setting(torch.backends.cuda), _matmul_setting(torch.backends.mkldnn)
_WORDS = {("ieee", "ieee"): "highest", ("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}


def matmul_precision() -> tuple[str, str]:
    """Of products of fp32 on a GPU and on a CPU: `ieee` where they are of full precision."""
    cuda, cpu = (str(setting.get()) for setting in _MATMULS)
    return cuda, cpu


def set_matmul_precision(values: tuple[str, str]) -> None:
    """Both, by the older function where it has a word for them: its own getter raises where they do not fit it."""
    if values in _WORDS:
        torch.set_float32_matmul_precision(_WORDS[values])
        return
    for setting, value in zip(_MATMULS, values, strict=True):
        setting.set(value)


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
    "the precision of all of fp32": _attribute(torch.backends, "fp32_precision"),
    "the precision of fp32 matmuls (TF32), on a GPU and on a CPU": _Setting(matmul_precision, set_matmul_precision),
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
        found = {name: setting.get() for name, setting in _SETTINGS.items()}
        changed = {name: now for name, now in found.items() if now != self._settings[name]}
        changes = [f"{name}: {self._settings[name]} before the call, {now} after it" for name, now in changed.items()]
        for name in changed:
            _SETTINGS[name].set(self._settings[name])
        if not torch.equal(self._random, torch.get_rng_state()):
            changes.append("the state of torch's random numbers: others will follow than before the call")
            torch.set_rng_state(self._random)
        if self._random_cuda:
            now = torch.cuda.get_rng_state_all()
            if not all(map(torch.equal, self._random_cuda, now)):
                changes.append("the state of the GPU's random numbers: others will follow than before the call")
                torch.cuda.set_rng_state_all(self._random_cuda)
        for owner, members in self._members.items():
            for name, x in _changed(members, dict(vars(owner)), owner):
                changes.append(f"{owner.__name__}.{name} is another function than before the call")
                if x is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, x)
        return changes


def _changed(before: dict[str, Any], now: dict[str, Any], owner: Any) -> list[tuple[str, Any]]:
    """Names of public functions that are other ones now, with what they were; None where that was a base class's."""
    found = [
        (name, x)
        for name, x in before.items()
        if now.get(name) is not x
        and _unwatched(now.get(name)) is not _unwatched(x)
        and not _is_wrapped(x, now.get(name))
    ]
    bases = owner.__mro__[1:] if isinstance(owner, type) else ()
    # Other new names are what a lazy import adds.
    found += [
        (name, None)
        for name, x in now.items()
        if name not in before and any(name in vars(base) for base in bases) and _unwatched(x) is x
    ]
    return [
        (name, x)
        for name, x in found
        if not name.startswith("_") and (x is None or callable(x) or inspect.isdatadescriptor(x))
    ]


def _unwatched(x: Any) -> Any:
    """What a watch over fresh memory, maybe another thread's, has put a layer around."""
    return inspect.unwrap(x) if getattr(x, "is_watch", False) else x


def _is_wrapped(before: Any, now: Any) -> bool:
    """Whether torch itself has put a layer around its function, as importing its compiler does."""
    return getattr(now, "__module__", "").partition(".")[0] == "torch" and inspect.unwrap(now) is before
