"""Shared memory as kernels see it, and the tensor descriptors by which tiles come there."""

import math
import operator
from types import SimpleNamespace
from typing import Any

import torch

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.memory import GlobalMemory, Region, Window
from tilewise._gluon.order import Buffer, current
from tilewise._gluon.values import GLUON, Tile, plain
from tilewise._gluon.watching import View, show_read


class Shared(View):
    """A view of shared memory: its elements, and the buffers that they lie in: one for each index of the first axis
    where it is `split`.
    """

    def __init__(
        self,
        data: torch.Tensor,
        buffers: list[Buffer],
        dtype: Any,
        layout: Any,
        split: bool,
        of: "Shared | None" = None,
    ) -> None:
        super().__init__(of)
        self.data, self.buffers, self.dtype, self.layout, self._split = data, buffers, dtype, layout, split

    @property
    def shape(self) -> list[int]:
        """Sizes."""
        return list(self.data.shape)

    @property
    def rank(self) -> int:
        """How many axes."""
        return self.data.dim()

    @property
    def type(self) -> "Shared":
        """Has dtype, shape and layout."""
        return self

    def _view(self, data: torch.Tensor, buffers: list[Buffer] | None = None, split: bool = False) -> "Shared":
        of = self if data.numel() == self.data.numel() else None
        return Shared(data, self.buffers if buffers is None else buffers, self.dtype, self.layout, split, of)

    def index(self, i: Any) -> "Shared":
        """One buffer."""
        i = operator.index(i)
        if not 0 <= i < len(self.data):
            raise KernelFaultError("out of bounds", f"buffer {i} of {len(self.data)} in shared memory", executed())
        return self._view(self.data[i], [self.buffers[i]] if self._split else None)

    def reshape(self, shape: Any) -> "Shared":
        """The same elements in another shape."""
        sizes = [operator.index(n) for n in shape]
        return self._view(self.data.view(sizes), split=self._split and sizes[0] == len(self.data))

    def permute(self, order: Any) -> "Shared":
        """Axes in another order."""
        axes = [operator.index(n) for n in order]
        return self._view(self.data.permute(*axes), split=self._split and axes[0] == 0)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Shared":
        """Part of an axis."""
        start, length, dim = operator.index(start), operator.index(length), operator.index(dim)
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            message = f"{start} to {start + length} of {self.data.shape[dim]} in shared memory"
            raise KernelFaultError("out of bounds", message, executed())
        inside = self._split and dim == 0
        return self._view(
            self.data.narrow(dim, start, length),
            self.buffers[start : start + length] if inside else None,
            split=self._split,
        )

    def load(self, layout: Any = None) -> Tile:
        """By the partition's threads."""
        for buffer in self.buffers:
            buffer.check_read()
        show_read(self)
        return Tile(self.data.clone(), layout)

    def store(self, value: Any) -> None:
        """By the partition's threads."""
        agent, data = current(), plain(value)
        if list(data.shape) != self.shape:
            message = f"a tile of {list(data.shape)} is stored to shared memory of {self.shape}"
            raise KernelFaultError("shapes differ", message, executed())
        if data.dtype is not self.data.dtype:
            message = f"{data.dtype} is stored to shared memory of {self.data.dtype}"
            raise KernelFaultError("dtypes differ", message, executed())
        for buffer in self.buffers:
            buffer.check_write(agent.number, agent.time)
            buffer.fenced = buffer.joined = buffer.visible = False
            agent.stored.append(buffer)
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
        self.nbytes_per_cta = math.prod(self.block_shape) * memory.flat.element_size()
        self.block_type = SimpleNamespace(
            shape=self.block_shape, nbytes=self.nbytes_per_cta, element_ty=self.dtype, dtype=self.dtype
        )

    @property
    def memory(self) -> GlobalMemory:
        """What it describes."""
        return self._memory

    @property
    def type(self) -> "Descriptor":
        """Has dtype, layout and block_type."""
        return self

    def window(self, coord: Any) -> tuple[Region | None, tuple[slice, ...]]:
        """Of the tile at `coord` what lies inside of the tensor, None where nothing does; and which part of the tile
        that is. Addresses count modulo 2^64.
        """
        first = [operator.index(c) for c in coord]
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
