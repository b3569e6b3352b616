"""Shared memory as kernels see it, and the tensor descriptors by which tiles come there."""

import math
import operator
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.allocation import Face, rank_of
from tilewise._gluon.compiler import SharedType, ask, left_open, tile_type
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.memory import GlobalMemory, Places, Region, Window
from tilewise._gluon.order import Part, current
from tilewise._gluon.values import GLUON, Pointer, Tile, plain, torch_dtype
from tilewise._gluon.watching import View, show_read

# What TMA's last coordinate must be a multiple of.
COORDINATE_BYTES = 16
# Bits of a copy's offsets in im2col mode, by the axes that they move it along.
OFFSET_BITS = {1: 16, 2: 8, 3: 5}
# Rows that a swizzled tile needs: its pattern repeats after so many.
SWIZZLED_ROWS = 8
# Triton has that from 3.9 on.
SLICES_BUFFERS = hasattr(gl.shared_memory_descriptor, "reinterpret")


def allocated(dtype: Any, shape: Sequence[int], layout: Any) -> SharedType:
    """Shared memory that the compiler can allocate, and use."""
    kind: SharedType = ask("allocate_shared_memory", dtype, tuple(shape), layout)
    _check_use(kind)
    return kind


def _check_use(kind: SharedType) -> None:
    """What Triton's code takes at first, and then ends the process for, when something is to be loaded or stored."""
    problem, layout = "", kind.layout
    if kind.dtype == gl.int1:
        problem = "expected a dtype of at least 8 bits"
    elif isinstance(layout, gl.NVMMASharedLayout) and layout.swizzle_byte_width:
        shape = kind.shape[-layout.rank :]
        columns = shape[0 if layout.transposed else -1]
        rows, width = math.prod(shape) // columns, columns * layout.element_bitwidth // 8
        if rows < SWIZZLED_ROWS or width < layout.swizzle_byte_width:
            problem = f"to swizzle by {layout.swizzle_byte_width} bytes takes {SWIZZLED_ROWS} rows of as many:"
            problem += f" got {rows} of {width}; expected them, or a smaller swizzle_byte_width"
    elif hasattr(layout, "offset_bases"):
        count = math.prod(kind.shape[-rank_of(layout) :])
        if count != 1 << len(layout.offset_bases):
            problem = f"offset_bases are of {1 << len(layout.offset_bases)} elements: got {count}"
    if problem:
        raise KernelFaultError("refused", f"{problem}: {kind}", executed())


class Shared(View):
    """A view of shared memory: some of its elements as they were allocated, or as they were reinterpreted."""

    def __init__(self, data: torch.Tensor, face: Face, kind: SharedType, of: "Shared | None" = None) -> None:
        super().__init__(of)
        self._data, self._face, self.kind = data, face, kind
        self.dtype, self.layout = kind.dtype, kind.layout

    @property
    def data(self) -> torch.Tensor:
        """The elements, in memory."""
        self._face.show()
        return self._data

    @property
    def parts(self) -> tuple[Part, ...]:
        """The buffers that the elements lie in, and where."""
        return self._face.parts(self._data)

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return list(self._data.shape)

    @property
    def rank(self) -> int:
        """How many axes."""
        return self._data.dim()

    @property
    def type(self) -> "Shared":
        """Has dtype, shape and layout."""
        return self

    def _view(self, data: torch.Tensor, kind: SharedType) -> "Shared":
        return Shared(data, self._face, kind, self if data.numel() == self._data.numel() else None)

    def _rearranged(self, question: str, *arguments: Any) -> SharedType:
        if len(self.shape) > rank_of(self.layout):
            # Asked that, Triton's code ends the process.
            message = f"{question} of buffers {self.shape}, in {self.layout}: expected one of them, index(i)"
            raise KernelFaultError("refused", message, executed())
        found: SharedType = ask(question, self.kind, *arguments)
        return found

    def index(self, i: Any) -> "Shared":
        """One buffer."""
        i = operator.index(i)
        if not 0 <= i < len(self._data):
            raise KernelFaultError("out of bounds", f"buffer {i} of {len(self._data)} in shared memory", executed())
        return self._view(self._data[i], ask("index", self.kind))

    def reshape(self, shape: Any) -> "Shared":
        """The same elements in another shape."""
        sizes = tuple(operator.index(n) for n in shape)
        kind = self._rearranged("reshape of shared memory", sizes)
        if not self._data.is_contiguous():
            raise KernelFaultError("not simulated", "reshape of shared memory that is permuted or a slice", executed())
        return self._view(self._data.view(sizes), kind)

    def permute(self, order: Any) -> "Shared":
        """Axes in another order."""
        axes = tuple(operator.index(n) for n in order)
        if sorted(axes) != [*range(len(self.shape))]:
            raise KernelFaultError("refused", f"permute of {len(self.shape)} axes by {list(axes)}", executed())
        return self._view(self._data.permute(axes), self._rearranged("permute of shared memory", axes))

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Shared":
        """Part of an axis."""
        start, length, dim = operator.index(start), operator.index(length), operator.index(dim)
        if not -len(self.shape) <= dim < len(self.shape):
            raise KernelFaultError("refused", f"a slice along axis {dim} of {self.shape}", executed())
        if not 0 <= start <= start + length <= self._data.shape[dim]:
            message = f"{start} to {start + length} of {self._data.shape[dim]} in shared memory"
            raise KernelFaultError("out of bounds", message, executed())
        if len(self.shape) > rank_of(self.layout) and not SLICES_BUFFERS:
            # Its code would end the process.
            message = "a slice of an array of buffers, which this Triton does not take: expected one of them, index(i)"
            raise KernelFaultError("refused", message, executed())
        return self._view(self._data.narrow(dim, start, length), ask("slice", self.kind, start, length, dim))

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> "Shared":
        """The bytes from its first one on as other elements."""
        dtype, shape, layout = dtype or self.dtype, shape or self.shape, layout or self.layout
        kind = ask("reinterpret", self.kind, dtype, tuple(operator.index(n) for n in shape), layout)
        _check_use(kind)
        data = torch.empty(kind.shape, dtype=torch_dtype(dtype))
        return Shared(data, self._face.reinterpreted(self._data, data, layout), kind)

    _reinterpret = reinterpret

    def load(self, layout: Any) -> Tile:
        """By the partition's threads."""
        layout = None if left_open(layout) else ask("load", self.kind, layout).layout
        for part in self.parts:
            part.check_read()
        show_read(self)
        return Tile(self.data.clone(), layout)

    def store(self, value: Any) -> None:
        """By the partition's threads."""
        agent, data = current(), plain(value)
        if list(data.shape) != self.shape:
            message = f"a tile of {list(data.shape)} is stored to shared memory of {self.shape}"
            raise KernelFaultError("shapes differ", message, executed())
        if data.dtype is not self._data.dtype:
            message = f"{data.dtype} is stored to shared memory of {self._data.dtype}"
            raise KernelFaultError("dtypes differ", message, executed())
        if value.layout is not None:
            ask("store", self.kind, tile_type(value))
        agent.stored += [part.check_write(agent.number, agent.time) for part in self.parts]
        self.data.copy_(data)

    def gather(self, indices: Any, axis: Any) -> Tile:
        """By the partition's threads, at each index of an axis what lies there."""
        places, number = self._places(indices, axis)
        ask("gather of shared memory", self.kind, tile_type(indices), number)
        for part in self.parts:
            part.check_read()
        show_read(self)
        return Tile(self.data.gather(number, places), indices.layout)

    def scatter(self, values: Any, indices: Any, axis: Any) -> None:
        """The other way round."""
        places, number = self._places(indices, axis)
        ask("scatter to shared memory", self.kind, tile_type(values), tile_type(indices), number)
        agent = current()
        agent.stored += [part.check_write(agent.number, agent.time) for part in self.parts]
        # Triton has broadcast them since 3.9, and refused other shapes before.
        places, data = torch.broadcast_tensors(places, plain(values))
        self.data.scatter_(number, places, data)

    def _places(self, indices: Any, axis: Any) -> tuple[torch.Tensor, int]:
        places, number = plain(indices).long(), operator.index(axis)
        if not -len(self.shape) <= number < len(self.shape):
            raise KernelFaultError("refused", f"axis {number} of {self.shape} in shared memory", executed())
        if bool(((places < 0) | (places >= self.shape[number])).any()):
            message = f"places {int(places.min())} to {int(places.max())} of {self.shape[number]} in shared memory"
            raise KernelFaultError("out of bounds", message, executed())
        return places, number

    def _keep_alive(self) -> None:
        """Nothing is freed before the CTA ends."""


class Descriptor:
    """A tensor descriptor in the kernel."""

    def __init__(self, base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any):
        self._base, memory = base, base.memory
        self.shape = [operator.index(n) for n in shape]
        self.strides = [operator.index(n) for n in strides]
        self.block_shape = [operator.index(n) for n in block_shape]
        self.layout, self.dtype = layout, GLUON[memory.flat.dtype]
        nbytes = math.prod(self.block_shape) * memory.flat.element_size()
        # Bases along no axis are of CTAs that have the same.
        self.nbytes_per_cta = nbytes >> sum(map(any, getattr(layout, "cga_layout", None) or ()))
        self.block_type = SimpleNamespace(
            shape=self.block_shape, nbytes=nbytes, element_ty=self.dtype, dtype=self.dtype
        )

    def in_tiles(self, block_shape: Any, layout: Any) -> "Descriptor":
        """The same tensor in tiles of another shape."""
        return Descriptor(self._base, self.shape, self.strides, block_shape, layout)

    @property
    def memory(self) -> GlobalMemory:
        """What it describes."""
        return self._base.memory

    @property
    def type(self) -> "Descriptor":
        """Has dtype, layout and block_type."""
        return self

    def _coordinates(self, coord: Any, writes: bool = False) -> list[int]:
        first = [operator.index(c) for c in coord]
        if first[-1] * self.memory.flat.element_size() % COORDINATE_BYTES or (writes and min(first) < 0):
            # Not in PTX's documentation: measured on an H200, with and without swizzling.
            what, also = ("to", ", and none negative") if writes else ("of", "")
            message = f"a copy {what} the tile at {first}, of {self.dtype}: the last coordinate must be a multiple of"
            message += f" {COORDINATE_BYTES} bytes{also}; a GPU stops with an illegal instruction"
            raise KernelFaultError("coordinates", message, executed())
        return first

    def window(self, coord: Any, writes: bool = False) -> tuple[Region | None, tuple[slice, ...]]:
        """Of the tile at `coord` what lies inside of the tensor, None where nothing does; and which part of the tile
        that is. Addresses count modulo 2^64.
        """
        first = self._coordinates(coord, writes)
        low = [max(0, -c) for c in first]
        high = [min(b, s - c) for b, s, c in zip(self.block_shape, self.shape, first, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None, ()
        offset = sum((c + a) * s for c, a, s in zip(first, low, self.strides, strict=True))
        start = operator.index(self._base.offset) + (offset + 2**63) % 2**64 - 2**63
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        # A stride along one element is never taken.
        strides = [s if n > 1 else 0 for n, s in zip(sizes, self.strides, strict=True)]
        last = start + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        extent = self._base.extent
        if not extent.first <= start <= last < extent.end:
            message = f"a tile at {first} reaches elements {start} to {last} of {extent.named(self.memory)}"
            raise KernelFaultError("out of bounds", message, executed())
        return Window(sizes, strides, start), tuple(slice(a, b) for a, b in zip(low, high, strict=True))


class Im2Col(Descriptor):
    """Of images [N, ..., C]: a tile's rows are the places where a convolution's window begins, its columns channels."""

    def __init__(self, base: Pointer, described: Any) -> None:
        x = described
        super().__init__(base, x.shape, x.strides, x.block_shape, x.layout)
        self._steps = list(x.element_strides or [1] * len(self.shape))[1:-1]
        # The first and the last place along each axis of an image.
        self._first = list(x.pixel_box_lower_corner)
        self._last = [n - 1 + m for n, m in zip(self.shape[1:-1], x.pixel_box_upper_corner, strict=True)]

    def _check_window(self, place: list[int], offsets: list[int]) -> None:
        """What PTX asks for: it says nothing of what else would be copied."""
        most = 2 ** OFFSET_BITS[len(place)] - 1
        if len(offsets) != len(place) or not all(0 <= n <= most for n in offsets):
            message = f"a copy in im2col mode with offsets {offsets}: expected {len(place)} from 0 to {most}"
            raise KernelFaultError("coordinates", message, executed())
        if not all(a <= n <= b for a, n, b in zip(self._first, place, self._last, strict=True)):
            message = f"a copy in im2col mode from {place} on: expected a place from {self._first} to {self._last}"
            raise KernelFaultError("coordinates", message, executed())

    def places(self, coord: Any, offsets: Any) -> tuple[Region, torch.Tensor]:
        """From a place on, image after image, each moved by `offsets`: what lies inside of the tensor, and which part
        of the tile that is.
        """
        image, *place, channel = self._coordinates(coord)
        moved = [operator.index(n) for n in offsets]
        self._check_window(place, moved)
        rows, columns = self.block_shape
        found = []
        for _ in range(rows):
            found.append([image, *(n + m for n, m in zip(place, moved, strict=True))])
            for axis in reversed(range(len(place))):
                place[axis] += self._steps[axis]
                if place[axis] <= self._last[axis]:
                    break
                place[axis] = self._first[axis]
            else:
                image += 1
        at = torch.tensor(found)
        channels = channel + torch.arange(columns)
        inside = ((at >= 0) & (at < torch.tensor(self.shape[:-1]))).all(1)[:, None]
        inside = inside & (channels >= 0) & (channels < self.shape[-1])
        elements = (at * torch.tensor(self.strides[:-1])).sum(1)[:, None] + channels * self.strides[-1]
        region = Places(operator.index(self._base.offset) + elements[inside])
        low, high = region.bounds()
        extent = self._base.extent
        if low <= high and not extent.first <= low <= high < extent.end:
            message = f"a tile at {coord} reaches elements {low} to {high} of {extent.named(self.memory)}"
            raise KernelFaultError("out of bounds", message, executed())
        return region, inside
