"""Launches of tensors: run, or collected to be compiled without a GPU or audited at sizes that no machine holds.

Packed batches: sequences end to end, separated by offsets. Work split into chunks.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tilewise.ops._device.records import ReadStrides, Strided, Strides
from tilewise.ops._host import backend, start
from tilewise.ops._host.launch import Descriptor as Descriptor
from tilewise.ops._host.launch import Launch as Launch
from tilewise.ops._host.start import Repeated as Repeated
from tilewise.ops._host.symbol import cached

if backend.interpreting():
    # The interpreter was requested before Triton was imported: kernels then run through Triton's interpreter
    # here.
    from tilewise import interpreter

    interpreter.repair()


@contextlib.contextmanager
def capture(architecture: int) -> Iterator[list[Launch]]:
    """Inside, this context's launches do not run: they are collected, as for an architecture.

    Tensors may be on the `meta` device.
    """
    found: list[Launch] = []
    with backend.collecting(found), backend.as_if_on(architecture):
        yield found


def run_all(launches: Sequence[Launch], device: torch.device) -> None:
    """Run launches of tensors in order on `device`: compiled on a GPU, interpreted on the CPU."""
    found = backend.collected()
    if found is not None:
        found.extend(launch.for_triton() for launch in launches)
    elif device.type == "cuda":
        if device.index in (None, torch._C._cuda_getDevice()):
            for launch in launches:
                start.run(launch)
        else:
            with torch.cuda.device(device):
                run_all(launches, device)
    else:
        for launch in launches:
            launch.run()


def run_repeated(repeated: start.Repeated, varying: Mapping[str, Any], device: torch.device) -> None:
    """The same for one of a launch that is repeated."""
    if device.type == "cuda" and device.index == torch._C._cuda_getDevice() and backend.collected() is None:
        repeated.run(varying)
    else:
        run_all((repeated.launch(varying),), device)


def power_of_2(number: int) -> int:
    """The smallest power of two not below a number, and at least 1; Triton's own takes 15 µs."""
    return 1 << max(0, number - 1).bit_length()


@cached
def padded_channels(channels: int) -> int:
    """Channels padded to a tile: a power of two, at least the 16 that a matrix product needs."""
    return max(16, power_of_2(channels))


@cached
def tile_widths(channels: int, values: int, element_size: int) -> tuple[int, int]:
    """Channels of q and k, and of v, padded to tiles.

    A tile narrower than 128 bytes next to a wider one is widened: Triton 3.6 on Hopper mixes up their layouts in shared
    memory, and the products come out wrong (`tilewise doctor` probes for it).
    """
    block_d, block_dv = padded_channels(channels), padded_channels(values)
    narrowest = min(max(block_d, block_dv), 128 // element_size)
    return max(block_d, narrowest), max(block_dv, narrowest)


def row_strides(strides: tuple[int, ...]) -> Strides:
    """Strides of `[B, T, H, D]`, or of packed `[N, H, D]`, which has no batch axis."""
    return Strides(*strides[:3]) if len(strides) == 4 else Strides(0, *strides[:2])


def strided(x: torch.Tensor) -> Strided:
    """A tensor of rows that kernels read or write through a pointer."""
    return Strided(x, row_strides(x.stride()))


def read_strides(
    tma: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
) -> ReadStrides:
    """Strides of what a kernel reads; none with descriptors, where `tma` says so."""
    if tma:
        return ReadStrides(None, None, None, None)
    return ReadStrides(*(None if x is None else row_strides(x.stride()) for x in (q, k, v, do)))


def lse_strides(strides: tuple[int, ...]) -> Strides:
    """Strides of `[B, H, T]`, or of packed `[H, N]`."""
    *batch, head, token = strides
    return Strides(batch[0] if batch else 0, token, head)


def fits_descriptor(x: torch.Tensor) -> bool:
    """Whether the tensor memory accelerator can read dense `[B, T, H, D]` in place: 16-byte aligned in every axis,
    not expanded, not empty.

    It takes strides below 2^40 bytes.
    """
    if x.dim() != 4 or x.data_ptr() % 16 != 0 or x.numel() == 0:
        return False
    per_line, most = 16 // x.element_size(), 2**40 // x.element_size()
    first, second, third, _ = x.stride()
    # `per_line` is a power of two: the OR of the strides is a multiple of it where all of them are.
    return (
        (first | second | third) % per_line == 0 and min(first, second, third) > 0 and max(first, second, third) < most
    )


def why_unreadable(name: str, x: torch.Tensor) -> str:
    """Why the tensor memory accelerator cannot read a tensor that does not fit a descriptor."""
    if x.numel() == 0:
        return f"{name} is empty"
    if x.data_ptr() % 16 != 0:
        return f"{name}'s data is not aligned to 16 bytes"
    for axis, stride in zip(("batch", "token", "head")[4 - x.dim() :], x.stride()[:-1], strict=True):
        if stride <= 0:
            return f"{name}'s {axis} stride is {stride}"
        if stride * x.element_size() % 16 != 0:
            return f"{name}'s {axis} stride of {stride * x.element_size()} bytes is not a multiple of 16"
    return f"{name} is packed" if x.dim() == 3 else f"{name}'s strides are too long for a tensor descriptor"


def why_pointers(**tensors: torch.Tensor) -> str | None:
    """Why a kernel that could read these tensors through the tensor memory accelerator reads through pointers."""
    found = next(((name, x) for name, x in tensors.items() if not fits_descriptor(x)), None)
    return None if found is None else f"{why_unreadable(*found)}: pointers, not TMA"


def descriptor(x: torch.Tensor, rows: int, columns: int) -> Descriptor:
    """A descriptor over `[B, H, T, D]` of a dense `[B, T, H, D]` tensor, for tiles of `rows` tokens and `columns`
    channels of one head.
    """
    batch, tokens, heads, channels = x.shape
    stride_b, stride_t, stride_h, _ = x.stride()
    return Descriptor(x, (batch, heads, tokens, channels), (stride_b, stride_h, stride_t, 1), (1, 1, rows, columns))


def batch_size(x: torch.Tensor, offsets: torch.Tensor | None) -> int:
    """Sequences in a dense `[B, T, H, D]` or a packed batch."""
    return x.shape[0] if offsets is None else offsets.shape[0] - 1


def tile_slots(tokens: int, block: int, offsets: torch.Tensor | None) -> int:
    """Tiles of `block` rows that one head's grid needs: exact for dense sequences of `tokens`, an upper bound for
    packed ones.

    The bound needs no lengths, so no synchronisation: sequence b starts at slot `offsets[b] // block + b` (see
    `_device.rows.find_tile`).
    """
    return -(-tokens // block) if offsets is None else tokens // block + offsets.shape[0] - 1


def pieces(total: int, most: int) -> list[tuple[int, int]]:
    """Splits `total` into chunks of at most `most`: the start and the size of each."""
    found = []
    first = 0
    # A range would fix its symbols.
    while first < total:
        found.append((first, min(most, total - first)))
        first += most
    return found
