"""Virtual memory for kernels interpreted at sizes that fit no machine: every access is checked and nothing is
allocated.

Each tensor has its own address range, far from all others. Floats read as 0; integers as the tensor's values if it has
any, else as the launch's tables say (`tables`).
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

# Elements of one table by their number.
Table = Callable[[Any], Any]
# Address range of one tensor: larger than any 47-bit address space, so that a wrong offset does not reach the next one.
REGION = 1 << 48


@dataclass(frozen=True)
class Address:
    """What a kernel gets in place of a tensor."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        """Where the first element lies."""
        return self.address


@dataclass(frozen=True)
class Region:
    """One tensor: the argument's name, bytes per element, elements from the first to the last, and their values."""

    name: str
    element_size: int
    elements: int
    values: Table | None


class VirtualMemory:
    """Replaces the interpreter's memory operations, and passes everything else on."""

    def __init__(self, interpreter: Any, report: Callable[[str], None]) -> None:
        self._interpreter, self._report = interpreter, report
        self._regions: list[Region] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._interpreter, name)

    def place(self, arguments: Mapping[str, Any], tables: Mapping[str, Table]) -> dict[str, Any]:
        """The arguments of a launch with an address in place of each tensor."""
        self._regions.clear()
        return {name: self._placed(name, value, tables) for name, value in arguments.items()}

    def _placed(self, name: str, value: Any, tables: Mapping[str, Table]) -> Any:
        if isinstance(value, TensorDescriptor):
            base = self._placed(name, value.base, tables)
            return TensorDescriptor(base, value.shape, value.strides, value.block_shape)
        if isinstance(value, tuple):
            # A record of the arguments' own, with the names of its fields.
            fields = getattr(value, "_fields", None) or [str(i) for i in range(len(value))]
            names = [name if field == "x" else field for field in fields]
            items = [self._placed(*one, tables) for one in zip(names, value, strict=True)]
            return type(value)._make(items) if hasattr(value, "_make") else tuple(items)
        if not isinstance(value, torch.Tensor):
            return value
        table = tables.get(name)
        if value.device.type != "meta":
            held = value.reshape(-1).numpy()
            table = held.__getitem__
        elements = (
            1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
            if value.numel()
            else 0
        )
        self._regions.append(Region(name, value.element_size(), elements, table))
        return Address(value.dtype, len(self._regions) * REGION)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        """Like the interpreter's: `other` where the mask is false."""
        # One that a number was made part of may be of integers, which would be taken for indices.
        mask = np.asarray(mask).astype(bool)
        region, elements = self._locate(pointers, mask, "reads")
        result = np.array(np.broadcast_to(other, pointers.shape), dtype)
        if region is None or region.values is None:
            result[mask] = 0
        elif region.elements:
            result[mask] = region.values(np.clip(elements, 0, region.elements - 1))
        return result

    def store(self, pointers: Any, _values: Any, mask: Any) -> None:
        """Like the interpreter's, but nothing is stored."""
        self._locate(pointers, np.asarray(mask).astype(bool), "writes")

    def _locate(self, pointers: Any, mask: Any, verb: str) -> tuple[Region | None, Any]:
        """The tensor that the unmasked pointers lead to, and their element numbers; reports where they are out of
        bounds.
        """
        kept = pointers[mask].astype(np.int64)
        if not kept.size:
            return None, kept
        number = (int(kept[0]) + REGION // 2) // REGION
        if not 0 < number <= len(self._regions):
            self._report(f"{verb} at an address that belongs to no tensor")
            return None, kept
        region = self._regions[number - 1]
        elements = (kept - number * REGION) // region.element_size
        outside = elements[(elements < 0) | (elements >= region.elements)]
        if outside.size:
            self._report(f"{verb} element {int(outside[0]):,} of {region.name}, which has {region.elements:,}")
        return region, elements


def has_values(arguments: Collection[Any]) -> bool:
    """Whether every tensor among a launch's arguments, in records too, has memory, so that the launch can run."""
    return all(
        has_values(value) if isinstance(value, tuple) else value.device.type != "meta"
        for value in arguments
        if isinstance(value, tuple | torch.Tensor)
    ) and not any(isinstance(value, TensorDescriptor) for value in arguments)


Arguments = Mapping[str, Any]


def tables(arguments: Arguments) -> dict[str, Table]:
    """Tables by the name of the argument, or of a record's field; each is made when it is read, since a kernel that
    only writes one lacks some of what it follows from.
    """
    for value in tuple(arguments.values()):
        if hasattr(value, "_asdict"):
            arguments = {**value._asdict(), **arguments}
    if hasattr(arguments.get("cu"), "_asdict"):
        # Keys' offsets are the queries' where tables follow from them.
        arguments = {**arguments, "cu": arguments["cu"].q}
    return {name: _read_later(make, arguments) for name, make in _TABLES.items() if arguments.get(name) is not None}


def _read_later(make: Callable[[Arguments], Table], arguments: Arguments) -> Table:
    return lambda elements: make(arguments)(elements)


def _always(value: Callable[[Arguments], int]) -> Callable[[Arguments], Table]:
    def make(arguments: Arguments) -> Table:
        number = value(arguments)
        return lambda elements: np.full(elements.shape, number)

    return make


def _lengths(arguments: Arguments) -> list[int]:
    """Of the sequences that are not empty."""
    cu = arguments["cu"]
    return [arguments["n_tokens"]] if cu is None else [length for length in cu.diff().tolist() if length]


def _slots(arguments: Arguments) -> int:
    """Blocks that a token names, its own stretch's included."""
    return int(arguments["S"] + arguments.get("OWN", 0))


def _sequence(arguments: Arguments) -> int:
    """The dense sequence that the chunk begins in."""
    return int(arguments["first_tile"] // -(-arguments["n_tokens"] // arguments["TOKENS"]))


def _last_entry(arguments: Arguments) -> int:
    """The last entry of the chunk's last token; of dense sequences, of those in the one that the chunk begins in."""
    slots, tile, tokens = _slots(arguments), arguments["TOKENS"], arguments["n_tokens"]
    count = arguments["perm"].numel() // (arguments["n_heads"] * slots)
    if arguments["cu"] is None:
        count = min(count, tokens - (arguments["first_tile"] - _sequence(arguments) * -(-tokens // tile)) * tile)
    return int(count * slots - 1)


def _last_list(arguments: Arguments) -> int:
    """The last block of the last head, of dense sequences in the one that the chunk begins in."""
    slots = arguments["n_slots"]
    last = (
        slots
        if arguments["cu"] is not None
        else (_sequence(arguments) + 1) * -(-arguments["n_tokens"] // arguments["BLOCK_SIZE"])
    )
    return int((arguments["n_heads"] - 1) * slots + last - 1)


def _extras(arguments: Arguments) -> int:
    """Segments that leave their sums aside."""
    aside = arguments.get("aside")
    return 0 if aside is None else int(aside.dk.shape[0] // (arguments["BLOCK_N"] * arguments.get("HEADS", 1)))


def _segments(arguments: Arguments) -> Table:
    """First place, entries, list, and for every second segment its number among those that are not their
    list's first.
    """
    entries = arguments["perm"].numel()
    count = min(entries, 256)
    columns = np.array([entries - count, count, _last_list(arguments), _extras(arguments)])
    return lambda elements: np.where((elements % 4 == 3) & (elements // 4 % 2 == 0), 0, columns[elements % 4])


def _ends(arguments: Arguments) -> Table:
    """Three segments a list; where segments are numbered, all of them."""
    segments = arguments.get("segments")
    return lambda elements: 3 * (elements + 1) if segments is None else np.full(elements.shape, segments.shape[0])


def _sizes(arguments: Arguments) -> Table:
    """Blocks of a union: as many as its tokens can name, and one of them needs a mask."""
    most = arguments["BLOCK_M"] // arguments["GROUP_P"] * arguments["SLOTS_P"]
    return lambda elements: np.where(elements % 2 == 0, most, 1)


def _tiles(arguments: Arguments) -> Table:
    """Tiles of the last sequence, the last one as often as slots are left over: sequence, number, first
    token, tokens.
    """
    cu = arguments["cu"]
    first, end = cu[-2:].tolist()
    block = arguments["BLOCK_N"] if "dk" in arguments else arguments["BLOCK_M"]
    last = max(0, -(-(end - first) // block) - 1)
    columns = np.array([cu.shape[0] - 2, 0, first, end - first])
    return lambda elements: np.where(elements % 4 == 1, np.minimum(elements // 4, last), columns[elements % 4])


_TABLES: dict[str, Callable[[Arguments], Table]] = {
    "flag": _always(lambda arguments: arguments["WANTED"]),
    "indices": _always(lambda arguments: -(-min(_lengths(arguments)) // arguments["BLOCK_SIZE"]) - 1),
    "chosen": _always(lambda arguments: (arguments["room"] - 1) // arguments["SIZE"]),
    "tokens": _always(lambda arguments: arguments["o" if "o" in arguments else "dq"].shape[:-2].numel() - 1),
    "firsts": _always(lambda arguments: arguments["perm"].numel() - 1),
    "totals": _always(lambda arguments: 2 * arguments["SEGMENT"]),
    "ends": _ends,
    "extras": _always(lambda arguments: max(0, _extras(arguments) - 2)),
    "segments": _segments,
    "perm": _always(_last_entry),
    "blocks": _always(lambda arguments: max(0, min(_lengths(arguments)) // arguments["BLOCK_SIZE"] - 1)),
    "bits": _always(lambda _: 1),
    "sizes": _sizes,
    "tiles": _tiles,
    # Of a cache that is full after the call, the last page.
    "lengths": _always(lambda arguments: arguments["n_keys"] - arguments.get("added", arguments.get("n_new", 0))),
    "table": _always(lambda arguments: arguments["n_pages"] - 1),
}
