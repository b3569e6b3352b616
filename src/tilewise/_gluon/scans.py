"""Reductions and scans along an axis of tiles."""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from triton.experimental.gluon import language as gl

from tilewise._gluon.faults import KernelFaultError, executed
from tilewise._gluon.values import ConditionError, Tile, plain, torch_dtype


def _axis_of(axis: Any, rank: int) -> int | None:
    if axis is None:
        return None
    number = operator.index(axis)
    if not -rank <= number < rank:
        raise KernelFaultError("shapes differ", f"axis {number} of a tile of {rank} axes", executed())
    return number % rank


def _reduced(x: Tile, data: torch.Tensor, axis: int | None, keep_dims: Any) -> Tile:
    """The result of a reduction of x: of a tile of one axis, a scalar."""
    if keep_dims:
        shape = [1 if axis in (None, i) else n for i, n in enumerate(x.shape)]
        return Tile(data.reshape(shape), x.layout)
    return Tile(data, None if x.layout is None or axis is None else gl.SliceLayout(axis, x.layout))


def total(x: Any, axis: Any = None, keep_dims: Any = False, dtype: Any = None) -> Any:
    """The sum, in 32 bits at least where it is of whole numbers."""
    data = plain(x)
    if not isinstance(data, torch.Tensor):
        return x
    data = data if dtype is None else data.to(torch_dtype(dtype))
    kind = data.dtype if data.is_floating_point() or data.dtype is torch.int64 else torch.int32
    place = _axis_of(axis, data.dim())
    result = data.sum(dtype=kind) if place is None else data.sum(place, dtype=kind)
    return _reduced(x, result, place, keep_dims)


def extreme(largest: bool) -> Callable[..., Any]:
    """The largest, or the smallest."""

    def call(
        x: Any,
        axis: Any = None,
        return_indices: Any = False,
        return_indices_tie_break_left: Any = True,
        keep_dims: Any = False,
    ) -> Any:
        if return_indices:
            # Triton's Gluon fails there: its places have no layout.
            raise KernelFaultError("not simulated", "a reduction with return_indices", executed())
        data = plain(x)
        if not isinstance(data, torch.Tensor):
            return x
        # Triton gives 32 bits at least.
        data = data if data.element_size() >= 4 else data.float() if data.is_floating_point() else data.int()
        place = _axis_of(axis, data.dim())
        return _reduced(x, _extreme_numbers(data, place, largest), place, keep_dims)

    return call


def _extreme_numbers(x: torch.Tensor, axis: int | None, largest: bool) -> torch.Tensor:
    """A NaN beside a number does not count."""
    reduce = torch.amax if largest else torch.amin
    least = -math.inf if largest else math.inf
    numbers = x.nan_to_num(least, math.inf, -math.inf) if x.is_floating_point() else x
    found = reduce(numbers) if axis is None else reduce(numbers, axis)
    if not x.is_floating_point():
        return found
    nothing = x.isnan().all() if axis is None else x.isnan().all(axis)
    return torch.where(nothing, math.nan, found)


def _tiles(x: Any) -> tuple[list[Tile], bool]:
    """Of one tile or a tuple of them."""
    single = isinstance(x, Tile)
    tiles = [x] if single else list(x)
    if len({tuple(tile.shape) for tile in tiles}) != 1:
        raise KernelFaultError("shapes differ", f"tiles of {[tile.shape for tile in tiles]}", executed())
    if len(layouts := {str(tile.layout) for tile in tiles if tile.layout is not None}) > 1:
        message = f"operands have different layouts, which the compiler refuses: {' and '.join(sorted(layouts))}"
        raise KernelFaultError("layouts differ", message, executed())
    return tiles, single


Rows = list[torch.Tensor]


def combined(function: Callable[..., Any], left: Rows, right: Rows) -> Rows:
    """A function of numbers, of each pair of elements."""
    kinds = [x.dtype for x in left]
    try:
        return _called(function, left, right, kinds)
    except ConditionError:
        # It decides by a number which number it is.
        flat = zip(*(x.reshape(-1).unbind() for x in (*left, *right)), strict=True)
        count = len(left)
        rows = [_called(function, list(one[:count]), list(one[count:]), kinds) for one in flat]
        return [torch.stack(column).view(left[0].shape) for column in zip(*rows, strict=True)]


def _called(function: Callable[..., Any], left: Rows, right: Rows, kinds: list[torch.dtype]) -> Rows:
    results = function(*map(Tile, (*left, *right)))
    results = results if isinstance(results, tuple) else (results,)
    found = [torch.as_tensor(plain(x), dtype=getattr(x, "kind", None)) for x in results]
    if [x.dtype for x in found] != kinds:
        message = f"a function combines {kinds} into {[x.dtype for x in found]}: expected the same"
        raise KernelFaultError("dtypes differ", message, executed())
    return found


def reduce(input: Any, axis: Any, combine_fn: Callable[..., Any], keep_dims: Any = False) -> Any:
    """All elements along an axis, or of the tile, combined by a function of two of them."""
    tiles, single = _tiles(input)
    place = _axis_of(axis, len(tiles[0].shape))
    rows = [plain(x).reshape(-1) if place is None else plain(x).movedim(place, 0) for x in tiles]
    while (count := len(rows[0])) > 1:
        even = count - count % 2
        pairs = combined(combine_fn, [x[0:even:2] for x in rows], [x[1:even:2] for x in rows])
        rows = [torch.cat((pair, x[even:])) for pair, x in zip(pairs, rows, strict=True)]
    results = tuple(_reduced(x, row[0], place, keep_dims) for x, row in zip(tiles, rows, strict=True))
    return results[0] if single else results


def associative_scan(input: Any, axis: Any, combine_fn: Callable[..., Any], reverse: Any = False) -> Any:
    """Each element combined with all before it along an axis, or with all after it."""
    tiles, single = _tiles(input)
    place = _axis_of(axis, len(tiles[0].shape)) or 0
    rows = [plain(x).movedim(place, 0) for x in tiles]
    rows = [x.flip(0) for x in rows] if reverse else rows
    steps = [[x[0] for x in rows]]
    for i in range(1, len(rows[0])):
        steps.append(combined(combine_fn, steps[-1], [x[i] for x in rows]))
    columns = [torch.stack(column) for column in zip(*steps, strict=True)]
    columns = [x.flip(0) for x in columns] if reverse else columns
    results = tuple(Tile(x.movedim(0, place), tile.layout) for x, tile in zip(columns, tiles, strict=True))
    return results[0] if single else results


def map_elementwise(scalar_fn: Callable[..., Any], *args: Any, pack: Any = 1, is_pure: Any = True) -> Any:
    """A function of numbers, of each element."""
    if operator.index(pack) != 1:
        raise KernelFaultError("not simulated", f"map_elementwise of {pack} elements at a time", executed())
    tiles, _ = _tiles(args)
    rows: list[Sequence[torch.Tensor]] = []
    for numbers in zip(*(plain(x).reshape(-1).unbind() for x in tiles), strict=True):
        results = scalar_fn(*map(Tile, numbers))
        results = results if isinstance(results, tuple) else (results,)
        rows.append([torch.as_tensor(plain(x), dtype=getattr(x, "kind", None)) for x in results])
    columns = tuple(
        Tile(torch.stack(column).view(tiles[0].shape), tiles[0].layout) for column in zip(*rows, strict=True)
    )
    return columns[0] if len(columns) == 1 else columns


REDUCING: dict[str, Any] = {
    "sum": total,
    "max": extreme(True),
    "min": extreme(False),
    "reduce": reduce,
    "associative_scan": associative_scan,
    "map_elementwise": map_elementwise,
}
# What Triton's own functions on top of these call besides.
INSIDE: dict[str, Any] = {
    "_promote_bfloat16_to_float32": lambda x: Tile(x.data.float(), x.layout) if x.kind is torch.bfloat16 else x,
}
