"""A tensor's place in a launch template: all that is known of a tensor before the call.

No Triton here: code that all backends share may compute.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tilewise.ops._host.symbol import plain

# Bytes that a kernel's loads may rely on in an address: what Triton specialises on.
ALIGNMENT = 16

Strides = tuple[int, ...]


def contiguous_strides(shape: Sequence[int]) -> Strides:
    """As torch lays out fresh memory."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _places(index: slice, size: int) -> tuple[int, int, int]:
    """The first place that a slice takes of so many, how many, and the step: as `slice.indices`, which takes no
    symbols.
    """
    first, stop, step = index.start, index.stop, 1 if index.step is None else index.step
    if step < 0:
        raise ValueError("a slot's slices step forward, as a tensor's do")
    if stop is None and first is None:
        return 0, size if step == 1 else -(-size // step), step
    first = 0 if first is None else _within(first, size)
    stop = size if stop is None else _within(stop, size)
    return first, -(-(stop - first) // step) if stop > first else 0, step


def _within(limit: int, size: int) -> int:
    limit = limit if limit >= 0 else limit + size
    return 0 if limit < 0 else size if limit > size else limit


class Slot:
    """A tensor's place in a template, or a view of one: all that is known of it before the call.

    It stands in for a tensor in a plan.
    """

    __slots__ = ("_address", "_strides", "base", "device", "dtype", "offset", "shape", "template")

    def __init__(
        self,
        template: Any,
        base: int,
        shape: tuple[int, ...],
        strides: Strides,
        dtype: torch.dtype,
        address: int = 0,
        offset: int = 0,
    ) -> None:
        self.template = template
        # Which of the call's tensors it is, or is a view of, from so many bytes on.
        self.base = base
        self.offset = offset
        self.shape = shape
        self._strides = strides
        self.dtype = dtype
        self.device = template.device
        self._address = address

    def stride(self, axis: int | None = None) -> Any:
        """As a tensor's."""
        return self._strides if axis is None else self._strides[axis]

    def dim(self) -> int:
        """As a tensor's."""
        return len(self.shape)

    def numel(self) -> int:
        """As a tensor's."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """As a tensor's."""
        return self.dtype.itemsize

    def data_ptr(self) -> int:
        """The address, but for a multiple of ALIGNMENT: of more nothing is known."""
        return self._address

    def new_empty(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> "Slot":
        """Fresh memory beside this tensor."""
        return self.template.allocate("empty", tuple(shape), dtype or self.dtype)

    def new_zeros(self, shape: Sequence[int], *, dtype: torch.dtype | None = None) -> "Slot":
        """The same, cleared."""
        return self.template.allocate("zeros", tuple(shape), dtype or self.dtype)

    def contiguous(self) -> "Slot":
        """Itself where it is, else a copy."""
        if self.numel() == 0 or all(
            size == 1 or have == want
            for size, have, want in zip(self.shape, self._strides, contiguous_strides(self.shape), strict=True)
        ):
            return self
        return self.template.compute(torch.Tensor.contiguous, (self,), self.shape, self.dtype)

    def add_(self, other: "Slot") -> "Slot":
        """As a tensor's."""
        return self.template.compute(torch.Tensor.add_, (self, other), self.shape, self.dtype)

    def _view(self, shape: Sequence[int], strides: Sequence[int], elements: int = 0) -> "Slot":
        moved = elements * self.dtype.itemsize
        address = (self._address + moved) % ALIGNMENT
        # Of a symbol it counts first whether it is aligned, then how far it is from that.
        at = 0 if address == 0 else plain(address)
        return Slot(self.template, self.base, tuple(shape), tuple(strides), self.dtype, at, self.offset + moved)

    def transpose(self, axis: int, other: int) -> "Slot":
        """As a tensor's."""
        shape, strides = list(self.shape), list(self._strides)
        shape[axis], shape[other] = shape[other], shape[axis]
        strides[axis], strides[other] = strides[other], strides[axis]
        return self._view(shape, strides)

    def __getitem__(self, index: Any) -> "Slot":
        """As a tensor's, for numbers, slices, None and one Ellipsis."""
        items = list(index) if isinstance(index, tuple) else [index]
        taken = sum(item is not None and item is not Ellipsis for item in items)
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        items[at : at + 1] = [slice(None)] * (len(self.shape) - taken)
        shape: list[int] = []
        strides: list[int] = []
        elements = axis = 0
        for item in items:
            if item is None:
                # As torch has it: what a step of the next axis would have been.
                shape.append(1)
                strides.append(self.shape[axis] * self._strides[axis] if axis < len(self.shape) else 1)
                continue
            size, stride = self.shape[axis], self._strides[axis]
            axis += 1
            if isinstance(item, slice):
                first, count, step = _places(item, size)
                shape.append(count)
                strides.append(stride * step)
                elements += first * stride
            else:
                at = item if item >= 0 else item + size
                if not 0 <= at < size:
                    raise IndexError(f"index {item} is out of range of an axis of {size}")
                elements += at * stride
        return self._view(shape, strides, elements)

    def __iter__(self) -> Iterator["Slot"]:
        return (self[i] for i in range(self.shape[0]))

    def _no_values(self, *_: Any) -> Any:
        raise TypeError(
            "a slot has no values: a plan decides from shapes, strides, dtypes and options; use compute() for work on"
            " values"
        )

    # Without these a slot would count as true, and as equal to nothing but itself.
    __bool__ = __eq__ = __ne__ = _no_values
    __hash__ = object.__hash__
    item = tolist = numpy = _no_values


def compute(function: Callable[..., Any], *arguments: Any, shape: Sequence[int], dtype: torch.dtype) -> Any:
    """What a function of torch's makes of tensors and numbers: a tensor of this shape and dtype, contiguous.

    In a template, a step.
    """
    slot = next((x for x in arguments if isinstance(x, Slot)), None)
    return function(*arguments) if slot is None else slot.template.compute(function, arguments, tuple(shape), dtype)
