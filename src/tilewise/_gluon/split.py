"""Which part of a tile each CTA of a cluster has, by the tile's layout."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.faults import KernelFaultError, executed

Slices = tuple[slice, ...]


class Split(NamedTuple):
    """A tile cut into equal chunks: its shape, how many chunks each axis has, and each CTA's chunk."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    @property
    def shape_per_cta(self) -> list[int]:
        """Of one chunk."""
        return [size // count for size, count in zip(self.shape, self.counts, strict=True)]

    def offset(self, rank: int) -> tuple[int, ...]:
        """Where a CTA's chunk begins."""
        return tuple(i * size for i, size in zip(self.chunks[rank], self.shape_per_cta, strict=True))

    def part(self, rank: int) -> Slices:
        """A CTA's chunk."""
        return tuple(
            slice(first, first + size) for first, size in zip(self.offset(rank), self.shape_per_cta, strict=True)
        )

    def group(self, rank: int) -> list[int]:
        """The CTAs that have the same chunk as this one, itself among them, from the first on."""
        return [other for other, chunk in enumerate(self.chunks) if chunk == self.chunks[rank]]

    def leaders(self) -> list[int]:
        """The first CTA of every chunk, which acts for the others that have it too."""
        return [rank for rank in range(len(self.chunks)) if self.group(rank)[0] == rank]

    def overlaps(self, rank: int, other: "Split", its_rank: int) -> bool:
        """Whether a CTA's chunk has elements of a CTA's chunk in another split."""
        pairs = zip(self.part(rank), other.part(its_rank), strict=True)
        return all(a.start < b.stop and b.start < a.stop for a, b in pairs)

    def covers(self, rank: int, other: "Split") -> bool:
        """Whether a CTA's chunk has all of its chunk in another split."""
        pairs = zip(self.part(rank), other.part(rank), strict=True)
        return all(a.start <= b.start and b.stop <= a.stop for a, b in pairs)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The tile from the chunks of all CTAs."""
        whole = parts[0].new_empty(self.shape)
        for rank in self.leaders():
            whole[self.part(rank)] = parts[rank]
        return whole


def split_of(layout: Any, shape: Sequence[int], ctas: int) -> Split:
    """How a layout cuts a tile. What has no layout of its own every CTA has."""
    return _split_of(layout, tuple(shape), ctas)


@functools.lru_cache(maxsize=4096)
def _split_of(layout: Any, shape: tuple[int, ...], ctas: int) -> Split:
    bases = _bases(layout, shape, ctas)
    counts = [min(1 << sum(basis[axis] != 0 for basis in bases), size) for axis, size in enumerate(shape)]
    chunks = []
    for rank in range(ctas):
        chunk = [0] * len(shape)
        for bit, basis in enumerate(bases):
            if rank >> bit & 1:
                chunk = [i ^ step for i, step in zip(chunk, basis, strict=True)]
        chunks.append(tuple(i % count for i, count in zip(chunk, counts, strict=True)))
    return Split(shape, tuple(counts), tuple(chunks))


def _bases(layout: Any, shape: tuple[int, ...], ctas: int) -> list[list[int]]:
    """For every bit of a CTA's rank, by how many chunks of each axis it moves on."""
    bits = ctas.bit_length() - 1
    if layout is None or not shape or isinstance(layout, gl.AutoLayout):
        return [[0] * len(shape) for _ in range(bits)]
    elements = getattr(layout, "block_bases", None)
    found = layout.cga_layout if elements is None else _in_chunks(elements, shape)
    if len(found) != bits:
        message = f"{layout} is for {1 << len(found)} CTAs, and a cluster has {ctas}: expected {bits} bases for CTAs"
        raise KernelFaultError("layouts differ", message, executed())
    # Axes in front of a shared layout's are those of a ring.
    return [[0] * (len(shape) - len(basis)) + list(basis) for basis in found]


def _in_chunks(bases: Sequence[Sequence[int]], shape: tuple[int, ...]) -> list[list[int]]:
    """The bases of a linear layout, which are in elements."""
    sizes = [size >> sum(basis[axis] != 0 for basis in bases) for axis, size in enumerate(shape)]
    if any(step % size for basis in bases for step, size in zip(basis, sizes, strict=True)):
        message = f"CTAs of a cluster that share a tile in smaller pieces than one chunk each: {list(bases)}"
        raise KernelFaultError("not simulated", message, executed())
    return [[step // size for step, size in zip(basis, sizes, strict=True)] for basis in bases]


def local(layout: Any) -> Any:
    """The layout of one CTA's chunk."""
    return _local(layout) if layout is not None and not isinstance(layout, gl.AutoLayout) else layout


@functools.lru_cache(maxsize=1024)
def _local(layout: Any) -> Any:
    if isinstance(layout, gl.SliceLayout | gl.DotOperandLayout):
        return dataclasses.replace(layout, parent=local(layout.parent))
    changes: dict[str, Any] = {"cga_layout": []} if hasattr(layout, "cga_layout") else {"block_bases": []}
    if any(field.name == "shape" for field in dataclasses.fields(layout)):
        bases = getattr(layout, "block_bases", None)
        bases = _in_chunks(bases, tuple(layout.shape)) if bases is not None else layout.cga_layout
        counts = [1 << sum(basis[axis] != 0 for basis in bases) for axis in range(len(layout.shape))]
        changes["shape"] = [size // count for size, count in zip(layout.shape, counts, strict=True)]
    return dataclasses.replace(layout, **changes)
