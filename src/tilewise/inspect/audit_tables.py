"""What the integer tables that kernels pass to each other hold in an audit: the largest numbers that their makers may
write for the launch.

Tables that were made on the host (offsets of packed sequences, targets) have their own values.
"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tilewise.inspect.audit_memory import Table

Arguments = Mapping[str, Any]


def tables(arguments: Arguments) -> dict[str, Table]:
    """Tables by the name of the argument, or of a record's field; each is made when it is read, for a kernel that only
    writes one has not all that it follows from.
    """
    for value in tuple(arguments.values()):
        if hasattr(value, "_asdict"):
            arguments = {**value._asdict(), **arguments}
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
}
