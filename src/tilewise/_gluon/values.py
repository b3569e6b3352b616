"""Values of a kernel: tiles with their layouts, and pointers."""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.compiler import TileType, ask, left_open, tile_type
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.memory import Extent, GlobalMemory, Places
from tilewise._gluon.order import Product

# Of 8 bits, and the largest number of each.
FP8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
LARGEST = {dtype: torch.finfo(dtype).max for dtype in FP8.values()}
TORCH = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "int1": torch.bool,
    **FP8,
}
GLUON = {
    dtype: getattr(gl, {"fp": "float", "bf": "bfloat"}.get(name[:2], name[:2]) + name[2:])
    for name, dtype in TORCH.items()
}
# By which of two different dtypes both are computed in, but for 16 bits.
RANK = {
    dtype: rank
    for rank, dtype in enumerate(
        (
            torch.bool,
            torch.uint8,
            torch.int8,
            torch.int16,
            torch.int32,
            torch.int64,
            torch.float16,
            torch.bfloat16,
            torch.float32,
            torch.float64,
        )
    )
}
INTEGERS = {torch.int8: 8, torch.int16: 16, torch.int32: 32, torch.int64: 64}


def torch_dtype(dtype: Any) -> torch.dtype:
    """Torch's dtype of one of Triton's."""
    dtype = getattr(dtype, "element_ty", dtype)
    if dtype.name not in TORCH:
        raise KernelFaultError("not simulated", f"numbers of type {dtype.name}", executed())
    return TORCH[dtype.name]


def rounded(value: Any, dtype: torch.dtype) -> Any:
    """A Python number as one of that dtype holds it."""
    if dtype is torch.bool:
        return bool(value)
    if dtype is torch.float64:
        return float(value)
    if dtype is torch.float32:
        return float(np.float32(value))
    if dtype.is_floating_point:
        return to_kind(torch.tensor(float(value)), dtype).item()
    value = int(value)
    if dtype is torch.uint8:
        return value & 0xFF
    half = 1 << INTEGERS[dtype] - 1
    return value if -half <= value < half else (value + half) % (2 * half) - half


def to_kind(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In that dtype. What is too large for 8 bits becomes the largest number there, as Hopper rounds it."""
    if dtype in LARGEST and x.is_floating_point():
        x = x.float().clamp(-LARGEST[dtype], LARGEST[dtype])
    return x.to(dtype)


class ConditionError(KernelFaultError):
    """A tile decides what is executed, in `if`, `and`, `or` or `not`."""

    def __init__(self, message: str) -> None:
        super().__init__("condition", message, executed())

    def __reduce__(self) -> Any:
        return KernelFaultError, (self.kind, self.message, *self.lines)


# Functions of the language that are a tile's methods too, by name.
METHODS: dict[str, Callable[..., Any]] = {}


class Tile:
    """A tensor of a kernel, in `data` a torch tensor; a scalar's is a Python number. With a product it is that one's
    result, to be waited for.
    """

    __slots__ = ("data", "kind", "layout", "product")
    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self, data: Any, layout: Any = None, kind: torch.dtype | None = None, product: Product | None = None
    ) -> None:
        if isinstance(data, torch.Tensor) and data.dim() == 0:
            kind, data = data.dtype, data.item()
        self.data, self.layout, self.product = data, layout, product
        self.kind: torch.dtype = data.dtype if isinstance(data, torch.Tensor) else kind or kind_of(data)

    @property
    def shape(self) -> list[int]:
        """Sizes, none of a scalar."""
        return list(self.data.shape) if isinstance(self.data, torch.Tensor) else []

    @property
    def dtype(self) -> Any:
        """Triton's dtype."""
        return GLUON[self.kind]

    @property
    def type(self) -> "Tile":
        """Has dtype, shape and layout."""
        return self

    @property
    def scalar(self) -> Any:
        """Triton's dtype, of its type."""
        return self.dtype

    @property
    def numel(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def T(self) -> "Tile":  # noqa: N802 as torch and Triton spell it
        """Transposed."""
        return self.permute(1, 0)

    def __bool__(self) -> bool:
        if isinstance(self.data, torch.Tensor) and self.data.numel() != 1:
            raise ConditionError(f"a tile of {self.shape} where one number is needed")
        return bool(plain(self))

    def __index__(self) -> int:
        return operator.index(plain(self))

    def __getitem__(self, index: Any) -> "Tile":
        tile = self
        for axis, part in enumerate(index if isinstance(index, tuple) else (index,)):
            if part is None:
                tile = expand_dims(tile, axis)
            elif part != slice(None):
                raise KernelFaultError("not simulated", f"the index {part}", executed())
        return tile

    def to(self, dtype: Any, fp_downcast_rounding: Any = None, bitcast: bool = False) -> "Tile":
        """In another dtype, rounded to nearest even."""
        return cast(self, dtype, bitcast, fp_downcast_rounding)

    def reshape(self, *shape: Any) -> "Tile":
        """In another shape."""
        sizes = [int(n) for n in (shape[0] if len(shape) == 1 and not isinstance(shape[0], int | Tile) else shape)]
        layout = inferred("reshape", self, tuple(sizes))
        return Tile(plain(self).reshape(sizes), layout)

    def permute(self, *order: Any) -> "Tile":
        """Axes in another order."""
        axes = [int(n) for n in (order[0] if len(order) == 1 and not isinstance(order[0], int) else order)]
        layout = inferred("permute", self, tuple(axes))
        return Tile(plain(self).permute(axes), layout)

    def __neg__(self) -> "Tile":
        # As Triton has it: -0.0 is 0.0.
        return compute(_negative, self)

    def __invert__(self) -> "Tile":
        return compute(_inverted, self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name in METHODS:
            return functools.partial(METHODS[name], self)
        raise KernelFaultError("not simulated", f"{name} of a tile", executed())


def _negative(x: Any) -> Any:
    return 0 - x


def _inverted(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return torch.bitwise_not(x)
    return not x if isinstance(x, bool) else ~x


class Pending(Tile):
    """A product's result that warpgroup_mma_wait has not returned yet: of another type in Triton, which refuses it."""

    __slots__ = ()


def kind_of(value: Any) -> torch.dtype:
    """The dtype that Triton gives a Python number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int32 if -(2**31) <= value < 2**31 else torch.int64
    return torch.float32


def plain(x: Any) -> Any:
    """The tensor or number behind a value, which is used by that."""
    if not isinstance(x, Tile):
        return x
    if isinstance(x, Pending):
        message = "a product's result is used that is not among the deps of a warpgroup_mma_wait"
        raise KernelFaultError("used too early", message, x.product.lines if x.product else (), executed())
    if x.product is not None:
        x.product.use()
    return x.data


def common_kind(operands: Sequence[Any], divides: bool = False) -> torch.dtype | None:
    """The dtype that operands are computed in, by Triton's rules; Python numbers among them take that of the others."""
    kinds = {x.kind for x in operands if isinstance(x, Tile)}
    if not kinds:
        return None
    if not any(kind.is_floating_point for kind in kinds) and any(isinstance(x, float) for x in operands):
        return torch.float32
    if kinds & {torch.float32, torch.float64}:
        return max(kinds, key=RANK.__getitem__)
    if kinds & LARGEST.keys():
        raise KernelFaultError("not simulated", "arithmetic in 8 bits: cast the operands first", executed())
    halves = kinds & {torch.float16, torch.bfloat16}
    if halves:
        # fp16 wins over bf16; bf16 beside whole numbers becomes fp32.
        alone = torch.float16 in kinds or kinds == {torch.bfloat16}
        return torch.float32 if divides or not alone else torch.float16 if torch.float16 in kinds else torch.bfloat16
    return max(kinds, key=RANK.__getitem__)


def compute(function: Callable[..., Any], *operands: Any) -> Tile:
    """An element-wise function. Layouts must agree, as the compiler has it."""
    layout = common_layout(operands)
    kind = common_kind(operands, function is _divide)
    values = [
        value.to(kind) if isinstance(value, torch.Tensor) and kind is not None and value.dtype is not kind else value
        for value in map(plain, operands)
    ]
    result = function(*values)
    if isinstance(result, torch.Tensor):
        return Tile(result, layout)
    if isinstance(result, bool) or kind is None:
        return Tile(result)
    if isinstance(result, float) and not kind.is_floating_point:
        kind = torch.float32
    return Tile(rounded(result, kind), None, kind)


def common_layout(operands: Sequence[Any]) -> Any:
    """The layout of the tensors among operands."""
    layouts = [x.layout for x in operands if isinstance(x, Tile) and x.layout is not None and x.shape]
    for layout in layouts[1:]:
        if layout != layouts[0]:
            message = f"operands have different layouts, which the compiler refuses: {layouts[0]} and {layout}"
            raise KernelFaultError("layouts differ", message, executed())
    return layouts[0] if layouts else None


def _floor_divide(x: Any, y: Any) -> Any:
    # Towards 0, as in C. By 0 it is some number: kernels compute places that they never use.
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return torch.div(x, _divisor(y), rounding_mode="trunc")
    return abs(x) // abs(y or 1) * (1 if (x < 0) == (y < 0) else -1)


def fused(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """x · y + z, rounded once."""
    if x.is_floating_point():
        return (x.double() * y.double() + z.double()).to(x.dtype)
    return x * y + z


def _remainder(x: Any, y: Any) -> Any:
    if any(
        value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float) for value in (x, y)
    ):
        # By a quotient that is rounded, as on a GPU: 2.5 % -0.001 is less than 0.
        left, right = torch.broadcast_tensors(torch.as_tensor(x), torch.as_tensor(y))
        result = torch.where(right.isinf(), left, fused(-torch.trunc(left / right), right, left))
        return result if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else result.item()
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return torch.fmod(torch.as_tensor(x), torch.as_tensor(_divisor(y)))
    return x - _floor_divide(x, y) * y


def _divisor(y: Any) -> Any:
    return y.where(y != 0, 1) if isinstance(y, torch.Tensor) and not y.is_floating_point() else y


def _divide(x: Any, y: Any) -> Any:
    if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor):
        return x / y
    if y == 0:
        return math.nan if x == 0 or x != x else math.copysign(math.inf, x) * math.copysign(1, y)
    return x / y


OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": _divide,
    "floordiv": _floor_divide,
    "mod": _remainder,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "lshift": operator.lshift,
    "rshift": operator.rshift,
}
COMPARISONS = {name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")}


def _operators(function: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    def forward(x: Tile, y: Any) -> Any:
        return NotImplemented if isinstance(y, Pointer) else compute(function, x, y)

    def reflected(y: Tile, x: Any) -> Any:
        return compute(function, x, y)

    return forward, reflected


for _name, _function in (OPERATIONS | COMPARISONS).items():
    _forward, _reflected = _operators(_function)
    setattr(Tile, f"__{_name}__", _forward)
    if _name in OPERATIONS:
        setattr(Tile, f"__r{_name}__", _reflected)


class Pointer:
    """Into a tensor in global memory: an offset, or a tile of offsets, in elements of its storage."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, memory: GlobalMemory, extent: Extent, offset: Any, layout: Any = None) -> None:
        self.memory, self.extent, self.offset, self.layout = memory, extent, offset, layout

    @property
    def dtype(self) -> Any:
        """A pointer type, as far as kernels look at it."""
        return SimpleNamespace(element_ty=GLUON[self.memory.flat.dtype], is_ptr=lambda: True)

    @property
    def type(self) -> "Pointer":
        """Has dtype, shape and layout."""
        return self

    @property
    def shape(self) -> list[int]:
        """Sizes, none of a scalar."""
        return list(self.offset.shape) if isinstance(self.offset, torch.Tensor) else []

    def __add__(self, other: Any) -> "Pointer":
        layout = common_layout([Tile(self.offset, self.layout), other])
        return Pointer(self.memory, self.extent, self.offset + plain(other), layout)

    __radd__ = __add__

    def __sub__(self, other: Any) -> "Pointer":
        return self + (-other)

    def __getitem__(self, index: Any) -> "Pointer":
        tile = Tile(self.offset, self.layout)[index]
        return Pointer(self.memory, self.extent, tile.data, tile.layout)

    def __getattr__(self, name: str) -> Any:
        if name in METHODS:
            return functools.partial(METHODS[name], self)
        raise AttributeError(name)

    def touched(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The offsets, and which of them are accessed (None: all); an access outside of the tensor is a fault."""
        offset = torch.as_tensor(self.offset, dtype=torch.int64)
        inside = (offset >= self.extent.first) & (offset < self.extent.end)
        wanted = None if mask is None else torch.as_tensor(plain(mask)).broadcast_to(offset.shape)
        outside = ~inside if wanted is None else wanted & ~inside
        if bool(outside.any()):
            first = int(offset[outside].reshape(-1)[0])
            message = f"element {first} of {self.extent.named(self.memory)} is accessed"
            raise KernelFaultError("out of bounds", message, executed())
        return offset, wanted

    def region(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor | None, Places]:
        """The same, and the places."""
        offset, wanted = self.touched(mask)
        return offset, wanted, Places(offset.reshape(-1) if wanted is None else offset[wanted])


def inferred(question: str, x: Any, *arguments: Any) -> Any:
    """The layout that Triton gives the result of an operation on a tile; None where that has none yet."""
    return None if x.layout is None else ask(question, tile_type(x), *arguments).layout


def placed(shape: Sequence[int], layout: Any) -> Any:
    """A layout for a tile, which the compiler must take; None where it is the compiler that finds one."""
    if layout is None or not shape or left_open(layout):
        return None
    ask("tile", TileType(gl.int32, tuple(shape), layout))
    return layout


def expand_dims(x: Any, axis: int) -> Any:
    """A new axis of one element; the layout must be a slice along it."""
    axis = operator.index(axis)
    axis += len(x.shape) + 1 if axis < 0 else 0
    layout = inferred("expand_dims", x, axis)
    return Tile(plain(x).unsqueeze(axis), layout)


def cast(x: Any, dtype: Any, bitcast: bool = False, fp_downcast_rounding: Any = None) -> Tile:
    """In another dtype, the same bits or rounded to nearest even."""
    if fp_downcast_rounding not in (None, "rtne"):
        raise KernelFaultError("not simulated", f"rounding {fp_downcast_rounding}", executed())
    tile = x if isinstance(x, Tile) else Tile(x)
    kind, value = torch_dtype(dtype), plain(tile)
    if bitcast and kind.itemsize != tile.kind.itemsize:
        message = f"the bits of {tile.kind} as {kind}: expected as many bits"
        raise KernelFaultError("dtypes differ", message, executed())
    if isinstance(value, torch.Tensor):
        return Tile(value.view(kind) if bitcast else to_kind(value, kind), tile.layout)
    if bitcast:
        return Tile(torch.tensor([value], dtype=tile.kind).view(kind)[0])
    return Tile(rounded(value, kind), None, kind)
