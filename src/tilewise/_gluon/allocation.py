"""Shared memory as it was allocated, and as kernels reinterpret it: which buffers, and which of their elements, a view
has.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from tilewise._gluon.compiler import offset_bases
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.order import Buffer, Part

Regions = tuple[tuple[int, int], ...]


def _places(sizes: Sequence[int], strides: Sequence[int], start: int) -> np.ndarray[Any, Any]:
    places = np.array([start])
    for size, stride in zip(sizes, strides, strict=True):
        places = np.add.outer(places, np.arange(size) * stride)
    return places.reshape(-1)


def _window(view: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    return tuple(view.shape), view.stride(), int(view.storage_offset())


def _by_buffer(elements: np.ndarray[Any, Any], size: int) -> Regions:
    """Buffers of `size` elements, and of each the elements, a bit each."""
    marked = np.zeros((int(elements.max(initial=-1)) // size + 1, size), dtype=bool)
    marked.reshape(-1)[elements] = True
    packed = np.packbits(marked, axis=1, bitorder="little")
    found = np.flatnonzero(marked.any(axis=1)).tolist()
    return tuple((i, int.from_bytes(packed[i].tobytes(), "little")) for i in found)


@functools.lru_cache(maxsize=4096)
def _regions(sizes: tuple[int, ...], strides: tuple[int, ...], start: int, size: int) -> Regions:
    return _by_buffer(_places(sizes, strides, start), size)


@functools.lru_cache(maxsize=256)
def element_offsets(layout: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """Where each element of a buffer lies, in elements."""
    if hasattr(layout, "interval_padding_pairs"):
        raise KernelFaultError("not simulated", "reinterpreting shared memory that is padded", executed())
    elements = np.zeros(1, dtype=np.int64)
    for basis in offset_bases(layout, list(shape)):
        elements = np.concatenate([elements, elements ^ flat_place(basis, shape)])
    offsets = np.empty(math.prod(shape), dtype=np.int64)
    offsets[elements] = np.arange(len(elements))
    return torch.from_numpy(offsets)


def flat_place(basis: Sequence[int], shape: Sequence[int]) -> int:
    """Of an element by its coordinates, its number."""
    number = 0
    for place, size in zip(basis, shape, strict=True):
        number = number * size + place
    return number


class Face:
    """Shared memory as elements of one type in one layout: as it was allocated, or reinterpreted."""

    def __init__(self, allocation: "Allocation", data: torch.Tensor, layout: Any, start: int = 0) -> None:
        self.allocation, self.data, self.layout = allocation, data, layout
        # In bytes.
        self.start = start
        self._parts: dict[Any, tuple[Part, ...]] = {}

    def show(self) -> None:
        """Be what was last written under another face."""
        allocation = self.allocation
        if allocation.shown is not self:
            allocation.shown.keep()
            self.data.view(-1).copy_(self._raw()[self._offsets()])
            allocation.shown = self

    def keep(self) -> None:
        """Be what another face sees."""
        self._raw()[self._offsets()] = self.data.view(-1)

    def _raw(self) -> torch.Tensor:
        nbytes = self.data.numel() * self.data.element_size()
        return self.allocation.raw[self.start : self.start + nbytes].view(self.data.dtype)

    def _offsets(self) -> torch.Tensor:
        """Of each element, from where this face begins."""
        count, sizes = self.data.numel(), self.data.shape
        # Buffers lie one after the other.
        one = element_offsets(self.layout, tuple(sizes[self.data.dim() - rank_of(self.layout) :]))
        return (torch.arange(0, count, len(one))[:, None] + one).view(-1)

    def reinterpreted(self, view: torch.Tensor, data: torch.Tensor, layout: Any) -> "Face":
        """The bytes from the first one of a view on, as other elements."""
        first = self._offsets().numpy()[_places(*_window(view))].min()
        start = self.start + int(first) * view.element_size()
        end, nbytes = start + data.numel() * data.element_size(), len(self.allocation.raw)
        if end > nbytes:
            message = f"bytes {start} to {end} of {nbytes} in shared memory are reinterpreted"
            raise KernelFaultError("out of bounds", message, executed())
        return Face(self.allocation, data, layout, start)

    def parts(self, view: torch.Tensor) -> tuple[Part, ...]:
        """The buffers that a view of the elements reaches into, and where."""
        key = _window(view)
        found = self._parts.get(key)
        if found is None:
            buffers = self.allocation.buffers
            found = self._parts[key] = tuple(Part(buffers[i], region) for i, region in self._regions(*key))
        return found

    def _regions(self, sizes: tuple[int, ...], strides: tuple[int, ...], start: int) -> Regions:
        base = self.allocation.base
        size = base.data.numel() // len(self.allocation.buffers)
        if self is base:
            return _regions(sizes, strides, start, size)
        mine, theirs = self.data.element_size(), base.data.element_size()
        first = (self._offsets().numpy()[_places(sizes, strides, start)] * mine + self.start)[:, None]
        touched = (first + np.arange(0, mine, min(mine, theirs))) // theirs
        elements = np.empty(base.data.numel(), dtype=np.int64)
        elements[base._offsets().numpy()] = np.arange(len(elements))
        return _by_buffer(elements[touched.reshape(-1)], size)


def rank_of(layout: Any) -> int:
    """Axes of a layout of shared memory; an allocation may have one more, of buffers."""
    if hasattr(layout, "offset_bases"):
        return len(layout.offset_bases[0])
    for name in ("order", "shape"):
        if hasattr(layout, name):
            return len(getattr(layout, name))
    return int(layout.rank)


class Allocation:
    """Its buffers: one for each index of the axis that the layout does not have, else one."""

    def __init__(self, data: torch.Tensor, layout: Any, name: str) -> None:
        self.base = self.shown = Face(self, data, layout)
        count = len(data) if data.dim() > rank_of(layout) else 1
        self.buffers = [Buffer(f"buffer {i} of {name}") for i in range(count)]

    @functools.cached_property
    def raw(self) -> torch.Tensor:
        """Its bytes, as far as a face that is not shown has them."""
        data = self.base.data
        return torch.zeros(data.numel() * data.element_size(), dtype=torch.uint8)
