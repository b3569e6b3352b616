"""Arguments of a tensor's methods, read in the ways that they may be given, and refused with what was expected."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mytorch import dtypes
from mytorch.device import Device

if TYPE_CHECKING:
    from mytorch.tensor import Tensor

Axis = int | tuple[int, ...] | None
Pair = int | tuple[int, int]


def pair(value: Pair, name: str, least: int) -> tuple[int, int]:
    """(height, width) from one number or two."""
    found = (value, value) if isinstance(value, int) else tuple(value)
    if len(found) != 2 or min(found) < least:
        raise ValueError(f"{name} is one integer or two, of at least {least}, not {value!r}")
    return found


def spread(numbers: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers given one by one or as one sequence."""
    return numbers if len(numbers) != 1 or isinstance(numbers[0], int) else tuple(numbers[0])


def either(default: Any, **named: Any) -> Any:
    """An argument that has two names, our own and torch's, by whichever it was given; where by neither, the default."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        said = " and ".join(f"{name}={value!r}" for name, value in given.items())
        raise TypeError(f"{' and '.join(named)} are two names of one argument, got {said}: give one of them")
    return next(iter(given.values()), default)


def over(axis: Axis, dim: Axis, keepdims: bool | None, keepdim: bool | None) -> tuple[Axis, bool]:
    """The axes of a reduction and whether they stay, by whichever names they were given."""
    return either(None, axis=axis, dim=dim), either(False, keepdims=keepdims, keepdim=keepdim)


def new_axis(what: str, axis: Any, n_axes: int) -> int:
    """Where a new axis stands among those of a tensor that has n_axes without it."""
    if not isinstance(axis, int) or not -n_axes - 1 <= axis <= n_axes:
        raise IndexError(
            f"{what} puts a new axis into a tensor of {n_axes} axes at {-n_axes - 1} to {n_axes}, not at {axis!r}"
        )
    return axis % (n_axes + 1)


def one_float_type(what: str, *tensors: Tensor) -> None:
    """Refuse tensors of several types or of integers where a backend takes one floating-point type."""
    if len({x.dtype for x in tensors}) > 1 or not dtypes.is_float(tensors[0].dtype):
        raise TypeError(
            f"{what} wants one floating-point type, got {', '.join(str(x.dtype) for x in tensors)}: convert with astype"
        )


def numbered(what: str, table: Tensor, numbers: Tensor, count: int) -> None:
    """Refuse numbers that are no int64 in 0 .. count - 1.

    On CUDA asking would wait for the device: there they give NaN, where the table has it.
    """
    if numbers.dtype != dtypes.int64:
        raise TypeError(f"{what} takes int64 numbers, not {numbers.dtype}")
    if numbers.size and (numbers.device is Device.CPU or not dtypes.is_float(table.dtype)):
        least, most = -(-numbers).max().item(), numbers.max().item()
        if least < 0 or most >= count:
            raise IndexError(f"{what} has numbers from {least} to {most}, and only 0 to {count - 1} are there")
