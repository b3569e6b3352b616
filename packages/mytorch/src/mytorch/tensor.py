"""Tensors: an array on a device, and where it came from."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mytorch import backends, dtypes, random
from mytorch.autograd import Function, Recorded, run_backward
from mytorch.backends.base import Array, Backend, Shape
from mytorch.device import Device
from mytorch.dtypes import DType
from mytorch.methods import Methods
from mytorch.operators import Operators, Scalar
from mytorch.ops import elementwise


def lengths_of(what: str, shape: Any, more: tuple[Any, ...], requires_grad: bool) -> tuple[Shape, bool]:
    """A shape given number by number or as one sequence, behind which requires_grad may stand without its name."""
    given: tuple[Any, ...] = (shape, *more)
    found = given
    if isinstance(shape, Iterable) and (not more or (len(more) == 1 and isinstance(more[0], bool))):
        found, requires_grad = tuple(shape), more[0] if more else requires_grad
    if not all(isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0 for n in found):
        raise TypeError(
            f"{what} takes a shape as {what}(3, 4) or {what}((3, 4)), of integers of at least 0, not"
            f" {', '.join(map(repr, given))}: give requires_grad, dtype and device by name"
        )
    return tuple(map(int, found)), requires_grad


class Tensor(Recorded, Operators, Methods):
    """A multi-dimensional array on a device, which may ask for its gradient.

    Made by its static methods, not by calling the class.
    """

    _data: Array
    _device: Device
    _requires_grad: bool
    _grad: Tensor | None
    _node: Function | None
    # How often the memory was written to, so that a graph that needs what was there before is not walked.
    _version: int

    def __init__(self, *_: Any, **__: Any) -> None:
        raise TypeError(
            "a tensor is made by Tensor.create, zeros, ones, randn, arange or from_numpy, or by mytorch.tensor, not by"
            " calling Tensor"
        )

    @staticmethod
    def _wrap(data: Array, device: Device, requires_grad: bool = False, node: Function | None = None) -> Tensor:
        self = object.__new__(Tensor)
        self._data, self._device, self._requires_grad, self._node, self._grad = data, device, requires_grad, node, None
        self._version = 0
        return self

    @staticmethod
    def _leaf(data: Array, device: Device, requires_grad: bool) -> Tensor:
        self = Tensor._wrap(data, device, requires_grad)
        if requires_grad and not dtypes.is_float(self.dtype):
            raise TypeError(f"only floating-point tensors can require a gradient, this one is {self.dtype}")
        return self

    # Factories.

    @staticmethod
    def create(
        data: Any,
        shape: Sequence[int] | None = None,
        requires_grad: bool = False,
        *,
        dtype: Any = None,
        device: Device | str = Device.CPU,
    ) -> Tensor:
        """A copy of numbers, nested lists or a NumPy array, under a shape of as many elements.

        Python's floats become fp32.
        """
        device = Device(device)
        if isinstance(data, Tensor):
            data = data.numpy()
        array = dtypes.supported(data, dtype)
        if shape is not None:
            if math.prod(shape) != array.size:
                raise ValueError(
                    f"{array.size} numbers do not fill the shape {list(shape)}, which has {math.prod(shape)}"
                )
            array = array.reshape(tuple(shape))
        return Tensor._leaf(backends.of(device).from_numpy(array), device, requires_grad)

    @staticmethod
    def from_numpy(array: np.ndarray, requires_grad: bool = False, *, device: Device | str = Device.CPU) -> Tensor:
        """A copy of a NumPy array, in its type."""
        if not isinstance(array, np.ndarray):
            raise TypeError(f"from_numpy takes a NumPy array, not {type(array).__name__}: use Tensor.create")
        return Tensor.create(array, None, requires_grad, device=device)

    @staticmethod
    def zeros(
        shape: int | Sequence[int],
        *more: int,
        requires_grad: bool = False,
        dtype: Any = dtypes.float32,
        device: Device | str = Device.CPU,
    ) -> Tensor:
        """All 0: `zeros(3, 4)` or `zeros((3, 4))`."""
        return Tensor._full(0, "zeros", shape, more, requires_grad, dtype, device)

    @staticmethod
    def ones(
        shape: int | Sequence[int],
        *more: int,
        requires_grad: bool = False,
        dtype: Any = dtypes.float32,
        device: Device | str = Device.CPU,
    ) -> Tensor:
        """All 1: `ones(3, 4)` or `ones((3, 4))`."""
        return Tensor._full(1, "ones", shape, more, requires_grad, dtype, device)

    @staticmethod
    def _full(value: float, what: str, shape: Any, more: Any, requires_grad: bool, dtype: Any, device: Any) -> Tensor:
        lengths, requires_grad = lengths_of(what, shape, more, requires_grad)
        device = Device(device)
        return Tensor._leaf(backends.of(device).full(lengths, value, dtypes.check(dtype)), device, requires_grad)

    @staticmethod
    def randn(
        shape: int | Sequence[int],
        *more: int,
        requires_grad: bool = False,
        dtype: Any = dtypes.float32,
        device: Device | str = Device.CPU,
    ) -> Tensor:
        """Normal numbers of mean 0 and variance 1: `randn(3, 4)` or `randn((3, 4))`.

        `mytorch.manual_seed` decides which, on every device the same.
        """
        lengths, requires_grad = lengths_of("randn", shape, more, requires_grad)
        return Tensor.create(
            random.generator().standard_normal(lengths), None, requires_grad, dtype=dtype, device=device
        )

    @staticmethod
    def arange(
        start: float,
        stop: float | None = None,
        step: float = 1,
        *,
        dtype: Any = None,
        device: Device | str = Device.CPU,
    ) -> Tensor:
        """From start (0 where one number is given) up to stop, which is left out: int64 for integers, else fp32."""
        found = np.arange(0 if stop is None else start, start if stop is None else stop, step)
        if dtype is None:
            dtype = dtypes.int64 if found.dtype.kind == "i" else dtypes.float32
        return Tensor.create(found, dtype=dtype, device=device)

    # What it is.

    @property
    def shape(self) -> Shape:
        """The length of each axis."""
        return tuple(self._data.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def strides(self) -> Shape:
        """Elements from one index to the next along each axis."""
        return self._backend.strides(self._data)

    @property
    def dtype(self) -> DType:
        """The element type."""
        return backends.of(self._device).dtype(self._data)

    @property
    def device(self) -> Device:
        """Where the memory is."""
        return self._device

    @property
    def requires_grad(self) -> bool:
        """Whether `backward` computes its gradient, and goes through it."""
        return self._requires_grad

    @property
    def grad(self) -> Tensor | None:
        """What `backward` has added up, for a tensor that was not computed from others."""
        return self._grad

    def set_grad(self, grad: Tensor | None) -> None:
        """Replace the gradient by a copy of one on the same device, of the same shape and type; None clears it."""
        if grad is None:
            self._grad = None
            return
        if (grad.device, grad.shape, grad.dtype) != (self.device, self.shape, self.dtype):
            raise ValueError(
                f"a gradient must be like its tensor: expected shape {list(self.shape)} on {self.device} in"
                f" {self.dtype}, got {list(grad.shape)} on {grad.device} in {grad.dtype}"
            )
        self._grad = Tensor._wrap(self._backend.copy(grad._data), self._device)

    @property
    def _backend(self) -> Backend:
        return backends.of(self._device)

    def numpy(self) -> np.ndarray:
        """A copy as a NumPy array."""
        return self._backend.to_numpy(self._data)

    data_cpu = numpy

    def item(self) -> Scalar:
        """The one element, as a Python number."""
        if self.size != 1:
            raise ValueError(f"item() wants one element, and there are {self.size} in shape {list(self.shape)}")
        return self.numpy().reshape(()).item()

    def __float__(self) -> float:
        return float(self._only("float"))

    def __int__(self) -> int:
        return int(self._only("int"))

    def _only(self, what: str) -> Scalar:
        if self.size != 1:
            raise TypeError(
                f"{what}() wants a tensor of one element, and there are {self.size} in shape {list(self.shape)}:"
                " choose one by its index, or make one with sum(), mean() or max()"
            )
        return self.item()

    def data_ptr(self) -> int:
        """The address of the first element, to read."""
        return self._backend.data_ptr(self._data)

    def mutable_data_ptr(self) -> int:
        """The address of the first element, to write to; refused where elements share memory.

        A graph that needs what was there is then refused.
        """
        if any(stride == 0 and n > 1 for stride, n in zip(self.strides, self.shape, strict=True)):
            raise ValueError(
                f"several elements of this tensor share memory (strides {list(self.strides)}): copy it before writing"
            )
        if self._node is not None:
            raise ValueError("this tensor is the result of a recorded operation, which may need it: write to a copy")
        self._version += 1
        return self._backend.data_ptr(self._data)

    def to(self, device: Device | str) -> Tensor:
        """On another device, with the same shape and requires_grad, as a new tensor; on the same
        device, itself.
        """
        device = Device(device)
        if device is self._device:
            return self
        return Tensor._wrap(backends.of(device).from_numpy(self.numpy()), device, self._requires_grad)

    def astype(self, dtype: Any) -> Tensor:
        """In another element type; the gradient comes back through it."""
        found = dtypes.check(dtype)
        return self if found == self.dtype else elementwise.Cast(found).apply(self)

    def detach(self) -> Tensor:
        """The same memory, without a history."""
        return Tensor._wrap(self._data, self._device)

    def __repr__(self) -> str:
        numbers = np.array2string(self.numpy(), separator=", ", prefix="Tensor(", precision=4, threshold=64)
        extra = f", dtype={self.dtype}" + (f", device={self.device}" if self.device is not Device.CPU else "")
        extra += (
            f", node={type(self._node).__name__}"
            if self._node
            else ", requires_grad=True"
            if self._requires_grad
            else ""
        )
        return f"Tensor({numbers}, shape={list(self.shape)}{extra})"

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("a tensor without axes has no length")
        return self.shape[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[i] for i in range(len(self)))

    # Gradients.

    def backward(self, grad: Tensor | None = None) -> None:
        """Add to `grad` of every leaf this was computed from; without an argument, for one element, whose gradient is
        1. Frees the graph.
        """
        if not self._requires_grad:
            raise RuntimeError(
                "this tensor requires no gradient, and nothing it was computed from does: give a leaf"
                " requires_grad=True"
            )
        if grad is None:
            if self.size != 1:
                raise ValueError(
                    f"backward() without a gradient wants one element, and there are {self.size}: give a gradient of"
                    " its shape"
                )
            run_backward(self, self._backend.full(self.shape, 1, self.dtype))
            return
        if grad.device is not self.device or grad.shape != self.shape:
            raise ValueError(
                f"expected a gradient of shape {list(self.shape)} on {self.device}, got {list(grad.shape)} on"
                f" {grad.device}"
            )
        run_backward(self, self._backend.cast(grad._data, self.dtype))

    def _accumulate(self, grad: Array, new: bool = False) -> None:
        """Add to grad, in its own memory: unless what comes is new, it may be other tensors' gradient too."""
        if self._requires_grad:
            backend = self._backend
            if self._grad is not None:
                found = backend.binary("add", self._grad._data, grad)
            else:
                found = backend.contiguous(grad) if new else backend.copy(grad)
            self._grad = Tensor._wrap(found, self._device)


def tensor(data: Any, *, dtype: Any = None, device: Device | str = Device.CPU, requires_grad: bool = False) -> Tensor:
    """A copy of a number, nested lists, a NumPy array or a tensor, as `Tensor.create`: Python's floats become fp32."""
    return Tensor.create(data, None, requires_grad, dtype=dtype, device=device)
