"""Rows as a table on a terminal, as lines that say all of it elsewhere, and what changed between two sets of them."""

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import groupby

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tilewise.inspect.facts import CARDS, Facts, Row, fits, occupancy

# Columns of the instruction mix: what they are called, and what they count.
MIX = {
    "mma": "matrix",
    "ex2": "exp2",
    "fma": "fma",
    "ldg": "global loads",
    "lds": "shared loads",
    "st": "stores",
    "bar": "barriers",
}
COLUMNS = ("kernel", "regs", "spill", "shared", "tensor cores", *MIX, "occupancy")
SHORT = {"shared memory": "shared", "tensor memory": "tensor"}


def kilobytes(count: int) -> str:
    """In units of 1,024 bytes."""
    return f"{count / 1024:.1f}"


def units(facts: Facts) -> str:
    """Which instructions multiply, and whether tiles are loaded through tensor descriptors."""
    found = {
        "wgmma serialised": facts.wgmma_serialised,
        "wgmma": facts.wgmma,
        "tcgen05": facts.tcgen05,
        "mma": facts.mma,
    }
    unit = next((name for name, used in found.items() if used), "")
    return " ".join(filter(None, (unit, "tma" if facts.tma else "")))


def card_line(architecture: int) -> str:
    """What a card offers."""
    card = CARDS[architecture]
    shared = f"{card.shared_memory >> 10} KB of shared memory a block, {card.shared_memory_all >> 10} KB an SM"
    return f"sm_{architecture} ({card.examples}): {shared}; {card.warps} warps, {card.blocks} blocks"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """One table per architecture on a terminal, else one line per kernel."""
    if not console.is_terminal:
        for row in rows:
            console.print(line(row), markup=False, highlight=False)
        return
    for architecture, group in groupby(rows, key=lambda row: row.architecture):
        console.print(_table(architecture, list(group)))


def line(row: Row) -> str:
    """All of a row."""
    start = f"sm_{row.architecture} {row.place}:"
    if row.facts is None:
        return f"{start} does not compile: {row.error}"
    facts, filled, card = row.facts, occupancy(row.facts), CARDS[row.architecture]
    spilled = (
        f"spills {facts.spill_stores} bytes ({facts.spill_loads} loaded)"
        if facts.spill_stores or facts.spill_loads
        else "no spill"
    )
    shared = f"{kilobytes(facts.shared_memory)} of {card.shared_memory >> 10} KB shared"
    parts = [
        f"{facts.registers} registers",
        spilled,
        shared if fits(facts) else f"{shared}: DOES NOT FIT",
        units(facts),
    ]
    if row.error:
        parts.append(f"no instruction mix: {row.error}")
    if facts.mix is not None:
        parts.append(", ".join(f"{name} {facts.mix[kind]}" for name, kind in MIX.items()))
    parts.append(f"{filled.blocks} x {facts.warps} of {card.warps} warps ({filled.limit})")
    return f"{start} {'; '.join(filter(None, parts))}"


def _table(architecture: int, rows: Sequence[Row]) -> Table:
    table = Table(title=card_line(architecture), title_justify="left", box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for name in COLUMNS:
        table.add_column(
            name,
            justify="left" if name in ("kernel", "tensor cores", "occupancy") else "right",
            no_wrap=name != "kernel",
        )
    errors: list[str] = []
    for place, group in groupby(rows, key=lambda row: (row.operator, row.label)):
        table.add_row(Text(" ".join(place), style="bold"))
        for row in group:
            table.add_row(*_cells(row))
            if row.error:
                errors.append(f"{row.place}: {row.error}")
    if errors:
        table.caption, table.caption_justify = "\n".join(errors), "left"
    return table


def _cells(row: Row) -> Iterator[Text | str]:
    yield f"  {row.kernel.replace('_kernel', '')}"
    if row.facts is None:
        yield from (Text("does", style="red"), Text("not", style="red"), Text("compile", style="red"))
        return
    facts, filled = row.facts, occupancy(row.facts)
    yield str(facts.registers)
    yield (
        Text(f"{facts.spill_stores}+{facts.spill_loads}", style="yellow")
        if facts.spill_stores or facts.spill_loads
        else "0"
    )
    yield Text(kilobytes(facts.shared_memory), style="" if fits(facts) else "red")
    yield Text(units(facts), style="red" if facts.wgmma_serialised else "")
    yield from (("-" if facts.mix is None else str(facts.mix[kind])) for kind in MIX.values())
    yield f"{filled.blocks}x{facts.warps}/{CARDS[row.architecture].warps} {SHORT.get(filled.limit, filled.limit)}"


# Keys that find a kernel on the other side, the surest first; the last pairs kernels of different names by their order.
_KEYS: tuple[Callable[[Row], Hashable], ...] = (
    lambda row: (row.architecture, row.operator, row.label, row.direction, row.kernel),
    # A configuration's number changes with the table.
    lambda row: (row.architecture, row.operator, row.label.lstrip("0123456789"), row.direction, row.kernel),
    lambda row: (row.architecture, row.direction, row.kernel),
    lambda row: (row.architecture, row.direction),
)


def diff_lines(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Only what changed, old -> new."""
    pairs, lost, gained = _pairs(old, new)
    lines: list[str] = []
    for before, after in pairs:
        changes = list(_changes(before, after))
        if changes:
            place = before.place if before.place == after.place else f"{before.place} -> {after.place}"
            lines += [f"sm_{before.architecture} {place}", *(f"    {change}" for change in changes)]
    lines += [f"sm_{row.architecture} {row.place}: only in the first" for row in lost]
    lines += [f"sm_{row.architecture} {row.place}: only in the second" for row in gained]
    return lines or [f"nothing changed in {len(pairs)} kernels"]


def _pairs(old: Sequence[Row], new: Sequence[Row]) -> tuple[list[tuple[Row, Row]], list[Row], list[Row]]:
    """The pairs, and what is left over on either side."""
    pairs: list[tuple[Row, Row]] = []
    lost, gained = list(old), list(new)
    for key in _KEYS:
        for row in tuple(lost):
            alike = [other for other in gained if key(other) == key(row)]
            # Kernels of different names are the same kernels only if there are equally many.
            if alike and (key is not _KEYS[-1] or len(alike) == sum(key(other) == key(row) for other in lost)):
                pairs.append((row, alike[0]))
                lost.remove(row)
                gained.remove(alike[0])
    order = {id(row): i for i, row in enumerate(old)}
    return sorted(pairs, key=lambda pair: order[id(pair[0])]), lost, gained


def _changes(before: Row, after: Row) -> Iterator[str]:
    if before.facts is None or after.facts is None:
        if before.error != after.error:
            yield f"{before.error or 'compiled'} -> {after.error or 'compiles'}"
        return
    values, others = _values(before.facts), _values(after.facts)
    for name in dict.fromkeys((*values, *others)):
        was, now = values.get(name), others.get(name)
        # A mix that was not requested on one side is no change.
        if was is not None and now is not None and was != now:
            yield f"{name} {was} -> {now}"


def _values(facts: Facts) -> dict[str, object]:
    filled = occupancy(facts)
    values: dict[str, object] = {
        "registers": facts.registers,
        "spill stores": facts.spill_stores,
        "spill loads": facts.spill_loads,
        "shared memory": facts.shared_memory,
        "fits": fits(facts),
        "tensor memory": facts.tensor_memory,
        "warps of a block": facts.warps,
        "tensor cores": units(facts) or "none",
        "ptxas": facts.ptxas,
    }
    values |= facts.mix or {}
    return values | {
        "CTAs an SM": filled.blocks,
        "warps an SM": filled.warps,
        "limited by": filled.limit,
    }
