"""Memory, copies and views: torch's tensors, moved by our kernels."""

from collections.abc import Sequence

import numpy as np
import torch

from mytorch.backends.base import Key, Shape
from mytorch.backends.gpu.kernels_elementwise import mytorch_copy_kernel, mytorch_fill_kernel
from mytorch.backends.gpu.launcher import (
    TORCH_TYPES,
    Array,
    Launcher,
    Plan,
    collapsed,
    plan_elements,
    plan_whole,
    planned,
    readable,
)
from mytorch.dtypes import DType

# Integers as wide as a type, by its size in bytes.
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@planned
def plan_copy(dtype: torch.dtype, shape: Shape, source: Shape, strides: Shape) -> Plan:
    """From memory of some strides to memory of others, which has a type."""
    sizes, (x_strides, out_strides) = collapsed(shape, source, strides)
    named = {"NDIM": len(sizes), "AS_BOOL": dtype == torch.bool}
    return plan_elements(
        mytorch_copy_kernel, shape, dtype, sizes=sizes, x_strides=x_strides, out_strides=out_strides, **named
    )


class Memory(Launcher):
    """The protocol's methods for memory, views and slices."""

    def from_numpy(self, x: np.ndarray) -> Array:
        return torch.from_numpy(np.array(x, order="C")).to(self.device)

    def to_numpy(self, x: Array) -> np.ndarray:
        return np.array((x if x.is_contiguous() else self.copy(x)).cpu().numpy())

    def full(self, shape: Shape, value: float, dtype: DType) -> Array:
        out = self._empty(shape, TORCH_TYPES[dtype])
        # Every type is filled exactly where its bits are taken for an integer.
        integer, bits = INTEGERS[dtype.itemsize], int(np.array(value, dtype).view(f"i{dtype.itemsize}"))
        self._launch(plan_whole(mytorch_fill_kernel, tuple(shape), integer), out=out.view(integer), bits=bits)
        return out

    def copy(self, x: Array) -> Array:
        out = self._empty(x.shape, x.dtype)
        self.copy_(out, x)
        return out

    def cast(self, x: Array, dtype: DType) -> Array:
        if x.dtype == TORCH_TYPES[dtype]:
            return x
        out = self._empty(x.shape, TORCH_TYPES[dtype])
        self.copy_(out, x)
        return out

    def copy_(self, x: Array, source: Array) -> None:
        self._launch(plan_copy(x.dtype, x.shape, source.stride(), x.stride()), x=readable(source), out=readable(x))

    def contiguous(self, x: Array) -> Array:
        return x if x.is_contiguous() else self.copy(x)

    def data_ptr(self, x: Array) -> int:
        return x.data_ptr()

    def strides(self, x: Array) -> Shape:
        return x.stride()

    def reshape(self, x: Array, shape: Shape) -> Array:
        if x.shape == shape:
            return x
        try:
            return x.view(shape)
        except RuntimeError:
            # Its strides cannot express the shape.
            return self.copy(x).view(shape)

    def permute(self, x: Array, axes: Sequence[int]) -> Array:
        return x.permute(tuple(axes))

    def broadcast_to(self, x: Array, shape: Shape) -> Array:
        return x.expand(shape)

    def slice(self, x: Array, key: Key) -> Array:
        return x[(*key, ...)]

    def cat(self, arrays: Sequence[Array], axis: int) -> Array:
        first = arrays[0]
        length = sum(x.shape[axis] for x in arrays)
        out = self._empty((*first.shape[:axis], length, *first.shape[axis + 1 :]), first.dtype)
        start = 0
        for x in arrays:
            self.copy_(out.narrow(axis, start, x.shape[axis]), x)
            start += x.shape[axis]
        return out

    def slice_grad(self, grad: Array, key: Key, shape: Shape) -> Array:
        out = self.full(shape, 0, self.dtype(grad))
        self.copy_(out[(*key, ...)], grad)
        return out
