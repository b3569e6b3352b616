"""Tiles put together, taken apart and looked up."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from tilewise._gluon.compiler import ask, tile_type
from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.values import Pointer, Tile, common_layout, expand_dims, inferred, placed, plain


def broadcast(x: Any, y: Any) -> tuple[Tile, Tile]:
    """Both in the shape that both fit."""
    layout = common_layout((x, y))
    a, b = torch.broadcast_tensors(torch.as_tensor(plain(x)), torch.as_tensor(plain(y)))
    return Tile(a, layout), Tile(b, layout)


def broadcast_to(x: Any, *shape: Any) -> Tile:
    """In a shape of as many axes, those of one element repeated."""
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int | Tile) else shape
    wanted = [operator.index(n) for n in sizes]
    if x.shape and (len(wanted) != len(x.shape) or any(n not in (1, m) for n, m in zip(x.shape, wanted, strict=True))):
        raise KernelFaultError("shapes differ", f"broadcast of {x.shape} to {wanted}", executed())
    return Tile(torch.as_tensor(plain(x)).broadcast_to(wanted), x.layout)


def trans(x: Any, *axes: Any) -> Tile:
    """Axes in another order: without one, the last two swapped."""
    rank = len(x.shape)
    return x.permute(*(axes or ([*range(rank - 2), rank - 1, rank - 2],)))


def join(x: Any, y: Any) -> Tile:
    """A new last axis of two elements."""
    a, b = broadcast(x, y)
    if not a.shape:
        raise KernelFaultError("shapes differ", "join takes tiles: got two numbers", executed())
    return Tile(torch.stack((a.data, b.data), -1), inferred("join", a, tile_type(a)))


def split(x: Any) -> tuple[Tile, Tile]:
    """The two halves of a last axis of two elements."""
    if not x.shape or x.shape[-1] != 2:
        raise KernelFaultError("shapes differ", f"split takes a last axis of 2: got {x.shape}", executed())
    layout = None if x.layout is None else ask("split", tile_type(x))[0].layout
    return Tile(plain(x)[..., 0], layout), Tile(plain(x)[..., 1], layout)


def gather(src: Any, index: Any, axis: Any) -> Tile:
    """Along an axis, the elements at those places."""
    data, places, number = plain(src), plain(index).long(), operator.index(axis)
    if src.layout is not None and index.layout is not None:
        ask("gather", tile_type(src), tile_type(index), number)
    if bool(((places < 0) | (places >= data.shape[number])).any()):
        found = f"{int(places.min())} to {int(places.max())}"
        message = f"gather takes places from 0 to {data.shape[number] - 1}: got {found}"
        raise KernelFaultError("out of bounds", message, executed())
    return Tile(data.gather(number, places), index.layout)


def histogram(input: Any, num_bins: Any, mask: Any = None, layout: Any = None) -> Tile:
    """How often each number from 0 on is there."""
    numbers, bins = plain(input), operator.index(num_bins)
    if mask is not None:
        numbers = numbers[torch.as_tensor(plain(mask)).broadcast_to(numbers.shape)]
    if numbers.numel() and not 0 <= int(numbers.min()) <= int(numbers.max()) < bins:
        message = f"a histogram of {bins} bins: got {int(numbers.min())} to {int(numbers.max())}"
        raise KernelFaultError("out of bounds", message, executed())
    return Tile(torch.bincount(numbers, minlength=bins).int(), placed((bins,), layout))


def of_pointers_too(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a tile that gives it another shape or layout, of tiles of pointers as well."""

    @functools.wraps(function)
    def call(x: Any, *arguments: Any, **named: Any) -> Any:
        if not isinstance(x, Pointer):
            return function(x, *arguments, **named)
        tile = function(Tile(x.offset, x.layout), *arguments, **named)
        return Pointer(x.memory, x.extent, tile.data, tile.layout)

    return call


SHAPING: dict[str, Any] = {
    "broadcast": broadcast,
    "broadcast_to": of_pointers_too(broadcast_to),
    "expand_dims": of_pointers_too(expand_dims),
    "reshape": of_pointers_too(lambda x, *shape, can_reorder=False: x.reshape(*shape)),
    "permute": of_pointers_too(lambda x, *order: x.permute(*order)),
    "trans": of_pointers_too(trans),
    "join": join,
    "split": split,
    "gather": gather,
    "histogram": histogram,
}
