"""What changed between two sets of kernels, kernel by kernel."""

from collections.abc import Callable, Hashable, Iterator, Sequence

from tilewise.inspect.facts import Facts, fits, occupancy
from tilewise.inspect.request import Row
from tilewise.inspect.text import units

# By what a kernel is found on the other side, the surest first; the last pairs kernels of different names in their
# order.
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
    """What belongs together, and what is left over on either side."""
    pairs: list[tuple[Row, Row]] = []
    lost, gained = list(old), list(new)
    for key in _KEYS:
        for row in tuple(lost):
            alike = [other for other in gained if key(other) == key(row)]
            # Kernels of other names are the same kernels only where there are as many.
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
        # A mix that one side was not asked for is no change.
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
        "matrix unit": units(facts) or "none",
        "ptxas": facts.ptxas,
    }
    values |= facts.mix or {}
    return values | {
        "CTAs an SM": filled.blocks,
        "warps an SM": filled.warps,
        "limited by": filled.limit,
    }
