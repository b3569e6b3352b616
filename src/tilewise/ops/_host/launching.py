"""A kernel launch as data: the kernel, its grid, its arguments, and the tensor descriptors among them; and launches
collected, to be compiled without a GPU or audited at sizes that no machine holds.

What launchers make arguments and grids of: padded channels, strides, packed batches (sequences end to end, separated by
offsets), work split into chunks.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.ops._device.records import ReadStrides, Strided, Strides
from tilewise.ops._host import backend, gluon
from tilewise.ops._host.symbol import cached, sample

if backend.interpreting():
    # The interpreter was requested before Triton was imported: kernels then run through Triton's interpreter
    # here.
    from tilewise import interpreter

    interpreter.repair()


class Descriptor(NamedTuple):
    """A tensor descriptor: how the tensor memory accelerator finds tiles of a block shape in `base`.

    With a layout it is Gluon's.
    """

    base: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    block_shape: tuple[int, ...]
    layout: Any = None

    def triton(self) -> Any:
        """As Triton's own launch path takes it."""
        shape, strides, block_shape = list(self.shape), list(self.strides), list(self.block_shape)
        if self.layout is None:
            return TensorDescriptor(self.base, shape, strides, block_shape)
        of_gluon: Any = gluon.TensorDescriptor
        return of_gluon(self.base, shape, strides, block_shape, self.layout)


@dataclass(slots=True)
class Launch:
    """One kernel, its grid (the number of programs) and its arguments by name."""

    kernel: Any
    grid: int
    arguments: Mapping[str, Any]

    def run(self) -> Any:
        """Launch on the current device and return the compiled kernel; a grid of 0 programs launches nothing and
        returns None.
        """
        return self.kernel[(self.grid,)](**self.for_triton().arguments) if self.grid else None

    def compile(self) -> Any:
        """The kernel compiled for this launch and the current device."""
        return self.kernel.warmup(grid=(self.grid,), **self.for_triton().arguments)

    def for_triton(self) -> "Launch":
        """The same with Triton's descriptors, and numbers in place of symbols."""
        numbers = {name: sample(x) for name, x in self.arguments.items()}
        arguments = {name: x.triton() if isinstance(x, Descriptor) else x for name, x in numbers.items()}
        return Launch(self.kernel, sample(self.grid), arguments)


@contextlib.contextmanager
def capture(architecture: int) -> Iterator[list[Launch]]:
    """Inside, this context's launches do not run: they are collected, as for an architecture.

    Tensors may be on the `meta` device.
    """
    found: list[Launch] = []
    with backend.collecting(found), backend.as_if_on(architecture):
        yield found


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
