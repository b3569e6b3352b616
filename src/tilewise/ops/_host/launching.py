"""A kernel launch as a value: run it, compile it without a GPU, or audit it at sizes that no machine holds."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise import interpreter
from tilewise.ops._host import backend


@dataclass(frozen=True)
class Launch:
    """One kernel, its grid (the number of programs) and its arguments by name."""

    kernel: Any
    grid: int
    arguments: Mapping[str, Any]

    def run(self) -> Any:
        """Launch on the current device and return the compiled kernel; a grid of 0 programs launches nothing and returns None."""
        return self.kernel[(self.grid,)](**self.arguments) if self.grid else None


class Started(NamedTuple):
    """A launch that has run: its arguments' values in some order, and how to run it again with others in that order."""

    values: list[Any]
    again: Callable[[list[Any]], None]


# Compiled kernels by what Triton specialises a launch on.
_compiled: dict[tuple[Any, ...], Any] = {}
MOST_COMPILED = 4096
OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion")


def _trait(value: Any) -> Any:
    """What of an argument that is no constant Triton compiles a kernel for: at least that, and never a number's value."""
    kind = type(value)
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16
    if kind is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31
    if kind is tuple:
        return tuple(map(_trait, value))
    if hasattr(value, "block_shape"):
        # A tensor descriptor, Triton's or Gluon's, whose layouts follow from these.
        return value.base.dtype, *value.block_shape
    return float if kind is float else value


def _run_on_gpu(launch: Launch) -> Started:
    """Run a launch on the current device. Triton binds each argument anew at every launch, some 40 µs; where an equal one has run, that is spared."""
    kernel, arguments = launch.kernel, launch.arguments
    # What is not given is left to its default.
    values = [arguments.get(parameter.name, parameter.default) for parameter in kernel.params]
    traits = [value if parameter.is_constexpr else _trait(value) for parameter, value in zip(kernel.params, values, strict=True)]
    key = (kernel, torch.cuda.current_device(), *map(arguments.get, OPTIONS), *traits)
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = compiled = launch.run()
        start = compiled[(launch.grid, 1, 1)]
    else:
        start = compiled[(launch.grid, 1, 1)]
        start(*values)
    return Started(values, lambda values: start(*values))


def _run_interpreted(launch: Launch) -> Started:
    # Not the launch itself, which would keep its tensors alive.
    kernel, grid, names = launch.kernel, launch.grid, list(launch.arguments)
    launch.run()

    def again(values: list[Any]) -> None:
        with interpreter.quiet():
            Launch(kernel, grid, dict(zip(names, values, strict=True))).run()

    return Started(list(launch.arguments.values()), again)


_captured: list[list[Launch]] = []


@contextlib.contextmanager
def capture(architecture: int) -> Iterator[list[Launch]]:
    """Inside, nothing runs: what would is collected, as for an architecture. Tensors may be on the `meta` device."""
    collected: list[Launch] = []
    _captured.append(collected)
    try:
        with backend.as_if_on(architecture):
            yield collected
    finally:
        _captured.remove(collected)


class _Recording(threading.local):
    """What a thread's launches are shown to, each with how it is started."""

    launched: Callable[[Launch, Callable[[Launch], Started]], None] | None = None


_recording = _Recording()


@contextlib.contextmanager
def recording(launched: Callable[[Launch, Callable[[Launch], Started]], None]) -> Iterator[None]:
    """Inside, this thread's launches are left to `launched`, which must start them."""
    _recording.launched = launched
    try:
        yield
    finally:
        _recording.launched = None


def observed() -> bool:
    """Whether launches are collected rather than run, or tiles are those of another architecture than the device's."""
    return bool(_captured) or backend.pretending()


def on_device(device: torch.device, call: Callable[..., Any], *arguments: Any) -> Any:
    """What `call` returns, made with `device` as the current one."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return call(*arguments)
    with torch.cuda.device(device):
        return call(*arguments)


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run launches in order on `device`: compiled on a GPU, interpreted on the CPU."""
    if _captured:
        _captured[-1].extend(launches)
        return
    start = _run_on_gpu if device.type == "cuda" else _run_interpreted
    if start is _run_interpreted:
        interpreter.repair()

    def run() -> None:
        with interpreter.quiet() if start is _run_interpreted else contextlib.nullcontext():
            for launch in launches:
                if launch.grid == 0:
                    continue
                if _recording.launched is None:
                    start(launch)
                else:
                    _recording.launched(launch, start)

    on_device(device, run)


def power_of_2(number: int) -> int:
    """The least power of two that is not below a number, and at least 1; Triton's own takes 15 µs."""
    return 1 << max(0, number - 1).bit_length()


def padded_channels(channels: int) -> int:
    """Channels as a tile holds them: a power of two, at least the 16 that a matrix product wants."""
    return max(16, power_of_2(channels))


def tile_widths(channels: int, values: int, element_size: int) -> tuple[int, int]:
    """Channels of q and k, and of v, as tiles hold them.

    A tile narrower than 128 bytes beside a wider one is widened: Triton 3.6 on Hopper mixes up their layouts in shared memory, and the
    products come out wrong (`tilewise doctor` probes for it).
    """
    block_d, block_dv = padded_channels(channels), padded_channels(values)
    narrowest = min(max(block_d, block_dv), 128 // element_size)
    return max(block_d, narrowest), max(block_dv, narrowest)


def row_strides(strides: tuple[int, ...]) -> tuple[int, int, int]:
    """Strides over (batch, token, head) from those of `[B, T, H, D]`, or of packed `[N, H, D]`, which has no batch axis."""
    return (strides[0], strides[1], strides[2]) if len(strides) == 4 else (0, strides[0], strides[1])


def fits_descriptor(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read dense `[B, T, H, D]` as it lies: 16-byte aligned in every axis, not expanded, not empty.

    It takes strides below 2^40 bytes.
    """
    if x.dim() != 4 or x.numel() == 0 or x.data_ptr() % 16 != 0:
        return False
    per_line, most = 16 // x.element_size(), 2**40 // x.element_size()
    return all(0 < stride < most and stride % per_line == 0 for stride in x.stride()[:-1])


def descriptor(x: torch.Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor over `[B, H, T, D]` of a dense `[B, T, H, D]` tensor, for tiles of `rows` tokens and `columns` channels of one head."""
    batch, tokens, heads, channels = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    return TensorDescriptor(x, [batch, heads, tokens, channels], [stride_b, stride_h, stride_t, 1], [1, 1, rows, columns])
