"""Shared memory as kernels see it, and the tensor descriptors by which tiles come there."""

import math
import operator
from types import SimpleNamespace
from typing import Any

import torch

from tilewise._gluon.allocation import Face
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.memory import GlobalMemory, Region, Window
from tilewise._gluon.order import Part, current
from tilewise._gluon.values import GLUON, Tile, plain, torch_dtype
from tilewise._gluon.watching import View, show_read

# What TMA's last coordinate must be a multiple of.
COORDINATE_BYTES = 16


class Shared(View):
    """A view of shared memory: some of its elements as they were allocated, or as they were reinterpreted."""

    def __init__(self, data: torch.Tensor, face: Face, dtype: Any, layout: Any, of: "Shared | None" = None) -> None:
        super().__init__(of)
        self._data, self._face, self.dtype, self.layout = data, face, dtype, layout

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

    def _view(self, data: torch.Tensor) -> "Shared":
        of = self if data.numel() == self._data.numel() else None
        return Shared(data, self._face, self.dtype, self.layout, of)

    def index(self, i: Any) -> "Shared":
        """One buffer."""
        i = operator.index(i)
        if not 0 <= i < len(self._data):
            raise KernelFaultError("out of bounds", f"buffer {i} of {len(self._data)} in shared memory", executed())
        return self._view(self._data[i])

    def reshape(self, shape: Any) -> "Shared":
        """The same elements in another shape."""
        return self._view(self._data.view([operator.index(n) for n in shape]))

    def permute(self, order: Any) -> "Shared":
        """Axes in another order."""
        return self._view(self._data.permute([operator.index(n) for n in order]))

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Shared":
        """Part of an axis."""
        start, length, dim = operator.index(start), operator.index(length), operator.index(dim)
        if not 0 <= start <= start + length <= self._data.shape[dim]:
            message = f"{start} to {start + length} of {self._data.shape[dim]} in shared memory"
            raise KernelFaultError("out of bounds", message, executed())
        return self._view(self._data.narrow(dim, start, length))

    def reinterpret(self, dtype: Any = None, shape: Any = None, layout: Any = None) -> "Shared":
        """The bytes from its first one on as other elements."""
        dtype, shape, layout = dtype or self.dtype, shape or self.shape, layout or self.layout
        data = torch.empty([operator.index(n) for n in shape], dtype=torch_dtype(dtype))
        face = self._face.reinterpreted(self._data, data, layout)
        return Shared(data, face, dtype, layout)

    _reinterpret = reinterpret

    def load(self, layout: Any = None) -> Tile:
        """By the partition's threads."""
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
        agent.stored += [part.check_write(agent.number, agent.time) for part in self.parts]
        self.data.copy_(data)

    def _keep_alive(self) -> None:
        """Nothing is freed before the CTA ends."""


class Descriptor:
    """A tensor descriptor in the kernel."""

    def __init__(self, memory: GlobalMemory, start: int, shape: Any, strides: Any, block_shape: Any, layout: Any):
        self._memory, self._start = memory, start
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
        return Descriptor(self._memory, self._start, self.shape, self.strides, block_shape, layout)

    @property
    def memory(self) -> GlobalMemory:
        """What it describes."""
        return self._memory

    @property
    def type(self) -> "Descriptor":
        """Has dtype, layout and block_type."""
        return self

    def window(self, coord: Any, writes: bool = False) -> tuple[Region | None, tuple[slice, ...]]:
        """Of the tile at `coord` what lies inside of the tensor, None where nothing does; and which part of the tile
        that is. Addresses count modulo 2^64.
        """
        first = [operator.index(c) for c in coord]
        if first[-1] * self._memory.flat.element_size() % COORDINATE_BYTES or (writes and min(first) < 0):
            # Not in PTX's documentation: measured on an H200, with and without swizzling.
            what, also = ("to", ", and none negative") if writes else ("of", "")
            message = f"a copy {what} the tile at {first}, of {self.dtype}: the last coordinate must be a multiple of"
            message += f" {COORDINATE_BYTES} bytes{also}; a GPU stops with an illegal instruction"
            raise KernelFaultError("coordinates", message, executed())
        low = [max(0, -c) for c in first]
        high = [min(b, s - c) for b, s, c in zip(self.block_shape, self.shape, first, strict=True)]
        if any(a >= b for a, b in zip(low, high, strict=True)):
            return None, ()
        offset = sum((c + a) * s for c, a, s in zip(first, low, self.strides, strict=True))
        start = self._start + (offset + 2**63) % 2**64 - 2**63
        sizes = [b - a for a, b in zip(low, high, strict=True)]
        # A stride along one element is never taken.
        strides = [s if n > 1 else 0 for n, s in zip(sizes, self.strides, strict=True)]
        last = start + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if not 0 <= start <= last < self._memory.flat.numel():
            message = f"a tile at {first} reaches elements {start} to {last} of {self._memory.flat.numel()}"
            raise KernelFaultError("out of bounds", message, executed())
        return Window(sizes, strides, start), tuple(slice(a, b) for a, b in zip(low, high, strict=True))
